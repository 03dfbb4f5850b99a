"""The edges of the object graph: what an object references, and how a path writes that step.

References come from `gc.get_referents`, which calls the C code of the class: no attribute is looked up and nothing is
compared, so no code of the user runs. References held in C++ (a graph, a gradient, the base of an array) are added.
Extension types that do not support the garbage collector hide theirs and lead nowhere. A step reads as in a notebook:
`.weight`, `[17]`, `['x']`, `-> closure 'big'`.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab.references import memory
from memlab.references.graphs import Nodes
from memlab.references.memory import asked, attributes_of_class, derives, mro_of
from memlab.torch_internals import dispatch, frames, graph

_flags: Any = type.__dict__["__flags__"].__get__
HEAP_TYPE, SUPPORTS_GC = 1 << 9, 1 << 14

Held = Iterable[tuple[int, Iterable[Any]]]
"""Groups of referenced objects, each with its distance from the holder: the shortest path to an object names it."""
Label = tuple[str, str]
"""The text of the step, and the role of the referenced object: the dict of an instance reads as its attributes."""
Edges = Iterator[tuple[Any, str, str]]
"""(referenced object, text, role) of everything that a path can name."""

MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
ATTRIBUTES, MEMBERS, HOOKS = "attributes", "members", "hooks"
CLOSURE, DEFAULT = "closure", "default"
"""These two roles are followed by the names of the tuple's items."""
MAX_KEY = 60


def values_of(mapping: Any) -> list[Any]:
    """The values of a dict, without calling what a subclass overrides."""
    return [value for _, value in items_of(mapping)]


