"""How a holder calls what it holds: `.weight`, `[17]`, `['x']`, `-> closure 'big'`; only C code of the classes runs for it."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Container, Iterator
from typing import Any

from memlab.names import kinds, memory
from memlab.names.kinds import attributes_of_class, instance_dict, items_of, mro_of
from memlab.seams import frames, graph

Label = tuple[str, str]
"""What stands in the path, and the role in which the held object is read: the dict of an instance is none of its own."""

MAX_KEY = 60
ATTRIBUTES, MEMBERS, CLOSURE, DEFAULTS, HOOKS = "attributes", "members", "closure", "defaults", "hooks"
_cell_contents: Any = types.CellType.__dict__["cell_contents"].__get__
_of_function = {name: attributes_of_class(types.FunctionType)[name].__get__ for name in (
    "__closure__", "__defaults__", "__kwdefaults__", "__code__", "__globals__", "__annotations__")}  # fmt: skip


def labels(holder: Any, role: str, name: str, met: Container[int]) -> dict[int, Label]:
    """The id of each held object that was met -> its label, for a holder of the Kind `name` that is read in a role."""
    found: dict[int, Label] = {}
    for thing, text, of in _named(holder, role, name):
        if id(thing) in met:
            found.setdefault(id(thing), (text, of))
    return found


def other(thing: Any) -> Label:
    """The label of something that its holder has no name for."""
    return f" -> {class_name(type(thing))}", ""


def class_name(kind: type) -> str:
    """The name of a class, whatever its metaclass would say."""
    return str(type.__dict__["__name__"].__get__(kind))


def _named(holder: Any, role: str, name: str) -> Iterator[tuple[Any, str, str]]:
    """(held object, text, role) of all that can be named."""
    if role in (ATTRIBUTES, MEMBERS):
        yield from _attributes(holder, role)
    elif role == HOOKS:
        yield from ((hook, f" {function_name(hook)}", "") for _, hook in items_of(holder))
    elif role.startswith(CLOSURE):
        yield from ((cell, f" -> closure {free!r}", "") for cell, free in _zip(holder, role))
    elif role.startswith(DEFAULTS):
        yield from ((value, f" -> default {free!r}", "") for value, free in _zip(holder, role))
    else:
        yield from _BY_KIND.get(name, _instance)(holder)


def _zip(holder: Any, role: str) -> Iterator[tuple[Any, str]]:
    yield from zip(tuple.__iter__(holder), role.split()[1:], strict=False)


def _attributes(own: Any, role: str) -> Iterator[tuple[Any, str, str]]:
    """The values of an instance's dict; what a module keeps its members in does not show."""
    for name, value in items_of(own):
        if role == ATTRIBUTES and type(name) is str and name.startswith("_") and kinds.is_dict(value):
            yield value, *_private_dict(name)
        else:
            yield value, attribute(name), ""


def _private_dict(name: str) -> Label:
    """The members of a module, and its hooks: `_forward_hooks` holds each forward hook; the traits of traitlets."""
    if name in kinds.MEMBERS or name == "_trait_values":
        return "", MEMBERS
    if name.endswith("_hooks"):
        return f" -> {name.strip('_').replace('_', ' ').removesuffix('s')}", HOOKS
    return attribute(name), ""


def function_name(thing: Any) -> str:
    """The name of a function, of anything else its class."""
    code = _of_function["__code__"](thing) if type(thing) is types.FunctionType else None
    return f"{code.co_name}()" if code is not None else class_name(type(thing))


def attribute(name: Any) -> str:
    """`.name`, or a module's numbered member as PyTorch writes it."""
    if type(name) is not str:
        return key(name)
    return f".{name}" if name.replace("_", "a").isalnum() else key(name)


