"""Allocations and frees of storages: from a log of weak references to columns of bounded length."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from memlab.trace import Kind
from memlab.trace.columns import Array

PREEXISTING, ALLOC, FREE = int(Kind.PREEXISTING), int(Kind.ALLOC), int(Kind.FREE)
ROOM = 2048
"""How many log entries are written to columns at once."""

_UNDATED = np.iinfo(np.int64).max


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage. `block` is -1 for a storage of no bytes, `time_ns` for one older than the log."""

    __slots__ = ("birth", "block", "key", "nbytes", "time_ns")
    birth: int
    block: int
    key: int
    nbytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """A block was replaced by another of the same storage, whose free does not end this block."""

    block: int
    nbytes: int


class Births:
    """Numbers each (operator, dtype, shape) with which storages are made."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}
        self.tables: tuple[dict[str, int], ...] = ({}, {}, {})

    def number(self, *texts: str) -> int:
        """The number of (operator, dtype, shape), where "" is unknown."""
        pairs = zip(self.tables, texts, strict=True)
        key = tuple(table.setdefault(text, len(table)) if text else -1 for table, text in pairs)
        return self.numbers.setdefault(key, len(self.numbers))

    def columns(self, births: np.ndarray) -> dict[str, np.ndarray]:
        """The operator, dtype and shape of blocks, as indices into the tables of texts."""
        known = np.array(list(self.numbers), "i4").reshape(-1, 3)[births]
        return dict(zip(("op", "dtype", "shape"), known.T.copy(), strict=True))


@dataclass(frozen=True, slots=True)
class Totals:
    """The state of the columns, and the entries taken from the log but not yet written.

    It is one value, so that an interrupt comes before or after a write and never in the middle.
    """

    row: int = 0
    blocks: int = 0
    preexisting: int = 0
    current: int = 0
    peak: int = 0
    base: int = 0
    peak_row: int = -1
    replaced: frozenset[int] = frozenset()
    taken: list[Any] = field(default_factory=list)


class Books:
    """The events as growing columns, thinned out when there are too many.

    Each StorageRef is in the log twice: when it was made, and when its weak reference reported the free. A number between
    them is a time: everything before it had happened by then.
    """

    def __init__(self, limit: int, clock: Callable[[], int]) -> None:
        self.limit, self.clock, self.started_ns = limit, clock, 0
        self.totals, self._is_writing = Totals(), False
        self.lost, self.lost_until_ns, self.lost_largest_bytes = 0, 0, 0
        # Time, 4 * block + kind, bytes, birth, key (0 at a death).
        self._rows = np.empty((5, 0), np.int64)

    def write(self, log: deque[Any]) -> Totals:
        """Write what is in the log. Any thread may call it; while one writes, another gets the totals as they are."""
        if self._is_writing:
            return self.totals
        self._is_writing = True  # no call since the check: neither a thread nor Ctrl-C can intervene
        try:
            while log or self.totals.taken:
                if self._rows.shape[1] - self.totals.row < ROOM:
                    self._make_room()
                if not self.totals.taken:  # in one C call: an entry is in the log or taken, even if interrupted
                    self.totals.taken.extend(islice(iter(log.popleft, None), min(len(log), ROOM)))
                # The time of the last frees of a batch: one left for the next batch, or the time now.
                try:
                    now_ns = log[0] if type(log[0]) is int else self.clock()
                except IndexError:
                    now_ns = self.clock()
                self._write_taken(now_ns)
        finally:
            self._is_writing = False
        return self.totals

    def _write_taken(self, now_ns: int) -> None:
        """Write what was taken. Nothing counts before the last line."""
        before = self.totals
        times, kind, block, nbytes, birth, key, replaced = _read(before.taken, before.blocks, before.replaced)
        if not len(kind):
            self.totals = dataclasses.replace(before, replaced=replaced, taken=[])
            return
        times = np.where(times == _UNDATED, now_ns, times)
        times = np.where(kind == PREEXISTING, self.started_ns, times)
        self._rows[:, before.row : before.row + len(kind)] = times, 4 * block + kind, nbytes, birth, key
        preexisting = np.where(kind == PREEXISTING, nbytes, 0)
        level = before.current + np.cumsum(np.where(kind == FREE, -nbytes, nbytes))
        # A late preexisting block existed all along, at the peak too: it makes no new peak.
        above = np.where(kind == ALLOC, level - np.cumsum(preexisting), -1)
        at, more = int(np.argmax(above)), int(preexisting.sum())
        is_peak = above[at] > before.peak
        self.totals = Totals(
            row=before.row + len(kind),
            blocks=max(before.blocks, int(block.max()) + 1),
            preexisting=before.preexisting + int((kind == PREEXISTING).sum()),
            current=int(level[-1]),
            peak=(int(above[at]) if is_peak else before.peak) + more,
            base=before.base + more,
            peak_row=before.row + at if is_peak else before.peak_row,
            replaced=replaced,
        )

    def _make_room(self) -> None:
        """Grow, or at the limit drop the smallest blocks made and freed in the older half.

        Blocks alive at the peak are kept, so the peak, what held it and the bytes alive now remain exact. Before `lost_until_ns`
        the curve may be too low.
        """
        totals = self.totals
        if totals.row >= self.limit:
            rows, half = self._rows[:, : totals.row].copy(), totals.row // 2
            block, kind = np.divmod(rows[1, :half], 4)
            born, died = np.flatnonzero(kind == ALLOC), np.flatnonzero(kind == FREE)
            _, of_born, of_died = np.intersect1d(block[born], block[died], assume_unique=True, return_indices=True)
            born, died = born[of_born], died[of_died]
            passing = (born > totals.peak_row) | (died <= totals.peak_row)
            born, died = born[passing], died[passing]
            smallest = np.argsort(rows[2, born], kind="stable")[: max(half // 4, 1)]
            keep = np.ones(totals.row, bool)
            keep[born[smallest]] = keep[died[smallest]] = False
            kept = int(keep.sum())
            self.lost += totals.row - kept
            self.lost_until_ns = int(rows[0, half])
            self.lost_largest_bytes = max(self.lost_largest_bytes, int(rows[2, ~keep].max(initial=0)))
            peak_row = int(keep[: totals.peak_row + 1].sum()) - 1
            self._rows = rows[:, keep]
            self.totals = totals = dataclasses.replace(totals, row=kept, peak_row=peak_row)
            self.limit = max(self.limit, kept * 5 // 4)
        wanted = totals.row + max(2 * ROOM, min(max(totals.row, 8 * ROOM), self.limit - totals.row))
        more = np.zeros((5, max(0, wanted - self._rows.shape[1])), np.int64)
        self._rows = np.concatenate([self._rows, more], axis=1)

    def columns(self, births: Births) -> dict[str, Any]:
        """Events and blocks as arrays, preexisting blocks first, and the texts.

        Per event: time_ns, kind, block, nbytes, key (id of the storage, 0 at its death). Per block: op, dtype, shape (indices
        into the texts, -1 for none), and block_id in order of allocation. `first_row` is the first event after the start,
        `peak_row` the one that reached the peak (`first_row - 1` if nothing rose above the base).
        """
        totals = self.totals
        time_ns, code, nbytes, birth, key = self._rows[:, : totals.row].copy()
        block, kind = np.divmod(code, 4)
        order = np.argsort(kind != PREEXISTING, kind="stable")
        born = order[kind[order] != FREE]
        block_id, first = np.unique(block[born], return_index=True)
        first_row, peak_row = int((kind == PREEXISTING).sum()), totals.peak_row
        return {
            "time_ns": np.maximum.accumulate(time_ns[order]),  # readers on other threads use their own time
            "kind": kind[order].astype("u1"),
            "block": np.searchsorted(block_id, block[order]).astype("i4"),
            "nbytes": nbytes[order],
            "key": key[order],
            "block_id": block_id,
            **births.columns(birth[born[first]]),
            "first_row": first_row,
            "peak_row": int(np.flatnonzero(order == peak_row)[0]) if peak_row >= 0 else first_row - 1,
            "texts": dict(zip(("op", "dtype", "shape"), map(tuple, births.tables), strict=True)),
        }


def _read(entries: list[Any], blocks: int, replaced: frozenset[int]) -> tuple[Any, ...]:
    """Entries of the log as columns: time (_UNDATED where none is known), kind, block, bytes, birth, key.

    Also the replaced blocks whose storages are still alive. `blocks` is how many there were before; a block number higher
    than all before it is an allocation. Undated entries get the time of the next dated one.
    """
    number = np.array([~one if type(one) is int else one.block for one in entries], np.int64)
    is_moment = number < -1
    block = np.where(is_moment, -1, number)
    is_birth = block > np.maximum.accumulate(np.concatenate([[blocks - 1], block]))[:-1]
    born = [entries[at] for at in np.flatnonzero(is_birth)]
    times, keys, births = (np.zeros(len(entries), np.int64) for _ in range(3))
    times[is_birth] = [one.time_ns for one in born]
    keys[is_birth], births[is_birth] = [one.key for one in born], [one.birth for one in born]
    dates: Array = np.where(is_moment, ~number, np.where(is_birth & (times >= 0), times, _UNDATED))
    dates = np.minimum.accumulate(dates[::-1])[::-1]
    kind = np.where(is_birth, np.where(times < 0, PREEXISTING, ALLOC), FREE)
    waiting = set(replaced)
    if waiting or any(type(one) is Replaced for one in entries):
        for at, one in enumerate(entries):
            if type(one) is Replaced:
                waiting.add(one.block)
            elif not is_birth[at] and int(block[at]) in waiting:  # the freed storage's block had been replaced before
                waiting.remove(int(block[at]))
                block[at] = -1
    keep = np.flatnonzero(block >= 0)
    nbytes = np.array([entries[at].nbytes for at in keep], np.int64)
    return dates[keep], kind[keep], block[keep], nbytes, births[keep], keys[keep], frozenset(waiting)
