"""GPUs for tests of fake CUDA, and what a call allocates and frees on them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memlab.trace.columns import Kind

GIB = 1 << 30


def card(total_bytes: int = 8 * GIB, capability: tuple[int, int] = (8, 6), multiprocessors: int = 28) -> Any:
    """A card with the attributes that fake CUDA asks for."""
    return SimpleNamespace(
        name="Fake 8", total_bytes=total_bytes, usable_bytes=total_bytes, compute_capability=capability,
        context_bytes=(0, 0), multiprocessors=multiprocessors,
    )  # fmt: skip


def logged(fake: Any, body: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What a call gives, and its log: sizes of allocations, and of frees as negative numbers."""
    fake.log.record_frees()
    before = len(fake.log)
    result = body()
    columns = fake.log.columns()
    is_free = columns["kind"][before:] == Kind.FREE
    return result, [
        int(-size if free else size) for size, free in zip(columns["nbytes"][before:], is_free, strict=True)
    ]


def alive(fake: Any) -> int:
    """Bytes of fake storages alive, as the allocator running along says."""
    fake.log.record_frees()
    return int(fake.log.allocator.requested_bytes)
