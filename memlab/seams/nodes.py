"""Hooks on nodes of PyTorch's autograd graph; seen in 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import torch

from memlab.seams.dispatch import DisableTorchFunction, TensorBase, function_mode_count

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
            return _grad_fn(tensor)
    return _grad_fn(tensor)


_grad_fn: Any = TensorBase.grad_fn.__get__


def number_of(node: Any) -> int:
    """Nodes are numbered in the order in which a thread made them; Node._sequence_nr."""
    return int(node._sequence_nr())


def is_alive(handle: Any) -> bool:
    """Whether the node behind the handle of a hook still exists; RemovableHandle.hooks_dict_ref."""
    return handle.hooks_dict_ref() is not None
