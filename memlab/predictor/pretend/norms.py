"""Norms: what layer, RMS, group and batch normalisation take on CUDA.

Sizes and order were read off the C++ allocator's own history (2.12.1, compute capability 7.5 to 12.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.predictor.pretend.kernels import FLOAT, LAST, aten, bytes_of, copies, release
from memlab.predictor.pretend.rules import rule


@rule("aten._fused_rms_norm.default")
def rms_norm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A kernel of its own on CUDA: the result and one factor per row (layer_norm_kernel.cu, _fused_rms_norm_cuda)."""
    tensor, normalized = args[0], args[1]
    held = copies(run, tensor)
    out = run.empty(tensor.shape, tensor.dtype, op=func)
    rows = (*tensor.shape[: tensor.dim() - len(normalized)], *[1] * len(normalized))
    factors = run.empty(rows, torch.float64 if tensor.dtype == torch.float64 else FLOAT, op=func)
    release(run, held)
    return out, factors


@rule("aten.native_layer_norm.default")
def layer_norm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A dense copy of the input if it is not dense (ATen/native/cuda/layer_norm_kernel.cu, expect_contiguous)."""
    held = copies(run, args[0])
    out = run.op(func, _dense_twin(run, args[0]), *args[1:], **kwargs)
    release(run, held)
    return out


def _dense_twin(run: Any, tensor: Any) -> Any:
    """What a shape function should be asked with where the kernel works on a dense copy: it takes no memory."""
    return (
        tensor
        if tensor.is_contiguous()
        else run.op(aten.view.default, run.op(aten.as_strided.default, tensor, (tensor.numel(),), (1,)), tensor.shape)
    )


@rule("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default")
def layer_norm_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Partial sums where there are very many rows (layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel)."""
    held = copies(run, args[1])
    out = run.op(func, args[0], _dense_twin(run, args[1]), *args[2:], **kwargs)
    held += copies(run, args[0])
    _partial_sums(run, func, args[1], args[2], [one for one in out[1:] if one is not None])
    release(run, held)
    return out


MANY_ROWS, ROWS_PER_SUM = 64 * 1024, 32


def _partial_sums(run: Any, func: Any, tensor: Any, normalized: Any, grads: list[Any]) -> None:
    columns = math.prod(normalized)
    rows = tensor.numel() // max(columns, 1)
    if not grads or rows <= MANY_ROWS or columns // 32 >= run.card.multiprocessors // 2:
        return
    partial = -(-rows // ROWS_PER_SUM) * columns * grads[0].element_size()
    blocks = [run.hold(partial, func) for _ in grads]
    for _ in grads:
        run.scratch(bytes_of(grads[0]), op=func)
    release(run, blocks)


@rule("aten.native_group_norm.default")
def group_norm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """One scale and one shift per channel (ATen/native/cuda/group_norm_kernel.cu, GroupNormKernelImplInternal)."""
    out = run.op(func, *args, **kwargs)
    weight, bias, samples, channels, inner = args[1], args[2], args[3], args[4], args[5]
    if inner > 1 and (weight is not None or bias is not None):
        run.scratch(*[samples * channels * 4] * 2, op=func)
    return out


@rule("aten.native_group_norm_backward.default")
def group_norm_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Sums per channel and coefficients per group (group_norm_kernel.cu, GroupNormBackwardKernelImplInternal)."""
    out = run.op(func, *args, **kwargs)
    gamma, samples, channels, inner, groups = args[4], args[5], args[6], args[7], args[8]
    per_channel, per_group = samples * channels * 4, samples * groups * 4
    last = [per_channel] if inner > 1 and gamma is not None else []
    run.scratch(per_channel, per_channel, per_group, per_group, *last, op=func)
    return out


def uses_cudnn(tensor: Any, weight: Any, mean: Any, var: Any, training: bool) -> bool:
    """Whether batch_norm goes to cuDNN (ATen/native/Normalization.cpp, _select_batch_norm_backend)."""
    kept = (mean is None) == (var is None) and (mean is not None or training)
    limit = 880801 if training else 65535
    fits = tensor.dim() >= 3 and tensor.shape[0] <= limit and tensor.dtype != torch.bfloat16
    single = tensor.dtype != torch.float16 or (weight is not None and weight.dtype == FLOAT)
    return bool(torch.backends.cudnn.enabled and weight is not None and kept and fits and single)


@rule("aten.native_batch_norm.default")
def batch_norm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """cuDNN keeps no statistics outside training; PyTorch's own kernel takes staging for channels-last inputs."""
    tensor, weight, mean, var, training = args[0], args[1], args[3], args[4], args[5]
    cudnn = uses_cudnn(tensor, weight, mean, var, training)
    if cudnn and not training:
        out = run.op(aten.empty_like.default, tensor)
        return out, run.empty((0,), FLOAT), run.empty((0,), FLOAT)
    found = run.op(func, *args, **kwargs)
    if training and not cudnn and is_channels_last(tensor):
        _staging(run, func, tensor, 4 * FLOAT.itemsize)
    return found


@rule("aten.native_batch_norm_backward.default")
def batch_norm_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """In PyTorch's own kernel for channels-last inputs the sums come before the result (cuda/Normalization.cu)."""
    tensor, weight, training = args[1], args[2], args[7]
    if not training or not is_channels_last(tensor) or uses_cudnn(tensor, weight, args[3], args[4], training):
        return run.op(func, *args, **kwargs)
    mask, channels = args[9], tensor.shape[1]
    sums = [run.hold(channels * 4, func) for _ in range(2)]
    grads = [run.empty((channels,), weight.dtype, op=func) if weight is not None and on else None for on in mask[1:]]
    _staging(run, func, tensor, 2 * FLOAT.itemsize)
    out = run.op(aten.empty_like.default, tensor)
    release(run, sums)
    return out, *grads


def is_channels_last(tensor: Any) -> bool:
    """Whether `batch_norm_use_channels_last_kernels` holds: also what has no inner dimensions."""
    if tensor.dim() == 2:
        return bool(tensor.is_contiguous())
    if tensor.is_contiguous():
        return False
    last = LAST.get(tensor.dim())
    return last is not None and bool(tensor.is_contiguous(memory_format=last))


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _staging(run: Any, func: Any, tensor: Any, per_channel: int) -> None:
    """Sums of thread blocks that share channels (cuda/Normalization.cuh, flexible_launch_configs: at most 512 threads)."""
    channels = tensor.shape[1]
    rows = tensor.numel() // max(channels, 1)
    width = min(_power_below(channels), 32)
    height = min(_power_below(-(-rows // 16)), 512 // width)
    if width * height != 512:
        width = min(_power_below(channels), 512 // height)
    columns = -(-channels // width)
    blocks = min(-(-rows // (height * 16)), 128)
    if blocks >= 8:
        run.scratch(per_channel * channels * blocks, 4 * columns, op=func)
