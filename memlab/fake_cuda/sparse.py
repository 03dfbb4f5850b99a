"""Sparse tensors on the fake GPU: their indices and values are fake CUDA tensors, requested as CUDA's kernels request them.

A sparse tensor is a wrapper with the layout that C++ asks for, and every operator on one has a rule here; others are
refused with the line of the program. The order of requests is that of ATen/native/sparse (SparseTensor.cpp, SparseTensorMath.cpp,
cuda/SparseCUDATensor.cu, cuda/SparseCUDATensorMath.cu), seen on the C++ allocator of PyTorch 2.12.1.

Limits: of compressed layouts there is CSR, to be made, copied and multiplied with dense matrices.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from memlab.errors import PredictionError
from memlab.fake_cuda import sorting, values
from memlab.fake_cuda.data_dependent import nonzero, on_host
from memlab.fake_cuda.data_dependent import to_gpu as dense_to_gpu
from memlab.fake_cuda.gpus import METAS, current, with_index
from memlab.fake_cuda.kernel_rules import FLOAT, LONG, Rule, name_of, registering, rule
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.places import where
from memlab.fake_cuda.tensors import FakeCudaTensor, is_fake
from memlab.torch_internals.cuda_names import make_wrapper_subclass, meta_kernels
from memlab.torch_internals.dispatch import current_autograd_node

aten = torch.ops.aten
COO, CSR = torch.sparse_coo, torch.sparse_csr
AVERAGE = 1
"""at::native::EmbeddingBagMode."""


class FakeSparseTensor(FakeCudaTensor):
    """A sparse CUDA tensor to Python: `parts` are its indices and its values."""

    parts: tuple[Any, ...]
    coalesced: bool

    @staticmethod
    def of(shape: Any, parts: tuple[Any, ...], coalesced: bool = False) -> FakeSparseTensor:
        """A sparse tensor of these parts: two are COO, three are CSR."""
        with meta_kernels():
            how = {"layout": COO} if len(parts) == 2 else {}
            made = make_wrapper_subclass(
                FakeSparseTensor, torch.Size(shape), dtype=parts[-1].dtype, device=METAS[current()], **how
            )
        made.parts, made.coalesced = parts, coalesced or (len(parts) == 2 and parts[0].shape[1] < 2)
        return made

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise PredictionError(f"a sparse nn.Parameter cannot be predicted ({where()}): make its values the parameter.")

    def new(self, *args: Any, **kwargs: Any) -> Any:
        """The legacy constructor, which optimizers use: indices, values, size."""
        if len(args) < 2 or not is_fake(args[0]):
            return refuse("new(...) of a sparse tensor")
        return FakeSparseTensor.of(args[2] if len(args) > 2 else self.shape, args[:2])

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, layout={self.layout})"

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        """COO or CSR; C++ takes the latter for dense, as it can have no such wrapper."""
        return COO if len(self.parts) == 2 else CSR

    @property
    def is_sparse_csr(self) -> bool:  # type: ignore[override]
        """Whether it is CSR."""
        return self.layout is CSR

    def to_dense(self, dtype: Any = None, **kwargs: Any) -> Any:
        """All elements."""
        return refuse("to_dense() of a CSR tensor") if self.is_sparse_csr else super().to_dense(dtype, **kwargs)

    @property
    def indices_(self) -> Any:
        """The indices of a COO tensor: (sparse dimensions, elements)."""
        return self.parts[0]

    @property
    def values_(self) -> Any:
        """The values: (elements, dense dimensions)."""
        return self.parts[-1]

    @property
    def count(self) -> int:
        """How many elements there are."""
        return int(self.values_.shape[0])


def refuse(what: str) -> Any:
    """Say what cannot be predicted, and where."""
    line = where() or "the program"
    raise PredictionError(f"{what} cannot be predicted ({line}): do this step with dense tensors, or leave it out.")


RULES: dict[str, Rule] = {}
"""Rules by the name of an operator that gets a sparse tensor, whatever the overload."""
of_sparse = registering(RULES)


def run(cuda: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that gets a sparse tensor."""
    name = name_of(func)
    if name.startswith("_foreach_"):
        return _one_by_one(name.removeprefix("_foreach_"), *args, **kwargs)
    found = RULES.get(name)
    if found is None:
        return refuse(f"{func} of a sparse tensor")
    return found(cuda, func, *args, **kwargs)


