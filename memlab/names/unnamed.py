"""Who holds what no name leads to: a word on the nearest holders, by one look at all that refers to these tensors."""

from __future__ import annotations

import gc
import types
from collections.abc import Collection
from typing import Any

from memlab.names.labels import class_name
from memlab.names.memory import Books, is_tensor

MOST = 8
"""So many storages are looked into: each look passes all objects once, and compares each reference with these."""


def holders(books: Books, keys: Collection[int], ours: Collection[Any]) -> dict[int, str]:
    """Storage key -> what holds it, in words, for the first few of these; `ours` are tables that do not count."""
    told = dict.fromkeys(list(keys)[:MOST], "nothing of Python's, so by a graph or by C++ code")
    targets = {number: thing for number, thing in books.kept.items() if told.keys() & books.enter(thing)}
    found: dict[int, set[str]] = {}
    asked = tuple(targets.values())
    ours = (*ours, asked, targets, books.kept)
    for holder in gc.get_referrers(*asked) if asked else ():
        if is_tensor(holder) or any(holder is one for one in ours):
            continue
        if issubclass(type(holder), types.ModuleType):  # what its C code shows may be freed: see `kinds`
            continue
        for thing in gc.get_referents(holder):
            for key in books.enter(thing) if id(thing) in targets else ():
                found.setdefault(key, set()).add(_with_article(class_name(type(holder))))
    told.update((key, " and ".join(sorted(names))) for key, names in found.items() if key in told)
    return told


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
