"""Private names of PyTorch's autograd graph and of its tensors; seen in 2.11 to 2.15.

Nothing here unpacks a saved tensor, runs a hook, or calls an operator; what raises is what PyTorch refuses to tell.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from types import GetSetDescriptorType
from typing import Any

import torch

from memlab.torch_internals.dispatch import DisableTorchFunction, TensorBase, function_mode_count
from memlab.torch_internals.private_names import private

_attributes: Any = type.__dict__["__dict__"].__get__
_Function: Any = private("torch._C._FunctionBase")
_functorch: Any = private("torch._C._functorch")
_NEXT = "next_functions"
_RAW = "_raw_saved_"

LEAF = (1 << 64) - 1
"""The number of nodes that gather gradients; they are made once for each leaf."""

Getters = tuple[tuple[str, Any], ...]

grad_fn: Any = TensorBase.grad_fn.__get__
"""The node of the graph that made a tensor, None for a leaf."""
is_leaf: Any = TensorBase.is_leaf.__get__
"""Whether no node made a tensor; tells without making the node's Python object."""
tensor_hooks: Any = private("torch._C.TensorBase._backward_hooks").__get__
"""The hooks of `Tensor.register_hook` by number, None where there are none."""
accumulate_hooks: Any = private("torch._C.TensorBase._post_accumulate_grad_hooks").__get__
"""The hooks of `register_post_accumulate_grad_hook`, None where there are none."""
base_of_view: Any = private("torch._C.TensorBase._base").__get__
"""The tensor that a view was taken of, None for others; autograd keeps it alive."""
address_of: Any = private("torch._C._data_address")
"""Where a tensor's storage begins, 0 where nothing is behind it; unlike `data_ptr` it leaves a lazily copied storage lazy."""
next_number: Any = private("torch.autograd._get_sequence_nr")
"""() -> the number that the next node of this thread will get: nodes are numbered as they are made, thread by thread."""
storage_key: Any = operator.attrgetter("_cdata")
"""What tells a storage from all others alive: the address of its C++ object (`UntypedStorage._cdata`)."""
_rows = (("crow_indices()", TensorBase.crow_indices), ("col_indices()", TensorBase.col_indices))
_columns = (("ccol_indices()", TensorBase.ccol_indices), ("row_indices()", TensorBase.row_indices))
_values = (("values()", TensorBase.values),)
sparse_parts: dict[torch.layout, Getters] = {
    torch.sparse_coo: (
        ("_indices()", private("torch._C.TensorBase._indices")),
        ("_values()", private("torch._C.TensorBase._values")),
    ),
    torch.sparse_csr: _rows + _values,
    torch.sparse_bsr: _rows + _values,
    torch.sparse_csc: _columns + _values,
    torch.sparse_bsc: _columns + _values,
}
"""Layout -> the tensors that a sparse one consists of, as (name, function)."""

nodes_stay = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)
"""Whether a node that Python has once looked at keeps its Python object for life.

Then PyTorch frees a row of such nodes recursively, and ends the process where 40,000 follow each other (a stack of 8 MiB);
seen in 2.13 and 2.15, not in 2.11 and 2.12.
"""


def quiet() -> Any:
    """As long as this lives, operators reach no mode and no autograd: those that hand out a sparse tensor's parts."""
    return tuple(guard() for guard in _QUIET)


_QUIET = tuple(
    private(f"torch._C.{name}") for name in ("_DisableTorchDispatch", "_DisableFuncTorch", "_AutoDispatchBelowAutograd")
)


def unwrapped(tensor: Any) -> Any:
    """What a tensor inside `torch.func` transforms wraps, None for any other."""
    return _functorch.get_unwrapped(tensor) if _functorch.is_functorch_wrapped_tensor(tensor) else None


def node_getters(kind: type) -> tuple[Any, Getters, Any] | None:
    """For a class of nodes: the getter of its next nodes, those of what it saved, and that of its leaf; None for others.

    C++ nodes are told by what is in their class; those of `autograd.Function` derive from torch._C._FunctionBase.
    """
    if any(base is _Function for base in type.__dict__["__mro__"].__get__(kind)):
        own = _attributes(_Function)
        return own[_NEXT].__get__, (("tensors", own["_raw_saved_tensors"].__get__),), None
    own = _attributes(kind)
    if "_sequence_nr" not in own or type(own.get(_NEXT)) is not GetSetDescriptorType:
        return None
    saved = tuple((name.removeprefix(_RAW), own[name].__get__) for name in own if name.startswith(_RAW))
    leaf = own["variable"].__get__ if "variable" in own else None
    return own[_NEXT].__get__, saved, leaf


def following(node: Any, getter: Any) -> list[Any]:
    """The next nodes; none of the context of an `autograd.Function` whose forward raised, which belongs to no graph."""
    try:
        return [one for one, _ in getter(node) if one is not None]
    except RuntimeError:
        return []


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


def number_of(node: Any) -> int:
    """The number of a node, of the thread that made it; `_sequence_nr` of its class, LEAF where there is none."""
    try:
        return int(node._sequence_nr())
    except (AttributeError, RuntimeError):
        return LEAF


def gpu_of_node(node: Any) -> int:
    """The number of the GPU that a node's backward runs on: that of its first gradient on meta, as fake CUDA has them."""
    devices = (one.device for one in node._input_metadata)
    return next((one.index or 0 for one in devices if one.type == "meta"), 0)


# --- hooks on nodes ---

PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}
"""The classes of plain tensors; fake CUDA adds its own, which stand for them."""


def is_plain(thing: Any) -> bool:
    """Whether a thing is a tensor and of no subclass."""
    return type(thing) in PLAIN


def can_hook() -> bool:
    """Whether nodes made now may get hooks: not inside `torch.func`."""
    return _functorch.peek_interpreter_stack() is None


def nodes_behind(*tensors: Any) -> Iterator[Any]:
    """Every node of the graph that made these tensors, each once; what nodes saved is not touched."""
    seen: dict[int, Any] = {}  # held, or another node could get the id of a freed one
    todo = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            todo += [following for following, _ in node.next_functions]
            yield node


def node_of(tensor: Any) -> Any:
    """The node that made a plain tensor, None for leaves and for what only looks like a plain tensor."""
    if function_mode_count():  # of the user's, which would be asked
        with DisableTorchFunction():
            return grad_fn(tensor)
    return grad_fn(tensor)


def is_alive(handle: Any) -> bool:
    """Whether the node behind the handle of a hook still exists; RemovableHandle.hooks_dict_ref."""
    return handle.hooks_dict_ref() is not None
