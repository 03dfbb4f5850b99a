"""Pretend cards for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


def card(total_bytes: int = 8 * GIB, capability: tuple[int, int] = (8, 6)) -> Any:
    """A card with the attributes that pretend CUDA asks for."""
    return SimpleNamespace(
        name="Pretend 8", total_bytes=total_bytes, usable_bytes=total_bytes, compute_capability=capability,
        context_bytes=(0, 0), multiprocessors=28,
    )  # fmt: skip
