"""The storages behind tensors, each once, with what can be read without running the user's code.

A tensor shows that it is a parameter, a gradient or saved by a graph. Buffers and optimizer state are found by walking from
the notebook's names. Memory behind opaque tensors (mkldnn) is listed but not counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab.references.live_tensors import describe, holds_memory
from memlab.torch_internals import dispatch, graph, sharded

TensorBase: Any = dispatch.TensorBase
_storage, _numel = TensorBase.untyped_storage, TensorBase.numel
_shape, _dtype, _layout = TensorBase.shape.__get__, TensorBase.dtype.__get__, TensorBase.layout.__get__
_is_leaf, _keeps_grad, _grad = graph.is_leaf, TensorBase.retains_grad.__get__, TensorBase.grad.__get__
_dtype_name = functools.cache(lambda dtype: str(dtype).removeprefix("torch."))
mro_of: Any = type.__dict__["__mro__"].__get__
attributes_of_class: Any = type.__dict__["__dict__"].__get__

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer", "activation", "other")
"""A storage gets the first category that fits."""
PARAMETER, BUFFER, GRADIENT, OPTIMIZER, ACTIVATION, OTHER = range(6)


def derives(kind: type, base: Any) -> bool:
    """Whether a class is derived from another, without asking their metaclasses."""
    return any(one is base for one in mro_of(kind))


def is_tensor(thing: Any) -> bool:
    """Whether something is a tensor, by its type and not by its `__class__`."""
    return derives(type(thing), TensorBase)


def asked(getter: Callable[[Any], Any], tensor: Any) -> Any:
    """The value of a getter for a tensor, None where PyTorch raises."""
    try:
        return getter(tensor)
    except RuntimeError:
        return None


def gradient(tensor: Any) -> Any:
    """The gradient of a tensor that keeps one; reading it from others would warn."""
    try:
        return _grad(tensor) if _is_leaf(tensor) or _keeps_grad(tensor) else None
    except RuntimeError:
        return None


def parts(tensor: Any) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) parts of a tensor without a storage of its own: a sparse one, one inside torch.func."""
    try:
        inner = graph.unwrapped(tensor)
        if inner is not None:
            yield "unwrapped", inner
            return
        guards = graph.quiet()
        try:
            found = [(name, function(tensor)) for name, function in graph.sparse_parts.get(_layout(tensor), ())]
        finally:
            del guards
        yield from found
    except (NotImplementedError, RuntimeError):
        return


def parts_if_any(tensor: Any) -> Iterator[tuple[str, Any]]:
    """The same; nothing for a tensor with a storage of its own."""
    try:
        _storage(tensor)
    except (NotImplementedError, RuntimeError):
        yield from parts(tensor)


@dataclass(slots=True)
class Memory:
    """One storage; its shape and dtype are those of the tensor that covers most of it.

    `is_saved` if a graph holds it, `is_plain` if something else does.
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
        """The name of its category."""
        saved = self.category == OTHER and self.is_saved and not self.is_plain
        return CATEGORIES[ACTIVATION if saved else self.category]


class StorageTable:
    """The storages of all tensors entered, by key, and what could not be inspected."""

    def __init__(self) -> None:
        self.memory: dict[int, Memory] = {}
        self.unseen: dict[str, int] = {}
        self.kept: dict[int, Any] = {}
        self._classes: dict[int, tuple[type, bool, bool, int]] = {}
        self._empty: set[int] = set()
        self._keys: dict[int, tuple[int, ...]] = {}

    def enter(self, tensor: Any, category: int = OTHER) -> tuple[int, ...]:
        """Add a tensor or storage; return the keys of its storages, none if it has no memory."""
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
        """The storages so far."""
        return list(filter(is_tensor, list(self.kept.values())))

    def close(self) -> None:
        """Drop the tensors; the facts about their memory stay."""
        self.kept.clear()
        self._keys.clear()
        self._classes.clear()

    def _enter(self, tensor: Any) -> tuple[int, ...]:
        kind = type(tensor)
        _, is_storage, is_plain, category = self._classes.get(id(kind)) or self._learn(kind)
        if not is_plain and not is_storage and (local := sharded.local_tensor(tensor)) is not tensor:
            return self.enter(local, PARAMETER if sharded.is_parameter(tensor) else OTHER)
        try:
            storage = tensor if is_storage else _storage(tensor)
            key: int = graph.storage_key(storage)
            found = self.memory.get(key) or self._new(key, storage, None if is_storage else tensor)
            if found is None:
                return ()
            if not is_storage:
                if category == OTHER and not _is_leaf(tensor):
                    category = ACTIVATION
                found.category = min(found.category, category)
                if found.shown_bytes < found.nbytes:
                    self._show(found, tensor, is_plain)
            return (key,)
        except (NotImplementedError, RuntimeError):  # it has no single storage of its own
            keys = tuple(key for _, part in parts(tensor) for key in self.enter(part))
            if not keys:
                self.not_seen(f"a tensor without a storage ({describe(tensor)})")
            return keys

    def _learn(self, kind: type) -> tuple[type, bool, bool, int]:
        """(class, whether it is a storage, whether reading sizes of its instances runs no code of the user, its category)."""
        classes = map(attributes_of_class, mro_of(kind))
        own: Any = next((one for one in classes if "__torch_dispatch__" in one), {})
        is_plain = own.get("__torch_dispatch__") is dispatch.plain_torch_dispatch
        category = PARAMETER if derives(kind, torch.nn.Parameter) else OTHER
        found = self._classes[id(kind)] = kind, derives(kind, torch.UntypedStorage), is_plain, category
        return found

    def _new(self, key: int, storage: Any, tensor: Any) -> Memory | None:
        """A new storage; None if it has no memory."""
        if key in self._empty:
            return None
        nbytes, device = storage.nbytes(), storage.device
        is_there = nbytes and device.type != "meta"
        is_there = is_there and ((tensor is not None and graph.address_of(tensor)) or holds_memory(storage))
        if not is_there:
            if tensor is not None:
                self._empty.add(key)
            return None
        found = self.memory[key] = Memory(key, str(device), nbytes)
        return found

    @staticmethod
    def _show(found: Memory, tensor: Any, is_plain: bool) -> None:
        """Take shape, dtype and address from the tensor that covers most; tensors of the user's classes give no shape."""
        dtype = _dtype(tensor)
        shown = _numel(tensor) * dtype.itemsize if is_plain else 0
        if shown <= found.shown_bytes:
            return
        found.shown_bytes, found.dtype = shown, _dtype_name(dtype)
        with contextlib.suppress(RuntimeError):  # nested tensors have no shape
            found.shape = tuple(_shape(tensor)) if is_plain else None
        found.address = found.address or graph.address_of(tensor)

    def not_seen(self, what: str) -> None:
        """Count something that could not be inspected."""
        self.unseen[what] = self.unseen.get(what, 0) + 1

    def saved(self, keys: Iterable[int]) -> None:
        """Mark these as saved by a graph."""
        for key in keys:
            self.memory[key].is_saved = True

    def held(self, keys: Iterable[int]) -> None:
        """Mark these as held by something other than a graph."""
        for key in keys:
            self.memory[key].is_plain = True
