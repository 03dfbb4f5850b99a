"""Private hooks of PyTorch's CUDA allocator, its history, its counters, and of the start of CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any


def record_history(entries: int) -> None:
    """Start recording allocator history with Python frames for allocations, dropping what an earlier recording left.

    torch.cuda.memory._record_memory_history_impl, seen in 2.11 to 2.15 (`clear_history` since 2.8); what the public-looking
    `_record_memory_history` calls, which memlab may have replaced (see `replace_history_switch`).
    """
    import torch

    torch.cuda.memory._record_memory_history_impl(
        "all", context="alloc", stacks="python", max_entries=entries, clear_history=True
    )


def stop_history() -> None:
    """Stop recording and forget the entries: the state of a process in which nobody recorded."""
    import torch

    torch.cuda.memory._record_memory_history_impl(None)


def history_is_on() -> bool:
    """Whether somebody records; torch._C._cuda_isHistoryEnabled, seen in 2.11 to 2.15.

    It reads the first device's allocator and ends the process where there is none yet: ask only once CUDA is up.
    """
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def when_cuda_starts(action: Callable[[], None]) -> None:
    """Call `action` now if CUDA is up, else right after it comes up and before anything is allocated on it.

    torch.cuda._lazy_call, seen in 1.0 to 2.15.
    """
    import torch

    torch.cuda._lazy_call(action)


def forget_when_cuda_starts(action: Callable[[], None]) -> None:
    """Take back `when_cuda_starts` where CUDA has not come up; torch.cuda._queued_calls, a list of (call, traceback)."""
    import torch

    queue = torch.cuda._queued_calls
    queue[:] = [item for item in queue if item[0] != action]


def history_switch() -> Callable[..., Any]:
    """The function with which users start and stop allocator history: torch.cuda.memory._record_memory_history."""
    import torch

    return torch.cuda.memory._record_memory_history


def replace_history_switch(switch: Callable[..., Any]) -> None:
    """Let users start and stop history through `switch`, so that theirs and ours do not end each other."""
    import torch

    torch.cuda.memory._record_memory_history = switch


def snapshot() -> dict[str, Any]:
    """The allocator's segments and history; torch._C._cuda_memorySnapshot behind torch.cuda.memory._snapshot."""
    import torch

    return torch._C._cuda_memorySnapshot(None)


def cuda_stats(device: int) -> Mapping[str, Any]:
    """The allocator's counters of one device, nested; torch._C._cuda_memoryStats, seen in 2.11 to 2.15.

    The public memory_stats() flattens and sorts the same for about 30 microseconds more.
    """
    import torch

    return torch._C._cuda_memoryStats(device)


def device_count() -> int:
    """How many devices CUDA has, once it is up; torch._C._cuda_getDeviceCount, seen in 2.11 to 2.15."""
    import torch

    return int(torch._C._cuda_getDeviceCount())


def has_primary_context(device: int) -> bool:
    """Whether this process has a context on a device; asking anything else would make one.

    torch._C._cuda_hasPrimaryContext, absent from builds without CUDA, seen in 2.12.
    """
    import torch

    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return ask is not None and bool(ask(device))


def blas_workspace_sizes() -> frozenset[int]:
    """The sizes, in bytes, of which one is that of every workspace PyTorch hands to cuBLAS.

    The environment variable CUBLAS_WORKSPACE_CONFIG (":size in KiB:count" once or more) as ATen's CublasHandlePool.cpp reads
    it, else its two defaults: 8 MiB and 128 KiB, and 32 MiB on cards of compute capability 9 and above; seen in 2.11 to 2.15.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return frozenset({sum(int(size) * int(count) for size, count in pairs) * 1024})
    return frozenset({(2 * 4096 + 8 * 16) * 1024, 8 * 4096 * 1024})