def key(thing: Any) -> str:
    """`[...]` for the key of a dict: plain values as they are written, of anything else the class."""
    if type(thing) in (str, bytes):
        text = repr(thing[:MAX_KEY]) + ("…" if len(thing) > MAX_KEY else "")
    elif type(thing) in (int, float, bool, complex, type(None)) or _is_plain_tuple(thing):
        text = repr(thing)
        text = text if len(text) <= MAX_KEY else text[:MAX_KEY] + "…"
    elif memory.is_tensor(thing):
        text = f"\0{id(thing)} {class_name(type(thing))}\0"  # whoever knows its path puts it in
    else:
        text = f"<{class_name(type(thing))}>"
    return f"[{text}]"


def _is_plain_tuple(thing: Any) -> bool:
    return type(thing) is tuple and len(thing) < 8 and all(type(one) in (int, float, bool, str) for one in thing)


# --- one function for each kind -----------------------------------------------------------------------------------------


def _dict(holder: Any) -> Iterator[tuple[Any, str, str]]:
    for name, value in items_of(holder):
        yield value, key(name), ""
    for name, _ in items_of(holder):
        yield name, " -> key", ""


def _sequence(values: Iterator[Any]) -> Iterator[tuple[Any, str, str]]:
    yield from ((value, f"[{index}]", "") for index, value in enumerate(values))


def _container(holder: Any) -> Iterator[tuple[Any, str, str]]:
    """What lies in a container of C's or of a class derived from one."""
    try:
        for base in mro_of(type(holder)):
            if (iterate := _ITERATED.get(id(base))) is not None:
                yield from iterate(holder)
                return
    except RuntimeError:  # another thread changes it
        return


def _tuple(holder: Any) -> Iterator[tuple[Any, str, str]]:
    """By the names of its fields where the class has them."""
    fields = next(
        (own["_fields"] for base in mro_of(type(holder)) if "_fields" in (own := attributes_of_class(base))), ()
    )
    if type(fields) is tuple and len(fields) == tuple.__len__(holder):
        yield from ((value, attribute(name), "") for value, name in zip(tuple.__iter__(holder), fields, strict=True))
    else:
        yield from _sequence(tuple.__iter__(holder))


def _set(iterator: Any) -> Iterator[tuple[Any, str, str]]:
    yield from ((value, " -> element of a set", "") for value in list(iterator))


_ITERATED: dict[int, Any] = {  # by the class's id: a metaclass may have a hash of its own
    id(dict): _dict,
    id(list): lambda holder: _sequence(list.__iter__(holder)),
    id(tuple): _tuple,
    id(deque): lambda holder: _sequence(iter(list(deque.__iter__(holder)))),
    id(set): lambda holder: _set(set.__iter__(holder)),
    id(frozenset): lambda holder: _set(frozenset.__iter__(holder)),
}


def _instance(holder: Any) -> Iterator[tuple[Any, str, str]]:
    """An instance: its dict, its slots, what it has as a container, its class."""
    own = instance_dict(holder)
    if own is not None:
        yield own, "", ATTRIBUTES
        yield from _attributes(own, ATTRIBUTES)  # before 3.13 the dict may have come into being just now
    yield from _slots(holder)
    yield from _container(holder)
    if any(base is BaseException for base in mro_of(type(holder))):
        yield BaseException.__dict__["args"].__get__(holder), ".args", ""
    yield type(holder), " -> class " + class_name(type(holder)), ""