def _one_by_one(name: str, tensors: Any, *others: Any, **kwargs: Any) -> Any:
    """What operators of many tensors do if one of them is sparse (ForeachOpsKernels.cpp, the slow route)."""
    made = []
    for number, tensor in enumerate(tensors):
        given = [one[number] if isinstance(one, list | tuple) else one for one in others]
        made.append(getattr(tensor, name)(*given, **kwargs))
    return None if name.endswith("_") else made


def is_sparse(thing: Any) -> bool:
    """Whether it is a sparse tensor of the fake GPU."""
    return isinstance(thing, FakeSparseTensor)


def is_coo(thing: Any) -> bool:
    """Whether it is one of the layout COO."""
    return is_sparse(thing) and thing.layout is COO


def copied(cuda: Any, tensor: Any, dtype: Any = None) -> Any:
    """A contiguous copy, as `to(copy=True)` makes."""
    made = cuda.empty(tensor.shape, dtype or tensor.dtype, op=aten._to_copy.default)
    if (known := values.known(tensor)) is not None and values.is_small(tensor):
        values.know(made, known)
    return made


# --- made of parts ---


@rule("_sparse_coo_tensor_with_dims_and_tensors.default", "_sparse_coo_tensor_unsafe.default")
def of_parts(cuda, func, *args, is_coalesced=None, **kwargs):
    """A sparse tensor shares its parts."""
    shape, indices, found = (args[2:5] if func is aten._sparse_coo_tensor_with_dims_and_tensors.default
                             else (args[2], *args[:2]))  # fmt: skip
    return FakeSparseTensor.of(shape, (indices, found), bool(is_coalesced))


@rule("_sparse_coo_tensor_with_dims.default", "sparse_coo_tensor.size")
def without_elements(cuda, func, *args, **kwargs):
    """Zeros: no memory at all."""
    shape = args[-1]
    dense = args[1] if len(args) == 3 else 0
    return _without_elements(cuda, shape, kwargs.get("dtype") or FLOAT, dense)


def factory(cuda: Any, func: Any, args: Any, kwargs: Any) -> FakeSparseTensor:
    """`torch.zeros(..., layout=torch.sparse_coo)`."""
    if kwargs["layout"] is not COO or name_of(func) not in ("zeros", "empty"):
        return refuse(f"{func} with layout={kwargs['layout']}")
    return _without_elements(cuda, args[0], kwargs.get("dtype") or torch.get_default_dtype())


def _without_elements(cuda: Any, shape: Any, dtype: Any, dense: int = 0) -> FakeSparseTensor:
    sparse = len(shape) - dense
    parts = cuda.empty((sparse, 0), torch.int64), cuda.empty((0, *shape[sparse:]), dtype)
    return FakeSparseTensor.of(shape, parts)


@rule("_to_sparse.default", "_to_sparse.sparse_dim")
def from_dense(cuda, func, tensor, sparse_dim=None, **kwargs):
    """What is not zero (dense_to_sparse in SparseTensor.cpp)."""
    if kwargs.get("layout") not in (None, COO) or (sparse_dim or tensor.dim()) != tensor.dim():
        return refuse(f"{func} to another layout")
    found = nonzero(cuda, aten.nonzero.default, tensor, "to_sparse")
    indices = cuda.empty((tensor.dim(), found.shape[0]), torch.int64, op=func)
    with cuda.held(indices.shape[1] * tensor.element_size(), op=func):
        made = cuda.empty((indices.shape[1],), tensor.dtype, op=func)
    return FakeSparseTensor.of(tensor.shape, (indices, made), coalesced=True)


