"""Hooks on nodes of PyTorch's autograd graph; seen in 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import torch

from memlab.seams.dispatch import DisableTorchFunction, function_mode_count
from memlab.seams.graph import grad_fn

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_functorch: Any = torch._C._functorch


def is_plain(thing: Any) -> bool:
    """Whether a thing is a tensor and of no subclass."""
    return type(thing) in _PLAIN


def can_hook() -> bool:
    """Whether nodes made now may get hooks: not inside `torch.func`; torch._C._functorch.peek_interpreter_stack."""
    return _functorch.peek_interpreter_stack() is None


def node_of(tensor: Any) -> Any:
    """The node that made a plain tensor, None for leaves and for what only looks like a plain tensor."""
    if function_mode_count():  # of the user's, which would be asked
        with DisableTorchFunction():
            return grad_fn(tensor)
    return grad_fn(tensor)


def is_alive(handle: Any) -> bool:
    """Whether the node behind the handle of a hook still exists; RemovableHandle.hooks_dict_ref."""
    return handle.hooks_dict_ref() is not None
