"""Values of a notebook for a fresh process: what can be sent is, with what it names; what cannot is refused by its name.

Functions and classes of the notebook are sent as code, with the globals that they read, transitively. Parameters of
modules, and tensors on a GPU, are sent by what they are (shape, type, storage) and not by their values: a prediction
needs no more. Other tensors are data, and go as they are. The bytes are a pickle, made here and read in a process that
was started here; nothing is ever read from there in that way.
"""

from __future__ import annotations

import enum
import importlib
import io
import linecache
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memlab.errors import PredictionError
from memlab.predictor.child import needed
from memlab.seams.traceback import running_shell

SMALL_BYTES = 1 << 16
"""Parameters up to here are sent with their values."""
_PARTS = (
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "_abc_impl",
    "__abstractmethods__",
    "__static_attributes__",
)
_GRAPH = "it has a graph of autograd behind it, which cannot leave its process; detach() it"


def send(first: Iterable[Any], names: Iterable[str], space: Mapping[str, Any]) -> bytes:
    """Bytes from which `receive` makes the values in `first`, then the named ones of the namespace and what they need."""
    sender = Sender(space)
    for value in first:
        sender.dump_or_refuse(value)
    sender.wanted.update(dict.fromkeys(name for name in names if name in space))
    refused: dict[str, str] = {}
    sent: set[str] = set()
    while pending := [name for name in sender.wanted if name not in sent]:
        for name in pending:
            sent.add(name)
            one = Sender(space) if refused else sender  # a pickler is broken after a failure: look for more to name
            if why := one.try_dump(space[name], name):
                refused[name] = why
            sender.wanted.update(one.wanted)
    if refused:
        listed = "; ".join(f"{name}: {why}" for name, why in sorted(refused.items()))
        raise PredictionError(
            f"not everything that the code names can be sent to a process of its own, and none can be forked here. "
            f"{listed[:600]}. Make it inside of the code that is predicted."
        )
    sender.dump(("", (sender.sources, sender.unsent_bytes)))
    return sender.file.getvalue()


