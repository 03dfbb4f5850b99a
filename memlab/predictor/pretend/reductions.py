"""What CUDA reductions take beside their results: the buffer and the semaphores by which thread blocks meet.

The launch is worked out as `setReduceConfig` does (ATen/native/cuda/Reduce.cuh), from the shape, the strides, the number of
multiprocessors and how many threads each holds. Limits: reductions of more than 2**31 elements are split by CUDA and may
take an accumulation buffer in addition; inputs are taken to be aligned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from memlab.predictor.pretend.rules import rule

MAX_THREADS, WARP = 512, 32
MIN_VALUES, MAX_VALUES = 16, 256
"""`min_values_per_thread` and `max_values_per_thread` of setReduceConfig."""
VECTOR = 4
WELFORD_BYTES, PAIR_BYTES = 16, 16
"""WelfordData<float, int32> is four words; a value with its int64 index is padded to sixteen bytes."""


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """maxThreadsPerMultiProcessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
    if capability[0] == 7:
        return 1024 if capability[1] >= 5 else 2048
    if capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12:
        return 1536
    return 2048


@dataclass(frozen=True, slots=True)
class Card:
    """What a launch depends on."""

    multiprocessors: int
    threads: int

    @classmethod
    def of(cls, card: Any) -> Card:
        """From a card of the catalogue."""
        return cls(card.multiprocessors, threads_per_multiprocessor(tuple(card.compute_capability)))


@dataclass(frozen=True, slots=True)
class Shape:
    """A reduction as TensorIterator sees it: sizes and element strides, fastest first, neighbours merged."""

    reduced: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]

    @property
    def inputs(self) -> int:
        """Elements per result."""
        return math.prod(size for size, _ in self.reduced)

    @property
    def outputs(self) -> int:
        """How many results."""
        return math.prod(size for size, _ in self.kept)


def shape_of(sizes: Any, strides: Any, dims: Any) -> Shape:
    """The shape of reducing these dimensions (none given: all)."""
    chosen = {d % max(len(sizes), 1) for d in dims} if dims is not None and len(dims) else set(range(len(sizes)))
    pairs = [(int(n), int(s), i in chosen) for i, (n, s) in enumerate(zip(sizes, strides, strict=True)) if n != 1]
    reduced = sorted(((n, s) for n, s, gone in pairs if gone), key=_stride)
    kept = [(n, s) for n, s, gone in reversed(pairs) if not gone]
    return Shape(_merged(reduced), _merged(kept))


