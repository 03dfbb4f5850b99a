"""Copies of pretend tensors as CUDA makes them: `copy.deepcopy` clones whole storages, pickling brings no values along."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memlab.predictor.pretend.tensors import CUDA0
from memlab.seams.dispatch import TensorBase


def deepcopy(tensor: Any, memo: dict[Any, Any]) -> Any:
    """As `torch.Tensor.__deepcopy__` and `nn.Parameter.__deepcopy__`, with their allocations."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    with torch.no_grad():
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(tensor.detach().clone(memory_format=torch.preserve_format), tensor.requires_grad)
        else:
            made = _on_copied_storage(tensor, memo).requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                made.grad = deepcopy(tensor.grad, memo)
    for name, value in tensor.__dict__.items():
        made.__dict__.setdefault(name, value)
    memo[id(tensor)] = made
    return made


def _on_copied_storage(tensor: Any, memo: dict[Any, Any]) -> Any:
    """The same view of a copy of the storage; views that are copied together share the copy."""
    storage = TensorBase.untyped_storage(tensor)
    key = ("storage of pretend tensors", id(storage))
    base = memo.get(key)
    if base is None or base[0]() is not storage:
        whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=CUDA0)
        base = memo[key] = (weakref.ref(storage), whole)
    made = torch.empty((), dtype=tensor.dtype, device=CUDA0)  # `self.new_empty([])` in torch/_tensor.py
    return made.set_(TensorBase.untyped_storage(base[1]), tensor.storage_offset(), tensor.shape, tensor.stride())


# --- pickling ---------------------------------------------------------------------------------------------------------


class Saved:
    """A storage in a pickle: pickle writes one object once, so what shared the storage shares it again."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        return restored, (self.storage.nbytes(),)


_being_saved: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()


def reduced(tensor: Any) -> Any:
    """What pickle writes of a pretend tensor: its looks and its storage, without data."""
    storage = TensorBase.untyped_storage(tensor)
    saved = _being_saved.get(id(storage))
    if saved is None:
        saved = _being_saved[id(storage)] = Saved(storage)
    looks = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, tensor.requires_grad)
    return rebuilt, (saved, *looks, isinstance(tensor, torch.nn.Parameter))


def restored(nbytes: int) -> Any:
    """A storage again, as a tensor of bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=CUDA0)


def rebuilt(
    whole: Any, shape: Any, stride: Any, offset: int, dtype: Any, requires_grad: bool, is_parameter: bool
) -> Any:
    """A pretend tensor again."""
    with torch.no_grad():
        made = whole.view(dtype) if not whole.numel() else _on(whole, dtype, offset, shape, stride)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _on(whole: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> Any:
    made = torch.empty(0, dtype=dtype, device=whole.device)
    return made.set_(TensorBase.untyped_storage(whole), offset, shape, stride)


SAFE = (restored, rebuilt)
"""What `torch.load` has to call for pretend tensors."""


def moved(value: Any, device: Any, storages: dict[int, Any] | None = None) -> Any:
    """What `torch.load(map_location=...)` gives: tensors on another device, each storage moved once."""
    storages = {} if storages is None else storages
    if isinstance(value, torch.Tensor):
        return value if value.device == device else _moved(value, device, storages)
    if type(value) in (list, tuple):
        return type(value)(moved(one, device, storages) for one in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = moved(value[key], device, storages)
    return value


def _moved(tensor: Any, device: Any, storages: dict[int, Any]) -> Any:
    storage = TensorBase.untyped_storage(tensor)
    known = storages.get(id(storage))
    if known is None:
        whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        known = storages[id(storage)] = (storage, whole)
    made = _on(known[1], tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
    needs_grad = tensor.requires_grad
    return (
        torch.nn.Parameter(made, needs_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else made.requires_grad_(needs_grad)
    )
