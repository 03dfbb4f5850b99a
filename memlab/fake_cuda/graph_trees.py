"""`torch.compile(mode="reduce-overhead")`: compiled code in CUDA graphs that share one private pool (inductor's graph trees).

The first call of a compiled half runs it with memory of the pool, the second copies its inputs into the pool and captures it, and
the others replay it, which allocates nothing. What the calls of one step returned is given back when the next step begins, even if
something still holds it. Read in torch/_inductor/cudagraph_trees.py (CUDAGraphTreeManager) of 2.12 and 2.13.

Limits: a recording in the middle of a step that is replayed takes what that step holds as not there, and a recording is not
repeated where parameters move. A tensor that the function finds for itself counts as one that stays where it is, like parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memlab.fake_cuda.tensors import is_fake
from memlab.torch_internals.dispatch import TensorBase

IN_GRAPHS = (
    "compiled code runs in CUDA graphs of one pool: the first call of each warms up, the second is captured, the others are "
    "replayed; a program of one step has only the first"
)
WITHOUT_GRAPHS = "compiled code runs without CUDA graphs: "
MIDDLE = "compiled code was captured in the middle of a step whose beginning was replayed: what that holds in the pool is left out"
OVERWRITTEN = (
    "gradients that a compiled backward returned were kept until the next step, which takes their memory in the pool: PyTorch "
    "ends with an error where they are read; clear them (zero_grad) before each step, or leave mode= out"
)
WARMUP, RECORDING, EXECUTION = "warm-up", "recording", "execution"

Half = Callable[[list[Any]], Any]


def wants_graphs(mode: Any, options: Any) -> bool:
    """Whether these arguments of `torch.compile` ask for CUDA graphs (torch/_inductor, list_mode_options)."""
    asked = (options or {}).get("triton.cudagraphs")
    return bool(asked) if asked is not None else mode in ("reduce-overhead", "max-autotune")


class GraphTrees:
    """The graphs of one prediction and their pool.

    `step` counts the calls of compiled functions from outside of one; a new step begins with the next of them, once a backward ran.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda, self.step, self.marked = cuda, 0, 0
        self._stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._handle = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream):
            pass
        self._graphs = [graph]
        self._state = ""
        self._path: tuple[int, ...] = ()
        self._returned: list[int] = []  # the blocks that the calls of this path returned
        self._replayed: list[Any] = []  # the logs of what replays returned
        self._began = -1  # the step of this path
        self._awaits_backward = False
        self._warm: set[int] = set()
        self._recorded: set[tuple[int, ...]] = set()
        self._numbers = itertools.count(1)
        self._made = range(0)  # the blocks of the last run

    def number(self) -> int:
        """One for a half of a compiled function."""
        return next(self._numbers)

    def run(self, number: int, half: Half, inputs: list[Any], fixed: Sequence[int], kind: str, unlogged: Any) -> Any:
        """Run a half, whose inputs at `fixed` stay where they are; `kind` is "forward", "backward" or "inference"."""
        out = self._run(number, half, inputs, fixed, unlogged)
        if kind != "inference":
            self._awaits_backward = kind == "forward"
        return out

    def _run(self, number: int, half: Half, inputs: list[Any], fixed: Sequence[int], unlogged: Any) -> Any:
        if self._state in (WARMUP, RECORDING):
            self._end_path(inputs)
        if number not in self._warm or self._state == WARMUP:
            self._leave_replay()
            self._warm.add(number)
            with self._running(), self._in_pool():
                out = half(inputs)
            return self._returning(WARMUP, number, out)
        if self._state != RECORDING:
            if (*self._path, number) not in self._recorded and (number,) in self._recorded:
                self._leave_replay()
            if (*self._path, number) in self._recorded:
                return self._replay(number, half, inputs, unlogged)
            self._leave_replay()
        out = self._returning(RECORDING, number, self._captured(half, inputs, fixed))
        self._recorded.add(self._path)
        return out

    @property
    def _now(self) -> int:
        return self.marked or self.step

    def _is_new_step(self) -> bool:
        return self._began != self._now and (bool(self.marked) or not self._awaits_backward)

    def _end_path(self, inputs: list[Any]) -> None:
        """A new step takes what the last one returned (try_end_curr_recording, try_end_curr_warmup)."""
        log = self._cuda.log
        log.record_frees()
        if self._is_new_step():
            grads = [
                one.grad for one in inputs if isinstance(one, torch.Tensor) and one.is_leaf and one.grad is not None
            ]
            kept = {log.block_of(TensorBase.untyped_storage(grad)) for grad in grads if is_fake(grad)}
            if kept.intersection(self._returned):
                self._cuda.assume(OVERWRITTEN)
            log.take_back(self._returned)
        elif log.are_alive(self._returned):
            return
        self._start_anew()

    def _start_anew(self) -> None:
        self._path, self._state = (), ""
        self._returned.clear()
        self._replayed.clear()

    def _leave_replay(self) -> None:
        """What follows is not in the graphs that were being replayed (try_end_curr_execution)."""
        if self._state != EXECUTION:
            return
        if not self._is_new_step() and any(log.is_holding() for log in self._replayed):
            self._cuda.assume(MIDDLE)
        self._start_anew()

    def _returning(self, state: str, number: int, out: Any) -> Any:
        log = self._cuda.log
        self._state, self._began = state, self._now
        self._path = (*self._path, number)
        tensors = [one for one in out if isinstance(one, torch.Tensor) and is_fake(one)]
        blocks = {log.block_of(TensorBase.untyped_storage(one)) for one in tensors}
        self._returned += sorted(block for block in blocks if block in self._made)
        return out

    @contextlib.contextmanager
    def _in_pool(self) -> Iterator[None]:
        """All requests of this thread go to the pool (_use_cuda_memory_pool_manager)."""
        log, thread, number = self._cuda.log, threading.get_ident(), max(self._handle)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            log.begin_pool(number, 0, lambda stream: threading.get_ident() == thread)
            try:
                yield
            finally:
                log.end_pool(number, 0)
                log.release_pool(number, 0, None)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Without the workspaces of cuBLAS before and after; what is made in it belongs to the pool."""
        log = self._cuda.log
        log.clear_workspaces()
        first = log.next_block
        yield
        self._made = range(first, log.next_block)
        log.clear_workspaces()

    def _captured(self, half: Half, inputs: list[Any], fixed: Sequence[int]) -> Any:
        log, kept = self._cuda.log, set(fixed)

        def is_copied(place: int, one: Any) -> bool:
            is_tensor = place not in kept and isinstance(one, torch.Tensor)
            return is_tensor and log.block_of(TensorBase.untyped_storage(one)) not in self._returned

        with self._in_pool():
            copies = {
                place: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
                for place, one in enumerate(inputs)
                if is_copied(place, one)
            }
            for place in copies:
                inputs[place] = copies[place]
        copies.clear()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with self._running(), torch.cuda.graph(graph, pool=self._handle, stream=self._stream):
            return half(inputs)

    def _replay(self, number: int, half: Half, inputs: list[Any], unlogged: Any) -> Any:
        self._state, self._began = EXECUTION, self._now
        self._path = (*self._path, number)
        with unlogged(self._cuda) as spare:
            out = half(inputs)
        self._replayed.append(spare)
        return out

    def mark_step(self) -> None:
        """The user says that a step begins (torch.compiler.cudagraph_mark_step_begin)."""
        self.marked -= 1
