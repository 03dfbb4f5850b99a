"""The tensors that are alive in this process, found without running the user's code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memlab.torch_internals import dispatch, graph


def live_tensors() -> Iterator[Any]:
    """Every tensor and storage that the garbage collector tracks, and gradients; `__class__` is not read."""
    for thing in tensors_and_storages():
        yield thing
        if not issubclass(type(thing), torch.UntypedStorage):
            grad = grad_of(thing)
            if grad is not None:
                yield grad


def tensors_and_storages() -> list[Any]:
    """Found as the referrers of these classes: an instance refers to its class.

    Not by `gc.get_objects`: that also gives the tuples which other threads are just building (`tuple(generator)`), and
    if anything else refers to one of these, its thread gets a SystemError (seen with CPython 3.11). It is slower, too.
    `isinstance` would ask `__class__`, which proxies answer with code of their own.
    """
    # By their ids: to look a class up itself would run the `__hash__` of its metaclass.
    classes = {id(kind): kind for root in (torch.Tensor, torch.UntypedStorage) for kind in _classes_from(root)}
    counts = {number: sys.getrefcount(kind) for number, kind in classes.items()}
    # Each class takes 2 % of the time, and PyTorch has a dozen that are rarely used. Those found without instances are left
    # out while their reference count stays the same, if all they do is wrap tensors, which are found by themselves: a new
    # instance goes unseen where another reference went away. So never parameters, storages, or the user's own.
    classes = {number: kind for number, kind in classes.items() if _UNUSED.get(number) != counts[number]}
    found = [thing for thing in gc.get_referrers(*classes.values()) if id(type(thing)) in classes]
    for number in classes.keys() - {id(type(thing)) for thing in found}:
        if str(type.__getattribute__(classes[number], "__module__")).startswith(_WRAPPERS):
            _UNUSED[number] = counts[number]
    return found


_WRAPPERS = ("torch.sparse.", "torch.nested.", "torch.masked.", "torch._subclasses.", "torch.testing.")
"""Modules of PyTorch whose tensor classes only wrap other tensors, as of 2.13."""

_UNUSED: dict[int, int] = {}
"""Id of such a class that had no instances at the last search -> its reference count then."""


def _classes_from(root: type) -> Iterator[type]:
    """A class and all its subclasses."""
    yield root
    derived: list[type] = type.__subclasses__(root)
    for kind in derived:
        yield from _classes_from(kind)


def grad_of(tensor: Any) -> Any:
    """The gradient of a leaf, None if there is none; calls nothing that a subclass overrides."""
    if tensor is None:
        return None
    with dispatch.DisableTorchFunction():
        try:
            return dispatch.TensorBase.grad.__get__(tensor) if dispatch.TensorBase.is_leaf.__get__(tensor) else None
        except RuntimeError:
            return None


def is_leaf(tensor: Any) -> bool:
    """Whether no graph made a tensor; also where PyTorch refuses to say, as for views of what FSDP1 has flattened."""
    try:
        return bool(graph.is_leaf(tensor))
    except RuntimeError:
        return True


def holds_memory(storage: Any) -> bool:
    """Whether a storage has memory; that of a wrapper subclass has a size only.

    Not for plain tensors: reading the address materializes a lazily copied storage.
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
