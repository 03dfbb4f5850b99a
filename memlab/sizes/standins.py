"""Stand-ins: tensors with the size, type and device of real ones, and no data.

They are PyTorch's fake tensors: operators on them compute shapes, not values. Those of tensors that share a storage share
one as well.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memlab.errors import MemlabError
from memlab.seams import dispatch
from memlab.seams.fakes import FakeTensor, FakeTensorMode, known_number, no_dispatch
from memlab.sizes.storages import is_tensor

_META = torch.device("meta")


def is_standin(thing: Any) -> bool:
    """Whether it is a tensor without data, ours or another's."""
    return issubclass(type(thing), FakeTensor)


class StandIns:
    """Makes one stand-in for each real tensor; `home` is the device of those that have none (meta).

    `device_types` are those that the figures are about. Inputs go to the model's device where it has a single one.
    """

    def __init__(self, home: torch.device, device_types: set[str], moves_inputs: bool = True) -> None:
        self.home = home
        self.device_types = device_types
        self.moves_inputs = moves_inputs
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._of: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[Any, torch.UntypedStorage]] = {}
        self._keys: set[int] = set()

    def of(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """The stand-in of a tensor, always the same one; on its device, or on the one that is given."""
        known = self._of.get(id(tensor))
        if known is None:
            if is_lazy(tensor):
                raise MemlabError(
                    "the model has lazy parameters, which get their size from the first input. Run it once, then ask for its size."
                )
            known = self._of[id(tensor)] = (tensor, self._make(tensor, device))
        return known[1]

    def has_storage(self, key: int) -> bool:
        """Whether a storage belongs to a stand-in, and so was there before the forward."""
        return key in self._keys

    def originals(self, fakes: list[Tensor]) -> list[Tensor]:
        """The real tensors behind these, and themselves for what was given as a shape."""
        real = {id(fake): tensor for tensor, fake in self._of.values()}
        return [real.get(id(fake), fake) for fake in fakes]

    def drop(self) -> None:
        """Let go of everything."""
        self._of.clear()
        self._storages.clear()
        self._keys.clear()

    def new(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """A stand-in for a tensor that does not exist."""
        with no_dispatch():  # or a mode that is on would make it a tensor of its own
            empty = torch.empty(shape, dtype=dtype, device=_META)
        return FakeTensor(self.mode, empty, device)

    def _make(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        if _is_known_number(tensor) and (device or tensor.device).type == "cpu":
            with no_dispatch():
                number = tensor.clone()  # flags and counters are asked for in forwards; the copy may be counted up
            return known_number(self.mode, number)
        fake = self._plain(tensor, device) if _is_plain(tensor) else self._exotic(tensor)
        if issubclass(type(tensor), nn.Parameter) or getattr(tensor, "_is_param", False):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        for name, value in tensor.__dict__.items():  # what users wrote on it, such as a name
            fake.__dict__.setdefault(name, value)
        return fake

    def _plain(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        with no_dispatch():
            empty = torch.empty(0, dtype=tensor.dtype, device=_META).set_(self._storage(tensor), *layout)
        where = device or tensor.device
        return FakeTensor(self.mode, empty, self.home if where.type == "meta" else where)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        real = tensor.untyped_storage()
        if real._cdata not in self._storages:
            fake = torch.UntypedStorage(real.nbytes(), device=_META)
            self._storages[real._cdata] = (real, fake)
            self._keys.add(fake._cdata)
        return self._storages[real._cdata][1]

    def _exotic(self, tensor: Tensor) -> Tensor:
        try:
            return self.mode.from_tensor(tensor.detach())
        except Exception as error:
            what = f"{type(tensor).__name__}, {str(tensor.layout).removeprefix('torch.')}"
            reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise MemlabError(
            f"PyTorch has no stand-in without data for a tensor of the model or its inputs ({what}): {reason}"
        )


def _is_plain(tensor: Tensor) -> bool:
    with dispatch.DisableTorchFunction():
        plain = type(tensor).__torch_dispatch__ is dispatch.plain_torch_dispatch or is_standin(tensor)
        return (
            plain
            and tensor.layout == torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )


def _is_known_number(tensor: Tensor) -> bool:
    is_number = tensor.device.type == "cpu" and type(tensor) is Tensor and not tensor.requires_grad
    return is_number and _is_plain(tensor) and tensor.numel() == 1


class Copies:
    """Copies of plain containers, with stand-ins in place of the tensors in them; everything else stays what it is.

    With a device the stand-ins are there, wherever the tensors are. Containers that are huge or nested deeply stay.
    """

    def __init__(self, standins: StandIns, device: torch.device | None = None) -> None:
        self.standins = standins
        self._device = device
        self._of: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        """The copy of a value: shared containers stay shared."""
        if is_tensor(value):
            return self.standins.of(value, self._device)
        kind = type(value)
        if kind is weakref.ref and is_tensor(
            value()
        ):  # by which recurrent layers see whether their weights were exchanged
            return weakref.ref(self.of(value()))
        if kind not in _CONTAINERS or depth > _DEPTH or len(value) > _ITEMS:
            return value
        if id(value) not in self._of:
            self._of[id(value)] = (value, value)  # a tuple that holds itself through a list stays as it is
            self._fill(value, kind, depth + 1)
        return self._of[id(value)][1]

    def _fill(self, value: Any, kind: type, depth: int) -> None:
        if kind is tuple:
            self._of[id(value)] = (value, tuple(self.of(item, depth) for item in value))
            return
        copy = _empty(value, kind)
        self._of[id(value)] = (value, copy)  # before its items, which may hold it
        if issubclass(kind, dict):
            copy.update((key, self.of(item, depth)) for key, item in list(value.items()))
        elif kind is set:
            copy.update(value)
        else:
            copy.extend(self.of(item, depth) for item in list(value))


_DEPTH = 50
_ITEMS = 100_000
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)


def _empty(value: Any, kind: type) -> Any:
    if kind is defaultdict:
        return defaultdict(value.default_factory)
    return deque(maxlen=value.maxlen) if kind is deque else kind()


@contextlib.contextmanager
def swapped(modules: list[nn.Module], copies: Copies) -> Iterator[None]:
    """Within it the modules hold stand-ins, and what they change of themselves they change in copies.

    Each module's `__dict__` is exchanged for a copy and put back as it was: mode, buffers, hooks, attributes, lists.
    """
    originals = [module.__dict__ for module in modules]
    hooks = [_hooks(original) for original in originals]
    try:
        for module, original in zip(modules, originals, strict=True):
            copy = {name: copies.of(value) for name, value in original.items()}
            copy["_compiled_call_impl"] = None  # compiled in place: sized as it is written
            if issubclass(type(module), nn.RNNBase) and copies.standins.home.type == "cuda":
                copy["dropout"] = 0.0  # cuDNN keeps the state of its dropout for the whole process
            object.__setattr__(module, "__dict__", copy)
        yield
    finally:
        try:
            _put_back(modules, originals, hooks)
        except KeyboardInterrupt:  # nothing may keep the model from getting its tensors back
            _put_back(modules, originals, hooks)
            raise


def _put_back(modules: list[nn.Module], originals: list[dict[str, Any]], hooks: list[_Tables]) -> None:
    for module, original, before in zip(modules, originals, hooks, strict=True):
        object.__setattr__(module, "__dict__", original)
        for table, content in before:
            if table.keys() != content.keys():
                table.clear()
                table.update(content)


_Tables = list[tuple[dict[Any, Any], dict[Any, Any]]]


def _hooks(attributes: dict[str, Any]) -> _Tables:
    """The tables of hooks and what is in them: a hook may take itself away through its handle, which knows the table."""
    tables = (value for name, value in attributes.items() if name.endswith(("_hooks", "_hooks_with_kwargs")))
    return [(table, dict(table)) for table in tables if isinstance(table, dict) and table]
