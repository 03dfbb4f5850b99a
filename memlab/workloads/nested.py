"""Tensors in nested containers: tuples, lists, dicts, dataclasses and their subclasses, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Map a function over every tensor: named tuples and dict subclasses keep their class. Other values are unchanged."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        # Only a copy keeps the class and its attributes: outputs of some libraries are such dicts.
        made = copy.copy(value)
        for key in list(value):
            made[key] = mapped(value[key], change)
        return made
    if isinstance(value, list | tuple):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, mapped(getattr(value, field.name), change))  # a frozen one, too
        return new
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in it."""
    found: list[Tensor] = []
    mapped(value, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return found
