"""The live storages, by weak references: what was made and freed since the last scan.

A scan walks all objects that the garbage collector tracks (15 ms for 200,000 of them, 45 ms for 1.5 million); whether one is
needed is known for a fraction of that, and frees are noticed at no cost. Storages that only a graph holds are found by
walking its nodes, without unpacking anything.

Limits: what C++ holds is not seen, nor what `Graphs` does not see. A storage that changes its size, and a gradient made
by an older graph that holds nothing but its leaves, cause no scan: the next one finds them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memlab.probes.rows import pause_gc
from memlab.references import memory
from memlab.references.graphs import look_limit
from memlab.references.live_tensors import holds_memory, live_tensors
from memlab.torch_internals import dispatch, graph
from memlab.torch_internals.objects import storage_id

BUDGET_S = 0.05
"""The time limit of one walk over graphs."""
MAX_DEPTH = 10_000
"""A quarter of what the main thread's stack can take."""
_MAX_KNOWN = 200_000
_TOO_MANY = "what graphs keep: too many nodes for a quick look"
_LOOKED_AT = f"after {MAX_DEPTH:,} nodes in a row PyTorch could not free more of them that were looked at"
_TOO_DEEP = f"what graphs keep: {_LOOKED_AT}"
_HIDDEN = "what a graph keeps of a tensor whose view was changed in place"
_HAS_YOUNG = sys.version_info < (3, 14) and not hasattr(sys, "_is_gil_enabled")
_storage_of: Any = dispatch.TensorBase.untyped_storage


class LiveStorage(weakref.ref[Any]):
    """A weak reference to a storage and its facts; `cell` is the entry that left it, or -1."""

    __slots__ = ("category", "cell", "device", "died", "key", "nbytes", "path")
    key: int
    device: str
    nbytes: int
    cell: int
    path: str
    category: str
    died: int | None


