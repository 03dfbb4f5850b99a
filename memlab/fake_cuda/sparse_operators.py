"""Operators on sparse tensors of the fake GPU: coalescing, sums and products, in the order in which CUDA's kernels request.

How many elements remain when equal indices are added up is a value that only a GPU computes: it is taken from the indices if the
host gave them, and else assumed to be all.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.fake_cuda import sorting, values
from memlab.fake_cuda.assumed import assumed
from memlab.fake_cuda.data_dependent import SIZE
from memlab.fake_cuda.kernel_rules import LONG, bytes_of, name_of, round_up
from memlab.fake_cuda.sparse import (
    CSR,
    FakeSparseTensor,
    clone,
    copied,
    is_coo,
    is_sparse,
    of_sparse,
    refuse,
    replace_parts,
)

aten = torch.ops.aten
INT = 4
PRODUCT = "cusparse::product"
"""The name under which a product by cuSPARSE is logged: its workspace is not known."""
_MERGED = 4096
"""Elements that a thread block of DeviceMergeSort sorts, of keys and values in 64 bits, at any capability."""


def _joined(cuda: Any, dim: int, *parts: Any) -> Any:
    shape = list(parts[0].shape)
    shape[dim] = sum(one.shape[dim] for one in parts)
    return cuda.empty(shape, parts[0].dtype, op=aten.cat.default)


def _distinct(cuda: Any, tensor: FakeSparseTensor, what: str) -> int:
    """How many indices differ."""
    known = values.known(tensor.indices_)
    if known is not None and not values.is_assumed(tensor.indices_):
        return int(torch.unique(known, dim=1).shape[1])
    return int(assumed(cuda, what, tensor.count, (0, tensor.count), SIZE, "size"))


@of_sparse("_coalesce")
def coalesce(cuda, func, tensor):
    """Equal indices are added up (_coalesce_sparse_cuda)."""
    count, dims = tensor.count, tensor.indices_.shape[0]
    flat = cuda.empty((1, count), torch.int64, op=func)
    capability = tuple(cuda.gpu.compute_capability)
    # Temporary bytes of thrust's sort_by_key with a comparator (DeviceMergeSort): keys, values, and where tiles are cut.
    cuts = round_up((-(-count // _MERGED) + 1) * LONG, sorting.ALIGNED)
    for_sorting = 2 * round_up(count * LONG, sorting.ALIGNED) + cuts + sorting.SLACK
    # And of its unique_by_key: how many there are, and a state per tile.
    tile = 2688 if capability == (8, 0) else 640 if capability < (9, 0) else 9856
    with cuda.held(count * LONG, count * LONG, op=func):
        cuda.scratch(for_sorting, op=func)
        cuda.scratch(sorting.ALIGNED + sorting.tiles(count, tile, 16), op=func)
        distinct = _distinct(cuda, tensor, "coalesce")
        made = cuda.empty((distinct, *tensor.values_.shape[1:]), tensor.dtype, op=func)
        if made.numel():
            with cuda.contiguous(tensor.values_):
                pass
        indices = flat if dims == 1 else cuda.empty((dims, distinct), torch.int64, op=func)
    if dims == 1:
        indices = flat.narrow(1, 0, distinct)
    return FakeSparseTensor.of(tensor.shape, (indices, made), coalesced=True)


def _coalesced(cuda: Any, tensor: FakeSparseTensor) -> Any:
    return tensor if tensor.coalesced else coalesce(cuda, aten._coalesce.default, tensor)


# --- with dense tensors ---


def _added(cuda: Any, func: Any, tensor: FakeSparseTensor) -> None:
    """What adding to a dense tensor takes for a while (add_out_dense_sparse_cuda): flattened indices, contiguous values."""
    if not tensor.count:
        return
    if tensor.coalesced:
        with cuda.contiguous(*([tensor.values_] if tensor.values_.dim() > 1 else [])):
            return
    cuda.scratch(*([tensor.count * LONG] if tensor.indices_.shape[0] > 1 else []), op=func)


@of_sparse("_to_dense")
def to_dense(cuda, func, tensor, dtype=None, **kwargs):
    """Zeros, to which it is added (sparse_to_dense)."""
    made = cuda.empty(tensor.shape, dtype or tensor.dtype, op=func)
    _added(cuda, func, tensor)
    return made


@of_sparse("add", "add_", "sub", "sub_")
def add(cuda, func, first, second, *, alpha=1):
    """Dense and sparse: into the dense one. Both sparse: their parts one after the other."""
    is_in_place = name_of(func).endswith("_")
    if not (is_coo(second) and (is_coo(first) or not is_sparse(first)) and first.dtype == second.dtype):
        return refuse(f"{func} of these tensors")
    if not is_sparse(first):
        made = first if is_in_place else cuda.empty(first.shape, first.dtype, op=func)
        _added(cuda, func, second)
        return made
    changed = second.values_
    if alpha != 1 or name_of(func).startswith("sub"):
        changed = cuda.empty(changed.shape, changed.dtype, op=aten.mul.Tensor)
    parts = _joined(cuda, 1, first.indices_, second.indices_), _joined(cuda, 0, first.values_, changed)
    return replace_parts(first, parts, False) if is_in_place else FakeSparseTensor.of(first.shape, parts)


@of_sparse("_sparse_addmm", "addmm")
def addmm(cuda, func, tensor, matrix, dense, *, beta=1, alpha=1):
    """A sparse matrix times a dense one (s_addmm_out_sparse_dense_cuda, s_addmm_out_csr_sparse_dense_cuda_worker)."""
    if not is_sparse(matrix) or is_sparse(dense) or is_sparse(tensor):
        return refuse(f"{func} of these tensors")
    made = cuda.empty((matrix.shape[0], dense.shape[1]), dense.dtype, op=func)
    _multiply(cuda, func, matrix, dense, made)
    return made


@of_sparse("mm")
def mm(cuda, func, matrix, dense):
    """As `_sparse_mm`: zeros, and a product that is added to them."""
    if not is_sparse(matrix) or is_sparse(dense):
        return refuse(f"{func} of these tensors")
    zeros = cuda.empty((matrix.shape[0], dense.shape[1]), dense.dtype, op=aten.zeros.default)
    return addmm(cuda, func, zeros, matrix, dense)


def _multiply(cuda: Any, func: Any, matrix: FakeSparseTensor, dense: Any, made: Any) -> None:
    """By cuSPARSE: COO as compressed rows in 32 bits, the result by columns."""
    odd = () if 1 in dense.stride() else (bytes_of(dense),)
    if not is_coo(matrix):
        with cuda.held(*odd, op=func):
            cuda.note(PRODUCT, (matrix.values_, dense))
        return
    found = _coalesced(cuda, matrix)
    if not found.count:
        cuda.scratch(dense.element_size(), op=func)
        return
    with cuda.held((matrix.shape[0] + 1) * INT, op=func):
        cuda.scratch(found.count * INT, op=func)
        with cuda.held(found.count * INT, bytes_of(made), *odd, op=func):
            cuda.note(PRODUCT, (found.values_, dense))


@of_sparse("sparse_mask")
def sparse_mask(cuda, func, dense, mask, *args):
    """The dense tensor's elements at the indices of the mask, times ones (sparse_mask, _mul_dense_sparse_out)."""
    if is_sparse(dense) or not is_coo(mask):
        return refuse(f"{func} of these tensors")
    with cuda.held(dense.element_size(), op=func):
        return _times_dense(cuda, func, mask, dense)


