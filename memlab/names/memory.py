"""What memory tensors stand for: their storages, each once, with the little that can be asked without running anything.

Parameters, gradients and what a graph keeps are told by the tensors themselves; buffers and optimizer state are not, that
is for who walks from the notebook's names. Memory behind opaque tensors (mkldnn) is named, and not counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab.names.living import describe, holds_memory
from memlab.seams import dispatch, graph

TensorBase: Any = dispatch.TensorBase
_storage: Any = TensorBase.untyped_storage
_shape, _dtype, _layout = TensorBase.shape.__get__, TensorBase.dtype.__get__, TensorBase.layout.__get__
_is_leaf, _keeps_grad = TensorBase.is_leaf.__get__, TensorBase.retains_grad.__get__
_grad: Any = TensorBase.grad.__get__
_numel: Any = TensorBase.numel
_mro: Any = type.__dict__["__mro__"].__get__
_attributes: Any = type.__dict__["__dict__"].__get__
_dtype_name = functools.cache(lambda dtype: str(dtype).removeprefix("torch."))

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer", "activation", "other")
"""The first that fits is what a storage is called."""
PARAMETER, BUFFER, GRADIENT, OPTIMIZER, ACTIVATION, OTHER = range(6)


@dataclass(slots=True)
class Memory:
    """One storage while it is being looked at: the tensor that shows most of it gives shape and dtype.

    `is_saved` where a graph keeps it, `is_plain` where anything but a graph was seen to.
    """

    key: int
    device: str
    nbytes: int
    address: int = 0
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    shown_bytes: int = -1
    category: int = OTHER
    is_saved: bool = False
    is_plain: bool = False

    @property
    def called(self) -> str:
        """The category, in a word."""
        saved = self.category == OTHER and self.is_saved and not self.is_plain
        return CATEGORIES[ACTIVATION if saved else self.category]


@dataclass(frozen=True, slots=True)
class _Class:
    """What is true of all tensors of a class. `is_plain` where asking one for its sizes runs nobody's code."""

    kind: type
    is_storage: bool
    is_plain: bool
    category: int

    @classmethod
    def of(cls, kind: type) -> _Class:
        """Ask the class, not what it says of itself."""
        derived = _mro(kind)
        if any(base is torch.UntypedStorage for base in derived):
            return cls(kind, True, False, OTHER)
        own: Any = next((one for base in derived if "__torch_dispatch__" in (one := _attributes(base))), {})
        is_plain = own.get("__torch_dispatch__") is dispatch.plain_torch_dispatch
        return cls(kind, False, is_plain, PARAMETER if any(base is torch.nn.Parameter for base in derived) else OTHER)


