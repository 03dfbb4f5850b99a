"""What CUDA kernels allocate where the shape functions show something else: dropout, softmax, losses and smaller ones.

Sizes and order were read off the C++ allocator's own history (2.12.1, compute capability 7.5 to 12.0). Others are in `norms`,
`convolutions`, `matrices`, `reductions`, `indexing`, `attention` and `recurrent`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

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


# --- the rest ----------------------------------------------------------------------------------------------------


@rule("aten.silu_backward.default", "aten.mish_backward.default")
def activation_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A kernel of its own on CUDA; elsewhere PyTorch composes it (native_functions.yaml)."""
    return run.op(aten.empty_like.default, args[0])


@rule(
    "aten.upsample_nearest1d_backward.default", "aten.upsample_nearest2d_backward.default",
    "aten.upsample_nearest3d_backward.default",
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


@rule("aten.log_sigmoid_forward.default")
def log_sigmoid(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """CUDA keeps no buffer for backward (ATen/native/cuda/ActivationLogSigmoidKernel.cu)."""
    return run.op(aten.empty_like.default, args[0]), run.empty((0,), args[0].dtype)


@rule("aten.roll.default")
def roll(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Several dimensions are rolled one after the other (ATen/native/TransformationHelper.h, roll_common)."""
    tensor, shifts, dims = args[0], args[1], get(args, 2, ())
    if not dims or len(shifts) <= 1:
        return run.op(func, *args, **kwargs)
    first = run.op(func, tensor, shifts[:1], dims[:1])
    return roll(func, (first, shifts[1:], dims[1:]), kwargs, run)


@rule("aten.pow.Scalar")
def power_of_number(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The base becomes a double or int64 on the card (ATen/native/Pow.cpp, pow_Scalar_out: wrapped_scalar_tensor)."""
    base = args[0]
    out = run.op(func, *args, **kwargs)
    if base != 1:
        run.scratch(16 if isinstance(base, complex) else 1 if isinstance(base, bool) else 8, op=func)
    return out