def items_of(mapping: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, without calling what a subclass overrides; other threads may change it meanwhile."""
    for _ in range(8):
        try:
            return list(dict.items(mapping))
        except RuntimeError:  # another thread put something in
            continue
    return []


def instance_dict(thing: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, read without running its code; None where it has none."""
    for base in mro_of(type(thing)):
        getter = attributes_of_class(base).get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            found = getter.__get__(thing)
            return found if type(found) is dict else None
        if getter is not None:
            return None
    return None


# --- how a path writes the step ---


def labels(holder: Any, role: str, kind: EdgeKind, met: Container[int]) -> dict[int, Label]:
    """The id of each referenced object that the walk reached -> its label; `role` is that of the holder."""
    word, *names = role.split() if role else ("",)
    if role in (ATTRIBUTES, MEMBERS):
        edges = _attributes(holder, role)
    elif role == HOOKS:
        edges = ((hook, f" {_function_name(hook)}", "") for hook in values_of(holder))
    elif word in (CLOSURE, DEFAULT):
        pairs = zip(tuple.__iter__(holder), names, strict=False)
        edges = ((thing, f" -> {word} {name!r}", "") for thing, name in pairs)
    else:
        edges = kind.named(holder)
    found: dict[int, Label] = {}
    for thing, text, of in edges:
        if id(thing) in met:
            found.setdefault(id(thing), (text, of))
    return found


def other(thing: Any) -> Label:
    """The label of an object that its holder has no name for."""
    return f" -> {class_name(type(thing))}", ""


def class_name(kind: type) -> str:
    """The name of a class, without asking its metaclass."""
    return str(type.__dict__["__name__"].__get__(kind))


def _function_name(thing: Any) -> str:
    return f"{thing.__code__.co_name}()" if type(thing) is types.FunctionType else class_name(type(thing))


def attribute(name: Any) -> str:
    """`.name`, or a module's numbered member as PyTorch writes it."""
    is_plain = type(name) is str and name.replace("_", "a").isalnum()
    return f".{name}" if is_plain else key(name)


def key(thing: Any) -> str:
    """`[...]` for the key of a dict: the repr of a plain value, the class of anything else."""
    kind = type(thing)
    if kind is str or kind is bytes:
        text = repr(thing[:MAX_KEY]) + ("…" if len(thing) > MAX_KEY else "")
    elif id(kind) in _PLAIN or (kind is tuple and len(thing) < 8 and all(id(type(one)) in _PARTS for one in thing)):
        text = repr(thing)
        text = text if len(text) <= MAX_KEY else text[:MAX_KEY] + "…"
    elif memory.is_tensor(thing):
        text = f"\0{id(thing)} {class_name(kind)}\0"  # `ReferencePaths` puts its path here
    else:
        text = f"<{class_name(kind)}>"
    return f"[{text}]"


_PLAIN = set(map(id, (int, float, bool, complex, type(None))))
_PARTS = set(map(id, (int, float, bool, str)))


def _attributes(own: Any, role: str) -> Edges:
    """The values of an instance's dict; the private dicts of members, hooks and traits do not show in the path."""
    for name, value in items_of(own):
        text, of = attribute(name), ""
        if role == ATTRIBUTES and type(name) is str and name.startswith("_") and derives(type(value), dict):
            if name in MODULE_MEMBERS or name == "_trait_values":
                text, of = "", MEMBERS
            elif name.endswith("_hooks"):  # `_forward_hooks` holds each forward hook
                text, of = f" -> {name.strip('_').replace('_', ' ').removesuffix('s')}", HOOKS
        yield value, text, of


def _container_edges(holder: Any) -> Edges:
    """The items of a built-in container or of a subclass of one."""
    base = next((base for base in mro_of(type(holder)) if id(base) in _ITERATORS), None)
    if base is None:
        return
    if base is dict:
        items = items_of(holder)
        yield from ((value, key(name), "") for name, value in items)
        yield from ((name, " -> key", "") for name, _ in items)
        return
    try:
        values = list(_ITERATORS[id(base)](holder))
    except RuntimeError:  # another thread changes it
        return
    classes = map(attributes_of_class, mro_of(type(holder)))
    fields = next((own["_fields"] for own in classes if "_fields" in own), ()) if base is tuple else ()
    if base is set or base is frozenset:
        yield from ((value, " -> element of a set", "") for value in values)
    elif type(fields) is tuple and len(fields) == len(values):
        yield from ((value, attribute(name), "") for value, name in zip(values, fields, strict=True))
    else:
        yield from ((value, f"[{index}]", "") for index, value in enumerate(values))


# By the class's id: a metaclass may have a hash of its own.
_ITERATORS: dict[int, Any] = {id(kind): kind.__iter__ for kind in (dict, list, tuple, deque, set, frozenset)}


def _instance_edges(holder: Any) -> Edges:
    """An instance: its dict, its slots (those of C types too), its items if it is a container, its class."""
    own, kind = instance_dict(holder), type(holder)
    if own is not None:
        yield own, "", ATTRIBUTES
        yield from _attributes(own, ATTRIBUTES)  # before 3.13 the dict may have been created just now
    for base in mro_of(kind):
        for name, member in list(attributes_of_class(base).items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    yield member.__get__(holder), attribute(name), ""
                except (AttributeError, TypeError):
                    continue
    yield from _container_edges(holder)
    if derives(kind, BaseException):
        yield BaseException.__dict__["args"].__get__(holder), ".args", ""
    yield kind, f" -> class {class_name(kind)}", ""


def _module_edges(holder: Any) -> Edges:
    own = instance_dict(holder) or {}
    for name in MODULE_MEMBERS:
        if derives(type(own.get(name)), dict):
            yield from _attributes(own[name], MEMBERS)
    yield from _instance_edges(holder)


def _function_edges(holder: Any) -> Edges:
    code, defaults = holder.__code__, holder.__defaults__
    yield holder.__closure__, "", " ".join((CLOSURE, *code.co_freevars))
    if defaults is not None:
        yield defaults, "", " ".join((DEFAULT, *code.co_varnames[: code.co_argcount][-len(defaults) :]))
    yield holder.__kwdefaults__, " -> defaults", ""
    yield holder.__globals__, ".__globals__", ""
    yield from ((thing, "", ATTRIBUTES) for thing in gc.get_referents(holder) if type(thing) is dict)


def _cell_edges(holder: Any) -> Edges:
    try:
        yield holder.cell_contents, "", ""
    except ValueError:  # empty
        return


def _frame_edges(holder: Any) -> Edges:
    """The local variables; a cell is replaced by its content."""
    for name, value in frames.locals_of(holder):
        yield value, f" -> {name}", ""
        if type(value) is types.CellType:
            yield from ((inner, f" -> {name}", "") for inner, _, _ in _cell_edges(value))
    for thing in gc.get_referents(holder):
        if type(thing) is types.CellType:
            yield thing, " -> closure", ""
        else:  # up to 3.12 reading `f_locals` leaves a dict in the frame
            names = {dict: " -> f_locals", types.FrameType: " -> f_back"}
            yield thing, names.get(type(thing), " -> a value in use"), ""


def _generator_edges(holder: Any) -> Edges:
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        frame = getattr(holder, name, None)
        if frame is not None:
            yield from ((thing, f" -> {frame.f_code.co_name}(){text}", of) for thing, text, of in _frame_edges(frame))
            yield frame, "", ""


def _tensor_edges(holder: Any) -> Edges:
    yield memory.gradient(holder), ".grad", ""
    yield asked(graph.grad_fn, holder), ".grad_fn", ""
    yield asked(graph.base_of_view, holder), "._base", ""
    yield from ((part, f".{name}", "") for name, part in memory.parts_if_any(holder))
    yield graph.tensor_hooks(holder), " -> hook", HOOKS
    yield graph.accumulate_hooks(holder), " -> hook after accumulation", HOOKS
    yield from _instance_edges(holder)


def _node_edges(holder: Any) -> Edges:
    following, saving, leaf = graph.node_getters(type(holder)) or (lambda node: (), (), None)
    yield from ((content, f" -> saved {name}", "") for name, content in graph.saved_by(holder, saving))
    yield from ((node, "", "") for node, _ in following(holder))
    if leaf is not None:
        yield leaf(holder), " -> leaf", ""
    yield from _instance_edges(holder)


def _class_edges(holder: Any) -> Edges:
    for name, value in list(attributes_of_class(holder).items()):
        yield value, attribute(name), ""
    yield from ((base, ".__base__", "") for base in type.__dict__["__bases__"].__get__(holder))


def _array_edges(holder: Any) -> Edges:
    for _, held in _array(holder):
        base, *items = held
        yield base, ".base", ""
        yield from ((item, f"[{index}]", "") for index, item in enumerate(items))


# --- what an object holds ---


@dataclass(frozen=True, slots=True, eq=False)
class EdgeKind:
    """How the objects of a class are followed (`held`) and written (`named`).

    `entry` is added to the distance of such an object: paths through classes and graphs come last. `is_noted` is set if the
    walk records it: a tensor, a module, an optimizer.
    """

    name: str
    held: Callable[[Any], Held]
    named: Callable[[Any], Edges] = _instance_edges
    entry: int = 0
    is_dict: bool = False
    is_instance: bool = False
    is_noted: bool = False


_DETOUR_CALL, _DETOUR_KEY, _DETOUR_GRAPH, _DETOUR_FRAME, _DETOUR_CLASS, _DETOUR_OPTIMIZER = 8, 10, 20, 16, 40, 60
_PARAMETERS_FIRST = 5


def _nothing(holder: Any) -> Any:
    return ()


def _far(steps: int) -> Callable[[Any], Held]:
    return lambda holder: ((steps, gc.get_referents(holder)),)


def _mapping(holder: Any) -> Held:
    """The values of a dict, and its keys at a distance: a path rarely leads through one (it does in the state of an optimizer).

    Where all keys are strings, `gc.get_referents` gives the values alone (dict_traverse of CPython 3.11 to 3.13).
    """
    found = gc.get_referents(holder)
    if len(found) <= dict.__len__(holder):
        return ((1, found),)
    keys = {id(key) for key, _ in items_of(holder)}
    return (
        (1, [one for one in found if id(one) not in keys]),
        (_DETOUR_KEY, [one for one in found if id(one) in keys]),
    )


def _frame(frame: Any) -> Held:
    """The local variables of a frame; the evaluation stack of a running one is not seen.

    Frames of IPython's shell lead only to the shell, which is a root of its own.
    """
    if frames.is_shells(frame.f_code):
        return ()
    # A function that has ended leads to its caller, and in a script the outermost one to memlab's own, which has the error.
    held = [
        one for one in gc.get_referents(frame)
        if type(one) is not types.FrameType or not one.f_code.co_filename.startswith(frames.OWN_FILES)
    ]  # fmt: skip
    return ((1, held), (1, [value for _, value in frames.locals_of(frame)]))


def _class(kind: Any) -> Held:
    """The attributes and bases of a class defined in Python."""
    if not _flags(kind) & HEAP_TYPE:
        return ()
    return ((1, list(attributes_of_class(kind).values())), (1, type.__dict__["__bases__"].__get__(kind)))


def _array(array: Any) -> Held:
    """The base of a numpy array and the objects in it; where there is an array, numpy is loaded."""
    numpy: Any = sys.modules["numpy"]
    held = [numpy.ndarray.base.__get__(array)]
    if type(array) is numpy.ndarray and numpy.ndarray.dtype.__get__(array).hasobject:
        found = numpy.ndarray.tolist(array)
        held += [found] if type(found) is not list else found
    return ((1, held),)


def _tensor(nodes: Nodes) -> EdgeKind:
    """A tensor: its gradient and parts, its graph, its base if it is a view, its attributes and hooks."""

    def held(tensor: Any) -> Held:
        yield 0, [memory.gradient(tensor), *(part for _, part in memory.parts_if_any(tensor))]
        yield 0, [nodes.of(tensor)]
        yield 3, [asked(graph.base_of_view, tensor)]
        yield 1, gc.get_referents(tensor)

    return EdgeKind("tensor", held, _tensor_edges, is_noted=True)


def _node(nodes: Nodes) -> EdgeKind:
    """A node of a graph: what it saved, and the nodes behind it."""

    def held(node: Any) -> Held:
        yield 1, [content for _, content in nodes.saved_by(node)]
        yield 1 - _DETOUR_GRAPH, nodes.behind(node)
        yield 1, gc.get_referents(node)
        yield 1, [nodes.leaf_of(node)]

    return EdgeKind("node", held, _node_edges, entry=_DETOUR_GRAPH)


def _module(module: Any) -> Held:
    """The parameters, buffers and children of a module, then its other attributes."""
    own = instance_dict(module)
    if own is None:
        yield 1, gc.get_referents(module)
        return
    rest, shown = dict.copy(own), {id(own)}
    for name in MODULE_MEMBERS:
        if derives(type(rest.get(name)), dict):
            members = rest.pop(name)
            shown.add(id(members))
            yield 0, [value for value in values_of(members) if value is not None]
    yield 1, list(rest.values())
    yield 1, [held for held in gc.get_referents(module) if id(held) not in shown]


def _optimizer(optimizer: Any) -> Held:
    """The parameters come before the states, whose paths lead through them: `opt.state[model.weight]`."""
    yield _DETOUR_OPTIMIZER, [(instance_dict(optimizer) or {}).get("param_groups")]
    yield _DETOUR_OPTIMIZER + _PARAMETERS_FIRST, gc.get_referents(optimizer)


# --- the table ---

ATOM = EdgeKind("atom", _nothing)
_CONTAINER = EdgeKind("container", _far(1))
_INSTANCE = EdgeKind("instance", _far(1), is_instance=True)
# `gc.get_referents` gives the items of a list or tuple last to first.
_ORDERED = EdgeKind("container", lambda holder: ((1, gc.get_referents(holder)[::-1]),))
_MAPPING = EdgeKind("container", _mapping)
_GENERATOR = EdgeKind("generator", _far(_DETOUR_CALL), _generator_edges)
_ARRAY = EdgeKind("array", _array, _array_edges)
_TRACEBACK = EdgeKind(
    "traceback",
    lambda tb: ((1, (tb.tb_frame, tb.tb_next)),),
    lambda tb: iter(((tb.tb_frame, "", ""), (tb.tb_next, "", ""))),
    entry=_DETOUR_FRAME,
)

_EXACT: dict[type, EdgeKind] = {
    dict: EdgeKind("dict", _mapping, _container_edges, is_dict=True),
    defaultdict: _MAPPING,
    OrderedDict: _MAPPING,
    list: _ORDERED,
    tuple: _ORDERED,
    types.FunctionType: EdgeKind("function", _far(_DETOUR_CALL), _function_edges),
    types.MethodType: EdgeKind("method", _far(4)),
    types.BuiltinMethodType: EdgeKind("builtin method", _far(4)),
    types.CellType: EdgeKind("cell", _far(0), _cell_edges, is_instance=True),
    types.FrameType: EdgeKind("frame", _frame, _frame_edges, entry=_DETOUR_FRAME),
    types.TracebackType: _TRACEBACK,
    **dict.fromkeys((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _GENERATOR),
    **dict.fromkeys((
        types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
        types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType, torch.Size,
    ), ATOM),
}  # fmt: skip
# Only the names of a module, not `gc.get_referents`: `_asyncio` of 3.12.1 gives freed objects, and the collector hangs.
names_of_module: Any = attributes_of_class(types.ModuleType)["__dict__"].__get__
_BASES: tuple[tuple[type, EdgeKind], ...] = (
    (types.ModuleType, EdgeKind("namespace", lambda module: ((1, [names_of_module(module)]),))),
    (torch.UntypedStorage, EdgeKind("storage", _nothing, is_noted=True)),
    (torch.nn.Module, EdgeKind("module", _module, _module_edges, is_noted=True)),
    (torch.optim.Optimizer, EdgeKind("optimizer", _optimizer, is_noted=True)),
    (type, EdgeKind("class", _class, _class_edges, entry=_DETOUR_CLASS)),
)
_BUILT_WITH = ("memlab.workloads.", "memlab.saving_techniques.")
"""The modules with the classes of models that users create and hold."""


def kind_of(kind: type, nodes: Nodes) -> EdgeKind:
    """How objects of a class are followed; `nodes` reads those of graphs."""
    if type(kind) is type and kind in _EXACT:
        return _EXACT[kind]
    if is_ours(kind):
        return ATOM
    if derives(kind, dispatch.TensorBase):
        return _tensor(nodes)
    for base, found in _BASES:
        if derives(kind, base):
            return found
    if nodes.getters(kind) is not None:
        return _node(nodes)
    if derives(kind, getattr(sys.modules.get("numpy"), "ndarray", None)):
        return _ARRAY
    if not _flags(kind) & SUPPORTS_GC:
        return ATOM
    return _INSTANCE if _flags(kind) & HEAP_TYPE else _CONTAINER


def is_ours(kind: type) -> bool:
    """Whether a class is memlab's own: its objects keep nothing of the user's alive and never appear in a path."""
    place = attributes_of_class(kind).get("__module__")
    if type(place) is not str or place.startswith(_BUILT_WITH):
        return False
    return place == "memlab" or place.startswith("memlab.")
