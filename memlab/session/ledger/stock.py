"""The storages that are alive, known by weak references: what came and what went since the last look.

A look walks all objects that the garbage collector knows (15 ms for 200,000 of them, 45 ms for 1.5 million); whether one is
worth it is known for a fraction of that, and what goes is noticed at no cost. Storages that only a graph keeps are found by
walking its nodes, and nothing is unpacked.

Limits: what C++ keeps is not seen, nor what `Graphs` does not see. A storage that changes its size, and the gradient
that an older graph makes which keeps nothing but its leaves, show no sign of themselves: the next look finds them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memlab.names import memory
from memlab.names.living import holds_memory, living_tensors
from memlab.probes.stillness import collector_paused
from memlab.seams import dispatch, graph, sequence
from memlab.session.ledger.graphs import Graphs

_HAS_YOUNG = sys.version_info < (3, 14) and not hasattr(sys, "_is_gil_enabled")
_storage_of: Any = dispatch.TensorBase.untyped_storage
_is_leaf: Any = dispatch.TensorBase.is_leaf.__get__
_UNREADABLE = (NotImplementedError, RuntimeError)


class Known(weakref.ref[Any]):
    """A weak reference to a storage, and what is said of it when it has gone; `cell` is the entry that left it, or -1."""

    __slots__ = ("category", "cell", "device", "died", "key", "nbytes", "path")
    key: int
    device: str
    nbytes: int
    cell: int
    path: str
    category: str
    died: int | None


class Stock:
    """What is alive, by device; `look` brings it up to date, `settle` takes out what has gone."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.graphs = Graphs()
        self.cost_s = 0.0
        self._known: dict[int, Known] = {}
        self._gone: deque[Known] = deque()
        self._new: list[Known] = []
        self._mark: tuple[Any, ...] = ((), 0, 0)

    # --- what went --------------------------------------------------------------------------------------------------

    def settle(self) -> list[Known]:
        """What has gone since the last time."""
        gone = []
        while self._gone:
            known = self._gone.popleft()
            if self._known.get(known.key) is known:
                del self._known[known.key]
                gone.append(self._lost(known))
        return gone

    def _lost(self, known: Known) -> Known:
        self.bytes[known.device] -= known.nbytes
        return known

    # --- what came --------------------------------------------------------------------------------------------------

    def may_have_changed(self) -> bool:
        """Whether tensors or nodes of graphs seem to have been made since the last `mark`.

        In doubt it says so. Where a view went and a tensor came it cannot tell.
        """
        if not _HAS_YOUNG or self._mark[0] != _collections():
            return True  # new objects may be old by now
        return self._mark != (_collections(), sequence.next_number(), _young_tensors())

    def mark(self) -> None:
        """What is made from here on is new; call it when all that is there has been looked at."""
        self._mark = (_collections(), sequence.next_number(), _young_tensors())

    def look(self) -> list[Known]:
        """What came among all objects."""
        begun = time.thread_time()
        with collector_paused(), dispatch.DisableTorchFunction():
            self._enter_all(living_tensors())
        self.mark()
        self.cost_s = time.thread_time() - begun
        return self._take_new()

    def _take_new(self) -> list[Known]:
        new, self._new = self._new, []
        return [known for known in new if known() is not None]

    def _enter_all(self, things: Iterable[Any]) -> None:
        with_graphs = []
        for thing in things:
            if issubclass(type(thing), torch.UntypedStorage):
                self._enter_storage(thing)
                continue
            self._enter(thing)
            if _has_graph(thing):
                with_graphs.append(thing)
        self.graphs.walk(with_graphs, self._enter)

    def _enter(self, tensor: Any) -> None:
        """Enter the storage of a tensor, or those of its parts."""
        try:
            storage: Any = _storage_of(tensor)
            known = self._known.get(storage._cdata)
            if known is not None and known.nbytes == storage.nbytes() and known() is storage:
                return
            if storage.device.type != "meta" and (graph.address_of(tensor) or holds_memory(storage)):
                self._add(storage)
        except _UNREADABLE:
            for _, part in memory.parts(tensor):
                self._enter(part)

    def _enter_storage(self, storage: Any) -> None:
        """Enter a storage that is held as such."""
        with contextlib.suppress(*_UNREADABLE):
            known = self._known.get(storage._cdata)
            if (known is None or known() is not storage) and holds_memory(storage):
                self._add(storage)

    def _add(self, storage: Any) -> None:
        """A storage not known yet, or of another size than before: then the old size has gone."""
        key, nbytes = storage._cdata, storage.nbytes()
        before = self._known.get(key)
        # A C function as the callback: Python code there would swallow Ctrl-C.
        known = Known(storage, self._gone.append)
        known.key, known.device, known.nbytes = key, str(storage.device), nbytes
        known.cell, known.path, known.category, known.died = -1, "", "other", None
        self._known[key] = known
        self.bytes[known.device] += nbytes
        self._new.append(known)
        if before is not None:
            self._lost(before)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Known]:
        return iter(list(self._known.values()))


def _has_graph(tensor: Any) -> bool:
    """Whether a tensor was made by a node of a graph; without looking at the node."""
    try:
        return not _is_leaf(tensor)
    except RuntimeError:
        return False


def _collections() -> tuple[int, ...]:
    """How often the garbage collector has moved objects to its oldest generation."""
    return tuple(generation["collections"] for generation in gc.get_stats()[1:])


def _young_tensors() -> int:
    """How many tensors and storages there are in the two younger generations of the garbage collector.

    All of it in one call of C functions, to the end, so that no list of others' objects stays and no other thread meets a
    reference to a tuple which it is still building (see `living`). Classes are told by their ids, since hashing one may
    run a metaclass's code.
    """
    kinds = {id(kind) for root in (torch.Tensor, torch.UntypedStorage) for kind in _derived(root)}
    young = itertools.chain.from_iterable(map(gc.get_objects, (0, 1)))
    with collector_paused():
        return sum(map(kinds.__contains__, map(id, map(type, young))))


def _derived(root: Any) -> Iterator[Any]:
    """A class and all that are derived from it."""
    yield root
    for kind in type.__subclasses__(root):
        yield from _derived(kind)
