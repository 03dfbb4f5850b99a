"""Matrix products and convolutions: copied operands, layouts of results, order of gradients.

Limits: the workspaces of cuBLAS and cuDNN themselves are in `memlab.prediction.workspaces`, cuDNN's as an interval.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.fake_cuda import convolution_workspaces
from memlab.fake_cuda.kernel_rules import CHANNELS_LAST, bytes_of, name_of, round_up, rule
from memlab.fake_cuda.reductions import reduce
from memlab.torch_internals.cuda_names import make_channels_last_strides_for, suggest_memory_format

aten = torch.ops.aten
CONTIGUOUS = torch.contiguous_format


@rule("linear.default")
def linear(cuda, func, tensor, weight, bias=None):
    """The bias is added in place where it cannot be fused (ATen/native/Linear.cpp, linear)."""
    if bias is None or tensor.dim() < 3 or tensor.is_contiguous():
        return func.decompose(tensor, weight, bias)
    return tensor.matmul(weight.t()).add_(bias)


def is_readable(matrix: Any) -> bool:
    """Whether cuBLAS can address the last two dimensions by a leading dimension."""
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    if (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)):
        return True
    return bool(matrix.is_contiguous())


@rule("mm.default", "bmm.default", "addmm.default", "baddbmm.default", "_addmm_activation.default")
def multiply(cuda, func, *args, **kwargs):
    """The product, then copies of operands whose layout cuBLAS cannot read: mostly expanded gradients.

    (ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas.)
    """
    out = cuda.op(func, *args, **kwargs)
    operands = args[:2] if name_of(func) in ("mm", "bmm") else args[1:3]
    copied = [bytes_of(one) for one in operands if not is_readable(one)]
    cuda.scratch(*copied, op="aten.contiguous")
    return out


@rule("_grouped_mm.default")
def grouped(cuda, func, left, right, groups=None, bias=None, out_dtype=None):
    """Rows in multiples of 16 bytes (ATen/native/GroupedMMUtils.h, create_grouped_gemm_output_tensor)."""
    columns, dtype = right.shape[-1], out_dtype or left.dtype
    if left.dim() == 2:
        shape = (groups.shape[0], left.shape[0], columns) if right.dim() == 2 else (left.shape[0], columns)
    else:
        shape = (left.shape[1], columns) if right.dim() == 2 else (*left.shape[:2], columns)
    row = round_up(columns, 16 // dtype.itemsize)
    return cuda.empty(shape, dtype, (row * shape[-2], row, 1)[-len(shape) :], op=func)


@rule("_trilinear.default")
def trilinear(cuda, func, first, second, third, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """Two batched products for each slice of one dimension: `nn.Bilinear` (ATen/native/Linear.cpp, _trilinear)."""
    size, parts, at_once = [], [first, second, third], []
    for dim in range(first.dim() + len(expand1)):
        for place, expanded in enumerate((expand1, expand2, expand3)):
            if dim in expanded:
                parts[place] = parts[place].unsqueeze(dim)
        size.append(max(one.shape[dim] for one in parts))
        if dim in sumdim and dim != unroll_dim:
            at_once.append(dim)
    out = cuda.empty([1 if dim in sumdim else one for dim, one in enumerate(size)], first.dtype, op=func)
    early = [dim for dim in at_once if dim in expand3]
    late = [dim for dim in at_once if dim not in expand3]
    for place in range(size[unroll_dim] if all(one.numel() for one in parts) else 0):
        one, other, last = (
            part.narrow(unroll_dim, 0 if unroll_dim in expanded else place, 1)
            for part, expanded in zip(parts, (expand1, expand2, expand3), strict=True)
        )
        product = _summed_product(one, other, early)
        product = _summed_product(product, last, late)  # the first is freed here
        (out if unroll_dim in sumdim else out.narrow(unroll_dim, place, 1)).add_(product)
        del product
    for dim in sorted(sumdim, reverse=True):
        out = out.squeeze(dim)
    return out


def _summed_product(left: Any, right: Any, dims: list[int]) -> Any:
    """`(left * right).sum(dims, keepdim=True)` by a batched product (ATen/native/Linear.cpp, sumproduct_pair)."""
    if not dims:
        return left * right
    for dim in dims:  # what only one of them has is summed up at once
        if left.shape[dim] > 1 and right.shape[dim] == 1:
            left = left.sum(dim, True)
        elif right.shape[dim] > 1 and left.shape[dim] == 1:
            right = right.sum(dim, True)
    rest = [dim for dim in range(left.dim()) if dim not in dims]
    both = [dim for dim in rest if left.shape[dim] > 1 and right.shape[dim] > 1]
    of_left = [dim for dim in rest if left.shape[dim] > 1 and right.shape[dim] == 1]
    of_right = [dim for dim in rest if left.shape[dim] == 1]

    def number(tensor: Any, kept: list[int]) -> int:
        return math.prod(tensor.shape[dim] for dim in kept)

    sizes = left.shape, right.shape
    batches, rows, columns, inner = (
        number(left, both),
        number(left, of_left),
        number(right, of_right),
        number(left, dims),
    )
    left = left.permute(*both, *of_left, *dims, *of_right).reshape(batches, rows, inner)
    right = right.permute(*both, *dims, *of_right, *of_left).reshape(batches, inner, columns)
    product = torch.bmm(left, right)
    order = [*both, *of_left, *dims, *of_right]
    wide = [max(one, other) for one, other in zip(sizes[0], sizes[1], strict=True)]
    product = product.view([1 if dim in dims else wide[dim] for dim in order])
    return product.permute([order.index(dim) for dim in range(len(order))])


def layout(tensor: Any, weight: Any) -> torch.memory_format:
    """The memory format that cuDNN works in (ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format)."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or torch.float64 in (tensor.dtype, weight.dtype):
        return CONTIGUOUS
    return last if any(suggest_memory_format(one) is last for one in (tensor, weight)) else CONTIGUOUS


