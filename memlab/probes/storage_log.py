"""Births and deaths of storages: from a log of weak references to columns, bounded however long it gets."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from memlab.trace import Kind

ADOPT, ALLOC, FREE = int(Kind.ADOPT), int(Kind.ALLOC), int(Kind.FREE)
ROOM = 2048
"""So many entries of the log are written into the books at once."""


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage, with what the books need to know; `block` is -1 until its birth is written."""

    __slots__ = ("birth", "block", "key", "nbytes", "time_ns")
    birth: int
    block: int
    key: int
    nbytes: int
    time_ns: int


class Books:
    """The events in columns that grow, and that thin themselves out when there are too many.

    `write` takes from a log in which each StorageRef stands twice: at its birth, and where its weak reference reported
    the death. Numbers between them are moments, before which everything in front of them happened.
    """

    COLUMNS = (("time_ns", "q"), ("code", "q"), ("nbytes", "q"), ("birth", "i"), ("key", "q"))  # code: 4 * block + kind

    def __init__(self, limit: int, clock: Callable[[], int]) -> None:
        self.limit, self.clock = limit, clock
        self.time_ns, self.code, self.nbytes, self.birth = array("q"), array("q"), array("q"), array("i")
        self.key = array("q")  # of births; that of a death stays what was there before
        self.capacity = self.row = self.blocks = self.adopted = 0
        self.current = self.peak = self.base = self.started_ns = 0
        self.peak_row, self.writing = -1, False
        self.lost, self.lost_until_ns, self.lost_largest_bytes = 0, 0, 0

    def write(self, log: deque[Any], live: dict[int, StorageRef]) -> None:
        """Enter what the log holds. Any thread may ask; a second one leaves it to the first."""
        if self.writing:
            return
        self.writing = True  # no call since the look at it: neither a thread nor Ctrl-C gets in between
        try:
            while log:
                if self.capacity - self.row < ROOM:
                    self._make_room()
                self._write_some(log, live)
        finally:
            self.writing = False

    def _write_some(self, log: deque[Any], live: dict[int, StorageRef]) -> None:
        """At most ROOM entries. Once an entry changes a value nothing is called, so Ctrl-C finds the books in order."""
        times, codes, sizes, births, keys = self.time_ns, self.code, self.nbytes, self.birth, self.key
        undated = row = self.row
        count, now = min(len(log), ROOM), self.clock()
        for _ in range(count):
            item = log[0]
            if type(item) is int:
                while undated < row:
                    times[undated] = item
                    undated += 1
                del log[0]
                continue
            block, nbytes = item.block, item.nbytes
            if block == -1 and nbytes:
                time_ns = item.time_ns
                while undated < row and time_ns >= 0:
                    times[undated] = time_ns
                    undated += 1
                undated = row + 1
                item.block = block = self.blocks
                self.blocks = block + 1
                sizes[row], births[row], keys[row] = nbytes, item.birth, item.key
                self.current = current = self.current + nbytes
                if time_ns < 0:  # adopted: it was there all along, at the peak too
                    times[row], codes[row] = self.started_ns, 4 * block + ADOPT
                    self.adopted += 1
                    self.base += nbytes
                    self.peak += nbytes
                else:
                    times[row], codes[row] = time_ns, 4 * block + ALLOC
                    if current > self.peak:
                        self.peak, self.peak_row = current, row
                self.row = row = row + 1
            elif block >= 0:
                times[row] = times[row - 1]  # until something dates it
                sizes[row], codes[row] = nbytes, 4 * block + FREE
                self.current -= nbytes
                self.row = row = row + 1
                key = item.key
                if key in live and live[key] is item:
                    del live[key]
                item.block = -2  # a block that gave way to another size is reported once more when its storage dies
            else:
                item.block = -2  # of no bytes, or reported before
            del log[0]
        if undated < row and log and type(log[0]) is int:
            now = log[0]  # a moment that was left for the next batch
        for late in range(undated, row):
            times[late] = now

    def _make_room(self) -> None:
        """Thin out at the limit, else grow."""
        if self.row >= self.limit:
            self._thin()
        wanted = self.row + max(2 * ROOM, min(max(self.row, 8 * ROOM), self.limit - self.row))
        for name, code in self.COLUMNS:
            column = getattr(self, name)
            column.frombytes(bytes(max(0, wanted - len(column)) * array(code).itemsize))
        self.capacity = wanted

    def _thin(self) -> None:
        """Drop the smallest blocks that were born and died in the older half.

        Blocks alive at the peak stay, so the peak, what held it, and the bytes alive now remain exact; before
        `lost_until_ns` the curve in between lacks the blocks dropped.
        """
        columns = self.columns()
        drop = _expendable(columns, self.row // 2, self.peak_row)
        keep, kept = ~drop, int((~drop).sum())
        self.lost += self.row - kept
        self.lost_until_ns = int(columns["time_ns"][self.row // 2])
        self.lost_largest_bytes = max(self.lost_largest_bytes, int(columns["nbytes"][drop].max(initial=0)))
        peak_row = int(keep[: self.peak_row + 1].sum()) - 1
        thinned = [array(code, columns[name][keep].tobytes()) for name, code in self.COLUMNS]
        self.time_ns, self.code, self.nbytes, self.birth, self.key = thinned
        self.capacity = self.row = kept
        self.peak_row = peak_row
        self.limit = max(self.limit, kept * 5 // 4)

    def columns(self) -> dict[str, np.ndarray]:
        """Copies of the rows so far."""
        return {name: np.array(getattr(self, name)[: self.row], dtype=code) for name, code in self.COLUMNS}


def _expendable(columns: dict[str, np.ndarray], half: int, peak_row: int) -> np.ndarray:
    """The rows of blocks that lived only within the first `half` rows and not at the peak: of the smaller ones."""
    block, kind = np.divmod(columns["code"][:half], 4)
    born, died = np.flatnonzero(kind == ALLOC), np.flatnonzero(kind == FREE)
    _, of_born, of_died = np.intersect1d(block[born], block[died], assume_unique=True, return_indices=True)
    born, died = born[of_born], died[of_died]
    passing = (born > peak_row) | (died <= peak_row)
    born, died = born[passing], died[passing]
    smallest = np.argsort(columns["nbytes"][born], kind="stable")[: max(half // 4, 1)]
    rows = np.zeros(len(columns["code"]), bool)
    rows[born[smallest]] = rows[died[smallest]] = True
    return rows


class Births:
    """Numbers for what storages are born as: (operator, dtype, shape), each a number in a table of texts."""

    def __init__(self) -> None:
        self.of_operator: dict[Any, dict[Any, int]] = {}
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.tables: tuple[dict[str, int], ...] = ({}, {}, {})

    def number(self, *texts: str) -> int:
        """The number of (operator, dtype, shape), where "" is unknown."""
        key = tuple(
            table.setdefault(text, len(table)) if text else -1 for table, text in zip(self.tables, texts, strict=True)
        )
        return self.numbers.setdefault((key[0], key[1], key[2]), len(self.numbers))

    def columns(self, births: np.ndarray) -> dict[str, np.ndarray]:
        """The op, dtype and shape of blocks, as numbers in the tables."""
        known = np.array(list(self.numbers), "i4").reshape(-1, 3)[births]
        return dict(zip(("op", "dtype", "shape"), known.T.copy(), strict=True))
