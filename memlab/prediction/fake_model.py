"""A model on tensors without data, in a child process: nothing is computed, and the change is not undone.

They are PyTorch's fake tensors: operators compute shapes, not values. Tensors that share a storage get fakes that share
one. Limits: a tensor of a layout that has no storage (oneDNN's own) has no bytes here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memlab.errors import MemlabError
from memlab.references.memory import is_tensor
from memlab.torch_internals import dispatch, fakes, graph
from memlab.torch_internals.objects import storage_id

_META = torch.device("meta")
_DEPTH, _ITEMS = 50, 100_000
"""Containers that are nested more deeply, or longer, are not searched."""
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a tensor: itself, its indices and values, or the tensors its class wraps."""
    if (inside := graph.unwrapped(tensor)) is not None:
        yield from plain_tensors(inside)
    elif fakes.wraps_others(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # its class has it
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.layout == torch.strided or tensor.layout == torch.jagged:
        yield tensor
    else:
        yield from (part(tensor) for _, part in graph.sparse_parts.get(tensor.layout, ()))


def storage_bytes(*tensors: Tensor) -> dict[int, int]:
    """The bytes of all storages of these tensors, each once; whole storages, also of views.

    A storage is identified by its `_cdata` while it is alive.
    """
    storages = (part.untyped_storage() for tensor in tensors for part in plain_tensors(tensor))
    return {storage_id(storage): storage.nbytes() for storage in storages}


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested containers and plain objects, each once, without running any `__iter__` or `__getattr__`."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = list(reversed(values))
    while todo:
        value = todo.pop()
        if is_tensor(value):
            found.setdefault(id(value), value)
        elif id(value) not in seen:
            seen.add(id(value))
            todo += reversed(_items(value))
    return list(found.values())


def _items(value: Any) -> list[Any]:
    kind, items = type(value), list[Any]()
    if issubclass(kind, dict):
        items = list(dict.values(value))
    elif issubclass(kind, list | tuple):
        items = list(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value))
    elif kind.__module__ == "builtins" or issubclass(kind, type | ModuleType | FunctionType | nn.Module):
        return []
    with contextlib.suppress(AttributeError):  # an object with slots
        items += list(object.__getattribute__(value, "__dict__").values())
    return items