def is_depthwise(tensor: Any, weight: Any, transposed: bool, groups: int) -> bool:
    """Whether PyTorch's own depthwise kernels are used (ATen/native/Convolution.cpp, ConvParams::is_depthwise)."""
    if transposed or groups == 1 or groups != tensor.shape[1] or weight.shape[0] % groups or tensor.dim() != 4:
        return False
    return layout(tensor, weight) is CONTIGUOUS


def _allocated(cuda: Any, fresh: Any, form: torch.memory_format, func: Any) -> Any:
    strides = None if form is CONTIGUOUS else make_channels_last_strides_for(fresh.shape)
    return cuda.empty(fresh.shape, fresh.dtype, strides, op=func)


@rule("convolution.default")
def convolution(cuda, func, tensor, weight, *args):
    """The result has cuDNN's layout; operands with another layout are copied (ATen/native/cudnn/ConvShared.cpp)."""
    if not torch.backends.cudnn.enabled and not is_depthwise(tensor, weight, args[4], args[6]):
        return _unfolded(cuda, func, tensor, weight, *args)
    form = layout(tensor, weight)
    with cuda.contiguous(tensor, form=form):
        out = _allocated(cuda, cuda.shapes.answer(func, (tensor, weight, *args), {}), form, func)
        with cuda.contiguous(weight, form=form):
            if not is_depthwise(tensor, weight, args[4], args[6]):
                convolution_workspaces.note(cuda, tensor, out, weight, args[6])
            return out


@rule("convolution_backward.default")
def convolution_backward(cuda, func, grad, tensor, weight, *args):
    """The depthwise kernel makes the weight's gradient first; the bias's is a sum (ATen/native/Convolution.cpp)."""
    mask, depthwise = args[7], is_depthwise(tensor, weight, args[4], args[6])
    if not torch.backends.cudnn.enabled and not depthwise:
        return _unfolded_backward(cuda, func, grad, tensor, weight, *args)
    form = layout(tensor, weight)
    grads = [None, None, None]
    is_line = tensor.dim() == 3
    # A gradient that is laid out otherwise is copied once, by Tensor::to(memory_format); a slice for each result.
    seen = suggest_memory_format(grad.unsqueeze(2) if is_line else grad)
    copied, sliced = ((grad,), ()) if depthwise or args[4] or seen is not form else ((), (grad,))
    # The dense copy of an input with one dimension of space lives until the end.
    with cuda.contiguous(*((tensor,) if is_line else ())):
        with cuda.contiguous(*copied, *(() if is_line else (tensor,)), form=form):
            fresh = cuda.shapes.answer(func, (grad, tensor, weight, *args), {})
            for place in (1, 0) if depthwise else (0, 1):
                if place and mask[1]:
                    with cuda.contiguous(*sliced, form=form):
                        grads[1] = _allocated(cuda, fresh[1], form, func)
                        if not depthwise:
                            convolution_workspaces.note(cuda, tensor, grad, weight, args[6], of_weight=True)
                elif mask[place]:
                    grads[0] = _allocated(cuda, fresh[0], form, func)
                    with cuda.contiguous(weight, *sliced, form=form):
                        if not depthwise:
                            convolution_workspaces.note(cuda, tensor, grad, weight, args[6])
        if mask[2]:
            grads[2] = cuda.empty((grad.shape[1],), grad.dtype, op=func)
            reduce(cuda, grad, [0, *range(2, grad.dim())], 4)
    return tuple(grads)


