"""Bytes over time: the level of allocated or reserved memory after every event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.trace.columns import Array, Kind, deltas
from memlab.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A step function: from `time_ns[i]` on the level is `bytes[i]`. The first step is the start, at time 0, with row -1."""

    time_ns: Array
    bytes: Array
    row: Array
    end_ns: int

    @property
    def start_bytes(self) -> int:
        """The level before the first event."""
        return int(self.bytes[0])

    @property
    def end_bytes(self) -> int:
        """The level after the last event."""
        return int(self.bytes[-1])

    def at_row(self, row: int) -> int:
        """The level after event `row`."""
        return int(self.bytes[int(np.searchsorted(self.row, row, side="right")) - 1])

    def without(self, left_out: Array) -> Array:
        """The levels without the changes of the steps that are marked as left out."""
        changes = np.diff(self.bytes, prepend=0)
        changes[1:][left_out] = 0
        levels: Array = np.cumsum(changes)
        return levels


def timeline(trace: Trace, device: int, of: str = "allocated") -> Timeline:
    """The level of one device over the run; `of` is "allocated", "requested" or "reserved"."""
    mine = np.flatnonzero(trace.events.device == device)
    change = deltas(trace.events, of)[mine]
    before = mine < trace.first_row
    start = int(change[before].sum())
    moves = ~before & (change != 0)
    row, change = mine[moves], change[moves]
    return Timeline(
        time_ns=np.concatenate(([0], trace.events.time_ns[row])),
        bytes=np.concatenate(([start], start + np.cumsum(change))),
        row=np.concatenate(([-1], row)),
        end_ns=max(trace.made_by.duration_ns, int(trace.events.time_ns[row[-1]]) if len(row) else 0),
    )


def lives(trace: Trace, device: int) -> tuple[Array, Array]:
    """The rows in which each block is allocated (-1: never) and freed (past the last row: not freed)."""
    events = trace.events
    begin, end = np.full(len(trace.blocks), -1), np.full(len(trace.blocks), len(events))
    held = (events.device == device) & (events.allocated_bytes > 0)
    for (one, other), column in (((Kind.PREEXISTING, Kind.ALLOC), begin), ((Kind.FREE, Kind.FREE_PENDING), end)):
        # np.isin takes three times as long.
        rows = np.flatnonzero(held & ((events.kind == one) | (events.kind == other)))
        column[events.block[rows]] = rows
    return begin, end


def highest(level: Array, first: Array, end: Array) -> Array:
    """The highest of `level[first:end]` for each pair of them; none of these stretches is empty."""
    edges = np.stack((first, end), axis=1).ravel()
    return np.maximum.reduceat(np.append(level, 0), edges)[::2] if len(edges) else first
