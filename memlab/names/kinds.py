"""The kinds of objects, by their classes alone, and what an object of each kind holds.

What an object holds is asked of its class's C code (`gc.get_referents`), never of the object: no attribute is looked up, nothing is
compared. What one holds through C++ (a graph, a gradient, an array's base) is added. Objects that hide what they hold, as
most extension types without support for the garbage collector do, lead nowhere.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memlab.names import memory
from memlab.names.graphs import Nodes
from memlab.seams import dispatch, frames

attributes_of_class: Any = type.__dict__["__dict__"].__get__
mro_of: Any = type.__dict__["__mro__"].__get__
_flags: Any = type.__dict__["__flags__"].__get__
HEAP_TYPE, SUPPORTS_GC = 1 << 9, 1 << 14

Held = Iterable[tuple[int, Iterable[Any]]]
"""Groups of held objects, each with how far they are from their holder: what is further is named by a nearer way."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What is true of all objects of a class. `entry` is added to the way to one: a class or a graph is a detour.

    `is_noted` where the object itself says something of tensors: a tensor, a module, an optimizer.
    """

    name: str
    held: Callable[[Any], Held]
    entry: int = 0
    is_dict: bool = False
    is_instance: bool = False
    is_noted: bool = False


def nothing(holder: Any) -> Held:
    """What simple values hold."""
    return ()


def one_step(holder: Any) -> Held:
    """What a container holds."""
    return ((1, gc.get_referents(holder)),)


def _in_order(holder: Any) -> Held:
    """What a list or tuple holds; C's code tells it from behind."""
    return ((1, gc.get_referents(holder)[::-1]),)


ATOM = Kind("atom", nothing)
_DETOUR_CALL, _DETOUR_KEY, _DETOUR_GRAPH, _DETOUR_FRAME, _DETOUR_CLASS, _DETOUR_OPTIMIZER = 8, 10, 20, 16, 40, 60

_PARAMETERS_FIRST = 5


def _mapping(holder: Any) -> Held:
    """The values of a dict, and further off its keys: nobody writes a path through one (an optimizer's states have such).

    Where all keys are texts, as mostly, C's code tells the values alone: CPython 3.11 to 3.13, dict_traverse.
    """
    found = gc.get_referents(holder)
    if len(found) <= dict.__len__(holder):
        return ((1, found),)
    keys = {id(key) for key, _ in items_of(holder)}
    return (
        (1, [one for one in found if id(one) not in keys]),
        (_DETOUR_KEY, [one for one in found if id(one) in keys]),
    )


def _far(steps: int) -> Callable[[Any], Held]:
    return lambda holder: ((steps, gc.get_referents(holder)),)


def _frame(frame: Any) -> Held:
    """A frame's local variables; what a running one has on its stack besides is not seen.

    Those of IPython's shell lead to itself alone, which has a name of its own.
    """
    if frames.is_shells(frame.f_code):
        return ()
    return ((1, gc.get_referents(frame)), (1, [value for _, value in frames.locals_of(frame)]))


def _class(kind: Any) -> Held:
    """The attributes of a class of Python's, and its bases."""
    if not _flags(kind) & HEAP_TYPE:
        return ()
    return ((1, list(attributes_of_class(kind).values())), (1, type.__dict__["__bases__"].__get__(kind)))


def _array(array: Any) -> Held:
    """What a numpy array was made of, and the objects in it; numpy is loaded where there is one."""
    numpy: Any = sys.modules["numpy"]
    held = [numpy.ndarray.base.__get__(array)]
    if type(array) is numpy.ndarray and numpy.ndarray.dtype.__get__(array).hasobject:
        found = numpy.ndarray.tolist(array)
        held += [found] if type(found) is not list else found
    return ((1, held),)


def _tensor_holds(nodes: Nodes) -> Callable[[Any], Held]:
    """A tensor's gradient and parts, its graph, the tensor it is a view of; its attributes and hooks."""

    def held(tensor: Any) -> Held:
        yield 0, [memory.gradient(tensor), *(part for _, part in memory.parts_if_any(tensor))]
        yield 0, [nodes.of(tensor)]
        yield 3, [memory.base_of(tensor)]
        yield 1, gc.get_referents(tensor)

    return held


def _node_holds(nodes: Nodes) -> Callable[[Any], Held]:
    """What a node saved, and the nodes behind it."""

    def held(node: Any) -> Held:
        yield 1, [content for _, content in nodes.saved_by(node)]
        yield 1 - _DETOUR_GRAPH, nodes.behind(node)
        yield 1, gc.get_referents(node)
        yield 1, [nodes.leaf_of(node)]

    return held


def module_holds(module: Any) -> Held:
    """A module's parameters, buffers and modules by their own names; the rest of its attributes."""
    own = instance_dict(module)
    if own is None:
        yield 1, gc.get_referents(module)
        return
    rest, shown = dict.copy(own), {id(own)}
    for name in MEMBERS:
        members = rest.get(name)
        if is_dict(members):
            del rest[name]
            shown.add(id(members))
            yield 0, [value for value in values_of(members) if value is not None]
    yield 1, list(rest.values())
    yield 1, [held for held in gc.get_referents(module) if id(held) not in shown]