# --- convolutions without cuDNN ---------------------------------------------------------------------------------------------------
# Group by group, samples are unfolded into columns one after the other (ATen/native/cuda/ConvolutionMM2d.cu,
# NaiveDilatedConvolution.cu, NaiveConvolutionTranspose2d.cu); order as on the C++ allocator of 2.12.1.


def unfolding(tensor, weight, outer, stride, padding, dilation, transposed):
    """(bytes of the columns of one sample and group, whether dilated or in three dimensions, whether pointwise).

    `outer` is the size of the result but for batch and channels.
    """
    kernel = weight.shape[2:]
    columns = math.prod(weight.shape[1:]) * math.prod(tensor.shape[2:] if transposed else outer)
    by_sample = not transposed and (len(kernel) == 3 or {*dilation} != {1})
    return columns * tensor.element_size(), by_sample, {*kernel, *stride} == {1} and not any(padding)


def _per_group(cuda: Any, groups: int, *tensors: Any) -> Any:
    """Copies of one group's part, or of non-dense tensors."""
    if groups == 1:
        return cuda.contiguous(*tensors)
    return cuda.held(*(bytes_of(one) // groups for one in tensors), op="aten.contiguous")


def _joined(cuda: Any, parts: list[Any], dim: int) -> Any:
    return parts[0] if len(parts) == 1 else cuda.op(aten.cat.default, parts, dim)


def _unfolded(cuda, func, tensor, weight, *args):
    _, stride, padding, dilation, transposed, _, groups = args
    cuda.note(aten.mm.default, (tensor, weight))  # columns times weights, by cuBLAS
    shape = cuda.shapes.answer(func, (tensor, weight, *args), {}).shape
    columns, by_sample, is_pointwise = unfolding(tensor, weight, shape[2:], stride, padding, dilation, transposed)
    sizes = [] if is_pointwise and not by_sample else [columns]
    if transposed:
        sizes = [columns, math.prod(shape[2:]) * tensor.element_size()]
    parts = []
    for _ in range(groups):
        with _per_group(cuda, groups, tensor):
            parts.append(cuda.empty((shape[0], shape[1] // groups, *shape[2:]), tensor.dtype, op=func))
            cuda.scratch(*sizes, op=func)
    return _joined(cuda, parts, 1)


def _unfolded_backward(cuda, func, grad, tensor, weight, *args):
    """Transposed convolutions unfold again for each gradient, dilated ones once, with a bias sum per sample."""
    _, stride, padding, dilation, transposed, _, groups, mask = args
    cuda.note(aten.mm.default, (tensor, weight))
    columns, by_sample, is_pointwise = unfolding(tensor, weight, grad.shape[2:], stride, padding, dilation, transposed)
    channels = tensor.shape[1] // groups, weight.shape[0] // groups, grad.shape[1] // groups
    shapes = ((len(tensor), channels[0], *tensor.shape[2:]), (channels[1], *weight.shape[1:]), (channels[2],))
    results: tuple[list[Any], ...] = ([], [], [])

    def make(*places: int) -> None:
        for place in places:
            if mask[place]:
                results[place].append(cuda.empty(shapes[place], tensor.dtype, op=func))

    for _ in range(groups):
        with _per_group(cuda, groups, grad, tensor):
            make(0)
            if transposed:
                cuda.scratch(columns if mask[0] else 0, op=func)
                make(1, 2)
                cuda.scratch(columns if mask[1] else 0, op=func)
            elif by_sample:
                make(1, 2)
                with cuda.held(columns, op=func):
                    for _ in range(len(grad) if mask[2] else 0):
                        cuda.scratch(channels[2] * grad.element_size(), op=func)
            else:
                with cuda.held(columns if mask[0] else 0, op=func):
                    make(2, 1)
                    if mask[1] and not mask[0] and not is_pointwise:
                        cuda.scratch(columns, op=func)
    joined = zip(results, (1, 0, 0), strict=True)
    return tuple([_joined(cuda, parts, dim) if parts else None for parts, dim in joined])
