"""The tensors that are alive in this process, found without running anybody's code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from memlab.seams import dispatch


def living_tensors() -> Iterator[Any]:
    """Every tensor and storage that the garbage collector knows, and gradients; asks no object what it claims to be."""
    for thing in tensors_and_storages():
        yield thing
        if not issubclass(type(thing), torch.UntypedStorage):
            grad = grad_of(thing)
            if grad is not None:
                yield grad


def tensors_and_storages() -> list[Any]:
    """Found as what refers to these classes: an instance refers to its class.

    Not by `gc.get_objects`: that also gives the tuples which other threads are just building (`tuple(generator)`), and
    where somebody else refers to one of these, its thread gets a SystemError (seen with CPython 3.11). It is slower, too.
    `isinstance` would ask `__class__`, which proxies answer with code of their own.
    """
    # By their ids: to look a class up itself would run the `__hash__` of its metaclass.
    kinds = {id(kind): kind for root in (torch.Tensor, torch.UntypedStorage) for kind in _classes_from(root)}
    return [thing for thing in gc.get_referrers(*kinds.values()) if id(type(thing)) in kinds]


def _classes_from(root: type) -> Iterator[type]:
    """A class and all that are derived from it."""
    yield root
    derived: list[type] = type.__subclasses__(root)
    for kind in derived:
        yield from _classes_from(kind)


def grad_of(tensor: Any) -> Any:
    """The gradient of a leaf, None where there is none; asks no subclass."""
    if tensor is None:
        return None
    with dispatch.DisableTorchFunction():
        try:
            return dispatch.TensorBase.grad.__get__(tensor) if dispatch.TensorBase.is_leaf.__get__(tensor) else None
        except RuntimeError:
            return None


def holds_memory(storage: Any) -> bool:
    """Whether there is anything behind a storage; tensors that wrap others have one with a size alone.

    Not for plain tensors, as asking for the address makes a lazily copied storage real.
    """
    try:
        return storage.device.type != "meta" and bool(storage.data_ptr())
    except RuntimeError:
        return False


def describe(tensor: Any) -> str:
    """A tensor's class and layout, for a list of what could not be seen."""
    with dispatch.DisableTorchFunction():
        layout = str(dispatch.TensorBase.layout.__get__(tensor)).removeprefix("torch.")
    return f"{type(tensor).__name__}, {layout}"