@rule("_embedding_bag_backward.default")
def of_bags(cuda, func, grad, indices, *args):
    """Sparse gradients are those of the bags at each index, divided for averages (_embedding_bag_sparse_backward)."""
    bag_of, sizes, rows, mode, is_sparse = args[1], args[2], args[4], args[6], args[7]
    if not is_sparse:
        return sorting.embedding_bag_backward(cuda, func, grad, indices, *args)
    if mode == sorting.MAXIMUM or args[8] is not None or any(one >= 0 for one in args[9:]):
        return refuse("sparse gradients of bags with maxima, weights or padding")
    made = grad.index_select(0, bag_of)
    if mode == AVERAGE:
        numbers = sizes.numel() * grad.element_size()
        cuda.scratch(numbers, numbers, indices.numel() * grad.element_size(), op=func)
    return FakeSparseTensor.of((rows, grad.shape[1]), (indices.reshape(1, -1), made))


def _on_gpu(data: Any, dtype: Any, device: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, dtype or data.dtype)
    return torch.tensor(data, dtype=dtype, device=device)


def _for_gpu(device: Any, *data: Any) -> Any:
    """The GPU that a factory makes a tensor on, None if on the host."""
    if device is None:
        return next((one.device for one in data[::-1] if is_fake(one)), None)
    device = with_index(device)
    return device if device.type == "cuda" else None


def make_factories(cuda: Any, patches: Patches) -> None:
    """`torch.sparse_coo_tensor` and `torch.sparse_csr_tensor` on the GPU; C++ would infer the device of meta tensors."""
    coo, csr = torch.sparse_coo_tensor, torch.sparse_csr_tensor

    @functools.wraps(coo)
    def sparse_coo_tensor(
        *args: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **rest: Any
    ) -> Any:
        given = [*args, *(rest.pop(name) for name in ("indices", "values", "size") if name in rest)]
        at = _for_gpu(device, *given)
        if at is None:
            return coo(*args, dtype=dtype, device=device, requires_grad=requires_grad, **rest)
        if len(given) == 1:
            made = _without_elements(cuda, given[0], dtype or torch.get_default_dtype())
        else:
            found = _on_gpu(given[1], dtype, at)
            indices = _on_gpu(given[0], torch.int64, at)
            shape = given[2] if len(given) > 2 and given[2] is not None else _inferred(cuda, indices, found)
            made = aten._sparse_coo_tensor_unsafe.default(indices, found, shape, is_coalesced=rest.get("is_coalesced"))
        return made.requires_grad_(requires_grad) if requires_grad else made

    @functools.wraps(csr)
    def sparse_csr_tensor(
        crow: Any, col: Any, found: Any, size: Any = None, *, dtype: Any = None, device: Any = None, **rest: Any
    ) -> Any:
        at = _for_gpu(device, crow, col, found)
        if at is None:
            size_given = () if size is None else (size,)
            return csr(crow, col, found, *size_given, dtype=dtype, device=device, **rest)
        if rest.get("requires_grad"):
            return refuse("a CSR tensor that requires a gradient")
        found, crow, col = _on_gpu(found, dtype, at), _on_gpu(crow, None, at), _on_gpu(col, None, at)
        if size is None:
            return refuse("a CSR tensor without a size")
        return FakeSparseTensor.of(size, (crow, col, found))

    product = torch.sparse.mm

    @functools.wraps(product)
    def multiply(first: Any, second: Any, *how: Any) -> Any:
        """C++ would take CSR for dense, as it can have no wrapper of that layout."""
        is_csr = any(is_sparse(one) and one.is_sparse_csr for one in (first, second))
        return torch.mm(first, second) if is_csr else product(first, second, *how)

    patches.put(torch.sparse, mm=multiply)
    patches.put(torch, sparse_coo_tensor=sparse_coo_tensor, sparse_csr_tensor=sparse_csr_tensor)


def _inferred(cuda: Any, indices: Any, found: Any) -> tuple[int, ...]:
    """The size where none is given: the largest indices, which are read."""
    known = values.known(indices)
    if known is None:
        return refuse("the size of a sparse tensor from indices of the GPU")
    cuda.scratch(*[indices.shape[0] * LONG] * 4, op=aten.max.dim)
    return (*(int(one) + 1 for one in known.amax(1)), *found.shape[1:])


# --- parts and facts ---


def _view(place: int) -> Rule:
    """A view of one of the parts: indices and values, or where rows begin, columns and values."""
    return lambda cuda, func, tensor: aten.alias.default(tensor.parts[place])


