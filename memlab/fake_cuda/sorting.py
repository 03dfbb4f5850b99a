"""Scratch memory of sorting, scans, sampling and indexed accumulation on CUDA; most of it is requested by the CUB library.

Sizes of CUB are those of PyTorch 2.12.1 (CUDA 13.0) as seen on the C++ allocator: it aligns its parts to 256 bytes
and requests 255 more. Limits: sorts of 16-bit keys take a table per multiprocessor that is only estimated here.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from memlab.fake_cuda import data_dependent
from memlab.fake_cuda.gradient_accumulation import current_node, is_filled_in_place
from memlab.fake_cuda.kernel_rules import LONG, bytes_of, round_up, rule, scratch
from memlab.fake_cuda.reductions import reduce
from memlab.fake_cuda.tensors import is_fake

aten = torch.ops.aten
DIGITS, ALIGNED, SLACK = 256, 256, 255
SINGLE_TILE = 2048
"""Up to this many elements a single thread block sorts, and requests one byte."""
SMALL_SORT = 4096
"""Up to this many elements along the dimension no radix sort is used (ATen/native/cuda/Sort.h, should_use_small_sort)."""
FEW_INDICES, ROWS_PER_SUM = 3072, 10


def sort_pairs(count: int, key_bytes: int, gpu: Any, bits: int | None = None, value_bytes: int = 8) -> int:
    """Temporary bytes of DeviceRadixSort::SortPairs."""
    passes = max(-(-(8 * key_bytes if bits is None else bits) // 8), 1)
    swap = 0 if passes == 1 else round_up(count * key_bytes, ALIGNED) + round_up(count * value_bytes, ALIGNED)
    if key_bytes < 4:
        return swap + round_up((gpu.multiprocessors * 20 + 22) * DIGITS * 8, ALIGNED) + SLACK
    # Elements per thread block, with int64 values (cub/device/dispatch/tuning/tuning_radix_sort.cuh).
    capability, is_wide = tuple(gpu.compute_capability), key_bytes == 8
    if capability < (8, 0):
        tile = 2816
    elif capability < (9, 0):
        tile = 3840 if is_wide else 3072
    else:
        tile = 4608 if is_wide else 5376
    return passes * DIGITS * 8 + -(-count // tile) * DIGITS * 4 + swap + round_up(4 * passes, ALIGNED) + SLACK


def _tiles(count: int, tile: int, state_bytes: int) -> int:
    """A state per tile, and 32 more."""
    return ALIGNED + round_up((32 + -(-count // tile)) * state_bytes, ALIGNED) + SLACK


def scan(count: int, element_bytes: int) -> int:
    """Temporary bytes of DeviceScan."""
    state_bytes, tile = {4: (8, 1920), 8: (16, 896)}.get(element_bytes, (16, 7680))
    return _tiles(count, tile, state_bytes)


def select(count: int, capability: tuple[int, int]) -> int:
    """Temporary bytes of `unique_by_key` over int64 pairs."""
    by_capability = {(8, 0): 1792, (9, 0): 4608}
    return _tiles(count, by_capability.get(capability, 3840 if capability > (9, 0) else 320), 16)


@rule("embedding.default")
def embedding(cuda, func, table, indices, *args):
    """Indices that no view makes one-dimensional are copied (ATen/native/Embedding.cpp: `indices.reshape(-1)`)."""
    try:
        aten.view.default(indices, (-1,))
        copied = 0
    except RuntimeError:
        copied = bytes_of(indices)
    with cuda.held(copied, op=func):
        return cuda.op(func, table, indices, *args)


@rule("embedding_dense_backward.default")
def embedding_backward(cuda, func, grad, indices, rows, padding, scales):
    """More than 3072 indices are sorted first (ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda)."""
    with cuda.contiguous(indices, grad):
        if indices.numel() <= FEW_INDICES and not scales:
            return cuda.op(func, grad, indices, rows, padding, scales)
        return _sorted_rows(cuda, func, grad, indices, rows)


MAXIMUM = 2
"""at::native::EmbeddingBagMode."""


@rule("_embedding_bag.default", "_embedding_bag_forward_only.default")
def embedding_bag(cuda, func, table, indices, *args):
    """The results come in another order than they are returned (ATen/native/cuda/EmbeddingBag.cu, _embedding_bag_cuda)."""
    answers = cuda.shapes.answer(func, (table, indices, *args), {})
    made = {place: cuda.empty(answers[place].shape, answers[place].dtype, op=func) for place in (2, 1, 0, 3)}
    return tuple(made[place] for place in range(4))


@rule("_embedding_bag_backward.default")
def embedding_bag_backward(cuda, func, grad, indices, *args):
    """Sums and averages are those of a plain embedding, always sorted (EmbeddingBag.cu, embedding_bag_backward_cuda_sum_avg)."""
    rows, mode, is_sparse = args[4], args[6], args[7]
    with cuda.contiguous(grad):
        if mode == MAXIMUM or is_sparse or not indices.numel():
            return cuda.op(func, grad, indices, *args)
        return _sorted_rows(cuda, func, grad, indices, rows)


def _sorted_rows(cuda: Any, func: Any, grad: Any, indices: Any, rows: int) -> Any:
    """The gradient of a table: sorted indices, then partial sums per segment of equal ones (EmbeddingBackwardKernel.cu)."""
    count, width = indices.numel(), indices.element_size()
    segments = min(count, rows)
    partial = count // ROWS_PER_SUM + segments
    with cuda.held(count * width, count * width, op=func):
        sorting = 1 if count <= SINGLE_TILE else sort_pairs(count, width, cuda.gpu, value_bytes=width)
        cuda.scratch(count * width, sorting, op=func)
        out = cuda.empty((rows, grad.shape[-1]), grad.dtype, op=func)
        with cuda.held(count * width, LONG, op=func):
            cuda.scratch(count * width, select(count, tuple(cuda.gpu.compute_capability)), op=func)
            with cuda.held(segments * width, segments * width, op=func):
                cuda.scratch(scan(segments, width), op=func)
                cuda.scratch(LONG, partial * width, partial * grad.shape[-1] * 4, op=func)
    return out


@rule("embedding_renorm_.default")
def embedding_renorm(cuda, func, table, indices, *args):
    """The indices are sorted and made unique (ATen/native/cuda/Embedding.cu, embedding_renorm_cuda_)."""
    count, width = indices.numel(), indices.element_size()
    sorting = sort_pairs(count, width, cuda.gpu) if count > SINGLE_TILE else count
    cuda.scratch(count * width, count * width, sorting, op=func)
    return cuda.op(func, table, indices, *args)


@rule("index_put.default", "index_put_.default", "_index_put_impl_.default")
def index_put(cuda, func, tensor, indices, values, accumulate=False, *args):
    """Adding into rows sorts the indices (ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel)."""
    is_new = func is aten.index_put.default
    if not accumulate and _is_masked_fill(tensor, indices, values):
        return cuda.op(aten.clone.default, tensor) if is_new else tensor
    given = [one for one in indices if one is not None]
    if accumulate and current_node() is None and func is not aten._index_put_impl_.default:
        for one in (one for one in given for _ in range(2)):  # its largest and its smallest (wrapIndexOnce)
            with cuda.held(LONG, op=func):
                reduce(cuda, one, None, LONG)
                cuda.scratch(1, op=func)
    in_place = is_new and is_filled_in_place(tensor)
    with cuda.held(0 if is_fake(values) else bytes_of(values), op=func):
        rest = (values, accumulate, *args)
        out = tensor if in_place else data_dependent.index(cuda, func, tensor, indices, *rest)
    if accumulate:
        _add_sorted(cuda, func, tensor, given)
    return out


def _is_masked_fill(tensor: Any, indices: Any, values: Any) -> bool:
    """`x[mask] = number` takes nothing (ATen/native/IndexingUtils.h, canDispatchToMaskedFill)."""
    masks = [(place, one) for place, one in enumerate(indices) if one is not None]
    if is_fake(values) or values.numel() != 1 or len(masks) != 1:
        return False
    before, mask = masks[0]
    covered = tuple(tensor.shape[before : before + mask.dim()])
    return mask.dtype in (torch.bool, torch.uint8) and is_fake(mask) and tuple(mask.shape) == covered


def _add_sorted(cuda: Any, func: Any, tensor: Any, indices: list[Any]) -> None:
    count = math.prod(torch.broadcast_shapes(*(one.shape for one in indices)))
    if not count or any(one.dtype not in (torch.int64, torch.int32) for one in indices):
        return
    nbytes = count * LONG
    with contextlib.ExitStack() as stack:
        # Each is wrapped and scaled by its stride, and added to the first: computeLinearIndex.
        for place in range(len(indices)):
            wrapped = cuda.hold(nbytes, func)
            scaled = cuda.hold(nbytes, func)
            cuda.release(wrapped)
            stack.callback(cuda.release, scaled) if place == 0 else cuda.release(scaled)
        bits = (max(math.prod(tensor.shape[: len(indices)]), 2) - 1).bit_length()
        sorting = 1 if count <= SINGLE_TILE else sort_pairs(count, LONG, cuda.gpu, bits)
        cuda.scratch(nbytes, nbytes, nbytes, sorting, op=func)


@rule("index.Tensor")
def index(cuda, func, tensor, indices):
    """Indices of different strides are copied (ATen/native/TensorAdvancedIndexing.cpp, AdvancedIndex)."""
    places = [one for one in indices if one is not None and one.dtype != torch.bool]
    shape = torch.broadcast_shapes(*(one.shape for one in places))
    copied = [math.prod(shape) * one.element_size() for one in places if one.shape != shape]
    with cuda.held(*copied, op=func):
        return data_dependent.index(cuda, func, tensor, indices)


@scratch("sort.default", "sort.stable", "argsort.stable")
def sort(cuda, out, tensor, dim=-1, *args, **kwargs):
    """A short dimension needs its indices, a long one a radix sort (ATen/native/cuda/Sort.cpp, sort_cuda_kernel)."""
    along, count, width = tensor.shape[dim] if tensor.dim() else 1, tensor.numel(), tensor.element_size()
    if along <= 1:
        return []
    if along <= SMALL_SORT:
        return [along * LONG]
    if along == count:
        return along * LONG, sort_pairs(along, width, cuda.gpu)
    cuda.assume("the scratch memory of sorting several long rows is estimated")
    return count * LONG, count * LONG, count * width, sort_pairs(count, width, cuda.gpu)


@rule("cumsum.default", "cumprod.default")
def cumulate(cuda, func, tensor, dim, *, dtype=None):
    """A single row uses CUB's scan (ATen/native/cuda/ScanKernels.cpp)."""
    kwargs = {} if dtype is None else {"dtype": dtype}
    converted = tensor.numel() * dtype.itemsize if dtype not in (None, tensor.dtype) else 0
    with cuda.held(converted, op=func):
        out = cuda.op(func, tensor, dim, **kwargs)
    if tensor.dim() and tensor.shape[dim] == tensor.numel() and tensor.numel():
        cuda.scratch(scan(tensor.numel(), out.element_size()), op=func)
    return out


@scratch("multinomial.default")
def multinomial(cuda, out, weights, samples, replacement=False, **kwargs):
    """Exponential draws without replacement, a cumulated distribution with it (ATen/native/cuda/MultinomialKernel.cu)."""
    return [bytes_of(weights)] * (3 if replacement and samples > 1 else 1)
