"""CUDA graphs and memory pools: what is captured runs once, with memory of a private pool; a replay allocates nothing.

PyTorch's own `torch.cuda.graph` and `make_graphed_callables` run on the graphs and pools made here. A stream takes part in a
capture from where it waits for one that does. As in ATen/cuda/CUDAGraph.cpp a graph keeps its pool until it is reset or deleted.

Limits: what CUDA forbids during a capture is refused only where a value is read. Memory of the driver for the graphs themselves
is not counted, as PyTorch's allocator does not see it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.cuda.graphs

from memlab.allocator.rules import release
from memlab.errors import PredictionError
from memlab.fake_cuda import gpus
from memlab.fake_cuda.gpus import State, with_index
from memlab.fake_cuda.kernel_rules import name_of
from memlab.fake_cuda.patches import Patches, nothing
from memlab.fake_cuda.places import where
from memlab.torch_internals import dispatch
from memlab.torch_internals.objects import schema_of

PLUGGED = "memory of an allocator of the user's (MemPool(allocator), CUDAPluggableAllocator) cannot be predicted: leave it out."
LAST_RESORT = "a MemPool(use_on_oom=True) is not used where memory runs out"
_ON_DEFAULT = (
    "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the default "
    "stream.)"
)
Handle = tuple[int, int]


class Capture:
    """The capture of a graph, and the streams that take part in it."""

    underway: ClassVar[dict[int, Capture]] = {}
    """Stream -> its capture, while that lasts."""

    def __init__(self, stream: int, draw: Callable[[], Any]) -> None:
        self.streams: set[int] = set()
        self.draw = draw
        """Called when random numbers are drawn in it."""
        self.join(stream)

    def join(self, stream: int) -> None:
        """A stream takes part from here on."""
        self.streams.add(stream)
        self.underway[stream] = self

    def end(self) -> None:
        """All of its streams are free again."""
        for stream in self.streams:
            del self.underway[stream]
        self.streams.clear()

    def takes(self, stream: int) -> bool:
        """Whether a stream takes part."""
        return stream in self.streams


def is_capturing() -> bool:
    """Whether the current stream takes part in a capture."""
    return bool(Capture.underway) and torch.cuda.current_stream().cuda_stream in Capture.underway


def refuse_waiting() -> None:
    """Reading a value waits for the GPU, which CUDA forbids in a capture."""
    if Capture.underway and is_capturing():
        line = where() or "the program"
        raise RuntimeError(
            f"CUDA error: operation not permitted when stream is capturing. {line} reads a value while a graph is captured."
        )


class Seeds(list[Any]):
    """What the generator of random numbers keeps on the GPU for a graph (CUDAGeneratorCaptureState).

    Before 2.12 all graphs of a GPU share them, from the first capture, on its stream, to the end of the last graph. From 2.14 on
    only graphs that draw random numbers have them, from where they first do.
    """

    shared: ClassVar[weakref.WeakValueDictionary[int, Seeds]] = weakref.WeakValueDictionary()

    @classmethod
    def of_graph(cls) -> Seeds:
        """Those of a graph that is about to be captured on the current stream."""
        if not cls.are_shared():
            with torch.cuda.stream(torch.cuda.default_stream()):
                return cls._made()
        found = cls.shared.get(gpus.current())
        if found is None:
            found = cls.shared[gpus.current()] = cls._made()
        return found

    @staticmethod
    def are_shared() -> bool:
        """As in the PyTorch that the prediction is for."""
        return release(State.active.dispatcher.torch_version) < (2, 12)

    @staticmethod
    def are_made_when_used() -> bool:
        """Whether a graph has them only from where it draws random numbers."""
        return release(State.active.dispatcher.torch_version) >= (2, 14)

    @classmethod
    def _made(cls) -> Seeds:
        return cls(torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2))


def drawn(func: Any, args: Any, kwargs: Any) -> None:
    """An operator that may draw random numbers has run; not all of them do when they drop nothing."""
    if not is_capturing():
        return
    arguments = schema_of(func).arguments
    given = {one.name: one.default_value for one in arguments}
    given |= dict(zip(given, args, strict=False)) | (kwargs or {})
    is_training = given.get("train") is not False and given.get("training") is not False
    if is_training and given.get("dropout_p", 1) and not name_of(func).endswith("backward"):
        mode = State.active.dispatcher.mode
        dispatch.push_mode(mode)
        try:
            Capture.underway[torch.cuda.current_stream().cuda_stream].draw()
        finally:
            dispatch.remove_mode(mode)


_numbers = itertools.count(1)


def graph_pool_handle() -> Handle:
    """A new pool, which graphs may share."""
    return 0, next(_numbers)


class CUDAGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    instantiate = enable_debug_mode = debug_dump = register_generator_state = staticmethod(nothing)

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Handle | None = None
        self._capture: Capture | None = None
        self._release: Callable[[], Any] = nothing
        self._seeds: Any = None
        self.is_captured = False

    def capture_begin(self, pool: Handle | None = None, capture_error_mode: str = "global", **kwargs: Any) -> None:
        """What runs on the current stream belongs to the graph from here on."""
        stream, log, device = torch.cuda.current_stream().cuda_stream, State.active.log, gpus.current()
        if self.is_captured:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if stream == 0:
            raise RuntimeError(_ON_DEFAULT)
        if not Seeds.are_made_when_used():
            self._draw()
        self._pool, self._capture = pool or (next(_numbers), 0), Capture(stream, self._draw)
        number = max(self._pool)
        log.begin_pool(number, device, self._capture.takes)
        clears = None if Seeds.are_shared() else stream  # since 2.12 workspaces of cuBLAS go with a graph
        self._release = weakref.finalize(self, log.release_pool, number, device, clears)

    def _draw(self) -> None:
        if self._seeds is None:
            self._seeds = Seeds.of_graph()

    def capture_end(self) -> None:
        """It ends here."""
        if self._capture is None:
            raise RuntimeError("capture_end was called without capture_begin.")
        State.active.log.end_pool(max(self.pool()), gpus.current())
        self._capture.end()
        self._capture, self.is_captured = None, True

    def replay(self) -> None:
        """Run it again, in the same memory."""
        if not self.is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def reset(self) -> None:
        """Forget what was captured."""
        self._release()
        self._release, self.is_captured = nothing, False
        if not Seeds.are_shared():
            self._seeds = None

    def pool(self) -> Handle:
        """Its pool, for another graph."""
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool


class MemPool:
    """Replaces `torch.cuda.MemPool`."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False, **kwargs: Any) -> None:
        if allocator is not None:
            raise PredictionError(PLUGGED)
        if use_on_oom:
            State.active.dispatcher.assume(LAST_RESORT)
        self.id, self.device, log = graph_pool_handle(), gpus.current(), State.active.log
        log.keep_pool(self.id[1], self.device, whole=no_split)
        weakref.finalize(self, log.release_pool, self.id[1], self.device, None, is_emptied=True)

    def use_count(self) -> int:
        """How many use it."""
        State.active.log.record_frees()
        return int(State.active.log.allocators[self.device].private.uses[self.id[1]])

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        """Nothing, as `torch.cuda.memory_snapshot` of a fake GPU."""
        return []


