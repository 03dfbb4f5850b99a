"""Every live tensor storage of a device, and the notebook path that keeps it alive.

The list is complete except for what no Python object shows: workspaces, tensors that only C++ holds, what a node of the graph
hides. The search for names may have a time budget. Nothing is kept alive: the result holds only numbers and strings.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import UntypedStorage

from memlab.errors import MemlabError
from memlab.references import roots
from memlab.references.edges import class_name
from memlab.references.graphs import Nodes, enter_graphs
from memlab.references.live_tensors import tensors_and_storages
from memlab.references.memory import Memory, StorageTable, is_tensor
from memlab.references.reference_paths import ReferencePaths
from memlab.references.walk import Root, Walk
from memlab.torch_internals import dispatch, frames

GROUPS = ("shape", "dtype", "category", "device")
_TIER_COST = 1 << 40


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage. `key` is unique among those alive; `address` is 0 where it cannot be read safely.

    `shape` and `dtype` are those of the tensor that covers most of it, None and "" where there is none. `path` is "" where
    none was found; `others` is how many more paths there are at least.
    """

    key: int
    address: int
    device: str
    nbytes: int
    shape: tuple[int, ...] | None
    dtype: str
    category: str
    path: str
    others: int


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """The number and the bytes of storages that have a field in common."""

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LiveStorages:
    """Storages, the largest first; what could not be inspected; whether the search for names was finished.

    `holders` describes what holds the largest storages without a path.
    """

    storages: tuple[Storage, ...]
    not_inspected: tuple[str, ...]
    is_complete: bool
    holders: Mapping[int, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The bytes of all storages."""
        return sum(storage.nbytes for storage in self.storages)

    def group(self, by: str) -> Mapping[str, StorageGroup]:
        """ "shape", "dtype", "category" or "device" -> how many storages and bytes, the largest first."""
        if by not in GROUPS:
            raise MemlabError(f"cannot group by {by!r:.80}. Choose one of {', '.join(GROUPS)}.")
        found: dict[str, StorageGroup] = {}
        for storage in self.storages:
            name = shape_text(storage.shape) if by == "shape" else str(getattr(storage, by)) or "unknown"
            before = found.get(name, StorageGroup(0, 0))
            found[name] = StorageGroup(before.count + 1, before.nbytes + storage.nbytes)
        return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def shape_text(shape: tuple[int, ...] | None) -> str:
    """A shape as text: (512, 512), () for a scalar, unknown."""
    return "unknown" if shape is None else str(shape)


def storages(device: str | None = None) -> list[Storage]:
    """Every live storage, quickly: without paths, with the categories that tensors show.

    Buffers and optimizer state are "other" here, and everything that a graph keeps, inputs too, is "activation".
    """
    with _listing(tensors_and_storages()) as table:
        enter_graphs(table, Nodes(table), table.tensors())
        return [_storage(found) for found in _of_device(table, device)]


def live_storages(
    device: str | None = None,
    only: Collection[int] | None = None,
    budget_s: float | None = None,
    errors: Iterable[BaseException] = (),
) -> LiveStorages:
    """Every live storage with the path that keeps it alive; `only` these keys where given.

    After `budget_s` seconds the search for names ends (`is_complete` is False then); the list is complete. The functions that
    `errors` have ended count as running.
    """
    end = time.perf_counter() + budget_s if budget_s is not None else math.inf
    with _listing(tensors_and_storages()) as table, _walk(table) as walk:
        walk.start(roots.of_errors(errors), _TIER_COST)
        walk.go(() if only is None else only, end, below=roots.FRAMES * _TIER_COST)
        if only is None or not walk.is_named(only):
            met = walk.holder if walk.is_complete else ()  # reached objects may not have been visited
            enter_graphs(table, walk.nodes, [one for one in table.tensors() if id(one) not in met], met)
            # Extend to running functions and the shell, and then to modules, while anything is unnamed.
            wanted = [found.key for found in _of_device(table, device) if only is None or found.key in only]
            for further in ((), roots.modules()):
                if walk.is_complete and not walk.is_named(wanted):
                    walk.start(further, _TIER_COST)
                    walk.go(wanted, end)
        paths_of, found = ReferencePaths(walk), []
        for one in _of_device(table, device):
            if only is None or one.key in only:
                number = walk.tensor_of.get(one.key)
                named = (paths_of.path(number), len(walk.more.get(number, ()))) if number is not None else ("", 0)
                found.append(_storage(one, *named))
        nameless = [one.key for one in found if not one.path] if only is None and walk.is_complete else []
        held = _holders(table, nameless, walk.objects) if nameless else {}
        unseen = [what if count == 1 else f"{what}, {count} times" for what, count in table.unseen.items()]
        if not frames.can_read_locals:
            unseen.append("local variables of running functions (this interpreter's frames are not known)")
        return LiveStorages(tuple(found), tuple(unseen), walk.is_complete, held)


def paths(tensor: Any) -> list[str]:
    """Every path that keeps a tensor's memory alive, nearer ones first; at most a hundred."""
    if not is_tensor(tensor) and not issubclass(type(tensor), UntypedStorage):
        raise MemlabError(f"paths lead to a tensor, got a {class_name(type(tensor))}.")
    with _listing([tensor]) as table, _walk(table, every_way=True) as walk:
        walk.start(roots.modules(), _TIER_COST)
        walk.go(())
        wanted = set(table.enter(tensor))
        numbers = [number for number, keys in walk.keys.items() if number == id(tensor) or wanted.intersection(keys)]
        return list(ReferencePaths(walk).every_path(numbers))


def storages_in(thing: Any, itself: bool = False) -> set[int]:
    """The keys of the storages that something keeps alive: a tensor's own and its graph's, a list's, a model's.

    Classes are not looked into, nor the namespaces of modules. With `itself` a tensor's own alone.
    """
    with _listing(()) as table, Walk(table, Nodes(table), no_classes=True) as walk:
        if itself:
            return set(table.enter(thing))
        walk.avoid(roots.namespaces())
        walk.start([Root(0, "", thing)], _TIER_COST)
        walk.go(())
        return set(walk.tensor_of)


@contextlib.contextmanager
def _listing(things: Iterable[Any]) -> Iterator[StorageTable]:
    """A table of these tensors, which it keeps alive until the block ends.

    Meanwhile no `__torch_function__` of the user runs, and the garbage collector is off, which would scan it all repeatedly.
    """
    was_on = gc.isenabled()
    gc.disable()
    table, thing = StorageTable(), None
    try:
        with dispatch.DisableTorchFunction():
            for thing in things:
                table.enter(thing)
            del things, thing  # they are in the table
            yield table
    finally:
        table.close()
        if was_on:
            gc.enable()


def _walk(table: StorageTable, every_way: bool = False) -> Walk:
    """A walk that starts at the notebook's names."""
    walk = Walk(table, Nodes(table), every_way)
    walk.avoid(roots.namespaces())
    walk.reserve(roots.shell())
    walk.start(roots.notebook(), _TIER_COST)
    return walk


def _of_device(table: StorageTable, device: str | None) -> list[Memory]:
    """The memory on a device ("cuda" is all of its devices), the largest first, each address once."""
    seen: set[tuple[str, int]] = set()
    found = []
    for one in sorted(table.memory.values(), key=lambda one: (-one.nbytes, one.key)):
        place = (one.device, one.address)
        if device not in (None, one.device, one.device.split(":")[0]) or place in seen:
            continue
        if one.address:  # two storages may share borrowed memory
            seen.add(place)
        found.append(one)
    return found


def _storage(found: Memory, path: str = "", others: int = 0) -> Storage:
    return Storage(
        found.key, found.address, found.device, found.nbytes, found.shape, found.dtype, found.called, path, others
    )


MOST = 8
"""For how many unnamed storages holders are searched, each at the cost of one pass over all objects."""


def _holders(table: StorageTable, keys: Collection[int], ours: Any) -> dict[int, str]:
    """Storage key -> a description of what holds it, for the first few; `ours` is a table that does not count as a holder."""
    told = dict.fromkeys(list(keys)[:MOST], "nothing of Python's, so by a graph or by C++ code")
    targets = {number: thing for number, thing in table.kept.items() if told.keys() & table.enter(thing)}
    found: dict[int, set[str]] = {}
    asked = tuple(targets.values())
    for holder in gc.get_referrers(*asked) if asked else ():
        # What the C code of a module shows may be freed: see `edges`.
        if is_tensor(holder) or issubclass(type(holder), types.ModuleType):
            continue
        if any(holder is one for one in (ours, asked, targets, table.kept)):
            continue
        name = class_name(type(holder))
        name = f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
        for thing in gc.get_referents(holder):
            for key in table.enter(thing) if id(thing) in targets else ():
                found.setdefault(key, set()).add(name)
    return told | {key: " and ".join(sorted(names)) for key, names in found.items() if key in told}
