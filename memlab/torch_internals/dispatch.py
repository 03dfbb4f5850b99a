"""Private hooks of PyTorch's dispatcher, as the CPU tensor tracker needs them.

These are on the path of every operator, so most are the C functions themselves, without a wrapper.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from memlab.torch_internals.private_names import private

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")


class OperatorMode(TorchDispatchMode):
    """A mode that looks at operators, and leaves compiled code compiled: anything else is not what the user wants to measure."""

    def __init__(self) -> None:  # PyTorch gives it no types
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the handler, 1 microsecond per operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled."""
        return True


TensorBase: Any = torch.Tensor.__base__
"""The class whose getters no subclass of Tensor has replaced."""
DisableTorchFunction: Any = private("torch._C.DisableTorchFunction")
"""Within it, no `__torch_function__` of the user's runs."""
HigherOrderOperator: Any = private("torch._ops.HigherOrderOperator")
"""Operators that take functions, and have no `_op`."""
plain_torch_dispatch: Any = private("torch._C._disabled_torch_dispatch_impl")
"""The `__torch_dispatch__` of tensor classes that have none of their own."""
current_autograd_node: Any = private("torch._C._current_autograd_node")
"""The node of the graph that runs in this thread, None outside of backward."""
mode_count: Any = private("torch._C._len_torch_dispatch_stack")
"""How many dispatch modes are on in this thread."""
function_mode_count: Any = private("torch._C._len_torch_function_stack")
"""How many function modes are on in this thread."""
push_mode: Any = private("torch._C._push_on_torch_dispatch_stack")
"""Put a dispatch mode on the stack of this thread.

Not by `__enter__`: that notes flags which a mode that the user leaves on would restore wrongly after ours has gone.
"""
_mode_at: Any = private("torch._C._get_dispatch_stack_at")
_pop_mode: Any = private("torch._C._pop_torch_dispatch_stack")


def may_remove(inferred: bool) -> bool:
    """Whether a mode that was put on while inference mode was on (`inferred`) or not can be taken off here.

    At its end inference mode puts back the dispatch keys of its beginning (c10/core/InferenceMode.h): with the key of modes
    on and no mode there, every factory fails from then on.
    """
    return inferred or not torch.is_inference_mode_enabled()


def modes() -> list[Any]:
    """The dispatch modes that are on in this thread, the lowest first."""
    return [_mode_at(depth) for depth in range(mode_count())]


def top_mode() -> Any:
    """The dispatch mode on top of the stack of this thread, None if there is none."""
    depth = mode_count()
    return _mode_at(depth - 1) if depth else None


def remove_mode(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack of this thread, wherever it lies; the others stay in their order."""
    above = []
    try:
        while mode_count():
            top = _pop_mode(None)
            if top is mode:
                return True
            above.append(top)
        return False
    finally:
        for other in reversed(above):
            push_mode(other)


def compiled_something() -> bool:
    """Whether torch.compile has compiled anything in this process; torch._dynamo.utils.counters["frames"]["ok"]."""
    # A signal may come while the module is being imported, as the first optimizer does.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and bool(counters["frames"]["ok"])
