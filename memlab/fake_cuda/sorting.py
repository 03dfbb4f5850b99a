"""Scratch memory of sorting, scans, sampling and indexed accumulation on CUDA; most of it is requested by the CUB library.

Sizes of CUB are those of PyTorch 2.12.1 (CUDA 13.0) as seen on the C++ allocator: it aligns its parts to 256 bytes
and requests 255 more. Limits: sorts of 16-bit keys take a table per multiprocessor that is only estimated here; scans and
selections of keys in 32 bits, and scans by key, have the tiles of compute capability 8.0.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import torch

from memlab.fake_cuda import data_dependent
from memlab.fake_cuda.gradient_accumulation import current_node, is_filled_in_place
from memlab.fake_cuda.kernel_rules import HALVES, LONG, bytes_of, round_up, rule, scratch
from memlab.fake_cuda.reductions import PAIR_BYTES, is_dense, reduce, reducing
from memlab.fake_cuda.tensors import is_fake

aten = torch.ops.aten
DIGITS, ALIGNED, SLACK = 256, 256, 255
SINGLE_TILE = {8: 2048, 4: 4864}
"""Up to this many elements a single thread block sorts, and requests one byte; by the bytes of the wider of key and value."""
SMALL_SORT = 4096
"""Up to this many elements along the dimension no radix sort is used (ATen/native/cuda/Sort.h, should_use_small_sort)."""
LONG_ROW, MANY_SEGMENTS = 1_000_000, 128
"""Rows that are sorted one by one, and how many are sorted as segments (ATen/native/cuda/SortStable.cu)."""
FEW_INDICES, ROWS_PER_SUM = 3072, 10


def _sort_tile(key_bytes: int, value_bytes: int, capability: tuple[int, int]) -> int:
    """Elements per thread block (cub/device/dispatch/tuning/tuning_radix_sort.cuh)."""
    is_wide = key_bytes == 8
    if max(key_bytes, value_bytes) == 4:
        return 5888 if capability < (8, 0) else 6528 if capability < (9, 0) else 8832
    if capability < (8, 0):
        return 2816
    if capability < (9, 0):
        return 3840 if is_wide else 3072
    return 4608 if is_wide else 5376


def sort_keys(count: int, bits: int, gpu: Any) -> int:
    """Temporary bytes of DeviceRadixSort::SortKeys of int64."""
    passes = -(-bits // 8)
    tiles = -(-count // _sort_tile(8, 8, tuple(gpu.compute_capability)))
    swap = 0 if passes == 1 else round_up(count * 8, ALIGNED)
    return passes * DIGITS * 8 + tiles * DIGITS * 4 + swap + round_up(4 * passes, ALIGNED) + SLACK


def sort_pairs(count: int, key_bytes: int, gpu: Any, bits: int | None = None, value_bytes: int = 8) -> int:
    """Temporary bytes of DeviceRadixSort::SortPairs."""
    passes = max(-(-(8 * key_bytes if bits is None else bits) // 8), 1)
    swap = 0 if passes == 1 else round_up(count * key_bytes, ALIGNED) + round_up(count * value_bytes, ALIGNED)
    if key_bytes < 4:
        return swap + round_up((gpu.multiprocessors * 20 + 22) * DIGITS * 8, ALIGNED) + SLACK
    tile = _sort_tile(key_bytes, value_bytes, tuple(gpu.compute_capability))
    return passes * DIGITS * 8 + -(-count // tile) * DIGITS * 4 + swap + round_up(4 * passes, ALIGNED) + SLACK


def tiles(count: int, tile: int, state_bytes: int) -> int:
    """A state per tile, and 32 more."""
    return ALIGNED + round_up((32 + -(-count // tile)) * state_bytes, ALIGNED) + SLACK


def scan(count: int, element_bytes: int) -> int:
    """Temporary bytes of DeviceScan."""
    state_bytes, tile = {4: (8, 1920), 8: (16, 896)}.get(element_bytes, (16, 7680))
    return tiles(count, tile, state_bytes)


def scan_by_key(count: int, key_bytes: int) -> int:
    """Temporary bytes of DeviceScan by key: a state and a key per tile."""
    tiles = -(-count // (2240 if key_bytes == 8 else 3840))
    return round_up(key_bytes * (tiles + 1), ALIGNED) + round_up((32 + tiles) * 16, ALIGNED) + SLACK


def select(count: int, key_bytes: int, capability: tuple[int, int]) -> int:
    """Temporary bytes of `unique_by_key`."""
    if key_bytes == 4:
        return tiles(count, 2816, 16)
    by_capability = {(8, 0): 1792, (9, 0): 4608}
    return tiles(count, by_capability.get(capability, 3840 if capability > (9, 0) else 320), 16)


def unique(count: int, key_bytes: int) -> int:
    """Temporary bytes of DeviceSelect::Unique."""
    return tiles(count, 1920 if key_bytes == 8 else 4608, 8)


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
        return _sorted_rows(cuda, func, grad, indices, rows, scales)


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
    rows, mode = args[4], args[6]
    with cuda.contiguous(grad):
        if mode == MAXIMUM or not indices.numel():
            return cuda.op(func, grad, indices, *args)
        return _sorted_rows(cuda, func, grad, indices, rows)


def _sorted_rows(cuda: Any, func: Any, grad: Any, indices: Any, rows: int, counts: bool = False) -> Any:
    """The gradient of a table: sorted indices, then partial sums per segment of equal ones (EmbeddingBackwardKernel.cu).

    `counts`: how often each occurs, by a scan from either side (Embedding.cu, embedding_dense_backward_cuda).
    """
    count, width = indices.numel(), indices.element_size()
    segments = min(count, rows)
    partial = count // ROWS_PER_SUM + segments
    with cuda.held(count * width, count * width, op=func):
        sorting = 1 if count <= SINGLE_TILE[width] else sort_pairs(count, width, cuda.gpu, value_bytes=width)
        cuda.scratch(count * width, sorting, op=func)
        with cuda.held(count * width if counts else 0, op=func):
            for _ in range(2 if counts else 0):
                cuda.scratch(scan_by_key(count, width), op=func)
            out = cuda.empty((rows, grad.shape[-1]), grad.dtype, op=func)
            with cuda.held(count * width, LONG, op=func):
                cuda.scratch(count * width, select(count, width, tuple(cuda.gpu.compute_capability)), op=func)
                with cuda.held(segments * width, segments * width, op=func):
                    cuda.scratch(scan(segments, width), op=func)
                    cuda.scratch(LONG, partial * width, partial * grad.shape[-1] * 4, op=func)
    return out


@rule("embedding_renorm_.default")
def embedding_renorm(cuda, func, table, indices, *args):
    """The indices are sorted and made unique (ATen/native/cuda/Embedding.cu, embedding_renorm_cuda_)."""
    count, width = indices.numel(), indices.element_size()
    with cuda.contiguous(indices):
        ordered = indices.sort()[0]
        cuda.scratch(count * width, LONG, unique(count, width), op=func)
        del ordered
    return cuda.op(func, table, indices, *args)


@rule("index_put.default", "index_put_.default", "_index_put_impl_.default")
def index_put(cuda, func, tensor, indices, values, accumulate=False, *args):
    """Adding into rows sorts the indices (ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel)."""
    is_new = func is aten.index_put.default
    if is_new and accumulate and not is_filled_in_place(tensor):  # a copy first
        return index_put(cuda, aten.index_put_.default, cuda.op(aten.clone.default, tensor), indices, values, True)
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
        _add_sorted(cuda, func, tensor, indices, values)
    return out


def _is_masked_fill(tensor: Any, indices: Any, values: Any) -> bool:
    """`x[mask] = number` takes nothing (ATen/native/IndexingUtils.h, canDispatchToMaskedFill)."""
    masks = [(place, one) for place, one in enumerate(indices) if one is not None]
    if is_fake(values) or values.numel() != 1 or len(masks) != 1:
        return False
    before, mask = masks[0]
    covered = tuple(tensor.shape[before : before + mask.dim()])
    return mask.dtype in (torch.bool, torch.uint8) and is_fake(mask) and tuple(mask.shape) == covered


def _add_sorted(cuda: Any, func: Any, tensor: Any, places: Any, values: Any) -> None:
    indices = [one for one in places if one is not None]
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
        sorting = 1 if count <= SINGLE_TILE[LONG] else sort_pairs(count, LONG, cuda.gpu, bits)
        # The values of all places, as a dense tensor (`expandedValue`).
        whole = [size for size, one in itertools.zip_longest(tensor.shape, places) if one is None]
        numbers = count * math.prod(whole)
        if is_fake(values) and (values.numel() < numbers or not values.is_contiguous()):
            stack.enter_context(cuda.held(numbers * values.element_size(), op="aten.contiguous"))
        cuda.scratch(nbytes, nbytes, nbytes, sorting, op=func)


@rule("masked_scatter.default", "masked_scatter_.default")
def masked_scatter(cuda, func, tensor, mask, source):
    """The mask is summed up in 64 bits (ATen/native/cuda/IndexKernel.cpp, masked_scatter_cuda_)."""
    out = cuda.op(func, tensor, mask, source)
    count = out.numel()
    wide = mask.expand(out.shape)
    with cuda.held(count * LONG, op=func), cuda.contiguous(wide), cuda.contiguous(source):
        cuda.scratch(scan(count, LONG), op=func)
    return out


@scratch("scatter_reduce.two")
def scatter_reduce(cuda, out, tensor, dim, index, source, reduce, *args, **kwargs):
    """For a mean, how many there are (ATen/native/TensorAdvancedIndexing.cpp, scatter_reduce_two)."""
    return [bytes_of(source), bytes_of(out), out.numel()] if reduce == "mean" else []


@rule("index_reduce.default", "index_reduce_.default")
def index_reduce(cuda, func, tensor, dim, index, source, reduce, *args, **kwargs):
    """The same, and where there is none (cuda/Indexing.cu, index_reduce_func_cuda_impl)."""
    out = cuda.op(func, tensor, dim, index, source, reduce, *args, **kwargs)
    if reduce == "mean":
        with cuda.held(bytes_of(out), op=func):
            cuda.scratch(bytes_of(source), op=func)
            cuda.scratch(out.numel(), op=func)
    return out


@rule("one_hot.default")
def one_hot(cuda, func, tensor, num_classes=-1):
    """To shape functions it is a comparison (ATen/native/Onehot.cpp), to a compiler, too."""
    if num_classes < 0 or torch.compiler.is_compiling():
        return func.decompose(tensor, num_classes)
    out = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


@rule("randperm.default", "randperm.generator")
def permutation(cuda, func, count, *args, **kwargs):
    """The order of random keys (ATen/native/cuda/Randperm.cu)."""
    out = cuda.op(func, count, *args, **kwargs)
    if count > 1:
        bits = min(64, math.ceil(math.log2(count - (6 * count**2 + 1) / (12 * math.log(0.9)))))
        key_bytes, value_bytes = 4 if bits <= 32 else 8, out.element_size()
        cuda.scratch(value_bytes, op=func)
        with cuda.held(count * value_bytes, count * key_bytes, count * key_bytes, op=func):
            cuda.scratch(sort_pairs(count, key_bytes, cuda.gpu, bits, value_bytes), op=func)
    return out


@rule("median.default", "nanmedian.default")
def median(cuda, func, tensor):
    """All of it is sorted (ATen/native/cuda/Sorting.cpp, median_impl)."""
    if tensor.numel():
        tensor.flatten().sort()
    return cuda.op(func, tensor)


@scratch("bernoulli.default")
def bernoulli(cuda, out, chances, **kwargs):
    """Chances in half precision are converted (ATen/native/cuda/DistributionTemplates.h, bernoulli_kernel)."""
    return [chances.numel() * 4] if chances.dtype in HALVES else []


@rule("index.Tensor")
def index(cuda, func, tensor, indices):
    """Indices of different strides are copied (ATen/native/TensorAdvancedIndexing.cpp, AdvancedIndex)."""
    places = [one for one in indices if one is not None and one.dtype != torch.bool]
    shape = torch.broadcast_shapes(*(one.shape for one in places))
    copied = [math.prod(shape) * one.element_size() for one in places if one.shape != shape]
    with cuda.held(*copied, op=func):
        return data_dependent.index(cuda, func, tensor, indices)


@rule("sort.default", "sort.stable", "argsort.stable")
def sort(cuda, func, tensor, *args, **kwargs):
    """A short dimension needs its indices, a long one a radix sort (ATen/native/cuda/Sort.cpp, sort_cuda_kernel)."""
    out = cuda.op(func, tensor, *args, **kwargs)
    # `sort.stable` has a keyword before its dimension.
    given = [one for one in args if not isinstance(one, bool)]
    dim = kwargs.get("dim", given[0] if given else -1)
    along = tensor.shape[dim] if tensor.dim() else 1
    if along <= 1 or not tensor.numel():
        return out
    if along <= SMALL_SORT:
        cuda.scratch(along * LONG, op=func)
        return out
    width, copied, inner = bytes_of(tensor), [], _sorted_layout(tensor, dim)
    if inner != tensor.stride() or not is_dense(tensor):
        copied.append(width)
    values, indices = (out[0], out[1]) if isinstance(out, tuple) else (out, out)
    copied += [size for one, size in ((values, width), (indices, tensor.numel() * LONG)) if one.stride() != inner]
    with cuda.held(*copied, op=func):
        _sort_rows(cuda, func, tensor, along)
    return out


def _sorted_layout(tensor: Any, dim: int) -> tuple[int, ...]:
    """Dense strides with the dimension innermost (Sort.cpp, infer_dense_strides_dim_last)."""
    dim %= tensor.dim()
    order = sorted((one for one in range(tensor.dim()) if one != dim), key=lambda one: -tensor.stride(one))
    strides, step = [0] * tensor.dim(), 1
    for one in (dim, *reversed(order)):
        strides[one] = step
        step *= tensor.shape[one]
    return tuple(strides)


def _sort_rows(cuda: Any, func: Any, tensor: Any, along: int) -> None:
    """Row after row, all at once with the number of the row, or by segments (ATen/native/cuda/SortStable.cu)."""
    count, width = tensor.numel(), tensor.element_size()
    rows = count // along
    if rows == 1 or along >= LONG_ROW:
        with cuda.held(along * LONG, op=func):
            for _ in range(rows):
                cuda.scratch(sort_pairs(along, width, cuda.gpu), op=func)
    elif rows < MANY_SEGMENTS:
        with cuda.held(count * LONG, count * LONG, op=func):
            cuda.scratch(count * width, sort_pairs(count, width, cuda.gpu), op=func)
            cuda.scratch(sort_keys(count, max((rows - 1).bit_length(), 1), cuda.gpu), op=func)
    else:
        swap = round_up(count * width, ALIGNED) + round_up(count * LONG, ALIGNED) + SLACK
        cuda.scratch(count * LONG, swap if width > 1 else SLACK + 1, op=func)


@rule("topk.default")
def topk(cuda, func, tensor, k, dim=-1, largest=True, is_sorted=True):
    """Many blocks per row where rows are few or long (ATen/native/cuda/TensorTopK.cu); results are sorted (TensorTopK.cpp)."""
    values, indices = cuda.op(func, tensor, k, dim, largest, is_sorted)
    if not values.numel():
        return values, indices
    with cuda.contiguous(tensor):
        select_largest(cuda, func, tensor, dim)
    if is_sorted and values.numel() > 1 and values.dim() and values.shape[dim] > SMALL_SORT:
        places = cuda.op(aten.empty_like.default, indices)
        ordered = cuda.op(aten.empty_like.default, values)
        with contextlib.ExitStack() as stack:
            for one, size in ((values, bytes_of(values)),) if dim % tensor.dim() != tensor.dim() - 1 else ():
                stack.enter_context(cuda.held(size, size, one.numel() * LONG, op=func))
            _sort_rows(cuda, func, values, values.shape[dim])
        cuda.scratch(bytes_of(indices), op=func)  # gathered
        del ordered, places
    return values, indices


BLOCK_THREADS, LEAST_ITEMS, MOST_ITEMS, REGISTERS = 256, 4, 64, 40
"""Of `mbtopk` in TensorTopK.cu: threads per block, elements and registers per thread."""
MANY_BLOCKS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
"""Up to so many rows, several blocks share one that is at least so long (TensorTopK.cu, should_use_multiblock)."""


def select_largest(cuda: Any, func: Any, tensor: Any, dim: int) -> None:
    """Digit counts per block, what is known per row, and two scans (TensorTopK.cu, mbtopk::launch)."""
    along = tensor.shape[dim] if tensor.dim() else 1
    rows = tensor.numel() // max(along, 1)
    if along < next((least for most, least in MANY_BLOCKS if rows <= most), 400):
        return
    blocks_at_once = cuda.gpu.multiprocessors * (65536 // (REGISTERS * BLOCK_THREADS))
    items = min(max(-(-tensor.numel() // (blocks_at_once * BLOCK_THREADS)), LEAST_ITEMS), MOST_ITEMS)
    blocks = rows * -(-along // (items * BLOCK_THREADS))
    width = tensor.element_size()
    of_rows = rows * width, rows * 8, rows * 2 * max(width, 4), blocks * DIGITS * 2, rows * DIGITS * 4
    with cuda.held(*of_rows, blocks * 4, blocks * 4, op=func):
        for _ in range(2):
            cuda.scratch(scan_by_key(blocks, 4), op=func)


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


@rule("multinomial.default")
def multinomial(cuda, func, weights, samples, replacement=False, **kwargs):
    """The largest of exponential draws, or a cumulated distribution (ATen/native/Distributions.cpp, multinomial_out;
    cuda/MultinomialKernel.cu); before that the weights are checked."""
    out = cuda.op(func, weights, samples, replacement, **kwargs)
    if replacement and samples > 1:
        cuda.scratch(*[bytes_of(weights)] * 3, op=func)
        return out
    smallest, largest = weights.aminmax()
    is_valid = (largest < math.inf) & (smallest >= 0)
    sums = weights.sum() if weights.dim() == 1 else weights.sum(1)
    is_zero = sums == 0 if weights.dim() == 1 else (sums == 0).any()
    del sums
    ~is_zero  # noqa: B018  # what is asserted
    with cuda.held(bytes_of(weights), op=func):
        if samples == 1:
            cuda.scratch(*reducing(cuda, weights, [-1], PAIR_BYTES), op=func)
        else:
            with cuda.held(out.numel() * weights.element_size(), op=func):
                select_largest(cuda, func, weights, -1)
    del largest, smallest, is_valid, is_zero
    return out
