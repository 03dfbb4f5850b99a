"""The modules and optimizers that the notebook's own names lead to, and what they are called there.

It looks a few steps deep into lists, tuples, dicts and the attributes of ordinary objects. No code of the user is called, and
nothing is compared or printed. What only a function's locals or a closure holds is not found.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from memlab.references.edges import instance_dict, items_of

MAX_DEPTH = 4
MAX_OBJECTS = 50_000
MAX_ITEMS = 1_000
"""How many items of a list or dict are searched: a list of models is short."""

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.Tensor, torch.UntypedStorage)


def notebook_names() -> dict[str, Any]:
    """A copy of the notebook's namespace, without the names that IPython keeps for itself."""
    namespace = sys.modules["__main__"].__dict__.copy()
    return {name: value for name, value in namespace.items() if not name.startswith("_") and name not in ("In", "Out")}


def name_of(thing: Any) -> str:
    """The notebook's name of exactly this object, "" if it has none of its own."""
    return next((name for name, value in notebook_names().items() if value is thing), "")


def modules_and_optimizers() -> Iterator[tuple[str, Any]]:
    """(path, object) of every outermost module and every optimizer, the shortest paths first."""
    waiting = deque((name, value, 0) for name, value in notebook_names().items())
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        path, thing, depth = waiting.popleft()
        if issubclass(type(thing), _PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if issubclass(type(thing), torch.nn.Module | torch.optim.Optimizer):
            # A way through what a library keeps to itself says nothing to its user: then it is called after its class.
            yield (path if path.count("._") < 2 else type(thing).__name__), thing
        elif depth < MAX_DEPTH:
            waiting.extend((path + step, value, depth + 1) for step, value in _inside(thing))


def _inside(thing: Any) -> list[tuple[str, Any]]:
    """(text of the step, value) for the contents of a container or of an instance of a user's class."""
    kind = type(thing)
    if issubclass(kind, dict):
        return [(f"[{key!r}]", value) for key, value in items_of(thing)[:MAX_ITEMS] if type(key) in (str, int)]
    if issubclass(kind, list | tuple):
        iterate = list.__iter__ if issubclass(kind, list) else tuple.__iter__
        return [(f"[{index}]", value) for index, value in zip(range(MAX_ITEMS), iterate(thing), strict=False)]
    if kind.__module__ in ("builtins", "types") or issubclass(kind, type(sys)):
        return []
    return [(f".{name}", value) for name, value in items_of(instance_dict(thing) or {}) if type(name) is str]