def _slots(holder: Any) -> Iterator[tuple[Any, str, str]]:
    """What stands in the slots of an object, also those of classes of C's, which have such members too."""
    for base in mro_of(type(holder)):
        for name, member in list(attributes_of_class(base).items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    yield member.__get__(holder), attribute(name), ""
                except (AttributeError, TypeError):
                    continue


def _module(holder: Any) -> Iterator[tuple[Any, str, str]]:
    own = instance_dict(holder) or {}
    for name in ("_parameters", "_buffers", "_modules"):
        members = own.get(name)
        if kinds.is_dict(members):
            yield from _attributes(members, MEMBERS)
    yield from _instance(holder)


def _function(holder: Any) -> Iterator[tuple[Any, str, str]]:
    code, cells = _of_function["__code__"](holder), _of_function["__closure__"](holder)
    yield cells, "", " ".join((CLOSURE, *code.co_freevars))
    defaults = _of_function["__defaults__"](holder)
    if defaults is not None:
        names = code.co_varnames[: code.co_argcount][-len(defaults) :]
        yield defaults, "", " ".join((DEFAULTS, *names))
    yield _of_function["__kwdefaults__"](holder), " -> defaults", ""
    yield _of_function["__globals__"](holder), ".__globals__", ""
    yield from ((thing, "", ATTRIBUTES) for thing in gc.get_referents(holder) if type(thing) is dict)


def _cell(holder: Any) -> Iterator[tuple[Any, str, str]]:
    try:
        yield _cell_contents(holder), "", ""
    except ValueError:  # empty
        return


def _frame(holder: Any) -> Iterator[tuple[Any, str, str]]:
    """The local variables; a cell stands for what is in it."""
    for name, value in frames.locals_of(holder):
        yield value, f" -> {name}", ""
        if type(value) is types.CellType:
            yield from ((inner, f" -> {name}", "") for inner, _, _ in _cell(value))
    for thing in gc.get_referents(holder):
        if type(thing) is types.CellType:
            yield thing, " -> closure", ""
        else:  # up to 3.12 a look at `f_locals` leaves a dict with the frame
            yield thing, " -> f_locals" if type(thing) is dict else " -> a value in use", ""


def _generator(holder: Any) -> Iterator[tuple[Any, str, str]]:
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        getter = attributes_of_class(type(holder)).get(name)
        frame = getter.__get__(holder) if getter is not None else None
        if frame is not None:
            yield from ((thing, f" -> {frame.f_code.co_name}(){text}", of) for thing, text, of in _frame(frame))
            yield frame, "", ""


def _traceback(holder: Any) -> Iterator[tuple[Any, str, str]]:
    yield holder.tb_frame, "", ""
    yield holder.tb_next, "", ""


def _tensor(holder: Any) -> Iterator[tuple[Any, str, str]]:
    yield memory.gradient(holder), ".grad", ""
    yield _node_of(holder), ".grad_fn", ""
    yield memory.base_of(holder), "._base", ""
    yield from ((part, f".{name}", "") for name, part in memory.parts_if_any(holder))
    for getter, text in ((graph.tensor_hooks, " -> hook"), (graph.accumulate_hooks, " -> hook after accumulation")):
        yield getter(holder), text, HOOKS
    yield from _instance(holder)


def _node_of(tensor: Any) -> Any:
    try:
        return graph.grad_fn(tensor)
    except RuntimeError:
        return None


def _node(holder: Any) -> Iterator[tuple[Any, str, str]]:
    getters = graph.node_getters(type(holder))
    if getters is not None:
        following, saving, leaf = getters
        yield from ((content, f" -> saved {name}", "") for name, content in graph.saved_by(holder, saving))
        yield from ((node, "", "") for node, _ in following(holder))
        if leaf is not None:
            yield leaf(holder), " -> leaf", ""
    yield from _instance(holder)


def _class(holder: Any) -> Iterator[tuple[Any, str, str]]:
    for name, value in list(attributes_of_class(holder).items()):
        yield value, attribute(name), ""
    yield from ((base, ".__base__", "") for base in type.__dict__["__bases__"].__get__(holder))


def _array(holder: Any) -> Iterator[tuple[Any, str, str]]:
    for _, held in kinds._array(holder):
        base, *items = held
        yield base, ".base", ""
        yield from ((item, f"[{index}]", "") for index, item in enumerate(items))


_BY_KIND: dict[str, Any] = {
    "array": _array,
    "cell": _cell,
    "class": _class,
    "container": _instance,
    "dict": _dict,
    "frame": _frame,
    "function": _function,
    "generator": _generator,
    "module": _module,
    "node": _node,
    "tensor": _tensor,
    "traceback": _traceback,
}
