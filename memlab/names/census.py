"""Every live tensor storage of a device, and the notebook path that keeps it alive.

What no object of Python's shows is not in it: workspaces, tensors that only C++ holds, what a node of the graph hides. The
listing is complete but for those; naming may be given a budget. Nothing is kept: values of ints and texts come back.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import UntypedStorage

from memlab.errors import MemlabError
from memlab.names import starts
from memlab.names.graphs import Graphs, Nodes
from memlab.names.labels import class_name
from memlab.names.living import tensors_and_storages
from memlab.names.memory import Books, Memory, is_tensor
from memlab.names.trails import Trails
from memlab.names.unnamed import holders
from memlab.names.walk import Root, Walk
from memlab.seams import dispatch, frames

GROUPS = ("shape", "dtype", "category", "device")
_TIER_COST = 1 << 40


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage. `key` tells it from all others alive; `address` is 0 where it cannot be had harmlessly.

    `shape` and `dtype` are those of the tensor that shows most of it, None and "" where no tensor does. `path` is "" where
    none was found; `others` is how many further paths are known at least.
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
class Group:
    """Storages that have something in common."""

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Census:
    """Storages, the largest first; what could not be inspected; whether every name was looked for.

    `holders` says of the largest storages without a path what holds them, in words.
    """

    storages: tuple[Storage, ...]
    not_inspected: tuple[str, ...]
    is_complete: bool
    holders: Mapping[int, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The bytes of all storages."""
        return sum(storage.nbytes for storage in self.storages)

    def group(self, by: str) -> Mapping[str, Group]:
        """ "shape", "dtype", "category" or "device" -> how many storages and bytes, the largest first."""
        if by not in GROUPS:
            raise MemlabError(f"cannot group by {by!r:.80}. Choose one of {', '.join(GROUPS)}.")
        found: dict[str, Group] = {}
        for storage in self.storages:
            name, before = group_name(storage, by), Group(0, 0)
            before = found.get(name, before)
            found[name] = Group(before.count + 1, before.nbytes + storage.nbytes)
        return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def group_name(storage: Storage, by: str) -> str:
    """The group of a storage."""
    if by == "shape":
        return shape_text(storage.shape)
    return str(getattr(storage, by)) or "unknown"


def shape_text(shape: tuple[int, ...] | None) -> str:
    """A shape as text: (512, 512), () for a scalar, unknown."""
    return "unknown" if shape is None else str(shape)


def storages(device: str | None = None) -> list[Storage]:
    """Every live storage, without paths; quick, with the categories that tensors tell of themselves.

    Buffers and optimizer states are "other" here, and what a graph keeps is "activation", inputs too.
    """
    with _listing(tensors_and_storages()) as books:
        _enter_graphs(books, Nodes(books))
        return [_storage(found) for found in _of_device(books, device)]


def census(device: str | None = None, only: Collection[int] | None = None, budget_s: float | None = None) -> Census:
    """Every live storage with the path that keeps it alive; `only` these keys where given.

    When `budget_s` is over it gives up naming, not listing, and says so (`is_complete`).
    """
    end = time.perf_counter() + budget_s if budget_s is not None else math.inf
    with _listing(tensors_and_storages()) as books, _walk(books) as walk:
        walk.go(() if only is None else only, end, below=starts.FRAMES * _TIER_COST)
        if only is None or not walk.is_named(only):
            _enter_graphs(books, walk.nodes, walk.holder if walk.is_complete else ())  # what was met may not be visited
            wanted = [found.key for found in _of_device(books, device) if only is None or found.key in only]
            _go_further(walk, wanted, end)
        trails = Trails(walk, frames.cell_number)
        found = [_named(one, walk, trails) for one in _of_device(books, device) if only is None or one.key in only]
        nameless = [one.key for one in found if not one.path] if only is None and walk.is_complete else []
        held = holders(books, nameless, (walk.objects,)) if nameless else {}
        return Census(tuple(found), _not_inspected(books), walk.is_complete, held)


def paths(tensor: Any) -> list[str]:
    """Every path that keeps a tensor's memory alive, nearer ones first; at most a hundred."""
    if not is_tensor(tensor) and not issubclass(type(tensor), UntypedStorage):
        raise MemlabError(f"paths lead to a tensor, got a {class_name(type(tensor))}.")
    with _listing([tensor]) as books, _walk(books, every_way=True) as walk:
        walk.start(starts.modules(), _TIER_COST)
        walk.go(())
        wanted = set(books.enter(tensor))
        numbers = [number for number, keys in walk.keys.items() if number == id(tensor) or wanted.intersection(keys)]
        return list(Trails(walk, frames.cell_number).every_path(numbers))


def storages_in(thing: Any, itself: bool = False) -> set[int]:
    """The keys of the storages that something keeps alive: a tensor's own and its graph's, a list's, a model's.

    Classes are not looked into, nor the namespaces of modules. With `itself` a tensor's own alone.
    """
    with _listing(()) as books, Walk(books, Nodes(books), no_classes=True) as walk:
        if itself:
            return set(books.enter(thing))
        walk.avoid(starts.namespaces())
        walk.start([Root(0, "", thing)], _TIER_COST)
        walk.go(())
        return set(walk.tensor_of)


def _go_further(walk: Walk, wanted: Collection[int], end: float) -> None:
    """To running functions and the shell, and at last to the modules: as far as something is still without a name."""
    if walk.is_complete and not walk.is_named(wanted):
        walk.go(wanted, end)
    if walk.is_complete and not walk.is_named(wanted):
        walk.start(starts.modules(), _TIER_COST)
        walk.go(wanted, end)


@contextlib.contextmanager
def _listing(things: Iterable[Any]) -> Iterator[Books]:
    """The books of these tensors; what is put in is kept until the block ends.

    Meanwhile no `__torch_function__` of the user's runs, and the collector does not walk over what is met again and again.
    """
    was_on = gc.isenabled()
    gc.disable()
    books, thing = Books(), None
    try:
        with dispatch.DisableTorchFunction():
            for thing in things:
                books.enter(thing)
            del things, thing  # they stand in the books
            yield books
    finally:
        books.close()
        if was_on:
            gc.enable()


def _enter_graphs(books: Books, nodes: Nodes, met: Container[int] = ()) -> None:
    """Enter what hangs on the tensors that are not among the met ones: their gradients, and what their graphs keep."""
    graphs = Graphs(books, nodes, met)
    for tensor in books.tensors():
        if id(tensor) not in met:
            graphs.enter(tensor)


def _walk(books: Books, every_way: bool = False) -> Walk:
    """A walk that is about to begin at the notebook's names."""
    walk = Walk(books, Nodes(books), every_way)
    walk.avoid(starts.namespaces())
    walk.reserve(starts.shell())
    walk.start(starts.notebook(), _TIER_COST)
    return walk


def _of_device(books: Books, device: str | None) -> list[Memory]:
    """The memory on a device ("cuda" is all of its devices), the largest first, each address once."""
    seen: set[tuple[str, int]] = set()
    found = []
    for one in sorted(books.memory.values(), key=lambda one: (-one.nbytes, one.key)):
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


def _named(found: Memory, walk: Walk, trails: Trails) -> Storage:
    number = walk.tensor_of.get(found.key)
    if number is None:
        return _storage(found)
    return _storage(found, trails.path(number), len(walk.more.get(number, ())))


def _not_inspected(books: Books) -> tuple[str, ...]:
    said = [f"{what}, {count} times" if count > 1 else what for what, count in books.unseen.items()]
    if not frames.can_read_locals:
        said.append("local variables of running functions (this interpreter's frames are not known)")
    return tuple(said)
