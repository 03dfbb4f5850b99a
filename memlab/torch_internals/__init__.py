"""Every private hook of PyTorch, IPython and ipykernel that memlab uses, in one package.

None of these is public API. Each says what it uses and where that was seen; `private_names` has all that can be
imported in one table, and `tests/torch_internals` notices when one breaks. Nothing else in memlab may touch a private name
of these libraries.

Here are those of PyTorch's CUDA allocator, its history and counters, of the start of CUDA, of the autograd engine, and of the
kernel; torch is imported when they are called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from memlab.torch_internals.private_names import private

# --- the allocator's history and counters ---


def record_history(entries: int) -> None:
    """Start recording allocator history with Python frames for allocations, dropping what an earlier recording left.

    `clear_history` is there since 2.8. The public-looking `_record_memory_history` calls the same, and memlab may have
    replaced it (see `replace_history_switch`).
    """
    private("torch.cuda.memory._record_memory_history_impl")(
        "all", context="alloc", stacks="python", max_entries=entries, clear_history=True
    )


def stop_history() -> None:
    """Stop recording and drop the entries: the state of a process that never recorded."""
    private("torch.cuda.memory._record_memory_history_impl")(None)


def history_is_on() -> bool:
    """Whether history is being recorded.

    It reads the first device's allocator and crashes the process if there is none yet: call it only once CUDA is initialized.
    """
    return bool(private("torch._C._cuda_isHistoryEnabled")())


def history_switch() -> Callable[..., Any]:
    """The function with which users start and stop allocator history."""
    return private("torch.cuda.memory._record_memory_history")


def replace_history_switch(switch: Callable[..., Any]) -> None:
    """Let users start and stop history through `switch`, so that theirs and ours do not end each other."""
    import torch

    torch.cuda.memory._record_memory_history = switch


def snapshot() -> dict[str, Any]:
    """The allocator's segments and history: what is behind torch.cuda.memory._snapshot.

    Symbolizing frames asks for `torch._inductor.codecache` (torch/csrc/profiler/python/combined_traceback.cpp, seen in 2.12
    and 2.13), and asking imports the compiler, which sets TORCHINDUCTOR_CACHE_DIR. Where the user has not imported it, a
    stand-in answers meanwhile.
    """
    import torch

    take = private("torch._C._cuda_memorySnapshot")
    with _one_at_a_time:  # a second thread would take the first one's stand-in for the compiler
        if "torch._inductor" in sys.modules:
            return take(None)
        stand_in: Any = _NoCompiler()
        vars(torch)["_inductor"] = stand_in
        try:
            return take(None)
        finally:
            if vars(torch).get("_inductor") is stand_in:  # else somebody has imported it meanwhile
                del vars(torch)["_inductor"]


_one_at_a_time = threading.RLock()  # a signal handler may ask for a snapshot within one


class _NoCompiler:
    """Has no attributes in the thread that made it; to other threads it is the compiler, imported as ever."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.thread:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


def cuda_stats(device: int) -> Mapping[str, Any]:
    """The allocator's counters of one device, nested.

    The public memory_stats() flattens and sorts the same for about 30 microseconds more.
    """
    return _memory_stats()(device)


@functools.cache  # asked for with every sample
def _memory_stats() -> Any:
    return private("torch._C._cuda_memoryStats")


def blas_workspace_sizes(capabilities: Collection[int] = ()) -> frozenset[int]:
    """The sizes, in bytes, of which one is that of every workspace PyTorch hands to cuBLAS, on cards of these capabilities.

    The environment variable CUBLAS_WORKSPACE_CONFIG (":size in KiB:count" once or more) as ATen's CublasHandlePool.cpp reads
    it, else its two defaults: 8 MiB and 128 KiB, and 32 MiB on cards of compute capability 9, and since 2.12 above.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return frozenset({sum(int(size) * int(count) for size, count in pairs) * 1024})
    small, large = (2 * 4096 + 8 * 16) * 1024, 8 * 4096 * 1024
    of = {9: {large}} | {major: {small} for major in range(9)}
    return frozenset().union(*(of.get(major, {small, large}) for major in capabilities or (0, 9)))


# --- the start of CUDA ---


def when_cuda_starts(action: Callable[[], None]) -> None:
    """Call `action` now if CUDA is initialized, else right after that and before anything is allocated."""
    private("torch.cuda._lazy_call")(action)


def forget_when_cuda_starts(action: Callable[[], None]) -> None:
    """Take back `when_cuda_starts` where CUDA has not come up; the queue has (call, traceback)."""
    queue = private("torch.cuda._queued_calls")
    queue[:] = [item for item in queue if item[0] != action]


def device_count() -> int:
    """How many devices CUDA has, once it is up."""
    return int(private("torch._C._cuda_getDeviceCount")())


def has_primary_context(device: int) -> bool:
    """Whether this process has a context on a device; other queries would create one. False in builds without CUDA."""
    import torch

    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return ask is not None and bool(ask(device))


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps; the next product makes new ones. A captured graph may use one: then they stay."""
    import gc

    import torch

    if not any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects()):  # isinstance runs properties
        private("torch._C._cuda_clearCublasWorkspaces")()


# --- the autograd engine ---


def engine_entry() -> Callable[..., Any]:
    """The one function through which Python starts the autograd engine, as `torch.autograd` calls it now.

    backward(), grad() and reentrant checkpoints call it.
    """
    return private("torch.autograd._engine_run_backward")


def replace_engine_entry(entry: Callable[..., Any]) -> None:
    """Let `torch.autograd` start the engine through `entry`."""
    import torch.autograd

    torch.autograd._engine_run_backward = entry


def forget_unfinished_backward() -> None:
    """Free what a failed backward on this thread left in the queue: nodes, their gradients, saved tensors.

    The engine leaves it in the thread's queue until another backward on the CPU begins (`local_ready_queue` in
    torch/csrc/autograd/engine.cpp, seen in 2.11 to 2.15); so one begins here, through a graph of one number.
    """
    import torch

    no_modes = private("torch.utils._python_dispatch._disable_current_modes")
    with no_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()


# --- the kernel ---


def let_clicks_through(widget: Any) -> None:
    """Let messages from the browser reach a widget while the cell runs.

    ipykernel 7.4 sends a comm's messages to the subshell that spoke last on it, which is the busy main shell for a widget
    made in a cell (`comm._reply_subshell_for`). Where the attribute means nothing, nothing changes.
    """
    with contextlib.suppress(Exception):
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = None


def is_kernel(shell: Any) -> bool:
    """Whether this IPython shell talks to a notebook front end (ipykernel's ZMQInteractiveShell) and not a terminal."""
    return shell is not None and "ipykernel" in sys.modules and hasattr(shell, "kernel")
