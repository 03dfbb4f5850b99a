"""The storages behind a tensor, whatever its layout or class, and tensors found in what a model takes and gives.

Limits: a tensor of a layout that has no storage (oneDNN's own) has no bytes here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from memlab.seams.fakes import unwrapped, wraps_others


def is_tensor(thing: Any) -> bool:
    """Asks the class, as proxies answer `isinstance` with code of their own."""
    return issubclass(type(thing), Tensor)


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, its indices and values, or what its class wraps."""
    tensor = unwrapped(tensor)
    if wraps_others(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # its class has it
            yield from parts(getattr(tensor, name))
    elif tensor.layout == torch.strided or tensor.layout == torch.jagged:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Every storage behind a tensor; a storage is known by its `_cdata` while it is alive."""
    return (part.untyped_storage() for part in parts(tensor))


def nbytes(tensor: Tensor) -> int:
    """The bytes of all storages behind a tensor, those of views of it included."""
    return sum(storage.nbytes() for storage in storages(tensor))


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested containers and plain objects, each once; nobody's `__iter__` or `__getattr__` is run."""
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
    kind = type(value)
    if issubclass(kind, dict):
        items = list(dict.values(value))
    elif issubclass(kind, list | tuple):
        items = list(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value))
    elif kind.__module__ == "builtins" or issubclass(kind, type | ModuleType | FunctionType | torch.nn.Module):
        return []
    else:
        items = []
    with contextlib.suppress(AttributeError):  # an object with slots
        items += list(object.__getattribute__(value, "__dict__").values())
    return items
