"""What CUDA kernels allocate where the shape functions show something else: softmax, losses, norms, dropout, convolutions.

Sizes and order were read off the C++ allocator's own history (2.12.1, compute capability 7.5 to 12.0). Limits: workspaces that
cuDNN asks for while it convolves are not here (`memlab.predictor.extras` gives them as an interval).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import make_channels_last_strides_for, suggest_memory_format

from memlab.predictor.pretend.reductions import reduce
from memlab.predictor.pretend.rules import rule

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""at::Reduction."""
FLOAT = torch.float32
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def bytes_of(tensor: Any) -> int:
    """What a dense copy takes."""
    return int(tensor.numel() * tensor.element_size())


def get(args: Any, position: int, default: Any = None) -> Any:
    """An argument that may be left out."""
    return args[position] if len(args) > position else default


def copies(run: Any, *tensors: Any) -> list[int]:
    """What `contiguous()` takes for those that are not."""
    return [run.hold(bytes_of(one), "contiguous") for one in tensors if one is not None and not one.is_contiguous()]


def release(run: Any, blocks: list[int]) -> None:
    """Give blocks back, the last first."""
    for block in reversed(blocks):
        run.release(block)


# --- dropout ----------------------------------------------------------------------------------------------------------------


@rule("aten.native_dropout.default")
def native_dropout(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The mask comes before the result (ATen/native/cuda/Dropout.cu, dropout_cuda)."""
    tensor, train = args[0], get(args, 2)
    if train is False or tensor.numel() == 0:
        return run.op(func, *args, **kwargs)
    mask = run.empty(tensor.shape, torch.bool, op=func)
    return run.op(aten.empty_like.default, tensor), mask


@rule("aten.dropout.default")
def dropout(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """CUDA keeps a mask of one byte per element (ATen/native/Dropout.cpp, is_fused_kernel_acceptable)."""
    tensor, p, train = args
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return torch.native_dropout(tensor, p, True)[0]


# --- softmax and what is built on it -----------------------------------------------------------------------------------------


@rule("aten._softmax_backward_data.default")
def softmax_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`Tensor tmp = grad * output` beside the result (ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    out = run.op(func, *args, **kwargs)
    run.scratch(bytes_of(args[0]), op=func)
    return out


@rule("aten._log_softmax_backward_data.default")
def log_softmax_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A dense copy of an expanded gradient (SoftMax.cu, host_softmax_backward)."""
    out = run.op(func, *args, **kwargs)
    release(run, copies(run, args[0]))
    return out


@rule("aten.softmax.int", "aten.log_softmax.int")
def softmax(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A half input is made single inside the kernel (ATen/native/SoftMax.cpp: is_cuda, Half, dtype float)."""
    tensor, dim = args[0], args[1]
    dtype = kwargs.get("dtype", get(args, 2))
    if tensor.dtype == torch.float16 and dtype == FLOAT:
        inner = aten._softmax if "log" not in str(func) else aten._log_softmax
        return inner(tensor, dim, True)
    return run.plain(func, *args, **kwargs)


@rule("aten.logsumexp.default")
def logsumexp(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Maxima, their finiteness and the exponentials (ATen/native/ReduceOps.cpp, logsumexp_out_impl)."""
    tensor, dims = args[0], args[1]
    gone = {d % max(tensor.dim(), 1) for d in dims}
    count = math.prod(n for i, n in enumerate(tensor.shape) if i not in gone)
    largest = run.hold(count * tensor.element_size(), func)
    run.scratch(count * tensor.element_size(), count, op=func)
    exponentials = run.hold(bytes_of(tensor), func)
    out = run.op(func, *args, **kwargs)
    reduce(run, tensor, dims, 4)
    release(run, [largest, exponentials])
    return out


# --- losses -----------------------------------------------------------------------------------------------------------------


@rule("aten.mse_loss.default", "aten.smooth_l1_loss.default")
def reduced_loss(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The scalar keeps the storage of all elements: it was made full and resized (ATen/native/Loss.cpp, TORCH_META_FUNC)."""
    if kwargs.get("reduction", get(args, 2, MEAN)) == NONE:
        return run.op(func, *args, **kwargs)
    full = _elementwise(run, func, args)
    loss = _elementwise(run, func, args)
    reduce(run, loss, None, 4)
    del loss
    return full.resize_(())


@rule("aten.huber_loss.default")
def huber_loss(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """All elements, then the scalar (ATen/native/Loss.cpp, huber_loss)."""
    if kwargs.get("reduction", get(args, 2, MEAN)) == NONE:
        return run.op(func, *args, **kwargs)
    loss = _elementwise(run, func, args)
    return _applied(run, loss)


@rule("aten.binary_cross_entropy.default")
def binary_cross_entropy(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The elements stay the scalar's storage (ATen/native/cuda/Loss.cu, binary_cross_entropy_out_cuda)."""
    if kwargs.get("reduction", get(args, 3, MEAN)) == NONE:
        return run.op(func, *args, **kwargs)
    loss = _elementwise(run, func, args)
    run.scratch(loss.element_size(), op=func)
    reduce(run, loss, None, 4)
    return loss.resize_(())


@rule("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """log_sigmoid, then the rest in place of (1 - target) (ATen/native/Loss.cpp)."""
    tensor, target = args[0], args[1]
    pos_weight = kwargs.get("pos_weight", get(args, 3))
    logs = run.op(aten.empty_like.default, tensor)  # noqa: F841  # alive until the end
    if pos_weight is not None:
        less = run.op(aten.empty_like.default, pos_weight)
        weights = run.empty(torch.broadcast_shapes(less.shape, target.shape), target.dtype, op=func)
        del less, weights
    loss = _elementwise(run, func, args)
    if kwargs.get("reduction", get(args, 4, MEAN)) == NONE:
        return loss
    return _applied(run, loss)


def _elementwise(run: Any, func: Any, args: Any) -> Any:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    dtype = torch.promote_types(args[0].dtype, args[1].dtype)
    return run.empty(shape, dtype, op=func)


def _applied(run: Any, loss: Any) -> Any:
    out = run.empty((), loss.dtype, op="aten.mean")
    reduce(run, loss, None, 4)
    return out


@rule("aten.multi_margin_loss.default")
def multi_margin_loss(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """One loss per sample before they are reduced (ATen/native/cuda/MultiMarginLoss.cu)."""
    out = run.op(func, *args, **kwargs)
    if out.dim() == 0 and args[0].dim() > 1:
        run.scratch(args[0].shape[0] * args[0].element_size(), op=func)
    return out


# --- norms ------------------------------------------------------------------------------------------------------------------


@rule("aten.silu_backward.default", "aten.mish_backward.default")
def activation_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A kernel of its own on CUDA; elsewhere PyTorch composes it (native_functions.yaml)."""
    return run.op(aten.empty_like.default, args[0])


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


@rule("aten.native_layer_norm_backward.default")
def layer_norm_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Partial sums where there are very many rows (layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel)."""
    held = copies(run, args[1])
    out = run.op(func, args[0], _dense_twin(run, args[1]), *args[2:], **kwargs)
    held += copies(run, args[0])
    _partial_sums(run, func, args[1], args[2], [one for one in out[1:] if one is not None])
    release(run, held)
    return out


@rule("aten._fused_rms_norm_backward.default")
def rms_norm_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The same for the weight alone."""
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


BATCH_NORMS = (
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten.cudnn_batch_norm.default",
)


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


# --- convolutions -----------------------------------------------------------------------------------------------------------


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


@rule(
    "aten.upsample_nearest1d_backward.default", "aten.upsample_nearest2d_backward.default", "aten.upsample_nearest3d_backward.default",
    "aten.upsample_linear1d_backward.default", "aten.upsample_bilinear2d_backward.default",
    "aten.upsample_bicubic2d_backward.default", "aten.upsample_trilinear3d_backward.default",
)  # fmt: skip
def upsample_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A dense copy of an expanded gradient (ATen/native/cuda/UpSample*.cu)."""
    out = run.op(func, *args, **kwargs)
    release(run, copies(run, args[0]) if not _is_dense(args[0]) else [])
    return out


def _is_dense(tensor: Any) -> bool:
    last = LAST.get(tensor.dim())
    return bool(tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last)))


# --- the rest ---------------------------------------------------------------------------------------------------------------


@rule("aten.roll.default")
def roll(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Several dimensions are rolled one after the other (ATen/native/TransformationHelper.h, roll_common)."""
    tensor, shifts, dims = args[0], args[1], get(args, 2, ())
    if not dims or len(shifts) <= 1:
        return run.op(func, *args, **kwargs)
    first = run.op(func, tensor, shifts[:1], dims[:1])
    return roll(func, (first, shifts[1:], dims[1:]), kwargs, run)
