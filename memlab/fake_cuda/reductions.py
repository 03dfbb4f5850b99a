"""Scratch memory of CUDA reductions: the buffer and the semaphores for reducing across thread blocks.

The launch configuration is computed as in `setReduceConfig` (ATen/native/cuda/Reduce.cuh), from shape, strides, the number of
multiprocessors and how many threads each holds. Limits: reductions of more than 2**31 elements are split by CUDA and may
need another accumulation buffer; inputs are assumed to be aligned.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memlab.fake_cuda.kernel_rules import bytes_of, rule, scratch

MAX_THREADS, WARP, VECTOR = 512, 32, 4
MIN_VALUES, MAX_VALUES = 16, 256
"""`min_values_per_thread` and `max_values_per_thread` of setReduceConfig."""
WELFORD_BYTES, PAIR_BYTES = 16, 16
"""WelfordData<float, int32> is four words; a value with its int64 index is padded to sixteen bytes."""

Dims = tuple[tuple[int, int], ...]


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """maxThreadsPerMultiProcessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
    if capability[0] == 7:
        return 1024 if capability[1] >= 5 else 2048
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12 else 2048


def by_stride(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of size and stride, the fastest first."""
    return sorted(pairs, key=operator.itemgetter(1))


def launch_dims(sizes: Any, strides: Any, dims: Any) -> tuple[Dims, Dims]:
    """What is reduced and what is kept, as TensorIterator sees it: (size, element stride), fastest first, neighbors merged.

    `dims` are those to reduce; by default all.
    """
    every = range(len(sizes))
    chosen = {d % max(len(sizes), 1) for d in dims} if dims is not None and len(dims) else set(every)
    pairs = [(int(sizes[i]), int(strides[i]), i in chosen) for i in every if sizes[i] != 1]
    reduced = by_stride((size, stride) for size, stride, gone in pairs if gone)
    return _merged(reduced), _merged([(size, stride) for size, stride, gone in reversed(pairs) if not gone])


def _merged(pairs: list[tuple[int, int]]) -> Dims:
    merged: list[tuple[int, int]] = []
    for size, stride in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def is_dense(tensor: Any) -> bool:
    """Whether its elements fill its memory without gaps or overlaps, in any order of dimensions."""
    pairs = [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]
    merged = _merged(by_stride(pairs))
    return tensor.is_contiguous() or (len(merged) <= 1 and all(stride == 1 for _, stride in merged))


def power_below(number: int, most: int = MAX_THREADS) -> int:
    """The largest power of two that is no larger (`last_pow2`)."""
    return min(1 << (max(number, 1).bit_length() - 1), most)


def scratch_bytes(reduced: Dims, kept: Dims, element_bytes: int, gpu: Any) -> tuple[int, ...]:
    """(bytes of the buffer, bytes of the semaphores) of one reduction; none if blocks need not synchronize."""
    inputs, outputs = (math.prod(size for size, _ in part) for part in (reduced, kept))
    on_fastest = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
    dim0, dim1 = (inputs, outputs) if on_fastest else (outputs, inputs)
    per_output = 1  # several inputs at once (`input_vectorized_thread_reduce_impl`) change no size
    if not on_fastest and kept[0][1] == 1:  # several results at once (`get_output_vec_size`)
        per_output = VECTOR
        for number in (kept[0][0], *(s for _, s in reduced), *(s for _, s in kept[1:])):
            while number % per_output:
                per_output //= 2
        dim0 //= per_output
    # The width and height of a thread block (`set_block_dimension`).
    limit = MAX_THREADS // per_output
    width = power_below(dim0, limit)
    height = min(power_below(dim1, limit), limit // min(width, WARP))
    width = min(width, limit // height)
    step_in, step_out = (width, 1) if on_fastest else (1, width)
    values = -(-inputs // step_in)
    if values < min(height * 16, MAX_VALUES):
        return ()
    values = -(-inputs // (step_in * height))
    per_multiprocessor = threads_per_multiprocessor(tuple(gpu.compute_capability)) // (width * height)
    grid, target = -(-(outputs // per_output) // step_out), gpu.multiprocessors * per_multiprocessor
    if values < MAX_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return ()
    return element_bytes * outputs * blocks * (1 if on_fastest else width * per_output), 4 * grid


def reducing(cuda: Any, tensor: Any, dims: Any, element_bytes: int) -> tuple[int, ...]:
    """The scratch sizes of reducing a tensor over these dimensions."""
    if tensor.numel() < MAX_VALUES * 2:  # there are never two blocks
        return ()
    return scratch_bytes(*launch_dims(tensor.shape, tensor.stride(), dims), element_bytes, cuda.gpu)


def reduce(cuda: Any, tensor: Any, dims: Any, element_bytes: int) -> None:
    """Allocate and release them."""
    cuda.scratch(*reducing(cuda, tensor, dims, element_bytes))


def _dims(args):
    """The dimensions that a call reduces, its first argument after the tensor; None for all."""
    return [args[0]] if args and isinstance(args[0], int) else args[0] if args else None


@scratch(
    "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "prod.default", "prod.dim_int", "nansum.default",
)  # fmt: skip
def sums(cuda, out, tensor, *args, **kwargs):
    """Sums and norms keep single precision between blocks; integers are widened before (ReduceOps.cpp)."""
    dtype = tensor.dtype
    widens = out.dtype != dtype and not dtype.is_floating_point and not dtype.is_complex
    dtype = out.dtype if widens else dtype
    accumulated = {torch.float64: 8, torch.complex64: 8, torch.complex128: 16}  # at::acc_type on CUDA
    element_bytes = accumulated.get(dtype, 4 if dtype.is_floating_point else 8)
    wide = tensor.numel() * out.element_size() if widens else 0
    return wide, *reducing(cuda, tensor, _dims(args), element_bytes)


@scratch(
    "linalg_vector_norm.default", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype",
)  # fmt: skip
def norms(cuda, out, tensor, order=2, *args, **kwargs):
    """As sums."""
    return sums(cuda, out, tensor, *args, **kwargs)


def _reduces(element_bytes: Callable[[torch.dtype], int], *names: str) -> None:
    """Register reductions that pass values of this size between blocks."""

    @scratch(*names)
    def sizes(cuda, out, tensor, *args, **kwargs):
        dims = _dims(args) if "dim" not in kwargs else _dims((kwargs["dim"],))
        return reducing(cuda, tensor, dims, element_bytes(tensor.dtype))


# Means with deviations (WelfordData); the values alone, or two; values with their places; a byte each.
_reduces(
    lambda dtype: 2 * WELFORD_BYTES if dtype == torch.float64 else WELFORD_BYTES,
    "var.correction", "std.correction", "var_mean.correction", "std_mean.correction",
)  # fmt: skip
_reduces(lambda dtype: dtype.itemsize, "amax.default", "amin.default", "max.default", "min.default")
_reduces(lambda dtype: 2 * dtype.itemsize, "aminmax.default")
_reduces(lambda dtype: PAIR_BYTES, "max.dim", "min.dim", "argmax.default", "argmin.default")
_reduces(lambda dtype: 1, "any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")


@rule("count_nonzero.default", "count_nonzero.dim_IntList")
def count_nonzero(cuda, func, tensor, *dims):
    """The sum of a mask (ATen/native/TensorAdvancedIndexing.cpp, count_nonzero_cuda)."""
    return (tensor != 0).sum(*dims)


@rule("logsumexp.default")
def logsumexp(cuda, func, tensor, dims, *args):
    """Maxima, their finiteness and the exponentials (ATen/native/ReduceOps.cpp, logsumexp_out_impl)."""
    gone = {d % max(tensor.dim(), 1) for d in dims}
    count = math.prod(size for i, size in enumerate(tensor.shape) if i not in gone)
    with cuda.held(count * tensor.element_size(), op=func):
        cuda.scratch(count * tensor.element_size(), count, op=func)
        with cuda.held(bytes_of(tensor), op=func):
            out = cuda.op(func, tensor, dims, *args)
            reduce(cuda, tensor, dims, 4)
    return out


@rule("_foreach_norm.Scalar")
def foreach_norm(cuda, func, tensors, order=2, *args, **kwargs):
    """One sum per chunk of 65536 elements and tensor (ATen/native/cuda/ForeachReduceOp.cu)."""
    chunks = max(-(-one.numel() // 65536) for one in tensors)
    element_bytes = tensors[0].element_size() if order == math.inf else 4
    with cuda.held(len(tensors) * chunks * element_bytes, op=func):
        return cuda.op(func, tensors, order, *args, **kwargs)