RULES |= dict.fromkeys(("_indices", "indices", "crow_indices"), _view(0)) | {
    "col_indices": _view(1),
    "_values": _view(-1),
    "values": _view(-1),
    "_nnz": lambda cuda, func, tensor: tensor.count,
    "sparse_dim": lambda cuda, func, tensor: int(tensor.indices_.shape[0]) if is_coo(tensor) else 2,
    "dense_dim": lambda cuda, func, tensor: tensor.values_.dim() - 1,
    "is_coalesced": lambda cuda, func, tensor: tensor.coalesced,
    "is_same_size": lambda cuda, func, tensor, other: tensor.shape == other.shape,
    "_coalesced_": lambda cuda, func, tensor, coalesced: replace_parts(tensor, tensor.parts, coalesced),
    "neg_": lambda cuda, func, tensor: tensor,  # only the values change
}


@of_sparse("detach", "alias", "detach_", "view_as")
def shared(cuda, func, tensor, *args):
    """The same parts."""
    return tensor if name_of(func) == "detach_" else FakeSparseTensor.of(tensor.shape, tensor.parts, tensor.coalesced)


# --- copies ---


@of_sparse("clone")
def clone(cuda, func, tensor, **kwargs):
    """Values, then indices (copy_into_sparse); a new gradient is taken as it is (autograd/functions/accumulate_grad.h)."""
    node = current_autograd_node()
    is_taken = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    if is_taken and all(one.is_contiguous() for one in tensor.parts):
        return FakeSparseTensor.of(tensor.shape, tensor.parts, tensor.coalesced)
    copies = [copied(cuda, one) for one in reversed(tensor.parts)]
    return FakeSparseTensor.of(tensor.shape, tuple(reversed(copies)), tensor.coalesced)


def to_gpu(cuda: Any, tensor: Any, dtype: Any = None) -> FakeSparseTensor:
    """A sparse tensor of the host on the GPU: of COO indices and values, of CSR the values first."""
    if tensor.layout is COO:
        indices, found = tensor._indices(), tensor._values()
        made = dense_to_gpu(cuda, indices), dense_to_gpu(cuda, found, dtype)
        return FakeSparseTensor.of(tensor.shape, made, tensor.is_coalesced())
    if tensor.layout is CSR:
        last = dense_to_gpu(cuda, tensor.values(), dtype)
        rest = [dense_to_gpu(cuda, one) for one in (tensor.crow_indices(), tensor.col_indices())]
        return FakeSparseTensor.of(tensor.shape, (*rest, last))
    return refuse(f"a {tensor.layout} tensor on the GPU")


@of_sparse("_to_copy")
def converted(cuda, func, tensor, *, dtype=None, device=None, **kwargs):
    """To the host, or another dtype: indices, then values."""
    if device is not None and device.type == "cpu":
        if not is_coo(tensor):
            return refuse("a copy of a CSR tensor to the host")
        parts = on_host(cuda, tensor.indices_, torch.int64), on_host(cuda, tensor.values_, dtype or tensor.dtype)
        return aten._sparse_coo_tensor_unsafe.default(*parts, tensor.shape)
    *rest, last = tensor.parts
    parts = *(copied(cuda, one) for one in rest), copied(cuda, last, dtype)
    return FakeSparseTensor.of(tensor.shape, parts, tensor.coalesced)


def replace_parts(target: FakeSparseTensor, parts: tuple[Any, ...], coalesced: bool) -> FakeSparseTensor:
    """The result of an operator in place."""
    target.parts, target.coalesced = parts, coalesced
    return target


@of_sparse("zero_")
def emptied(cuda, func, tensor):
    """No elements any more."""
    none = _without_elements(cuda, tensor.shape, tensor.dtype, tensor.values_.dim() - 1)
    return replace_parts(tensor, none.parts, True)


@of_sparse("zeros_like", "empty_like")
def without_elements_like(cuda, func, tensor, **kwargs):
    """No elements; or dense zeros if asked for."""
    if kwargs.get("layout") is torch.strided:
        return cuda.empty(tensor.shape, kwargs.get("dtype") or tensor.dtype, op=func)
    return _without_elements(cuda, tensor.shape, kwargs.get("dtype") or tensor.dtype, tensor.values_.dim() - 1)
