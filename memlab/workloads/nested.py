"""Tensors inside of what holds them: tuples, lists, dicts, dataclasses, and their kinds, as models take and give them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with every tensor changed: a named tuple stays one, a dict of a class of its own too. Other things stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        return _filled(value, change)
    if isinstance(value, list | tuple):
        made = [mapped(one, change) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replaced(value, change)
    return value


def _filled(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy, as only that keeps the class and what else it has: outputs and batches of libraries are such dicts."""
    made = copy.copy(value)
    for key in list(value):
        made[key] = mapped(value[key], change)
    return made


def _replaced(value: Any, change: Callable[[Tensor], Any]) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(made, field.name, mapped(getattr(value, field.name), change))  # a frozen one, too
    return made


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in it."""
    found: list[Tensor] = []
    mapped(value, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return found
