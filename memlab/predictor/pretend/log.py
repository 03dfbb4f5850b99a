"""The log: births and deaths of pretend CUDA memory in order, and an allocator of the card that runs along.

Storages die by weak references, whose callbacks may come at any bytecode: a callback only appends to a queue (in C), and the
queue is entered before the next birth and before anything is read, so that the order stays that of happening.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.allocator import OutOfMemory
from memlab.probes.storage_log import Births, StorageRef
from memlab.seams.dispatch import current_autograd_node
from memlab.seams.sequence import LEAF, next_number, number_of
from memlab.trace.columns import Kind
from memlab.units import GiB

ALLOC, FREE = int(Kind.ALLOC), int(Kind.FREE)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that a library may take memory for: the row it came before, its tensors, who ran it."""

    row: int
    name: str
    stream: int
    in_backward: bool
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


@dataclass(slots=True)
class Held:
    """A block that is alive: the allocator's block, its bytes and stream."""

    taken: Any
    nbytes: int
    stream: int


class Log:
    """Rows of what was requested, and the allocator that answers meanwhile.

    `allocator` has the face of `memlab.allocator.CachingAllocator`; its OutOfMemory goes up to whoever asked, or, without
    `raises_oom`, the card grows.
    """

    COLUMNS = (("time_ns", "q"), ("kind", "B"), ("block", "q"), ("nbytes", "q"), ("stream", "q"), ("key", "q"))

    def __init__(self, allocator: Any, raises_oom: bool = True) -> None:
        self.allocator, self.raises_oom = allocator, raises_oom
        self.births = Births()
        self.time_ns, self.kind, self.block = array("q"), array("B"), array("q")
        self.nbytes, self.stream, self.key = array("q"), array("q"), array("q")
        self.born_as = array("i")
        self.operators: list[Operator] = []
        self.emptied: list[int] = []
        self.recorded_streams: list[tuple[int, int, int]] = []
        self.out_of_memory: list[tuple[int, int, int]] = []
        self._stream_now = 0
        self._switched_at: list[int] = []
        self._switched_to: list[int] = []
        self._lock = threading.RLock()  # operators of other threads come here, too
        self._live: dict[int, StorageRef] = {}
        self._held: dict[int, Held] = {}
        self._dead: deque[StorageRef] = deque()
        self._die = self._dead.append
        self._birth_numbers: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.kind)  # any thread may ask how far it is

    # --- births and deaths ------------------------------------------------------------------------------------------------

    def birth(self, storage: Any, nbytes: int, op: Any, dtype: Any) -> None:
        """A storage was made."""
        with self._lock:
            if self._dead:
                self.settle_deaths()
            if not nbytes:
                return  # the allocator gives nothing for nothing
            key = id(storage)
            block = self._enter(nbytes, op, dtype, key)
            ref = StorageRef(storage, self._die)
            ref.key, ref.block, ref.nbytes = key, block, nbytes
            self._live[key] = ref

    def _enter(self, nbytes: int, op: Any, dtype: Any, key: int) -> int:
        try:
            taken = self._take(nbytes)
        except BaseException:
            self.out_of_memory.append((len(self.kind), nbytes, self.stream_now))
            raise
        number = self._birth_numbers.get((op, dtype))
        if number is None:
            name = "" if dtype is None else str(dtype).removeprefix("torch.")
            number = self._birth_numbers[op, dtype] = self.births.number(str(op), name, "")
        block = len(self.born_as)
        self.born_as.append(number)
        stream = self.stream_now
        self._held[block] = Held(taken, nbytes, stream)
        self._row(ALLOC, block, nbytes, stream, key)
        return block

    def _take(self, nbytes: int) -> Any:
        try:
            return self.allocator.malloc(nbytes, self.stream_now)
        except OutOfMemory:
            if self.raises_oom:
                raise
            self.allocator.grow(2 * nbytes + self.allocator.total_bytes + GiB)
            return self.allocator.malloc(nbytes, self.stream_now)

    @property
    def stream_now(self) -> int:
        """The stream that work is asked on: of the thread, or in backward that on which the forward of the node ran."""
        node = current_autograd_node() if self._switched_at else None
        if node is None:
            return self._stream_now
        number = number_of(node)
        at = bisect_right(self._switched_at, number) - 1
        return self._switched_to[at] if at >= 0 and number != LEAF else 0

    @stream_now.setter
    def stream_now(self, stream: int) -> None:
        """Nodes are numbered as they are made: those from here on belong to this stream (autograd/engine.cpp, Node::stream)."""
        self._stream_now = stream
        self._switched_at.append(next_number())
        self._switched_to.append(stream)

    def _row(self, kind: int, block: int, nbytes: int, stream: int, key: int) -> None:
        self.time_ns.append(time.time_ns())
        self.kind.append(kind)
        self.block.append(block)
        self.nbytes.append(nbytes)
        self.stream.append(stream)
        self.key.append(key)

    def settle_deaths(self) -> None:
        """Enter the storages that died since."""
        dead = self._dead
        with self._lock:
            while dead:
                ref = dead.popleft()
                if ref.block >= 0:
                    self._free(ref.block)
                    if self._live.get(ref.key) is ref:
                        del self._live[ref.key]
                    ref.block = -1

    def _free(self, block: int) -> None:
        held = self._held.pop(block)
        self.allocator.free(held.taken)
        self._row(FREE, block, held.nbytes, held.stream, 0)

    def resized(self, storage: Any, nbytes: int, op: Any, dtype: Any) -> None:
        """A storage has another size now: the new bytes come before the old ones go, as in c10."""
        old = self._live.get(id(storage))
        known = old.nbytes if old is not None and old() is storage else 0
        if known == nbytes:
            return
        if old is not None:
            self._live.pop(id(storage), None)
        self.birth(storage, nbytes, op, dtype)
        if old is not None and old.block >= 0:
            self._free(old.block)
            old.block = -1

    # --- memory of no tensor ----------------------------------------------------------------------------------------------

    def hold(self, nbytes: int, op: Any, dtype: Any = None) -> int:
        """Take memory that belongs to no tensor; the block to give back (-1 for nothing)."""
        with self._lock:
            self.settle_deaths()
            return self._enter(nbytes, op, dtype, 0) if nbytes else -1

    def release(self, block: int) -> None:
        """Give it back."""
        with self._lock:
            self.settle_deaths()
            if block >= 0:
                self._free(block)

    # --- what else happens ------------------------------------------------------------------------------------------------

    def is_known(self, storage: Any) -> bool:
        """Whether a storage is in the log and alive."""
        ref = self._live.get(id(storage))
        return ref is not None and ref() is storage

    def record_stream(self, storage: Any, stream: int) -> None:
        """A storage is used on another stream."""
        self.settle_deaths()
        ref = self._live.get(id(storage))
        if ref is not None and ref() is storage:
            self.recorded_streams.append((len(self.kind), ref.block, stream))
            self.allocator.record_stream(self._held[ref.block].taken, stream)

    def empty_cache(self) -> None:
        """The user's code gave cached segments back."""
        self.settle_deaths()
        self.emptied.append(len(self.kind))
        self.allocator.empty_cache()

    def note(self, name: str, in_backward: bool, shapes: tuple[tuple[int, ...], ...], dtype: str) -> None:
        """An operator of interest is about to run."""
        self.settle_deaths()
        self.operators.append(Operator(len(self.kind), name, self.stream_now, in_backward, shapes, dtype))

    def mark(self) -> int:
        """The time now; what died so far is dated before it."""
        self.settle_deaths()
        return time.time_ns()

    def address_of(self, storage: Any) -> int:
        """A number like an address for a storage, 0 where it has no memory."""
        ref = self._live.get(id(storage))
        return ref.key if ref is not None else 0

    def columns(self) -> dict[str, np.ndarray]:
        """The rows so far; `birth` is per block, into the tables of `births`."""
        self.settle_deaths()
        columns = {name: np.array(getattr(self, name), dtype=code) for name, code in self.COLUMNS}
        return columns | {"birth": np.array(self.born_as, "i4")}
