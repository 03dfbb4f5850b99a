"""What CUDA takes to sort, scan, draw, and to add into rows named by an index."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from memlab.predictor.pretend import answers, cub
from memlab.predictor.pretend.engine import current_node, is_filled_in_place
from memlab.predictor.pretend.kernels import bytes_of, get, release
from memlab.predictor.pretend.reductions import reduce
from memlab.predictor.pretend.rules import installer, rule
from memlab.predictor.pretend.tensors import PretendTensor, is_pretend

aten = torch.ops.aten
LONG = 8
SMALL_SORT = 4096
"""Up to so many elements along the dimension a sort needs no radix sort (ATen/native/cuda/Sort.h, should_use_small_sort)."""

# --- embedding ----------------------------------------------------------------------------------------------------------------

FEW_INDICES = 3072
ROWS_PER_SUM = 10


@rule("aten.embedding_dense_backward.default")
def embedding_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """More than 3072 indices are sorted first (ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda)."""
    grad, indices, rows, _, scales = args
    count, width = indices.numel(), indices.element_size()
    if count <= FEW_INDICES and not scales:
        return run.op(func, *args, **kwargs)
    held = [run.hold(count * width, func) for _ in range(3)]
    run.scratch(cub.sort_pairs(count, width, run.card, value_bytes=width), op=func)
    run.release(held.pop())
    out = run.op(func, *args, **kwargs)
    _segments(run, func, grad, count, rows, width)
    release(run, held)
    return out


def _segments(run: Any, func: Any, grad: Any, count: int, rows: int, width: int) -> None:
    """Partial sums per segment of equal indices (ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    capability = tuple(run.card.compute_capability)
    segments = min(count, rows)
    starts, number = run.hold(count * width, func), run.hold(LONG, func)
    copy = run.hold(count * width, func)
    run.scratch(cub.select(count, capability), op=func)
    run.release(copy)
    parts = [run.hold(segments * width, func) for _ in range(2)]
    run.scratch(cub.scan(segments, width), op=func)
    partial = count // ROWS_PER_SUM + segments
    rest = [run.hold(LONG, func), run.hold(partial * width, func), run.hold(partial * grad.shape[-1] * 4, func)]
    release(run, [starts, number, *parts, *rest])


@rule("aten.embedding_renorm_.default")
def embedding_renorm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The indices are sorted and made unique (ATen/native/cuda/Embedding.cu, embedding_renorm_cuda_)."""
    count, width = args[1].numel(), args[1].element_size()
    held = [run.hold(count * width, func) for _ in range(2)]
    run.scratch(cub.sort_pairs(count, width, run.card) if count > cub.SINGLE_TILE else count, op=func)
    release(run, held)
    return run.op(func, *args, **kwargs)


# --- indices --------------------------------------------------------------------------------------------------------------------


@rule("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")
def index_put(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Adding into rows sorts the indices (ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel)."""
    tensor, indices, values = args[0], args[1], args[2]
    adds = kwargs.get("accumulate", get(args, 3, False))
    if not adds and _is_masked_fill(tensor, indices, values):
        return run.op(aten.clone.default, tensor) if func is aten.index_put.default else tensor
    if adds and current_node() is None and func is not aten._index_put_impl_.default:
        _checked(run, func, indices)
    in_place = func is aten.index_put.default and is_filled_in_place(tensor)
    moved = run.hold(bytes_of(values), func) if not is_pretend(values) else -1
    out = tensor if in_place else answers.index_put(func, args, kwargs, run)
    run.release(moved)
    if adds:
        _sorted_add(run, func, tensor, [one for one in indices if one is not None], bytes_of(values))
    return out


def _is_masked_fill(tensor: Any, indices: Any, values: Any) -> bool:
    """`x[mask] = number` takes nothing (ATen/native/IndexingUtils.h, canDispatchToMaskedFill)."""
    masks = [one for one in indices if one is not None]
    if is_pretend(values) or values.numel() != 1 or len(masks) != 1:
        return False
    before, mask = next(i for i, one in enumerate(indices) if one is not None), masks[0]
    covered = tuple(tensor.shape[before : before + mask.dim()])
    return mask.dtype in (torch.bool, torch.uint8) and is_pretend(mask) and tuple(mask.shape) == covered


@installer
@contextlib.contextmanager
def numbers_of_the_host(run: Any, patches: Any) -> Iterator[None]:
    """`x[...] = number` makes its number on the host where x is on CUDA (torch/csrc/autograd/python_variable_indexing.cpp)."""
    patches.put(PretendTensor, __setitem__=_setitem)
    yield


def _setitem(self: Any, key: Any, value: Any) -> None:
    if isinstance(value, bool | int | float | complex):
        value = torch.scalar_tensor(value, dtype=self.dtype, device="cpu")
    torch.Tensor.__setitem__(self, key, value)


def _checked(run: Any, func: Any, indices: Any) -> None:
    """The largest and the smallest index are looked at (wrapIndexOnce)."""
    for one in indices:
        if one is not None:
            for _ in range(2):
                found = run.hold(LONG, func)
                reduce(run, one, None, LONG)
                run.scratch(1, op=func)
                run.release(found)


def _sorted_add(run: Any, func: Any, tensor: Any, indices: list[Any], value_bytes: int) -> None:
    shape = torch.broadcast_shapes(*(one.shape for one in indices))
    count = math.prod(shape)
    if not count or any(one.dtype not in (torch.int64, torch.int32) for one in indices):
        return
    nbytes = count * LONG
    linear = _linear_index(run, func, nbytes, len(indices))
    held = [linear] + [run.hold(nbytes, func) for _ in range(3)]
    rows = max(math.prod(tensor.shape[: len(indices)]), 2)
    bits = (rows - 1).bit_length()
    run.scratch(1 if count <= cub.SINGLE_TILE else cub.sort_pairs(count, LONG, run.card, bits), op=func)
    release(run, held)


def _linear_index(run: Any, func: Any, nbytes: int, dims: int) -> int:
    """Each index wrapped and scaled by its stride, added to the first (computeLinearIndex)."""
    total = -1
    for _ in range(dims):
        wrapped, scaled = run.hold(nbytes, func), run.hold(nbytes, func)
        run.release(wrapped)
        if total < 0:
            total = scaled
        else:
            run.release(scaled)
    return int(total)


@rule("aten.index.Tensor")
def index(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Indices that lie differently are copied (ATen/native/TensorAdvancedIndexing.cpp, AdvancedIndex)."""
    held = []
    indices = [one for one in args[1] if one is not None and one.dtype != torch.bool]
    if len(indices) > 1 and len({one.shape for one in indices}) > 1:
        shape = torch.broadcast_shapes(*(one.shape for one in indices))
        held = [run.hold(math.prod(shape) * one.element_size(), func) for one in indices if one.shape != shape]
    out = answers.index(func, args, kwargs, run)
    release(run, held)
    return out


# --- sorting, scanning, drawing -------------------------------------------------------------------------------------------------


@rule("aten.sort.default", "aten.sort.stable", "aten.argsort.stable")
def sort(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A short dimension takes its places, a long one a radix sort (ATen/native/cuda/Sort.cpp, sort_cuda_kernel)."""
    tensor = args[0]
    out = run.op(func, *args, **kwargs)
    dim = kwargs.get("dim", get(args, 2 if "stable" in str(func) else 1, -1))
    along = tensor.shape[dim] if tensor.dim() else 1
    if along <= 1:
        return out
    if along <= SMALL_SORT:
        run.scratch(along * LONG, op=func)
    elif along == tensor.numel():
        run.scratch(along * LONG, cub.sort_pairs(along, tensor.element_size(), run.card), op=func)
    else:
        run.assume("the memory that sorting several long rows takes beside its result is estimated")
        count = tensor.numel()
        keys = cub.sort_pairs(count, tensor.element_size(), run.card)
        run.scratch(count * LONG, count * LONG, count * tensor.element_size(), keys, op=func)
    return out


@rule("aten.cumsum.default", "aten.cumprod.default")
def cumulate(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A single row is scanned by CUB (ATen/native/cuda/ScanKernels.cpp)."""
    tensor, dim = args[0], args[1]
    dtype = kwargs.get("dtype") or tensor.dtype
    wide = run.hold(tensor.numel() * dtype.itemsize, func) if dtype != tensor.dtype else -1
    out = run.op(func, *args, **kwargs)
    run.release(wide)
    if tensor.dim() and tensor.shape[dim] == tensor.numel() and tensor.numel():
        run.scratch(cub.scan(tensor.numel(), out.element_size()), op=func)
    return out


@rule("aten.multinomial.default")
def multinomial(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Exponential draws without replacement, a cumulated distribution with it (ATen/native/cuda/MultinomialKernel.cu)."""
    weights, samples = args[0], args[1]
    replaces = kwargs.get("replacement", get(args, 2, False))
    out = run.op(func, *args, **kwargs)
    nbytes = bytes_of(weights)
    if replaces and samples > 1:
        run.scratch(nbytes, nbytes, nbytes, op=func)
    else:
        run.scratch(nbytes, op=func)
    return out


@rule("aten._foreach_norm.Scalar")
def foreach_norm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """One sum per chunk of 65536 elements and tensor (ATen/native/cuda/ForeachReduceOp.cu)."""
    tensors = args[0]
    chunks = max(-(-one.numel() // 65536) for one in tensors)
    ends = kwargs.get("ord", get(args, 1, 2)) in (math.inf,)
    sums = run.hold(len(tensors) * chunks * (tensors[0].element_size() if ends else 4), func)
    out = run.op(func, *args, **kwargs)
    run.release(sums)
    return out
