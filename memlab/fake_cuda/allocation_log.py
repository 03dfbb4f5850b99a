"""The allocation log of the fake GPUs: allocations and frees in order, and a simulated allocator of each alongside.

Frees are seen by weak references, whose callbacks may run at any bytecode: a callback only appends to a queue (in C), and
the queue is drained before the next allocation and before any read, so that events keep their order.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memlab.allocator import OutOfMemory
from memlab.allocator.private_pools import PrivatePools, in_pool, stream_of
from memlab.fake_cuda import gpus
from memlab.probes.storage_log import Births, StorageRef
from memlab.torch_internals.dispatch import current_autograd_node
from memlab.torch_internals.graph import LEAF, next_number, number_of
from memlab.trace.columns import Kind
from memlab.units import GiB

ALLOC, FREE = int(Kind.ALLOC), int(Kind.FREE)


class Operator(NamedTuple):
    """An operator that a library may allocate a workspace for: the row it precedes, its tensors, its thread, its GPU.

    `stream` says which private pool it is in, too.
    """

    row: int
    name: str
    stream: int
    in_backward: bool
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    device: int


class _Streams:
    """The current stream of a GPU, and those that it had before."""

    def __init__(self) -> None:
        self._now = 0
        self._switched_at: list[int] = []
        self._switched_to: list[int] = []
        self._chosen: tuple[int, int] | None = None

    @property
    def now(self) -> int:
        """The stream of a request: the thread's, or in backward the one on which the node's forward ran."""
        node = current_autograd_node() if self._switched_at else None
        if node is None:
            return self._now
        number = number_of(node)
        if self._chosen is not None and self._chosen[0] == number:
            return self._chosen[1]
        at = bisect_right(self._switched_at, number) - 1
        return self._switched_to[at] if at >= 0 and number != LEAF else 0

    def switch(self, stream: int) -> None:
        """Nodes are numbered as they are made: those from here on belong to this stream (autograd/engine.cpp, Node::stream).

        What a hook chooses in backward holds while its node runs.
        """
        node = current_autograd_node()
        self._chosen = None if node is None else (number_of(node), stream)
        self._now = stream
        self._switched_at.append(next_number())
        self._switched_to.append(stream)


class AllocationLog:
    """The requests, and the allocators that answer them.

    `allocators` has one for each GPU, with the interface of `memlab.allocator.CachingAllocator`; their OutOfMemory is raised to
    the caller, or, without `raises_oom`, the GPU grows.
    """

    COLUMNS = (("time_ns", "q"), ("kind", "B"), ("block", "q"), ("nbytes", "q"), ("stream", "q"), ("key", "q"))

    def __init__(self, allocators: Sequence[Any], raises_oom: bool = True) -> None:
        self.allocators, self.raises_oom = allocators, raises_oom
        self._streams = [_Streams() for _ in allocators]
        self.births = Births()
        columns = [array(code) for _, code in self.COLUMNS]
        self.time_ns, self.kind, self.block, self.nbytes, self.stream, self.key = columns
        self._append = [column.append for column in columns]
        self.born_as, self.born_on = array("i"), array("B")
        self.operators: list[Operator] = []
        self.emptied: list[int] = []
        self.recorded_streams: list[tuple[int, int, int]] = []
        # row, what, pool, GPU, how often the cache had been emptied
        self.pools: list[tuple[int, str, int, int, int]] = []
        self.cleared: list[tuple[int, int, int]] = []  # row, stream, GPU
        self._routes: list[list[tuple[int, Callable[[int], bool]]]] = [[] for _ in allocators]
        self.out_of_memory: list[tuple[int, int, int, int]] = []
        self._lock = threading.RLock()  # operators of other threads come here, too
        self._refs: dict[int, StorageRef] = {}
        self._live: dict[int, tuple[Any, int, int]] = {}  # by block: the allocator's, its bytes and stream
        self._dead: deque[StorageRef | tuple[int, int, int | None, bool]] = deque()  # also what `release_pool` was told
        self._die = self._dead.append
        self._birth_numbers: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.kind)  # any thread may read the progress

    def allocated(self, storage: Any, nbytes: int, op: Any, dtype: Any) -> None:
        """Log a new storage."""
        with self._lock:
            if self._dead:
                self.record_frees()
            if not nbytes:
                return  # the allocator returns None for 0 bytes
            key = id(storage)
            device = gpus.number_on(storage) if len(self.allocators) > 1 else 0
            block = self._allocate(nbytes, op, dtype, key, device)
            ref = StorageRef(storage, self._die)
            ref.key, ref.block, ref.nbytes = key, block, nbytes
            self._refs[key] = ref

    def _allocate(self, nbytes: int, op: Any, dtype: Any, key: int, device: int) -> int:
        allocator, stream = self.allocators[device], self._place(device)
        try:
            taken = allocator.malloc(nbytes, stream)
        except OutOfMemory:
            if self.raises_oom:
                self.out_of_memory.append((len(self.kind), nbytes, stream, device))
                raise
            allocator.grow(2 * nbytes + allocator.total_bytes + GiB)
            taken = allocator.malloc(nbytes, stream)
        number = self._birth_numbers.get((op, dtype))
        if number is None:
            name = "" if dtype is None else str(dtype).removeprefix("torch.")
            number = self._birth_numbers[op, dtype] = self.births.number(str(op), name, "")
        block = len(self.born_as)
        self.born_as.append(number)
        self.born_on.append(device)
        self._live[block] = (taken, nbytes, stream)
        self._row(ALLOC, block, nbytes, stream, key)
        return block

    def _row(self, kind: int, block: int, nbytes: int, stream: int, key: int) -> None:
        row = time.time_ns(), kind, block, nbytes, stream, key
        for append, value in zip(self._append, row, strict=True):
            append(value)

    def record_frees(self) -> None:
        """Log the frees since the last call."""
        dead = self._dead
        with self._lock:
            while dead:
                ref = dead.popleft()
                if isinstance(ref, tuple):
                    self._released(*ref)
                elif ref.block >= 0:
                    self._free(ref.block)
                    if self._refs.get(ref.key) is ref:
                        del self._refs[ref.key]
                    ref.block = -1

    def _free(self, block: int) -> None:
        taken, nbytes, stream = self._live.pop(block)
        self.allocators[self.born_on[block]].free(taken)
        self._row(FREE, block, nbytes, stream, 0)

    def _ref(self, storage: Any) -> StorageRef | None:
        ref = self._refs.get(id(storage))
        return ref if ref is not None and ref() is storage else None

    def resized(self, storage: Any, nbytes: int, op: Any, dtype: Any) -> None:
        """Log a resized storage: the new bytes are allocated before the old ones are freed, as in c10."""
        known = self._ref(storage)
        if (known.nbytes if known is not None else 0) == nbytes:
            return
        old = self._refs.pop(id(storage), None)
        self.allocated(storage, nbytes, op, dtype)
        if old is not None and old.block >= 0:
            self._free(old.block)
            old.block = -1

    def adopt(self, other: AllocationLog) -> None:
        """Log what another log still has, as new."""
        other.record_frees()
        for ref in other._refs.values():
            if (storage := ref()) is not None:
                self.allocated(storage, ref.nbytes, "torch.compile", None)

    @property
    def next_block(self) -> int:
        """The number that the next allocation gets."""
        return len(self.born_as)

    def are_alive(self, blocks: Sequence[int]) -> bool:
        """Whether one of these blocks is still held."""
        self.record_frees()
        return any(block in self._live for block in blocks)

    def is_holding(self) -> bool:
        """Whether a tensor in it is alive."""
        self.record_frees()
        return bool(self._live)

    def take_back(self, blocks: Sequence[int]) -> None:
        """Free blocks although tensors have them, whose memory is gone from here on."""
        self.record_frees()
        wanted = {block for block in blocks if block in self._live}
        for ref in list(self._refs.values()):
            if ref.block in wanted:
                self._free(ref.block)
                del self._refs[ref.key]
                ref.block = -1

    def clear_workspaces(self) -> None:
        """cuBLAS gives back its workspaces, of all streams (_cuda_clearCublasWorkspaces)."""
        self.record_frees()
        streams = {(stream_of(one.stream), one.device) for one in self.operators}
        self.cleared += [(len(self.kind), stream, device) for stream, device in sorted(streams)]

    def is_known(self, storage: Any) -> bool:
        """Whether a storage is in the log and alive."""
        return self._ref(storage) is not None

    def block_of(self, storage: Any) -> int:
        """The block of a storage; -1 if it has no memory."""
        ref = self._ref(storage)
        return ref.block if ref is not None else -1

    def address_of(self, storage: Any) -> int:
        """A number like an address for a storage; 0 if it has no memory."""
        ref = self._refs.get(id(storage))
        return ref.key if ref is not None else 0

    def hold(self, nbytes: int, op: Any = "scratch") -> int:
        """Allocate memory that belongs to no tensor; return the block to release (-1 for 0 bytes)."""
        with self._lock:
            self.record_frees()
            return self._allocate(int(nbytes), op, None, 0, gpus.current()) if nbytes else -1

    def release(self, block: int) -> None:
        """Release such memory."""
        with self._lock:
            self.record_frees()
            if block >= 0:
                self._free(block)

    @property
    def allocator(self) -> Any:
        """The allocator of the current GPU."""
        return self.allocators[gpus.current()]

    def switch_stream(self, stream: int, device: int) -> None:
        """Make a stream the current one of its GPU."""
        self._streams[device].switch(stream)

    def _place(self, device: int) -> int:
        """The stream of a request, and the private pool that it goes to: the first whose route takes this stream (get_pool)."""
        stream = self._streams[device].now
        if not self._routes[device]:
            return stream
        pools = (pool for pool, takes in self._routes[device] if takes(stream))
        return in_pool(next(pools, 0), stream)

    def _on_pool(self, change: Callable[[PrivatePools, int], None], pool: int, device: int) -> None:
        self.pools.append((len(self.kind), change.__name__, pool, device, len(self.emptied)))
        change(self.allocators[device].private, pool)

    def keep_pool(self, pool: int, device: int, whole: bool = False) -> None:
        """A private pool has one more user; `whole`: it does not split its segments."""
        self.record_frees()
        self._on_pool(PrivatePools.keep_whole if whole else PrivatePools.keep, pool, device)

    def begin_pool(self, pool: int, device: int, takes: Callable[[int], bool]) -> None:
        """Requests of streams for which `takes` is true go to a private pool, which has one more user."""
        self.record_frees()
        self._on_pool(PrivatePools.begin, pool, device)
        self._routes[device].append((pool, takes))

    def end_pool(self, pool: int, device: int) -> None:
        """They no longer do; its user stays."""
        self.record_frees()
        self._on_pool(PrivatePools.end, pool, device)
        self._routes[device] = [one for one in self._routes[device] if one[0] != pool]

    def release_pool(self, pool: int, device: int, stream: int | None, is_emptied: bool = False) -> None:
        """A user of a private pool is gone; queued like frees, as it may happen at any time.

        If it is a graph, cuBLAS gives back the workspaces of the `stream` of its capture; if a MemPool, the pool `is_emptied`.
        """
        self._dead.append((pool, device, stream, is_emptied))

    def _released(self, pool: int, device: int, stream: int | None, is_emptied: bool) -> None:
        if stream is not None:
            self.cleared.append((len(self.kind), stream, device))
        self._on_pool(PrivatePools.release, pool, device)
        if is_emptied:
            self.pools.append((len(self.kind), "empty", pool, device, len(self.emptied)))
            self.allocators[device].empty_cache(pool)

    def record_stream(self, storage: Any, stream: int) -> None:
        """A storage is used on another stream."""
        self.record_frees()
        ref = self._ref(storage)
        if ref is not None:
            self.recorded_streams.append((len(self.kind), ref.block, stream))
            self.allocators[self.born_on[ref.block]].record_stream(self._live[ref.block][0], stream)

    def empty_cache(self) -> None:
        """Log `empty_cache`, which empties those of all GPUs."""
        self.record_frees()
        self.emptied.append(len(self.kind))
        for allocator in self.allocators:
            allocator.empty_cache()

    def note(self, name: str, in_backward: bool, shapes: tuple[tuple[int, ...], ...], dtype: str) -> None:
        """Log an operator that may need a workspace."""
        self.record_frees()
        device = gpus.current()
        self.operators.append(Operator(len(self.kind), name, self._place(device), in_backward, shapes, dtype, device))

    def mark(self) -> int:
        """The time now; frees so far are dated before it."""
        self.record_frees()
        return time.time_ns()

    def columns(self) -> dict[str, np.ndarray]:
        """The rows so far; per block `birth`, into the tables of `births`, and its `device`."""
        self.record_frees()
        columns = {name: np.array(getattr(self, name), dtype=code) for name, code in self.COLUMNS}
        return columns | {"birth": np.array(self.born_as, "i4"), "device": np.array(self.born_on, "u1")}
