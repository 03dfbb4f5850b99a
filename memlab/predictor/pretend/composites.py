"""Operators that PyTorch composes of others: composed here as for a CUDA tensor.

The choices in C++ ask for the device or for subclasses of Tensor, and would take pretend tensors for what they are not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memlab.predictor.pretend.rules import installer, rule
from memlab.predictor.pretend.tensors import CUDA0, is_pretend, with_index

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


@installer
@contextlib.contextmanager
def groups_are_of_the_card(run: Any, patches: Any) -> Iterator[None]:
    """Optimizers make new numbers where their groups are, which C++ takes for the meta device (ASGD, a learning rate in a tensor).

    (torch/utils/_foreach_utils.py, _group_tensors_by_device_and_dtype, 2.11 to 2.15.)
    """
    for name in ("torch.optim.optimizer", "torch.optim.swa_utils", "torch.nn.utils.clip_grad"):
        module = sys.modules[name]
        patches.put(module, _group_tensors_by_device_and_dtype=_named(module._group_tensors_by_device_and_dtype))
    yield


def _named(group: Any) -> Any:
    def grouped(tensors: Any, with_indices: bool = False) -> Any:
        found = group(tensors, with_indices)
        if not any(device is not None and device.type == "meta" for device, _ in found):
            return found
        pretend = _on_card([one for column in tensors[:1] for one in column])
        return {
            (CUDA0 if pretend and device.type == "meta" else device, dtype): all_
            for (device, dtype), all_ in found.items()
        }

    return grouped


@installer
@contextlib.contextmanager
def tensors_stay_what_they_are(run: Any, patches: Any) -> Iterator[None]:
    """`torch.as_tensor` returns a tensor that is there already (torch/csrc/utils/tensor_new.cpp asks C++ for its device)."""
    patches.put(torch, as_tensor=_keeping(torch.as_tensor))
    yield


def _keeping(real: Any) -> Any:
    @functools.wraps(real)
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
        if is_pretend(data) and (device is None or with_index(device).type == "cuda"):
            return data if dtype is None else data.to(dtype)
        return real(data, dtype=dtype, device=device)

    return as_tensor
