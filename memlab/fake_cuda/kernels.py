"""Rules of simple kernels: dropout, softmax, losses, norms and others.

Sizes and order were read off the C++ allocator's own history (2.12.1, compute capability 7.5 to 12.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.allocator.rules import release
from memlab.fake_cuda.kernel_rules import CHANNELS_LAST, FLOAT, HALVES, bytes_of, name_of, rule, scratch
from memlab.fake_cuda.reductions import power_below, reduce
from memlab.torch_internals.cuda_names import make_contiguous_strides_for, suggest_memory_format

aten = torch.ops.aten
NONE, MEAN = 0, 1
"""at::Reduction."""


@rule("_unsafe_view.default", "_reshape_alias.default")
def unsafe_view(cuda, func, tensor, shape, *args):
    """A view, though its schema says otherwise (`Tensor.reshape`, `matmul`)."""
    return cuda.op(aten.view.default, tensor, shape)


@rule("native_dropout.default")
def native_dropout(cuda, func, tensor, p, train):
    """The mask comes before the result (ATen/native/cuda/Dropout.cu, dropout_cuda)."""
    if train is False or tensor.numel() == 0:
        return cuda.op(func, tensor, p, train)
    mask = cuda.empty(tensor.shape, torch.bool, op=func)
    return cuda.op(aten.empty_like.default, tensor), mask


@rule("dropout.default")
def dropout(cuda, func, tensor, p, train):
    """CUDA keeps a mask of one byte per element (ATen/native/Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return torch.native_dropout(tensor, p, True)[0]


@rule("silu_backward.default", "mish_backward.default")
def activation_backward(cuda, func, grad, *args):
    """One kernel on CUDA; elsewhere PyTorch composes it (native_functions.yaml)."""
    return cuda.op(aten.empty_like.default, grad)


@rule("log_sigmoid_forward.default")
def log_sigmoid(cuda, func, tensor):
    """CUDA keeps no buffer for backward (ATen/native/cuda/ActivationLogSigmoidKernel.cu)."""
    return cuda.op(aten.empty_like.default, tensor), cuda.empty((0,), tensor.dtype)


@scratch("pow.Scalar")
def power_of_number(cuda, out, base, exponent):
    """The base becomes a double or int64 on the GPU (ATen/native/Pow.cpp, pow_Scalar_out: wrapped_scalar_tensor)."""
    return [] if base == 1 else [16 if isinstance(base, complex) else 1 if isinstance(base, bool) else 8]


@scratch("_softmax.default", "_log_softmax.default", "_log_softmax_backward_data.default")
def dense_copy(cuda, out, tensor, *args):
    """Copy of non-contiguous logits, as in `cross_entropy(x.transpose(1, 2), y)`, or of a gradient (SoftMax.cu)."""
    return [] if tensor.is_contiguous() else [bytes_of(tensor)]


@scratch("_softmax_backward_data.default")
def softmax_backward(cuda, out, grad, output, *args):
    """`Tensor tmp = grad * output`, and its dense copy (ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    product = cuda.shapes.answer(aten.mul.Tensor, (grad, output), {})
    is_dense = product.stride == tuple(make_contiguous_strides_for(product.shape))
    return [product.nbytes] if is_dense else [product.nbytes] * 2


@rule("softmax.int", "log_softmax.int")
def softmax(cuda, func, tensor, dim, dtype=None):
    """A half input is made single inside the kernel (ATen/native/SoftMax.cpp: is_cuda, Half, dtype float)."""
    if tensor.dtype == torch.float16 and dtype == FLOAT:
        return (aten._log_softmax if "log" in name_of(func) else aten._softmax)(tensor, dim, True)
    return func.decompose(tensor, dim, dtype)


@scratch("_safe_softmax.default")
def safe_softmax(cuda, out, tensor, dim, *args, **kwargs):
    """Fully masked rows are detected (ATen/native/SoftMax.cpp, _safe_softmax)."""
    return out.numel(), out.numel() // max(out.shape[dim], 1), out.element_size()


def _elements(cuda, func, tensor, target):
    shape = torch.broadcast_shapes(tensor.shape, target.shape)
    return cuda.empty(shape, torch.promote_types(tensor.dtype, target.dtype), op=func)


def _mean(cuda, loss):
    out = cuda.empty((), loss.dtype, op="aten.mean")
    reduce(cuda, loss, None, 4)
    return out


@rule("mse_loss.default", "smooth_l1_loss.default")
def mse_loss(cuda, func, tensor, target, reduction=MEAN, *args):
    """The scalar keeps the storage of all elements: it was made full and resized (ATen/native/Loss.cpp, TORCH_META_FUNC)."""
    if reduction == NONE:
        return cuda.op(func, tensor, target, reduction, *args)
    full = _elements(cuda, func, tensor, target)
    loss = _elements(cuda, func, tensor, target)
    reduce(cuda, loss, None, 4)
    del loss
    return full.resize_(())


@rule("huber_loss.default")
def huber_loss(cuda, func, tensor, target, reduction=MEAN, *args):
    """All elements, then the scalar (ATen/native/Loss.cpp, huber_loss)."""
    if reduction == NONE:
        return cuda.op(func, tensor, target, reduction, *args)
    return _mean(cuda, _elements(cuda, func, tensor, target))


@rule("binary_cross_entropy.default")
def binary_cross_entropy(cuda, func, tensor, target, weight=None, reduction=MEAN):
    """The elements stay the scalar's storage (ATen/native/cuda/Loss.cu, binary_cross_entropy_out_cuda)."""
    if reduction == NONE:
        return cuda.op(func, tensor, target, weight, reduction)
    loss = _elements(cuda, func, tensor, target)
    cuda.scratch(loss.element_size(), op=func)
    reduce(cuda, loss, None, 4)
    return loss.resize_(())


@rule("binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(cuda, func, tensor, target, weight=None, pos_weight=None, reduction=MEAN):
    """log_sigmoid, then the rest in place of (1 - target) (ATen/native/Loss.cpp)."""
    logs = cuda.op(aten.empty_like.default, tensor)  # noqa: F841  # alive until the end
    if pos_weight is not None:
        less = cuda.op(aten.empty_like.default, pos_weight)
        weights = cuda.empty(torch.broadcast_shapes(less.shape, target.shape), target.dtype, op=func)
        del less, weights
    loss = _elements(cuda, func, tensor, target)
    return loss if reduction == NONE else _mean(cuda, loss)


@rule("nll_loss2d_forward.default")
def nll_loss2d(cuda, func, *args):
    """The total of the weights is allocated first (ATen/native/cuda/NLLLoss2d.cu, nll_loss2d_forward_out_cuda_template)."""
    loss = cuda.shapes.answer(func, args, {})[0]
    total = cuda.empty((), loss.dtype, op=func)
    return cuda.empty(loss.shape, loss.dtype, op=func), total


@rule("soft_margin_loss.default")
def soft_margin_loss(cuda, func, tensor, target, reduction=MEAN):
    """All elements in place, whose storage stays the scalar's (ATen/native/Loss.cpp, soft_margin_loss_out)."""
    loss = cuda.empty(tensor.shape, tensor.dtype, op=func)
    if reduction == NONE:
        return loss
    _mean(cuda, loss)
    return loss.resize_(())


@rule("soft_margin_loss_backward.default")
def soft_margin_loss_backward(cuda, func, grad, tensor, target, reduction):
    """`exp(-target * input)`, then the gradient in place (ATen/native/Loss.cpp, soft_margin_loss_backward_out)."""
    negative = cuda.op(aten.empty_like.default, target)
    product = _elements(cuda, func, negative, tensor)
    exponential = cuda.op(aten.empty_like.default, product)
    del product, negative
    out = cuda.empty(tensor.shape, tensor.dtype, op=func)
    del exponential
    return out


@rule("multilabel_margin_loss_forward.default")
def multilabel_margin_loss(cuda, func, tensor, target, reduction):
    """What is a target comes first, as numbers (ATen/native/cuda/MultiLabelMarginCriterion.cu)."""
    is_target = cuda.empty(target.shape, tensor.dtype, op=func)
    losses = cuda.empty((len(tensor),) if tensor.dim() > 1 else (), tensor.dtype, op=func)
    return losses if reduction == NONE or not losses.dim() else _mean(cuda, losses), is_target


@rule("multilabel_margin_loss_backward.default", "multi_margin_loss_backward.default")
def margin_loss_backward(cuda, func, grad, tensor, *args):
    """A dense gradient (ATen/native/cuda/MultiLabelMarginCriterion.cu, MultiMarginLoss.cu)."""
    with cuda.contiguous(tensor):
        return cuda.empty(tensor.shape, tensor.dtype, op=func)


@scratch("multi_margin_loss.default")
def multi_margin_loss(cuda, out, tensor, *args, **kwargs):
    """One loss per sample before they are reduced (ATen/native/cuda/MultiMarginLoss.cu)."""
    return [tensor.shape[0] * tensor.element_size()] if out.dim() == 0 and tensor.dim() > 1 else []


@rule("_fused_rms_norm.default")
def rms_norm(cuda, func, tensor, normalized, *args):
    """One kernel on CUDA: the result and one factor per row (layer_norm_kernel.cu, _fused_rms_norm_cuda)."""
    with cuda.contiguous(tensor):
        out = cuda.empty(tensor.shape, tensor.dtype, op=func)
        rows = (*tensor.shape[: tensor.dim() - len(normalized)], *[1] * len(normalized))
        return out, cuda.empty(rows, torch.float64 if tensor.dtype == torch.float64 else FLOAT, op=func)


@rule("native_layer_norm.default")
def layer_norm(cuda, func, tensor, *args):
    """A dense copy of a non-dense input (ATen/native/cuda/layer_norm_kernel.cu, expect_contiguous)."""
    with cuda.contiguous(tensor):
        return cuda.op(func, _as_dense(cuda, tensor), *args)


def _as_dense(cuda, tensor):
    """The argument for a shape function if the kernel works on a dense copy; it allocates nothing."""
    if tensor.is_contiguous():
        return tensor
    flat = cuda.op(aten.as_strided.default, tensor, (tensor.numel(),), (1,))
    return cuda.op(aten.view.default, flat, tensor.shape)


MANY_ROWS, ROWS_PER_SUM, MOST_BLOCKS = 64 * 1024, 32, 32 * 1024


@rule("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def layer_norm_backward(cuda, func, grad, tensor, normalized, *args):
    """Partial sums for very many rows (layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel)."""
    with cuda.contiguous(tensor):
        out = cuda.op(func, grad, _as_dense(cuda, tensor), normalized, *args)
        columns = math.prod(normalized)
        rows = tensor.numel() // max(columns, 1)
        grads = [one for one in out[1:] if one is not None]
        few = rows <= MANY_ROWS or columns // 32 >= cuda.gpu.multiprocessors // 2
        with cuda.contiguous(grad):
            shape = min(-(-rows // ROWS_PER_SUM), MOST_BLOCKS // -(-columns // 32)), columns
            for one in [cuda.empty(shape, grads[0].dtype, op=func) for _ in ([] if few else grads)]:
                one.sum(0)
    return out


@rule("native_group_norm.default")
def group_norm(cuda, func, tensor, weight, bias, samples, channels, inner, groups, *args):
    """One scale and one shift per channel (ATen/native/cuda/group_norm_kernel.cu, GroupNormKernelImplInternal).

    Since 2.14 also moments in single precision and a copy of an input that is not contiguous, which was made, and saved, before.
    """
    is_new = release(cuda.torch_version) >= (2, 14)
    out = cuda.op(func, _as_dense(cuda, tensor), weight, bias, samples, channels, inner, groups, *args)
    moments = [samples * groups * 4] * 2 if is_new and tensor.dtype in HALVES else []
    scales = [samples * channels * 4] * 2 if inner > 1 and (weight is not None or bias is not None) else []
    with cuda.contiguous(tensor), cuda.held(*moments, op=func):
        cuda.scratch(*scales, op=func)
    return out


@rule("native_group_norm_backward.default")
def group_norm_backward(cuda, func, grad, tensor, mean, deviation, weight, samples, channels, inner, groups, wanted):
    """Sums per channel and coefficients per group (group_norm_kernel.cu, GroupNormBackwardKernelImplInternal)."""
    per_channel, per_group = samples * channels * 4, samples * groups * 4
    has_sums = inner > 1 or release(cuda.torch_version) < (2, 14)
    work = [per_channel] * 2 if has_sums else []
    if wanted[0]:
        work += [per_group] * 2 + ([per_channel] if inner > 1 and weight is not None else [])
    first = cuda.empty(tensor.shape, tensor.dtype, op=func) if wanted[0] else None
    with cuda.contiguous(tensor, grad):
        dtype = tensor.dtype if weight is None else weight.dtype
        rest = [cuda.empty((channels,), dtype, op=func) if one else None for one in wanted[1:]]
        cuda.scratch(*work, op=func)
    return first, *rest


def uses_cudnn(tensor: Any, weight: Any, mean: Any, var: Any, training: bool) -> bool:
    """Whether batch_norm goes to cuDNN (ATen/native/Normalization.cpp, _select_batch_norm_backend)."""
    kept = (mean is None) == (var is None) and (mean is not None or training)
    limit = 880801 if training else 65535
    fits = tensor.dim() >= 3 and tensor.shape[0] <= limit and tensor.dtype != torch.bfloat16
    single = tensor.dtype != torch.float16 or (weight is not None and weight.dtype == FLOAT)
    return bool(torch.backends.cudnn.enabled and weight is not None and kept and fits and single)


@rule("batch_norm.default")
def batch_norm_in_order(cuda, func, tensor, weight, bias, mean, var, training, *args):
    """cuDNN works on a contiguous copy, which is kept for backward (ATen/native/Normalization.cpp, _batch_norm_impl_index)."""
    if uses_cudnn(tensor, weight, mean, var, training):
        tensor = tensor.contiguous(memory_format=suggest_memory_format(tensor))
    return func.decompose(tensor, weight, bias, mean, var, training, *args)


@rule("native_batch_norm.default")
def batch_norm(cuda, func, tensor, weight, bias, mean, var, training, *args):
    """cuDNN keeps no statistics outside training; PyTorch's own kernel takes staging for channels-last inputs."""
    cudnn = uses_cudnn(tensor, weight, mean, var, training)
    if cudnn and not training:
        out = cuda.op(aten.empty_like.default, tensor)
        return out, cuda.empty((0,), FLOAT), cuda.empty((0,), FLOAT)
    results = cuda.op(func, tensor, weight, bias, mean, var, training, *args)
    if training and not cudnn and is_channels_last(tensor):
        _staging(cuda, func, tensor, 4 * FLOAT.itemsize)
    return results


@rule("native_batch_norm_backward.default")
def batch_norm_backward(cuda, func, *args):
    """In PyTorch's own kernel for channels-last inputs the sums come before the result (cuda/Normalization.cu).

    cuDNN takes a dense gradient (cudnn/BatchNorm.cpp).
    """
    grad, tensor, weight, mean, var, _, _, training, _, mask = args
    if training and uses_cudnn(tensor, weight, mean, var, training):
        with cuda.contiguous(grad, form=suggest_memory_format(tensor)):
            return cuda.op(func, *args)
    if not training or not is_channels_last(tensor):
        return cuda.op(func, *args)
    channels = tensor.shape[1]
    with cuda.held(channels * 4, channels * 4, op=func):
        grads = [
            cuda.empty((channels,), weight.dtype, op=func) if weight is not None and on else None for on in mask[1:]
        ]
        _staging(cuda, func, tensor, 2 * FLOAT.itemsize)
        return cuda.op(aten.empty_like.default, tensor), *grads


def is_channels_last(tensor: Any) -> bool:
    """Whether `batch_norm_use_channels_last_kernels` holds: also for what has no inner dimensions."""
    if tensor.dim() == 2 or tensor.is_contiguous():
        return bool(tensor.dim() == 2 and tensor.is_contiguous())
    last = CHANNELS_LAST.get(tensor.dim())
    return last is not None and bool(tensor.is_contiguous(memory_format=last))


def _staging(cuda: Any, func: Any, tensor: Any, per_channel: int) -> None:
    """Sums of thread blocks that share channels (cuda/Normalization.cuh, flexible_launch_configs: at most 512 threads)."""
    channels = tensor.shape[1]
    rows = tensor.numel() // max(channels, 1)
    width = power_below(channels, 32)
    height = power_below(-(-rows // 16), 512 // width)
    if width * height != 512:
        width = power_below(channels, 512 // height)
    blocks = min(-(-rows // (height * 16)), 128)
    if blocks >= 8:
        cuda.scratch(per_channel * channels * blocks, 4 * -(-channels // width), op=func)


@scratch(*(
    f"upsample_{kind}_backward.default"
    for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
), *(
    f"_upsample_{kind}_backward.default"
    for kind in ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "bilinear2d_aa", "bicubic2d_aa")
), *(
    f"{kind}_backward.default"
    for kind in (
        "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "fractional_max_pool2d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
        "reflection_pad1d", "reflection_pad2d",
    )
))  # fmt: skip
def dense_gradient(cuda, out, grad, *args):
    """A dense copy of an expanded gradient (ATen/native/cuda: UpSample*.cu, *Pool*.cu, ReflectionPad.cu)."""
    last = CHANNELS_LAST.get(grad.dim())
    is_last = last is not None and grad.is_contiguous(memory_format=last)
    return [] if is_last or grad.is_contiguous() else [bytes_of(grad)]


@rule("roll.default")
def roll(cuda, func, tensor, shifts, dims=()):
    """Several dimensions are rolled one after the other (ATen/native/TransformationHelper.h, roll_common)."""
    if not dims or len(shifts) <= 1:
        with cuda.contiguous(tensor):  # (cuda/TensorTransformations.cu, roll_cuda)
            return cuda.empty(tensor.shape, tensor.dtype, op=func)
    first = roll(cuda, func, tensor, shifts[:1], dims[:1])
    return roll(cuda, func, first, shifts[1:], dims[1:])


@rule("im2col.default", "col2im.default")
def columns(cuda, func, tensor, *sizes):
    """The result is made as large as the argument, then resized (ATen/native/cuda/Im2Col.cu, Col2Im.cu: empty_like)."""
    shape = cuda.shapes.answer(func, (tensor, *sizes), {}).shape
    out = cuda.empty(tensor.shape, tensor.dtype, op=func)
    with cuda.contiguous(tensor):
        return out.resize_(shape)


@rule("_euclidean_dist.default")
def euclidean_distance(cuda, func, first, second):
    """A product of the points with their norms and ones appended (ATen/native/Distance.cpp, _euclidean_dist)."""
    norms = first.pow(2).sum(-1, True)
    ones = torch.ones_like(norms)
    other_norms = second.pow(2).sum(-1, True)
    other_ones = torch.ones_like(other_norms)
    extended = torch.cat([first.mul(-2), norms, ones], -1)
    del norms, ones
    other = torch.cat([second, other_ones, other_norms], -1)
    del other_norms, other_ones
    return extended.matmul(other.mT).clamp_min_(0).sqrt_()


@rule("_pdist_backward.default")
def pairs_backward(cuda, func, grad, tensor, *args):
    """The sum of a gradient per pair of points (ATen/native/cuda/DistanceKernel.cu, pdist_backward_kernel_impl)."""
    if len(tensor) < 2:
        return cuda.op(func, grad, tensor, *args)
    out = cuda.empty(tensor.shape, tensor.dtype, op=func)
    _sum_over(cuda, func, (len(tensor) - 1, *tensor.shape), tensor.dtype, 0)
    return out


@rule("_cdist_backward.default")
def distances_backward(cuda, func, grad, first, second, *args):
    """The same (cdist_backward_kernel_impl)."""
    out = cuda.op(func, grad, first, second, *args)
    batch = grad.shape[:-2].numel()
    shape = (batch, second.shape[-2], *first.shape[-2:])
    if math.prod(shape):
        _sum_over(cuda, func, shape if batch > 1 else shape[1:], first.dtype, int(batch > 1))
    return out


def _sum_over(cuda: Any, func: Any, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> None:
    """Memory of this shape, which is summed over one dimension into the result."""
    reduce(cuda, cuda.empty(shape, dtype, op=func), (dim,), 4)


@rule("dist.default")
def distance(cuda, func, first, second, *args):
    """The norm of the difference (ATen/native/Distance.cpp)."""
    return (first - second).norm(*args)


@rule("affine_grid_generator.default")
def affine_grid(cuda, func, theta, size, align_corners):
    """The product of a grid of the image and the matrices (ATen/native/AffineGridGenerator.cpp)."""
    count, _, *image = size
    axes = len(image)
    base = cuda.empty((count, *image, axes + 1), theta.dtype, op=func)
    return base.view(count, -1, axes + 1).bmm(theta.transpose(1, 2)).view(count, *image, axes)


@scratch("_fft_c2r.default")
def inverse_of_real(cuda, out, tensor, *args):
    """cuFFT writes over what it transforms: a copy (ATen/native/cuda/SpectralOps.cpp, _fft_c2r_cufft)."""
    return [bytes_of(tensor)]


@scratch("abs.default")
def magnitude(cuda, out, tensor):
    """Of complex numbers it is computed as complex ones first (ATen/native/UnaryOps.cpp, unary_op_impl_with_complex_to_float)."""
    return [bytes_of(tensor)] if tensor.is_complex() else []


@rule("angle.default")
def angle(cuda, func, tensor):
    """The same, but that comes before the result (ATen/native/UnaryOps.cpp, angle)."""
    with cuda.held(*([bytes_of(tensor)] if tensor.is_complex() else []), op=func):
        return cuda.op(func, tensor)


@scratch("linalg_inv_ex.default", "linalg_lu.default")
def factors(cuda, out, tensor, *args):
    """The factors of matrices, whichever library computes them (ATen/native/BatchLinearAlgebra.cpp, linalg_solve_ex)."""
    return [bytes_of(tensor)]