class Sender(pickle.Pickler):
    """A pickler that notes which names of the notebook what it pickled needs, and the sources of its functions."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=4)
        self.wanted: dict[str, None] = {}
        self.sources: dict[str, list[str]] = {}
        self._space = space
        self.unsent_bytes = 0
        self._storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}  # alive, so that no two of them get one id

    def try_dump(self, value: Any, name: str | None = None) -> str:
        """Pickle a value, with its name if it has one; why it cannot be, "" if it was."""
        kind = type(value).__name__
        try:
            self.dump(value if name is None else (name, value))
        except RecursionError:
            return f"{kind} (nested too deeply)"
        except Exception as error:
            said = str(error).partition("\n")[0]
            return f"{kind} ({said})" if said else kind
        return ""

    def dump_or_refuse(self, value: Any) -> None:
        """Pickle a value that has no name of its own."""
        why = self.try_dump(value)
        if why:
            raise PredictionError(
                f"the work cannot be sent to a process of its own, and none can be forked here: {why}."
            )

    def reducer_override(self, value: Any) -> Any:
        """How a value is made anew; NotImplemented leaves it to pickle."""
        kind = type(value)
        if kind is types.FunctionType:
            return NotImplemented if is_importable(value) else self._function(value)
        if issubclass(kind, type):
            return NotImplemented if is_importable(value) else self._class(value)
        if value is not None and value is running_shell():
            return running_shell, ()
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._storages:
            return self._storage(value)
        plain = _PLAIN.get(kind)
        return plain(value) if plain is not None else NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        is_ours = function.__globals__ is self._space
        if is_ours:
            self.wanted.update(dict.fromkeys(name for name in needed.of_code(code) if name in self._space))
        module = "__main__" if is_ours else str(function.__globals__.get("__name__"))
        if not is_ours and vars(sys.modules.get(module, object)) is not function.__globals__:
            raise pickle.PicklingError(f"{function.__qualname__} belongs to no module")
        self.sources.setdefault(code.co_filename, linecache.getlines(code.co_filename))
        made = (marshal.dumps(code), module, function.__name__, function.__closure__)
        state = {
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__dict__": function.__dict__,
            "__annotations__": _plain_annotations(function),
            "__qualname__": function.__qualname__,
            "__module__": function.__module__,
            "__doc__": function.__doc__,
        }
        return _function, made, state, None, None, _fill

    def _class(self, value: type) -> Any:
        if issubclass(type(value), enum.EnumMeta):
            raise pickle.PicklingError(f"{value.__name__} is an Enum that the notebook defines")
        slots = {name for name, part in vars(value).items() if isinstance(part, types.MemberDescriptorType)}
        state = {name: part for name, part in vars(value).items() if name not in _PARTS and name not in slots}
        made = {"__module__": value.__module__, "__doc__": value.__doc__}
        made |= {"__slots__": vars(value)["__slots__"]} if "__slots__" in vars(value) else {}
        state.pop("__slots__", None)
        return _class, (type(value), value.__name__, value.__bases__, made), state, None, None, _fill

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.grad_fn is not None:
            raise pickle.PicklingError(_GRAPH)
        kind = type(value)
        is_parameter = issubclass(kind, torch.nn.Parameter)
        if value.layout is not torch.strided or value.is_quantized or not (is_parameter or kind is torch.Tensor):
            return NotImplemented
        storage = value.untyped_storage()
        by_shape = value.is_cuda or (is_parameter and storage.nbytes() > SMALL_BYTES)
        self._storages.setdefault(id(storage), (storage, by_shape))
        place = (storage, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        made = (kind if is_parameter else None, value.requires_grad, *place)
        state = {"grad": value.grad} if value.grad is not None else None
        return _tensor, made, state, None, None, _fill

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        """Where its values do not count, its size alone."""
        if self._storages[id(storage)][1]:
            self.unsent_bytes += storage.nbytes()
            return _blank_storage, (storage.nbytes(), str(storage.device))
        return _storage, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes(),)


# Kinds that pickle leaves out, and that hold what it can carry.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    types.ModuleType: lambda value: (importlib.import_module, (value.__name__,)),
    types.CellType: lambda value: (_cell, (), _contents(value), None, None, _fill_cell),
    types.MappingProxyType: lambda value: (_proxy, (dict(value),)),
    property: lambda value: (property, (value.fget, value.fset, value.fdel, value.__doc__)),
    classmethod: lambda value: (classmethod, (value.__func__,)),
    staticmethod: lambda value: (staticmethod, (value.__func__,)),
}


def is_importable(value: Any) -> bool:
    """Whether another process finds a function or class by the name of its module, and its own in it."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return False
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _plain_annotations(function: types.FunctionType) -> dict[str, Any]:
    return {name: kind for name, kind in function.__annotations__.items() if isinstance(kind, str | type)}


# --- in the fresh process ---


def receive(data: bytes) -> pickle.Unpickler:
    """The unpickler: `load()` gives the first values, one each, and then what `names` takes."""
    return pickle.Unpickler(io.BytesIO(data))


def receive_names(unpickler: pickle.Unpickler) -> int:
    """Load the named values into `__main__`, and the sources of functions; how many bytes came without their values."""
    space = vars(sys.modules["__main__"])
    while True:
        name, value = unpickler.load()
        if not name:
            break
        space[name] = value
    sources, unsent_bytes = value
    for file, lines in sources.items():
        linecache.cache.setdefault(file, (sum(map(len, lines)), None, lines, file))
    return int(unsent_bytes)


def _function(code: bytes, module: str, name: str, closure: tuple[types.CellType, ...] | None) -> types.FunctionType:
    space = vars(sys.modules["__main__"]) if module == "__main__" else vars(importlib.import_module(module))
    return types.FunctionType(marshal.loads(code), space, name, None, closure)


def _cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _proxy(values: dict[str, Any]) -> types.MappingProxyType[str, Any]:
    return types.MappingProxyType(values)


def _class(kind: Callable[..., type], name: str, bases: tuple[type, ...], made: dict[str, Any]) -> type:
    return kind(name, bases, made)


def _blank_storage(nbytes: int, device: str) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _storage(data: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)


def _tensor(kind: type | None, requires_grad: bool, storage: Any, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    shape, stride, offset = place
    data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    if kind is not None:
        return kind(data, requires_grad)
    return data.requires_grad_(requires_grad)


def _fill(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(made, name, value)
