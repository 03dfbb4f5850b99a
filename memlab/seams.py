"""Every private hook of PyTorch, IPython and ipykernel that memlab leans on, in one place.

None of these is a public promise. Each function says what it uses, where that was seen, and what happens without it;
`tests/test_seams.py` notices when one breaks. Nothing else in memlab may touch a private name of these libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

# --- PyTorch: the allocator's history and counters -------------------------------------------------------------------


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


# --- PyTorch: the autograd engine and dispatch modes ------------------------------------------------------------------

_ENGINE_NAME = "_engine_run_backward"


def engine_entry() -> Callable[..., Any]:
    """The one function through which Python starts the autograd engine, as `torch.autograd` calls it now.

    torch.autograd._engine_run_backward, seen in 2.3 to 2.15; backward(), grad() and reentrant checkpoints call it.
    """
    import torch.autograd

    return getattr(torch.autograd, _ENGINE_NAME)


def replace_engine_entry(entry: Callable[..., Any]) -> None:
    """Let `torch.autograd` start the engine through `entry`."""
    import torch.autograd

    setattr(torch.autograd, _ENGINE_NAME, entry)


# --- ipykernel and ipywidgets ---------------------------------------------------------------------------------------


def let_clicks_through(widget: Any) -> None:
    """Let messages from the browser reach a widget while the cell runs.

    ipykernel 7.4 sends a comm's messages to the subshell that spoke last on it, which is the busy main shell for a widget
    made in a cell (`comm._reply_subshell_for`). Where the attribute means nothing, nothing changes.
    """
    comm = getattr(widget, "comm", None)
    if comm is not None and hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = None


def is_kernel(shell: Any) -> bool:
    """Whether this IPython shell talks to a notebook front end (ipykernel's ZMQInteractiveShell) and not a terminal."""
    return shell is not None and "ipykernel" in sys.modules and hasattr(shell, "kernel")