def _times_dense(cuda: Any, func: Any, tensor: FakeSparseTensor, dense: Any) -> Any:
    shape = tensor.values_.shape
    with cuda.held(bytes_of(tensor.values_) // tensor.element_size() * dense.element_size(), op=aten.index.Tensor):
        indices = copied(cuda, tensor.indices_)
        made = cuda.empty(shape, torch.result_type(dense, tensor.values_), op=func)
    return FakeSparseTensor.of(tensor.shape, (indices, made), tensor.coalesced)


# --- element by element ---


def _is_number(thing: Any) -> bool:
    return not isinstance(thing, torch.Tensor) or thing.dim() == 0


@of_sparse("mul", "mul_")
def mul(cuda, func, tensor, other):
    """By a number: new indices, new values, also in place (_mul_dense_sparse_out); by a dense tensor as `sparse_mask`."""
    if not is_sparse(tensor):
        tensor, other = other, tensor
    if not is_coo(tensor) or is_sparse(other):
        return refuse(f"{func} of two sparse tensors")
    if not _is_number(other):
        if other.shape != tensor.shape:
            return refuse(f"{func} of a sparse and a dense tensor of other sizes")
        return _times_dense(cuda, func, tensor, other)
    parts = copied(cuda, tensor.indices_), copied(cuda, tensor.values_)
    if name_of(func).endswith("_"):
        return replace_parts(tensor, parts, tensor.coalesced)
    return FakeSparseTensor.of(tensor.shape, parts, tensor.coalesced)


@of_sparse("div", "pow", "div_")
def by_number(cuda, func, tensor, number, **kwargs):
    """Indices, then values; division in place takes nothing (div_out_sparse_zerodim, pow_out_sparse_scalar)."""
    if not is_coo(tensor) or not _is_number(number):
        return refuse(f"{func} of these tensors")
    if name_of(func) == "div_":
        return tensor
    tensor = _coalesced(cuda, tensor) if name_of(func) == "pow" else tensor
    parts = copied(cuda, tensor.indices_), copied(cuda, tensor.values_)
    return FakeSparseTensor.of(tensor.shape, parts, tensor.coalesced)


@of_sparse("neg", "sqrt", "abs", "tanh", "sin", "relu", "square")
def unary(cuda, func, tensor):
    """Values, then indices; all but the negative of equal ones that are added up first (SparseUnaryOps.cpp)."""
    if not is_coo(tensor):
        return refuse(f"{func} of a CSR tensor")
    tensor = tensor if name_of(func) == "neg" else _coalesced(cuda, tensor)
    made = copied(cuda, tensor.values_)
    return FakeSparseTensor.of(tensor.shape, (copied(cuda, tensor.indices_), made), tensor.coalesced)


@of_sparse("sum", "norm")
def reduced(cuda, func, tensor, *args, **kwargs):
    """Of the values; the norm adds up equal indices first (sum_coo, norm_sparse)."""
    if any(isinstance(one, list) and one for one in (*args, *kwargs.values())):
        return refuse(f"{func} of a sparse tensor over some dimensions")
    if name_of(func) == "norm":
        return _coalesced(cuda, tensor).values_.norm()
    return tensor.values_.sum(dtype=kwargs.get("dtype"))


@of_sparse("t", "transpose")
def transpose(cuda, func, tensor, *dims):
    """A copy with two rows of indices exchanged (sparse_transpose_)."""
    if not is_coo(tensor) or tensor.values_.dim() > 1:
        return refuse(f"{func} of this sparse tensor")
    first, second = dims or (0, 1)
    made = clone(cuda, func, tensor)
    cuda.scratch(tensor.count * LONG, op=func)
    shape = list(tensor.shape)
    shape[first], shape[second] = shape[second], shape[first]
    return FakeSparseTensor.of(shape, made.parts)


@of_sparse("cat")
def cat(cuda, func, tensors, dim=0):
    """Indices, then values; those of the others are moved along, in copies (cat_sparse_impl)."""
    dim %= tensors[0].dim()
    if not all(map(is_coo, tensors)) or dim >= tensors[0].indices_.shape[0]:
        return refuse(f"{func} of these tensors")
    parts = (
        _joined(cuda, 1, *(one.indices_ for one in tensors)),
        _joined(cuda, 0, *(one.values_ for one in tensors)),
    )
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    return FakeSparseTensor.of(shape, parts)


@of_sparse("_to_sparse_csr", "_to_sparse")
def compressed(cuda, func, tensor, *args, layout=None, **kwargs):
    """COO in order as CSR: where rows begin is new, the rest is shared (coo_to_sparse_csr)."""
    if not is_coo(tensor) or len(tensor.shape) != 2 or (name_of(func) == "_to_sparse" and layout is not CSR):
        return refuse(f"{func} of this sparse tensor")
    found = _coalesced(cuda, tensor)
    rows = cuda.empty((tensor.shape[0] + 1,), torch.int64, op=func)
    return FakeSparseTensor.of(tensor.shape, (rows, found.indices_[1], found.values_))
