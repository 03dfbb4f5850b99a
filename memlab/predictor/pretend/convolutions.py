"""Convolutions: how results lie, what is copied before, what makes which gradient.

Limits: workspaces that cuDNN asks for while it convolves are not here (`memlab.predictor.extras` gives them as an interval).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import make_channels_last_strides_for, suggest_memory_format

from memlab.predictor.pretend.kernels import LAST, bytes_of, release
from memlab.predictor.pretend.reductions import reduce
from memlab.predictor.pretend.rules import rule


def layout(tensor: Any, weight: Any) -> torch.memory_format:
    """The one cuDNN works in (ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format)."""
    last = LAST.get(tensor.dim())
    if last is None or torch.float64 in (tensor.dtype, weight.dtype):
        return torch.contiguous_format
    return last if any(suggest_memory_format(one) is last for one in (tensor, weight)) else torch.contiguous_format


def _laid_out(run: Any, fresh: Any, form: torch.memory_format, func: Any) -> Any:
    if fresh is None or form is torch.contiguous_format:
        return None if fresh is None else run.empty(fresh.shape, fresh.dtype, op=func)
    strides = make_channels_last_strides_for(fresh.shape)
    return run.empty(fresh.shape, fresh.dtype, strides, op=func)


def _copied(run: Any, form: torch.memory_format, *tensors: Any) -> list[int]:
    odd = [one for one in tensors if not one.is_contiguous(memory_format=form)]
    return [run.hold(bytes_of(one), "aten.contiguous") for one in odd]


@rule("aten.convolution.default")
def convolution(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The result lies as cuDNN works; what does not is copied (ATen/native/cudnn/ConvShared.cpp)."""
    run._note(func, args, kwargs)
    form = layout(args[0], args[1])
    held = _copied(run, form, args[0], args[1])
    out = _laid_out(run, run.shapes.answer(func, args, kwargs), form, func)
    release(run, held)
    return out


@rule("aten.convolution_backward.default")
def convolution_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The depthwise kernel makes the weight's gradient first; the bias's is a sum (ATen/native/Convolution.cpp)."""
    run._note(func, args, kwargs)
    grad, tensor, weight, mask = args[0], args[1], args[2], args[10]
    form = layout(tensor, weight)
    held = _copied(run, form, grad, tensor, weight)
    fresh = run.shapes.answer(func, args, kwargs)
    order = (1, 0) if is_depthwise(tensor, weight, args) else (0, 1)
    grads = {place: _laid_out(run, fresh[place] if mask[place] else None, form, func) for place in order}
    release(run, held)
    if not mask[2]:
        return grads[0], grads[1], None
    bias = run.empty((grad.shape[1],), grad.dtype, op=func)
    reduce(run, grad, [0, *range(2, grad.dim())], 4)
    return grads[0], grads[1], bias


def is_depthwise(tensor: Any, weight: Any, args: Any) -> bool:
    """Whether PyTorch's own depthwise kernels are taken (ATen/native/Convolution.cpp, ConvParams::is_depthwise)."""
    groups, transposed = args[9], args[7]
    if transposed or groups == 1 or groups != tensor.shape[1] or weight.shape[0] % groups or tensor.dim() != 4:
        return False
    return layout(tensor, weight) is torch.contiguous_format
