"""Allocated bytes over time by category; the layers sum to *allocated* exactly.

The requested bytes of a block count for its category from its allocation until its owner frees it; what the allocator
added is `rounding`. At the peak the layers equal `breakdown(by="category")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memlab.analysis.breakdown import ROUNDING
from memlab.analysis.timeline import Timeline, lives, timeline
from memlab.trace.columns import Array, Category
from memlab.trace.trace import Trace

LAYERS = ("parameter", "buffer", "optimizer", "gradient", "activation", "input", "temporary", "other", ROUNDING)
"""All layers in stacking order: long-lived ones at the bottom."""

_LAYER_OF_CATEGORY = np.array([LAYERS.index(category.name.lower()) for category in Category], "u1")
_ROUNDING = LAYERS.index(ROUNDING)


@dataclass(frozen=True, slots=True, eq=False)
class Areas:
    """The bytes of each layer over time, as step functions; `layers` has those that are ever above 0, in order."""

    time_ns: Array
    layers: Mapping[str, Array]

    @property
    def total_bytes(self) -> Array:
        """The sum of the layers: the allocated curve."""
        return sum(self.layers.values(), np.zeros(len(self.time_ns), np.int64))

    def at(self, index: Array) -> Areas:
        """The same at selected times."""
        return Areas(self.time_ns[index], {name: level[index] for name, level in self.layers.items()})

    def edges(self) -> dict[str, Array]:
        """The upper edge of each layer when they are stacked."""
        tops = np.cumsum(np.reshape([*self.layers.values()], (len(self.layers), len(self.time_ns))), axis=0)
        return dict(zip(self.layers, tops, strict=True))


def has_categories(trace: Trace, device: int) -> bool:
    """Whether any block of this device has a category."""
    if not trace.blocks.category.any() and not len(trace.recategorised):
        return False
    events = trace.events
    mine = events.block[(events.device == device) & (events.block >= 0)]
    return bool(trace.blocks.category[mine].any() or np.isin(trace.recategorised.block, mine).any())


def areas(trace: Trace, device: int, line: Timeline | None = None) -> Areas:
    """The layers at every step of `line`, by default every change of what one device has allocated."""
    line = line or timeline(trace, device)
    stops = np.maximum(line.row, trace.first_row - 1)  # rows, ascending; -1 is the start
    born, died = lives(trace, device)
    known_in = np.where(born >= 0, born, died)  # where the allocation was not seen, only the free tells
    block = np.flatnonzero(known_in < len(trace.events))
    size = np.zeros(len(born), np.int64)
    size[block] = trace.events.requested_bytes[known_in[block]]
    layer = _LAYER_OF_CATEGORY[trace.blocks.category]
    change = np.zeros((len(stops) + 1) * len(LAYERS))  # sums of whole numbers below 2**53 are exact

    def add(row: Array, to: Array, count: Array) -> None:
        change[:] += np.bincount(np.searchsorted(stops, row) * len(LAYERS) + to, count, len(change))

    came = block[born[block] >= 0]
    add(born[came], layer[came], size[came])
    if len(changes := trace.recategorised):  # moved from layer to layer while a block lives
        changes = changes.rows(np.lexsort((changes.row, changes.block)))
        changes = changes.rows((born[changes.block] >= 0) & (changes.row <= died[changes.block]))
        moved, after = changes.block, _LAYER_OF_CATEGORY[changes.category]
        before = np.where(np.diff(moved, prepend=-1) != 0, layer[moved], np.roll(after, 1))
        row = np.maximum(changes.row, born[moved])
        add(row, before, -size[moved])
        add(row, after, size[moved])
        layer[moved] = after  # of several changes of a block the last stays
    add(died[block], layer[block], -size[block])
    levels = np.cumsum(change.reshape(-1, len(LAYERS))[:-1], axis=0).astype(np.int64).T
    levels[_ROUNDING] = line.bytes - levels.sum(axis=0)
    return Areas(line.time_ns, {name: level for name, level in zip(LAYERS, levels, strict=True) if level.any()})
