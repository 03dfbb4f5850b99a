"""The private entry of PyTorch's autograd engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def forget_unfinished_backward() -> None:
    """Let go of what a backward that raised on this thread had still to do: nodes, their gradients, what the graph saved.

    The engine leaves it in the thread's queue until another backward on the CPU begins (`local_ready_queue` in
    torch/csrc/autograd/engine.cpp, seen in 2.11 to 2.15); so one begins here, through a graph of one number.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()
