"""What PyTorch counts about its allocator (`torch.cuda.memory_stats`), folded from a journal of the events.

The hot path writes one row per event; currents, peaks and totals are told from the rows when somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memlab.allocator.rules import UNLIMITED, Settings
from memlab.trace.columns import Array

ALLOC, FREE, LET_GO, COMPLETE = range(4)
"""What a row says: handed out, given back at once, let go while other streams use it, completed afterwards."""
SEGMENT, MAP = 4, 5
"""A segment comes or goes, pages come or go; the size is negative where they go."""
_SMALL = 8  # added to a row's code where it concerns the small pool

Row = tuple[int, int, int, int, int]
"""(what, size, requested, change of the number of inactive splits, change of their bytes)"""

FOLD_AT = 1 << 16
"""From so many rows on the journal is folded: it costs 0.3 microseconds a row and keeps memory bounded."""
_NAMES = (
    "allocation",
    "allocated_bytes",
    "active",
    "active_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "segment",
    "reserved_bytes",
)
_SIGNS = {  # of the columns above, by what a row says
    "allocated": np.array([1, -1, -1, 0, 0, 0]),
    "active": np.array([1, -1, 0, -1, 0, 0]),
    "segment": np.array([0, 0, 0, 0, 1, 0]),
    "reserved": np.array([0, 0, 0, 0, 1, 1]),
}
_POOLS = ("all", "small_pool", "large_pool")


def code(what: int, is_small: bool) -> int:
    """The first number of a row."""
    return what + _SMALL * is_small


@dataclass(slots=True)
class Stat:
    """One figure of one pool, as PyTorch's struct of this name."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def move(self, change: int) -> None:
        """Add to it."""
        self.current += change
        self.peak = max(self.peak, self.current)
        self.allocated += max(change, 0)
        self.freed += max(-change, 0)

    def fold(self, changes: Array) -> None:
        """The same for changes in order."""
        self.peak = max(self.peak, self.current + int(np.cumsum(changes).max(initial=0)))
        self.current += int(changes.sum())
        self.allocated += int(changes[changes > 0].sum())
        self.freed -= int(changes[changes < 0].sum())


@dataclass(slots=True)
class Statistics:
    """The figures of one allocator; `journal` is written by it and read here."""

    settings: Settings
    journal: list[Row] = field(default_factory=list)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    _stats: dict[tuple[str, str], Stat] = field(default_factory=dict)
    _oversize: dict[str, Stat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stats = {(name, pool): Stat() for name in _NAMES for pool in _POOLS}
        self._oversize = {name: Stat() for name in ("oversize_allocations", "oversize_segments")}

    def fold(self) -> None:
        """Read what was written since the last time."""
        if not self.journal:
            return
        rows = np.array(self.journal, np.int64)
        self.journal.clear()
        is_small, what = rows[:, 0] >= _SMALL, rows[:, 0] % _SMALL
        for name, changes in _changes(what, rows).items():
            for pool, chosen in (("all", slice(None)), ("small_pool", is_small), ("large_pool", ~is_small)):
                self._stats[name, pool].fold(changes[chosen])
        self._fold_oversize(what, rows[:, 1])

    def _fold_oversize(self, what: Array, size: Array) -> None:
        if self.settings.max_split_size == UNLIMITED:
            return
        is_large = np.abs(size) >= self.settings.max_split_size
        self._oversize["oversize_allocations"].fold(_SIGNS["allocated"][what] * is_large)
        self._oversize["oversize_segments"].fold(_SIGNS["segment"][what] * np.sign(size) * is_large)

    def reset_peaks(self) -> None:
        """From here on peaks are counted anew, as after `torch.cuda.reset_peak_memory_stats`."""
        self.fold()
        for stat in (*self._stats.values(), *self._oversize.values()):
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """As `torch.cuda.reset_accumulated_memory_stats`."""
        self.fold()
        for stat in (*self._stats.values(), *self._oversize.values()):
            stat.allocated = stat.freed = 0
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0

    def as_dict(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats`, sorted by key as there."""
        self.fold()
        found = {
            f"{name}.{pool}.{figure}": getattr(stat, figure)
            for (name, pool), stat in self._stats.items()
            for figure in Stat.__slots__
        }
        found |= {
            f"{name}.{figure}": getattr(stat, figure)
            for name, stat in self._oversize.items()
            for figure in Stat.__slots__
        }
        counts = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
        found |= {name: getattr(self, name) for name in counts} | {"num_oom_rejections": 0}
        found["max_split_size"] = -1 if self.settings.max_split_size == UNLIMITED else self.settings.max_split_size
        return dict(sorted(found.items()))


def _changes(what: Array, rows: Array) -> dict[str, Array]:
    """Name of a figure -> by how much each row changes it."""
    size, requested, splits, split_bytes = (rows[:, column] for column in range(1, 5))
    allocated, active = _SIGNS["allocated"][what], _SIGNS["active"][what]
    segment = _SIGNS["segment"][what] * np.sign(size)
    return {
        "allocation": allocated,
        "allocated_bytes": allocated * size,
        "active": active,
        "active_bytes": active * size,
        "requested_bytes": active * requested,
        "inactive_split": splits,
        "inactive_split_bytes": split_bytes,
        "segment": segment,
        "reserved_bytes": _SIGNS["reserved"][what] * size,
    }