def _merged(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for size, stride in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def is_dense(tensor: Any) -> bool:
    """Whether its elements fill its memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1), key=_stride
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _stride(pair: tuple[int, int]) -> int:
    return pair[1]


def _power_below(number: int) -> int:
    return MAX_THREADS if number >= MAX_THREADS else 1 << (max(number, 1).bit_length() - 1)


def _block(dim0: int, dim1: int, limit: int) -> tuple[int, int]:
    """(width, height) of a thread block, as `set_block_dimension`."""
    wide, high = min(_power_below(dim0), limit), min(_power_below(dim1), limit)
    width = min(wide, WARP)
    height = min(high, limit // width)
    return min(wide, limit // height), height


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _output_vector(shape: Shape) -> int:
    """How many results a thread makes at once (`get_output_vec_size`)."""
    vector = VECTOR
    numbers = [shape.kept[0][0]] + [s for _, s in shape.reduced] + [s for _, s in shape.kept[1:]]
    for number in numbers:
        while number % vector:
            vector //= 2
    return vector


def scratch_bytes(shape: Shape, element_bytes: int, card: Card, vector: int = VECTOR) -> tuple[int, int]:
    """(bytes of the buffer, bytes of the semaphores) of one reduction; (0, 0) where blocks need not meet."""
    on_fastest = not shape.kept or (bool(shape.reduced) and shape.reduced[0][1] < shape.kept[0][1])
    dim0, dim1 = (shape.inputs, shape.outputs) if on_fastest else (shape.outputs, shape.inputs)
    per_output = 1
    fastest = (shape.reduced if on_fastest else shape.kept)[:1]
    if fastest and fastest[0][1] == 1:
        if on_fastest and dim0 > 128 and len(shape.reduced) + len(shape.kept) == 1:
            dim0 //= vector
        elif not on_fastest:
            per_output = _output_vector(shape)
            dim0 //= per_output
    width, height = _block(dim0, dim1, MAX_THREADS // per_output)
    step_in, step_out = (width, 1) if on_fastest else (1, width)
    values = _up(shape.inputs, step_in)
    if values < min(height * 16, MAX_VALUES):
        return 0, 0
    values = _up(shape.inputs, step_in * height)
    grid, target = _up(shape.outputs // per_output, step_out), card.multiprocessors * (card.threads // (width * height))
    if values < MAX_VALUES or grid > target:
        return 0, 0
    blocks = max(min(_up(target, grid), _up(values, MIN_VALUES)), _up(values, MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    size = element_bytes * shape.outputs * blocks * (1 if on_fastest else width * per_output)
    return size, 4 * grid


def reduce(run: Any, tensor: Any, dims: Any, element_bytes: int, vector: int = VECTOR) -> None:
    """Take and give back what reducing a tensor over these dimensions takes beside its result."""
    if tensor.numel() < MAX_VALUES * 2:
        return  # never enough for two blocks
    sizes = scratch_bytes(shape_of(tensor.shape, tensor.stride(), dims), element_bytes, Card.of(run.card), vector)
    if sizes[0]:
        held = [run.hold(nbytes) for nbytes in sizes]
        for block in reversed(held):
            run.release(block)


def _dims(func: Any, args: Any, kwargs: Any) -> Any:
    """The dimensions that a call reduces; None for all."""
    for name in ("dim", "dims"):
        found = _argument(func, args, kwargs, name)
        if found is not None:
            return [found] if isinstance(found, int) else found
    return None


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else None
    return None


def _accumulated(dtype: torch.dtype) -> int:
    """Bytes of what a sum of this type is kept in: at::acc_type on CUDA."""
    return {torch.float64: 8, torch.complex64: 8, torch.complex128: 16}.get(dtype, 4 if dtype.is_floating_point else 8)


@rule(
    "aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim", "aten.prod.default", "aten.prod.dim_int",
    "aten.nansum.default", "aten.linalg_vector_norm.default", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype",
)  # fmt: skip
def sums(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Sums and norms keep single precision between blocks; integers are widened before (ReduceOps.cpp)."""
    tensor = args[0]
    out = run.op(func, *args, **kwargs)
    widens = out.dtype != tensor.dtype and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    wide = run.hold(tensor.numel() * out.element_size(), func) if widens else -1
    reduce(run, tensor, _dims(func, args, kwargs), _accumulated(out.dtype if widens else tensor.dtype))
    run.release(wide)
    return out


@rule(
    "aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction",
)  # fmt: skip
def moments(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Welford's four numbers between blocks (ReduceMomentKernel.cu, vt0 = 2)."""
    out = run.op(func, *args, **kwargs)
    reduce(run, args[0], _dims(func, args, kwargs), WELFORD_BYTES if args[0].dtype != torch.float64 else 32, 2)
    return out


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremes(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Values alone."""
    out = run.op(func, *args, **kwargs)
    reduce(run, args[0], _dims(func, args, kwargs), args[0].element_size())
    return out


@rule("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def places(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Values with their places."""
    out = run.op(func, *args, **kwargs)
    reduce(run, args[0], _dims(func, args, kwargs), PAIR_BYTES)
    return out


@rule("aten.any.default", "aten.all.default", "aten.any.dim", "aten.all.dim", "aten.any.dims", "aten.all.dims")
def truths(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """One byte each."""
    out = run.op(func, *args, **kwargs)
    reduce(run, args[0], _dims(func, args, kwargs), 1)
    return out