MEMBERS = ("_parameters", "_buffers", "_modules")


def _optimizer_holds(optimizer: Any) -> Held:
    """The parameters come before the states, whose paths lead through them: `opt.state[model.weight]`."""
    own = instance_dict(optimizer)
    yield _DETOUR_OPTIMIZER, [own.get("param_groups") if own is not None else None]
    yield _DETOUR_OPTIMIZER + _PARAMETERS_FIRST, gc.get_referents(optimizer)


def is_dict(thing: Any) -> bool:
    """Whether something is a dict, or of a class derived from it."""
    return any(base is dict for base in mro_of(type(thing)))


def values_of(mapping: Any) -> list[Any]:
    """The values of a dict, whatever a derived class makes of `values`."""
    return [value for _, value in items_of(mapping)]


def items_of(mapping: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, whatever a derived class makes of `items`, and whoever changes it meanwhile."""
    for _ in range(8):
        try:
            return list(dict.items(mapping))
        except RuntimeError:  # another thread put something in
            continue
    return []


def instance_dict(thing: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; found without asking the object. None where it has none."""
    for base in mro_of(type(thing)):
        getter = attributes_of_class(base).get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            found = getter.__get__(thing)
            return found if type(found) is dict else None
        if getter is not None:
            return None
    return None


_EXACT: dict[type, Kind] = {
    dict: Kind("dict", _mapping, is_dict=True),
    defaultdict: Kind("container", _mapping),
    OrderedDict: Kind("container", _mapping),
    list: Kind("container", _in_order),
    tuple: Kind("container", _in_order),
    types.FunctionType: Kind("function", _far(_DETOUR_CALL)),
    types.MethodType: Kind("method", _far(4)),
    types.BuiltinMethodType: Kind("builtin method", _far(4)),
    types.CellType: Kind("cell", _far(0), is_instance=True),
    types.FrameType: Kind("frame", _frame, entry=_DETOUR_FRAME),
    types.TracebackType: Kind("traceback", lambda tb: ((1, (tb.tb_frame, tb.tb_next)),), entry=_DETOUR_FRAME),
    types.GeneratorType: Kind("generator", _far(_DETOUR_CALL)),
    types.CoroutineType: Kind("generator", _far(_DETOUR_CALL)),
    types.AsyncGeneratorType: Kind("generator", _far(_DETOUR_CALL)),
    types.CodeType: ATOM,
    types.MethodDescriptorType: ATOM,
    types.WrapperDescriptorType: ATOM,
    types.ClassMethodDescriptorType: ATOM,
    types.GetSetDescriptorType: ATOM,
    types.MemberDescriptorType: ATOM,
    types.MethodWrapperType: ATOM,
    torch.Size: ATOM,
}
_CONTAINER = Kind("container", one_step)
_INSTANCE = Kind("instance", one_step, is_instance=True)


def _namespace(module: Any) -> Held:
    """A module's names; not what its C code shows: `_asyncio` of 3.12.1 gives freed objects, and the collector hangs."""
    return ((1, [_names_of_module(module)]),)


_names_of_module: Any = attributes_of_class(types.ModuleType)["__dict__"].__get__
_CLASS = Kind("class", _class, entry=_DETOUR_CLASS)
_STORAGE = Kind("storage", nothing, is_noted=True)
_MODULE = Kind("module", module_holds, is_noted=True)
_OPTIMIZER = Kind("optimizer", _optimizer_holds, is_noted=True)
_ARRAY = Kind("array", _array)


def kind_of(kind: type, nodes: Nodes) -> Kind:
    """The Kind of the objects of a class; `nodes` asks those of graphs."""
    known = _EXACT.get(kind) if type(kind) is type else None
    if known is not None:
        return known
    if is_ours(kind):
        return ATOM
    derived = mro_of(kind)
    if any(one is dispatch.TensorBase for one in derived):
        return Kind("tensor", _tensor_holds(nodes), is_noted=True)
    for base, found in _BASES:
        if any(one is base for one in derived):
            return found
    if nodes.getters(kind) is not None:
        return Kind("node", _node_holds(nodes), entry=_DETOUR_GRAPH)
    return _other_kind(kind, derived)


def _other_kind(kind: type, derived: tuple[type, ...]) -> Kind:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and any(one is getattr(numpy, "ndarray", None) for one in derived):
        return _ARRAY
    if not _flags(kind) & SUPPORTS_GC:
        return ATOM
    return _INSTANCE if _flags(kind) & HEAP_TYPE else _CONTAINER


_BASES = (
    (types.ModuleType, Kind("namespace", _namespace)),
    (torch.UntypedStorage, _STORAGE),
    (torch.nn.Module, _MODULE),
    (torch.optim.Optimizer, _OPTIMIZER),
    (type, _CLASS),
)


_BUILT_WITH = ("memlab.workloads.", "memlab.savings.")
"""Where the classes of models stand that users make and hold."""


def is_ours(kind: type) -> bool:
    """Whether a class is memlab's own: it keeps nothing of the user's alive, and is not named as if it did."""
    place = attributes_of_class(kind).get("__module__")
    if type(place) is not str or place.startswith(_BUILT_WITH):
        return False
    return place == "memlab" or place.startswith("memlab.")
