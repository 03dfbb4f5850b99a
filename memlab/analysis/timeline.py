"""Bytes over time: the level of allocated or reserved memory after every event, and the same drawn with few points."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from memlab.trace.columns import Array, deltas
from memlab.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A stair: from `time_ns[i]` on the level is `bytes[i]`. The first step is the start, at time 0, with row -1."""

    time_ns: Array
    bytes: Array
    row: Array
    end_ns: int

    @property
    def start_bytes(self) -> int:
        """What was there before the first event."""
        return int(self.bytes[0])

    @property
    def end_bytes(self) -> int:
        """What is there after the last event."""
        return int(self.bytes[-1])


def timeline(trace: Trace, device: int, of: str = "allocated") -> Timeline:
    """The level of one device over the run; `of` is "allocated", "requested" or "reserved"."""
    mine = np.flatnonzero(trace.events.device == device)
    change = deltas(trace.events, of)[mine]
    before = mine < trace.first_row
    start = int(change[before].sum())
    row, change = mine[~before], change[~before]
    moves = change != 0
    row, change = row[moves], change[moves]
    return Timeline(
        time_ns=np.concatenate(([0], trace.events.time_ns[row])),
        bytes=np.concatenate(([start], start + np.cumsum(change))),
        row=np.concatenate(([-1], row)),
        end_ns=max(trace.made_by.duration_ns, int(trace.events.time_ns[row[-1]]) if len(row) else 0),
    )


def thinned(line: Timeline, bins: int) -> tuple[Array, Array]:
    """(time_ns, bytes) of at most 4 points a bin of equal time, among them each bin's lowest and highest.

    No peak is lost: the largest value is one of the points, at its own time. Draw it as a stair.
    """
    time_ns, level = line.time_ns, line.bytes
    if len(level) > 4 * bins:
        edges = np.linspace(time_ns[0], max(line.end_ns, time_ns[-1]) + 1, bins + 1).astype(time_ns.dtype)
        cuts = np.unique(np.searchsorted(time_ns, edges))
        keep = np.unique(np.concatenate([_corners(level, a, b) for a, b in itertools.pairwise(cuts)]))
        time_ns, level = time_ns[keep], level[keep]
    return np.append(time_ns, line.end_ns), np.append(level, level[-1])


def _corners(level: Array, begin: int, end: int) -> Array:
    inside = level[begin:end]
    return begin + np.array([0, int(inside.argmin()), int(inside.argmax()), len(inside) - 1])