class Books:
    """Storage key -> Memory of all tensors that were entered, and what could not be inspected."""

    def __init__(self) -> None:
        self.memory: dict[int, Memory] = {}
        self.unseen: dict[str, int] = {}
        self._classes: dict[int, _Class] = {}
        self._empty: set[int] = set()
        self._keys: dict[int, tuple[int, ...]] = {}
        self.kept: dict[int, Any] = {}

    def enter(self, tensor: Any, category: int = OTHER) -> tuple[int, ...]:
        """Enter the memory of a tensor or storage; the keys of what is behind it, none where that is no memory."""
        keys = self._keys.get(id(tensor))
        if keys is None:
            self.kept[id(tensor)] = tensor  # or its id would be used again
            keys = self._keys[id(tensor)] = self._enter(tensor)
        if category != OTHER:
            for key in keys:
                found = self.memory[key]
                found.category = min(found.category, category)
        return keys

    def tensors(self) -> list[Any]:
        """What has been entered so far."""
        return list(filter(is_tensor, list(self.kept.values())))

    def close(self) -> None:
        """Let go of the tensors; what is known of their memory stays."""
        self.kept.clear()
        self._keys.clear()
        self._classes.clear()

    def _enter(self, tensor: Any) -> tuple[int, ...]:
        try:
            known = self._class(type(tensor))
            return self._bare(tensor) if known.is_storage else self._tensor(tensor, known)
        except (NotImplementedError, RuntimeError):
            return self._parts(tensor)

    def _tensor(self, tensor: Any, known: _Class) -> tuple[int, ...]:
        storage = _storage(tensor)
        key: int = storage._cdata
        found = self.memory.get(key) or self._new(key, storage, tensor)
        if found is None:
            return ()
        category = known.category if known.category != OTHER or _is_leaf(tensor) else ACTIVATION
        if category < found.category:
            found.category = category
        if found.shown_bytes < found.nbytes:
            self._show(found, tensor, known.is_plain)
        return (key,)

    def _new(self, key: int, storage: Any, tensor: Any) -> Memory | None:
        """A storage met for the first time; None where there is no memory behind it."""
        if key in self._empty:
            return None
        nbytes, device = storage.nbytes(), storage.device
        if not nbytes or device.type == "meta" or not (graph.address_of(tensor) or holds_memory(storage)):
            self._empty.add(key)
            return None
        found = self.memory[key] = Memory(key, str(device), nbytes)
        return found

    def _bare(self, storage: Any) -> tuple[int, ...]:
        key: int = storage._cdata
        if key not in self.memory:
            if key in self._empty or not storage.nbytes() or not holds_memory(storage):
                return ()
            self.memory[key] = Memory(key, str(storage.device), storage.nbytes())
        return (key,)

    @staticmethod
    def _show(found: Memory, tensor: Any, is_plain: bool) -> None:
        """Take shape, dtype and address from the tensor that covers most; a class of the user's is not asked for shapes."""
        dtype = _dtype(tensor)
        shown = _numel(tensor) * dtype.itemsize if is_plain else 0
        if shown <= found.shown_bytes:
            return
        found.shown_bytes, found.dtype = shown, _dtype_name(dtype)
        with contextlib.suppress(RuntimeError):  # nested tensors have no shape
            found.shape = tuple(_shape(tensor)) if is_plain else None
        found.address = found.address or graph.address_of(tensor)

    def _class(self, kind: type) -> _Class:
        known = self._classes.get(id(kind))
        if known is None:
            known = self._classes[id(kind)] = _Class.of(kind)
        return known

    def _parts(self, tensor: Any) -> tuple[int, ...]:
        """The memory of what a tensor without one storage of its own consists of."""
        keys: list[int] = []
        for _, part in parts(tensor):
            keys += self.enter(part)
        if not keys:
            self.not_seen(f"a tensor without a storage ({describe(tensor)})")
        return tuple(keys)

    def not_seen(self, what: str) -> None:
        """Take note of something that could not be inspected."""
        self.unseen[what] = self.unseen.get(what, 0) + 1

    def saved(self, keys: Iterable[int]) -> None:
        """A graph keeps these for backward."""
        for key in keys:
            self.memory[key].is_saved = True

    def held(self, keys: Iterable[int]) -> None:
        """Something that is not a graph keeps these."""
        for key in keys:
            self.memory[key].is_plain = True


def parts(tensor: Any) -> Iterator[tuple[str, Any]]:
    """What a tensor without a storage of its own consists of, as (name, tensor): a sparse one, one inside torch.func."""
    try:
        inner = graph.unwrapped(tensor)
        if inner is not None:
            yield "unwrapped", inner
            return
        functions = graph.sparse_parts.get(_layout(tensor), ())
        guards = graph.quiet()
        try:
            found = [(name, function(tensor)) for name, function in functions]
        finally:
            del guards
        yield from found
    except (NotImplementedError, RuntimeError):
        return


def gradient(tensor: Any) -> Any:
    """The gradient of a tensor that has one; other tensors are not asked, as that would warn."""
    try:
        return _grad(tensor) if _is_leaf(tensor) or _keeps_grad(tensor) else None
    except RuntimeError:
        return None


def parts_if_any(tensor: Any) -> Iterator[tuple[str, Any]]:
    """The same, nothing for a tensor that has a storage of its own."""
    try:
        _storage(tensor)
    except (NotImplementedError, RuntimeError):
        yield from parts(tensor)


def base_of(tensor: Any) -> Any:
    """The tensor that a view was taken of, None for others."""
    try:
        return graph.base_of_view(tensor)
    except RuntimeError:
        return None


def is_tensor(thing: Any) -> bool:
    """Whether something is a tensor, by its class and not by what it says."""
    return any(base is TensorBase for base in _mro(type(thing)))


def is_parameter(thing: Any) -> bool:
    """Whether something is an `nn.Parameter`, by its class."""
    return any(base is torch.nn.Parameter for base in _mro(type(thing)))
