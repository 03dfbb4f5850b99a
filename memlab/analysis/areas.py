"""Who held the allocated bytes over time: the level of each category, which together are *allocated* to the byte.

What an allocated block requested counts for its category from when it comes until its owner lets go; what the allocator
added is `rounding`. At the peak the layers are what `breakdown(by="category")` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from memlab.analysis.breakdown import ROUNDING
from memlab.analysis.timeline import Timeline, timeline
from memlab.trace.columns import Array, Category, Kind, deltas
from memlab.trace.trace import Trace

LAYERS = ("parameter", "buffer", "optimizer", "gradient", "activation", "input", "temporary", "other", ROUNDING)
"""Every layer there can be, in the order in which they are stacked: what stays lies below what moves."""

_LAYER_OF_CATEGORY = np.array([LAYERS.index(category.name.lower()) for category in Category], "u1")
_ROUNDING = LAYERS.index(ROUNDING)
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Areas:
    """The bytes of each layer at some moments, as stairs; `layers` has those that ever hold something, in order."""

    time_ns: Array
    layers: Mapping[str, Array]

    @property
    def total_bytes(self) -> Array:
        """The sum of the layers: the allocated curve."""
        return sum(self.layers.values(), np.zeros(len(self.time_ns), np.int64))

    def at(self, index: Array) -> Areas:
        """The same at some of its moments only."""
        return Areas(self.time_ns[index], {name: level[index] for name, level in self.layers.items()})

    def edges(self) -> dict[str, Array]:
        """The upper edge of each layer when they are stacked."""
        tops = np.cumsum(np.reshape([*self.layers.values()], (len(self.layers), len(self.time_ns))), axis=0)
        return dict(zip(self.layers, tops, strict=True))


def has_categories(trace: Trace, device: int) -> bool:
    """Whether anybody told the category of a block of this device."""
    if not trace.blocks.category.any() and not len(trace.recategorised):
        return False
    events = trace.events
    mine = events.block[(events.device == device) & (events.block >= 0)]
    return bool(trace.blocks.category[mine].any() or np.isin(trace.recategorised.block, mine).any())


def areas(trace: Trace, device: int, line: Timeline | None = None) -> Areas:
    """The layers at every step of `line`, by default every change of what one device has allocated."""
    line = line or timeline(trace, device)
    levels = _levels(trace, device, line.row)
    held = {name: level for name, level in zip(LAYERS, levels, strict=True) if level.any()}
    return Areas(line.time_ns, held)


def _levels(trace: Trace, device: int, rows: Array) -> Array:
    """Layer by layer the bytes after each of these events (ascending; -1 is the start)."""
    stops = np.maximum(rows, trace.first_row - 1)
    size, layer = _requested(trace, device), _LAYER_OF_CATEGORY[trace.blocks.category]
    change = np.zeros((len(stops) + 1) * len(LAYERS))  # sums of whole numbers below 2**53 are exact

    def add(row: Array, to: Array | int, count: Array) -> None:
        cell = np.searchsorted(stops, row) * len(LAYERS) + to
        first = int(cell.min(initial=len(change)))
        sums = np.bincount(cell - first, count)
        change[first : first + len(sums)] += sums

    for begin in range(0, len(trace.events), _ROWS_AT_ONCE):
        events = trace.events.rows(slice(begin, begin + _ROWS_AT_ONCE))
        moved = np.where(events.device == device, deltas(events, "allocated"), 0)
        row = np.flatnonzero(moved)
        moved, block = moved[row], events.block[row]
        own = np.sign(moved) * size[block]
        add(row + begin, layer[block], own)
        add(row + begin, _ROUNDING, moved - own)
    for row, block, before, after in _transfers(trace, device, layer):
        add(row, before, -size[block])
        add(row, after, size[block])
    return np.cumsum(change.reshape(-1, len(LAYERS))[:-1], axis=0).astype(np.int64).T


def _requested(trace: Trace, device: int) -> Array:
    """What each block of a device requested."""
    events = trace.events
    size = np.zeros(len(trace.blocks), np.int64)
    for kinds in ((Kind.FREE,), (Kind.ADOPT, Kind.ALLOC)):  # of a block that nobody saw coming, only the end tells
        rows = np.isin(events.kind, kinds) & (events.device == device)
        size[events.block[rows]] = events.requested_bytes[rows]
    return size


def _transfers(trace: Trace, device: int, layer: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
    """(row, block, from layer, to layer): each change of a living block's category, and back again where it goes."""
    changes = trace.recategorised
    if not len(changes):
        return
    begin, end = lives(trace, device)
    changes = changes.rows(np.lexsort((changes.row, changes.block)))
    changes = changes.rows((begin[changes.block] >= 0) & (changes.row <= end[changes.block]))
    block, after = changes.block, _LAYER_OF_CATEGORY[changes.category]
    is_first = np.diff(block, prepend=-1) != 0
    before = np.where(is_first, layer[block], np.roll(after, 1))
    yield np.maximum(changes.row, begin[block]), block, before, after
    yield end[block], block, after, before


def lives(trace: Trace, device: int) -> tuple[Array, Array]:
    """Of each block the row in which it comes (-1: never), and in which it goes (past the last one: it stays)."""
    events = trace.events
    begin, end = np.full(len(trace.blocks), -1), np.full(len(trace.blocks), len(events))
    held = (events.device == device) & (events.allocated_bytes > 0)
    for kinds, column in (((Kind.ADOPT, Kind.ALLOC), begin), ((Kind.FREE, Kind.FREE_PENDING), end)):
        rows = np.flatnonzero(held & np.isin(events.kind, kinds))
        column[events.block[rows]] = rows
    return begin, end
