"""Operators that PyTorch composes of others: composed here as for a CUDA tensor.

The choices in C++ ask for the device or for subclasses of Tensor, and would take pretend tensors for what they are not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memlab.predictor.pretend.rules import installer, rule
from memlab.predictor.pretend.tensors import is_pretend

aten = torch.ops.aten


@rule("aten._unsafe_view.default", "aten._reshape_alias.default")
def unsafe_view(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A view, though its schema says otherwise (`Tensor.reshape`, `matmul`)."""
    return run.op(aten.view.default, args[0], args[1])


@rule("aten.linear.default")
def linear(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The bias is added in place where it cannot be fused (ATen/native/Linear.cpp, linear)."""
    tensor, weight = args[0], args[1]
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    if bias is None or tensor.dim() < 3 or tensor.is_contiguous():
        return run.plain(func, *args, **kwargs)
    return tensor.matmul(weight.t()).add_(bias)


@installer
@contextlib.contextmanager
def foreach_norms(run: Any, patches: Any) -> Iterator[None]:
    """Gradients are clipped by the multi-tensor kernels, which PyTorch keeps for tensors of its own class.

    (torch/utils/_foreach_utils.py, _has_foreach_support, 2.11 to 2.15.)
    """
    module = sys.modules["torch.nn.utils.clip_grad"]
    real = module._has_foreach_support
    patches.put(module, _has_foreach_support=lambda found, device: _on_card(found) or real(found, device))
    yield


def _on_card(tensors: Any) -> bool:
    return bool(tensors) and all(one is None or is_pretend(one) for one in tensors)