@contextlib.contextmanager
def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
    """Requests of this thread go to a pool; backward has threads of its own."""
    log, thread = State.active.log, threading.get_ident()
    at = with_index("cuda" if device is None else device).index
    number = max(pool.id)
    log.begin_pool(
        number, at, lambda stream: threading.get_ident() == thread and dispatch.current_autograd_node() is None
    )
    try:
        yield
    finally:
        log.end_pool(number, at)
        log.release_pool(number, at, None)


def capture_graphs(cuda: Any, patches: Patches) -> None:
    """Let PyTorch's functions for graphs and pools find these."""
    graphs, memory = torch.cuda.graphs, torch.cuda.memory
    patches.callback(Capture.underway.clear)
    patches.callback(Seeds.shared.clear)
    patches.put(
        graphs, CUDAGraph=CUDAGraph, _cuda_isCurrentStreamCapturing=is_capturing, _graph_pool_handle=graph_pool_handle
    )
    patches.put(graphs.graph, default_capture_stream=None)  # one of the real GPU, or of an earlier prediction
    patches.put(torch._C, _host_emptyCache=nothing)
    pools = {"MemPool": MemPool, "use_mem_pool": use_mem_pool}
    patches.put(torch.cuda, CUDAGraph=CUDAGraph, is_current_stream_capturing=is_capturing, **pools)
    patches.put_where_present(memory, **pools)
