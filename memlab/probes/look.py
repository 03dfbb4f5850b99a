"""One look at the CUDA allocator: a snapshot with the counters around it, which tell whether anything happened meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab import seams
from memlab.probes.counters import cuda_counters
from memlab.probes.stillness import uninterrupted

Counts = tuple[int, int]
"""Allocations and frees that a device has ever seen, by its counters."""


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot and the counters around it, a pair for each device."""

    shot: dict[str, Any]
    before: list[Counts]
    after: list[Counts]

    @property
    def is_settled(self) -> bool:
        """Whether nothing happened meanwhile: segments and entries are read one after the other."""
        return self.before == self.after


def take_look(snapshot: Callable[[], dict[str, Any]]) -> Look:
    """A snapshot, during which no other thread allocated if that can be had within a few tries."""
    with uninterrupted():
        for _ in range(4):
            before = all_counts()
            look = Look(snapshot(), before, all_counts())
            if look.is_settled:
                break
    return look


def alloc_and_free_count(device: int) -> Counts:
    """How many allocations and frees a device has ever seen: equal before and after means that nothing happened."""
    counts = cuda_counters(device)
    return counts["alloc_count"], counts["free_count"]


def difference(now: Counts, before: Counts) -> Counts:
    """How many allocations and frees lie between two counts."""
    return now[0] - before[0], now[1] - before[1]


def all_counts() -> list[Counts]:
    """The counts of every device."""
    return [alloc_and_free_count(device) for device in range(seams.device_count())]


def segments_of(shot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    """The segments of one device in a snapshot."""
    return [segment for segment in shot["segments"] if segment["device"] == device]


def counters_as_snapshot() -> dict[str, Any]:
    """Where an allocator has no snapshots: all that is allocated as one block, all that is reserved as one segment."""
    segments = []
    for device in range(len(all_counts())):
        counters = cuda_counters(device)
        allocated, reserved = (max(counters[name], 0) for name in ("allocated", "reserved"))
        blocks = [{"address": 0, "size": allocated, "state": "active_allocated"}] if allocated else []
        facts = {"device": device, "address": 0, "total_size": reserved, "allocated_size": allocated}
        segments.append({**facts, "blocks": blocks})
    return {"segments": segments, "device_traces": [[] for _ in segments], "allocator_settings": {}}