class LiveSet:
    """The live storages by device; `look` updates it, `settle` removes what was freed."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.graphs = Graphs()
        self.cost_s = 0.0
        self._known: dict[int, LiveStorage] = {}
        self._gone: deque[LiveStorage] = deque()
        self._new: list[LiveStorage] = []
        self._mark: tuple[Any, ...] = ((), 0, 0)

    def settle(self) -> list[LiveStorage]:
        """What was freed since the last call."""
        gone = []
        while self._gone:
            known = self._gone.popleft()
            if self._known.get(known.key) is known:
                del self._known[known.key]
                self.bytes[known.device] -= known.nbytes
                gone.append(known)
        return gone

    def may_have_changed(self) -> bool:
        """Whether tensors or nodes of graphs seem to have been made since the last `mark`.

        In doubt it returns True. It cannot tell if a view was freed and a tensor made.
        """
        if not _HAS_YOUNG or self._mark[0] != _collections():
            return True  # new objects may have aged by now
        return self._mark != (_collections(), graph.next_number(), young_tensors())

    def mark(self) -> None:
        """Count what is made from here on as new; call it after a complete scan."""
        self._mark = (_collections(), graph.next_number(), young_tensors())

    def look(self) -> list[LiveStorage]:
        """The new storages among all objects."""
        begun, with_graphs = time.thread_time(), []
        with pause_gc(), dispatch.DisableTorchFunction():
            for thing in live_tensors():
                if issubclass(type(thing), torch.UntypedStorage):
                    with contextlib.suppress(NotImplementedError, RuntimeError):
                        if not self._is_known(thing) and holds_memory(thing):
                            self._add(thing)
                    continue
                self._enter(thing)
                with contextlib.suppress(RuntimeError):
                    if not graph.is_leaf(thing):  # without looking at the node
                        with_graphs.append(thing)
            thing = None
            self.graphs.walk(with_graphs, self._enter)
        self.mark()
        self.cost_s = time.thread_time() - begun
        new, self._new = self._new, []
        return [known for known in new if known() is not None]

    def _is_known(self, storage: Any) -> bool:
        known = self._known.get(storage_id(storage))
        return known is not None and known() is storage

    def _enter(self, tensor: Any) -> None:
        """Add the storage of a tensor, or those of its parts."""
        try:
            storage: Any = _storage_of(tensor)
            if self._is_known(storage) and self._known[storage_id(storage)].nbytes == storage.nbytes():
                return
            if storage.device.type != "meta" and (graph.address_of(tensor) or holds_memory(storage)):
                self._add(storage)
        except (NotImplementedError, RuntimeError):
            for _, part in memory.parts(tensor):
                self._enter(part)

    def _add(self, storage: Any) -> None:
        """Add a storage that is new or has changed its size: the old size then counts as freed."""
        key, nbytes = storage_id(storage), storage.nbytes()
        before = self._known.get(key)
        # A C function as the callback: Python code would swallow Ctrl-C there.
        known = LiveStorage(storage, self._gone.append)
        known.key, known.device, known.nbytes = key, str(storage.device), nbytes
        known.cell, known.path, known.category, known.died = -1, "", "other", None
        self._known[key] = known
        self.bytes[known.device] += nbytes
        self._new.append(known)
        if before is not None:
            self.bytes[before.device] -= before.nbytes

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[LiveStorage]:
        return iter(list(self._known.values()))


def _collections() -> tuple[int, ...]:
    """How often the garbage collector has moved objects to its oldest generation."""
    return tuple(generation["collections"] for generation in gc.get_stats()[1:])


def young_tensors() -> int:
    """The number of tensors and storages in the two younger generations of the garbage collector.

    A single expression of C functions, so that no list of foreign objects stays and no other thread sees a reference to a
    tuple that it is still building. Classes are compared by id, since hashing one may run a metaclass's code.
    """
    kinds: list[type] = [torch.Tensor, torch.UntypedStorage]
    for kind in kinds:  # it grows: all subclasses of these
        kinds += type.__subclasses__(kind)
    known = set(map(id, kinds))
    young = itertools.chain.from_iterable(map(gc.get_objects, (0, 1)))
    with pause_gc():
        return sum(map(known.__contains__, map(id, map(type, young))))


class Graphs:
    """What new graphs hold: their nodes, each once, and the tensors those saved.

    Nodes are identified by autograd's sequence numbers, so that only new ones are walked. From PyTorch 2.13 on a node that
    Python has accessed keeps its Python object, and freeing a chain of 40,000 of them crashes the process (see
    `torch_internals.graph.nodes_stay`): so the depth below each node is tracked, and walking stops long before.

    Limits: nodes that other threads made may not be found, and what CopySlices hides is not. `unseen` says what the last walk
    left out, "" if nothing.
    """

    def __init__(self) -> None:
        self.unseen = ""
        self._number = 0
        self._depth: dict[int, int] = {}
        self._deepest = 0
        self._searches = 0
        self._getters: dict[int, Any] = {}

    def walk(self, tensors: Sequence[Any], enter: Callable[[Any], None]) -> None:
        """Pass `enter` what the new nodes behind these non-leaf tensors have saved."""
        if not tensors:
            self._depth.clear()
            self._deepest = self._searches = 0
        elif graph.nodes_stay and (self._deepest >= MAX_DEPTH or look_limit.is_closed):
            self.unseen = _TOO_DEEP
            return
        elif graph.nodes_stay and len(tensors) > MAX_DEPTH - self._deepest:
            self.unseen = _TOO_MANY  # each of them might be the next in the chain
            return
        nodes = [node for tensor in tensors if (node := memory.asked(graph.grad_fn, tensor)) is not None]
        starts = [graph.number_of(node) for node in nodes]
        self.unseen, self._getters = "", {}
        self._follow(nodes, enter)
        self._deepest = max((self._depth.get(number, self._deepest) for number in starts), default=0)
        self._number = graph.next_number()

    def may_search(self) -> bool:
        """Whether a search for names may walk graphs now: only once if not all was walked."""
        if self.unseen not in (_TOO_MANY, _TOO_DEEP) or not graph.nodes_stay:
            return True
        self._searches += 1
        return self._searches == 1

    def _follow(self, nodes: list[Any], enter: Callable[[Any], None]) -> None:
        """Walk the new nodes and record the length of the chain of accessed nodes below each.

        For those not reached the maximum is assumed.
        """
        found: dict[int, list[int]] = {}
        depth, deepest = self._depth, self._deepest
        most = MAX_DEPTH - deepest if graph.nodes_stay else 1 << 60
        until = time.thread_time() + BUDGET_S
        while nodes:
            node = nodes.pop()
            number = graph.number_of(node)
            if number in found or not self._number <= number < graph.LEAF:
                continue
            if len(found) >= most or (not len(found) & 63 and time.thread_time() > until):
                self.unseen = _TOO_MANY
                for rest in (number, *map(graph.number_of, nodes)):
                    depth.setdefault(rest, deepest)
                break
            behind = self._behind(node, enter)
            found[number] = [graph.number_of(other) for other in behind]
            nodes += behind
        for number in sorted(found):  # a node is made after those behind it
            below = (depth.get(other, deepest) for other in found[number] if other != graph.LEAF)
            depth[number] = 1 + max(below, default=0)
        if len(depth) > _MAX_KNOWN:
            for number in sorted(depth)[: -_MAX_KNOWN // 2]:
                del depth[number]

    def _behind(self, node: Any, enter: Callable[[Any], None]) -> list[Any]:
        """The nodes behind one, also behind the tensors it saved, which are added."""
        kind = type(node)
        if id(kind) not in self._getters:
            self._getters[id(kind)] = graph.node_getters(kind)
        if graph.hides_what_it_holds(kind):
            self.unseen = self.unseen or _HIDDEN
        if self._getters[id(kind)] is None:
            return []
        following, saving, _ = self._getters[id(kind)]
        found = [other for other, _ in following(node)]
        for _, content in graph.saved_by(node, saving):
            if memory.is_tensor(content):
                enter(content)
                found.append(memory.asked(graph.grad_fn, content))
        return [other for other in found if other is not None]
