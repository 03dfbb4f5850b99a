"""The tensors that are alive in this process, found without running anybody's code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from memlab.seams import dispatch


def living_tensors() -> Iterator[Any]:
    """Every tensor and storage that the garbage collector knows, and gradients; asks no object what it claims to be."""
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would ask `__class__`, which proxies answer with code of their own
        if kind is torch.UntypedStorage:
            yield thing
        elif issubclass(kind, torch.Tensor):
            yield thing
            grad = _grad(thing)
            if grad is not None:
                yield grad


def _grad(tensor: Any) -> Any:
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
