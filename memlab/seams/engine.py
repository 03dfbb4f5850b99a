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
