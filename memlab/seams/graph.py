"""Private names of PyTorch's autograd graph and of its tensors; seen in 2.11 to 2.15.

Nothing here unpacks a saved tensor, runs a hook, or calls an operator; what raises is what PyTorch refuses to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import GetSetDescriptorType
from typing import Any

import torch

from memlab.seams.dispatch import TensorBase

_attributes: Any = type.__dict__["__dict__"].__get__
_Function: Any = torch._C._FunctionBase
_NEXT = "next_functions"
_RAW = "_raw_saved_"

Getters = tuple[tuple[str, Any], ...]

_of_function: Getters = (("tensors", _attributes(_Function)["_raw_saved_tensors"].__get__),)
_next_of_function: Any = _attributes(_Function)[_NEXT].__get__

grad_fn: Any = TensorBase.grad_fn.__get__
"""The node of the graph that made a tensor, None for a leaf."""
is_leaf: Any = TensorBase.is_leaf.__get__
"""Whether no node made a tensor; tells without making the node's Python object."""
tensor_hooks: Any = TensorBase._backward_hooks.__get__
"""The hooks of `Tensor.register_hook` by number, None where there are none."""
accumulate_hooks: Any = TensorBase._post_accumulate_grad_hooks.__get__
"""The hooks of `register_post_accumulate_grad_hook`, None where there are none."""
base_of_view: Any = TensorBase._base.__get__
"""The tensor that a view was taken of, None for others; autograd keeps it alive."""
_core: Any = torch._C
address_of: Any = _core._data_address
"""Where a tensor's storage begins, 0 where nothing is behind it; unlike `data_ptr` it leaves a lazily copied storage lazy."""
sparse_parts: Any = {
    torch.sparse_coo: (("_indices()", TensorBase._indices), ("_values()", TensorBase._values)),
    torch.sparse_csr: (("crow_indices()", TensorBase.crow_indices), ("col_indices()", TensorBase.col_indices)),
    torch.sparse_csc: (("ccol_indices()", TensorBase.ccol_indices), ("row_indices()", TensorBase.row_indices)),
}
sparse_parts[torch.sparse_bsr] = sparse_parts[torch.sparse_csr]
sparse_parts[torch.sparse_bsc] = sparse_parts[torch.sparse_csc]
for _layout in tuple(sparse_parts):
    if _layout is not torch.sparse_coo:
        sparse_parts[_layout] += (("values()", TensorBase.values),)
"""Layout -> the tensors that a sparse one consists of, as (name, function)."""


nodes_stay = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)
"""Whether a node that Python has once looked at keeps its Python object for life.

Then PyTorch frees a row of such nodes recursively, and ends the process where 40,000 follow each other (a stack of 8 MiB);
seen in 2.13 and 2.15, not in 2.11 and 2.12.
"""


def quiet() -> Any:
    """As long as this lives, operators reach no mode and no autograd: those that hand out a sparse tensor's parts."""
    return torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch(), torch._C._AutoDispatchBelowAutograd()


def unwrapped(tensor: Any) -> Any:
    """What a tensor inside `torch.func` transforms wraps, None for any other; torch._C._functorch.get_unwrapped."""
    functorch = torch._C._functorch
    return functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else None


def node_getters(kind: type) -> tuple[Any, Getters, Any] | None:
    """For a class of nodes: the getter of its next nodes, those of what it saved, and that of its leaf; None for others.

    C++ nodes are told by what is in their class; those of `autograd.Function` derive from torch._C._FunctionBase.
    """
    if any(base is _Function for base in type.__dict__["__mro__"].__get__(kind)):
        return _next_of_function, _of_function, None
    own = _attributes(kind)
    if "_sequence_nr" not in own or type(own.get(_NEXT)) is not GetSetDescriptorType:
        return None
    saved = tuple((name.removeprefix(_RAW), own[name].__get__) for name in own if name.startswith(_RAW))
    leaf = own["variable"].__get__ if "variable" in own else None
    return own[_NEXT].__get__, saved, leaf


def saved_by(node: Any, getters: Getters) -> Iterator[tuple[str, Any]]:
    """What a node saved for backward, as (name, tensor, or whatever a pack hook made of it); nothing is unpacked."""
    for name, getter in getters:
        try:
            raw = getter(node)
        except RuntimeError:  # given back already
            continue
        if type(raw) is tuple or type(raw) is list:
            yield from ((f"{name}[{number}]", _content(item)) for number, item in enumerate(raw))
        else:
            yield name, _content(raw)


def _content(saved: Any) -> Any:
    """SavedTensor.data: the tensor itself, or what the hook packed; None where it was given back."""
    try:
        return saved.data
    except (AttributeError, RuntimeError):  # None among the saved; packed by a hook that is not Python's
        return None


def hides_what_it_holds(kind: type) -> bool:
    """Whether a node's class shows nothing of a node that it wraps: CopySlices, of a view changed in place."""
    return type.__dict__["__name__"].__get__(kind) == "CopySlices"