class FakeTensors:
    """Makes one fake tensor per real one; `home` is the device of those that have none (meta).

    `device_types` are those that count. Inputs move to the device of the model, if it has only one.
    """

    def __init__(self, of_model: list[Tensor], of_inputs: list[Tensor]) -> None:
        def devices(tensors: list[Tensor]) -> list[torch.device]:
            return list(dict.fromkeys(one.device for one in tensors if one.device.type != "meta"))

        known = devices(of_model) or devices(of_inputs) or [torch.get_default_device()]
        self.home = known[0] if known[0].type != "meta" else torch.device("cpu")
        if str(self.home) == "cuda":
            self.home = torch.device("cuda", 0)
        self.device_types = {self.home.type, *(device.type for device in known if device.type != "meta")}
        self.moves_inputs = len(known) == 1
        self.mode = fakes.FakeTensorMode(allow_non_fake_inputs=True)
        self._of: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[Any, torch.UntypedStorage]] = {}
        self.storage_keys: set[int] = set()

    def of(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """The fake of a tensor, always the same one; on its device, or on the given one."""
        if id(tensor) not in self._of:
            if is_lazy(tensor):
                what = "the model has lazy parameters, which get their size from the first input"
                raise MemlabError(f"{what}. Run it once, then ask for its size.")
            self._of[id(tensor)] = (tensor, self._make(tensor, device))
        return self._of[id(tensor)][1]

    def originals(self, copies: list[Tensor]) -> list[Tensor]:
        """The real tensors of these fakes; fakes that were given as a shape are returned themselves."""
        real = {id(fake): tensor for tensor, fake in self._of.values()}
        return [real.get(id(fake), fake) for fake in copies]

    def _make(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        is_number = tensor.device.type == "cpu" and type(tensor) is Tensor and not tensor.requires_grad
        if is_number and _is_plain(tensor) and tensor.numel() == 1 and (device or tensor.device).type == "cpu":
            with fakes.no_dispatch():
                number = tensor.clone()  # forwards read flags and counters; the copy may be modified
            return fakes.known_number(self.mode, number)
        fake = self._plain(tensor, device) if _is_plain(tensor) else self._exotic(tensor)
        if issubclass(type(tensor), nn.Parameter) or getattr(tensor, "_is_param", False):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        for name, value in tensor.__dict__.items():  # attributes set by users, such as a name
            fake.__dict__.setdefault(name, value)
        return fake

    def _plain(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        real = tensor.untyped_storage()
        if storage_id(real) not in self._storages:
            fake = torch.UntypedStorage(real.nbytes(), device=_META)
            self._storages[storage_id(real)] = (real, fake)
            self.storage_keys.add(storage_id(fake))
        with fakes.no_dispatch():
            empty = torch.empty(0, dtype=tensor.dtype, device=_META)
            empty.set_(self._storages[storage_id(real)][1], *layout)
        where = device or tensor.device
        return fakes.FakeTensor(self.mode, empty, self.home if where.type == "meta" else where)

    def _exotic(self, tensor: Tensor) -> Tensor:
        try:
            return self.mode.from_tensor(tensor.detach())
        except Exception as error:
            what = f"{type(tensor).__name__}, {str(tensor.layout).removeprefix('torch.')}"
            reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise MemlabError(f"PyTorch has no fake for a tensor of the model or its inputs ({what}): {reason}")


def _is_plain(tensor: Tensor) -> bool:
    with dispatch.DisableTorchFunction():
        has_own = type(tensor).__torch_dispatch__ is not dispatch.plain_torch_dispatch
        if tensor.layout != torch.strided or (has_own and type(tensor) is not fakes.FakeTensor):
            return False
        return not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


class FakeCopies:
    """Puts fakes in place of the tensors in plain containers, which change in place; tuples and references are copied.

    With a device the fakes are on it, wherever the tensors are.
    """

    def __init__(self, of_tensors: FakeTensors, device: torch.device | None = None) -> None:
        self.of_tensors = of_tensors
        self._device = device
        self._of: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        """What takes the place of a value: shared containers stay shared."""
        if is_tensor(value):
            return self.of_tensors.of(value, self._device)
        kind = type(value)
        if kind is weakref.ref and is_tensor(value()):  # recurrent layers use it to detect replaced weights
            return weakref.ref(self.of(value()))
        if kind not in _CONTAINERS or depth > _DEPTH or len(value) > _ITEMS:
            return value
        if id(value) not in self._of:
            self._of[id(value)] = (value, value)  # before its items, which may hold it
            is_dict = issubclass(kind, dict)
            items = [self.of(item, depth + 1) for item in (list(value.values()) if is_dict else list(value))]
            if kind is tuple:
                self._of[id(value)] = (value, tuple(items))
            elif is_dict:
                value.update(zip(list(value), items, strict=True))
            else:
                value.clear()
                value.extend(items)
        return self._of[id(value)][1]


# --- modules ---

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
_MAX_PATHS = 1000
"""The maximum number of paths listed per module."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """One tensor of a model, by its first path; `nbytes` are those of storages that no earlier tensor has."""

    path: str
    layer: str
    kind: str
    tensor: Tensor
    nbytes: int
    also: tuple[str, ...] = ()


class ModulePaths:
    """The modules of a model, each once (`modules`), with all paths of each (`every`)."""

    def __init__(self, model: nn.Module) -> None:
        self.paths: dict[int, list[str]] = {}
        self.modules: list[nn.Module] = []
        self.every: list[tuple[str, nn.Module]] = []
        todo: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
        while todo:
            path, module, above = todo.pop()
            known = self.paths.setdefault(id(module), [])
            if not known:
                self.modules.append(module)
            if len(known) < _MAX_PATHS:
                known.append(path)
                self.every.append((path, module))
                below = above | {id(module)}
                children = reversed(module.__dict__.get("_modules", {}).items())
                todo += [
                    (f"{path}.{name}" if path else name, child, below)
                    for name, child in children
                    if child is not None and id(child) not in below
                ]

    def of(self, module: nn.Module, above: str) -> str:
        """The path of a module, when called by the module at `above`."""
        paths = self.paths[id(module)]
        below = f"{above}." if above else ""
        return next((path for path in paths if path.startswith(below)), paths[0])

    def tensors(self) -> list[ModelTensor]:
        """Every tensor that the modules hold, parameters first, starting at the outermost module."""
        found: dict[int, tuple[str, str, Tensor, list[str]]] = {}
        for kind, table in ((PARAMETER, "_parameters"), (BUFFER, "_buffers"), (ATTRIBUTE, "")):
            for module in self.modules:
                layer = self.paths[id(module)][0]
                places = module.__dict__.get(table, {}) if table else module.__dict__
                for name, tensor in list(places.items()):
                    if is_tensor(tensor):
                        _, _, _, names = found.setdefault(id(tensor), (layer, kind, tensor, []))
                        names.append(f"{layer}.{name}" if layer else name)
        seen: set[int] = set()
        tensors = []
        for layer, kind, tensor, (first, *also) in found.values():
            sizes = {} if is_lazy(tensor) else storage_bytes(tensor)
            nbytes = sum(size for key, size in sizes.items() if key not in seen)
            tensors.append(ModelTensor(first, layer, kind, tensor, nbytes, tuple(also)))
            seen |= set(sizes)
        return tensors

    def exchange(self, copies: FakeCopies) -> None:
        """Replace the modules' tensors by fakes, permanently."""
        for module in self.modules:
            copies.of(module.__dict__)
            module.__dict__["_compiled_call_impl"] = None  # compiled in place: sized as it is written
            if issubclass(type(module), nn.RNNBase) and copies.of_tensors.home.type == "cuda":
                module.__dict__["dropout"] = 0.0  # cuDNN keeps the state of its dropout for the whole process
