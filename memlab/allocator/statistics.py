"""What PyTorch counts about its allocator (`torch.cuda.memory_stats`), computed from a journal of the events.

The hot path writes one row per event; current values, peaks and totals are computed when they are read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from memlab.allocator.rules import UNLIMITED, Settings
from memlab.trace.columns import Array

ALLOC, FREE, FREE_PENDING, COMPLETE = range(4)
"""Kinds of rows: allocated, freed at once, freed while other streams use it, completed afterwards."""
SEGMENT, MAP = 4, 5
"""A segment or pages are allocated or released; the size is negative when released."""

Row = tuple[int, bool, int, int, int, int]
"""(what, whether in the small pool, size, requested, change of the number of inactive splits, change of their bytes)"""

FOLD_AT = 1 << 16
"""The journal is folded at this many rows, at 0.3 microseconds a row, to keep memory bounded."""
# What a row adds to these figures, by its kind.
_ALLOCATED, _ACTIVE = np.array([1, -1, -1, 0, 0, 0]), np.array([1, -1, 0, -1, 0, 0])
_SEGMENTS, _RESERVED = np.array([0, 0, 0, 0, 1, 0]), np.array([0, 0, 0, 0, 1, 1])
_COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


@dataclass(slots=True)
class Stat:
    """One figure of one pool, like PyTorch's struct of this name."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def fold(self, changes: Array) -> None:
        """Add changes, in order."""
        self.peak = max(self.peak, self.current + int(np.cumsum(changes).max(initial=0)))
        self.current += int(changes.sum())
        self.allocated += int(changes[changes > 0].sum())
        self.freed -= int(changes[changes < 0].sum())


@dataclass(slots=True)
class Statistics:
    """The figures of one allocator, which writes `journal`."""

    settings: Settings
    journal: list[Row] = field(default_factory=list)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    _stats: defaultdict[str, Stat] = field(default_factory=lambda: defaultdict(Stat))

    def fold(self) -> None:
        """Fold what was written since the last time."""
        what, is_small, size, requested, splits, split_bytes = np.array(self.journal, np.int64).reshape(-1, 6).T
        self.journal.clear()
        allocated, active, segments = _ALLOCATED[what], _ACTIVE[what], _SEGMENTS[what] * np.sign(size)
        by_name = {
            "allocation": allocated,
            "allocated_bytes": allocated * size,
            "active": active,
            "active_bytes": active * size,
            "requested_bytes": active * requested,
            "inactive_split": splits,
            "inactive_split_bytes": split_bytes,
            "segment": segments,
            "reserved_bytes": _RESERVED[what] * size,
        }
        for name, changes in by_name.items():
            self._stats[f"{name}.all"].fold(changes)
            self._stats[f"{name}.small_pool"].fold(changes[is_small == 1])
            self._stats[f"{name}.large_pool"].fold(changes[is_small == 0])
        is_oversize = np.abs(size) >= self.settings.max_split_size
        self._stats["oversize_allocations"].fold(allocated * is_oversize)
        self._stats["oversize_segments"].fold(segments * is_oversize)

    def reset_peaks(self) -> None:
        """Reset the peaks, as `torch.cuda.reset_peak_memory_stats`."""
        self.fold()
        for stat in self._stats.values():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """As `torch.cuda.reset_accumulated_memory_stats`."""
        self.fold()
        for stat in self._stats.values():
            stat.allocated = stat.freed = 0
        for name in _COUNTS:
            setattr(self, name, 0)

    def as_dict(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats`, sorted by key as there."""
        self.fold()
        figures = Stat.__slots__
        found = {f"{name}.{figure}": getattr(stat, figure) for name, stat in self._stats.items() for figure in figures}
        found |= {name: getattr(self, name) for name in _COUNTS} | {"num_oom_rejections": 0}
        found["max_split_size"] = -1 if self.settings.max_split_size == UNLIMITED else self.settings.max_split_size
        return dict(sorted(found.items()))
