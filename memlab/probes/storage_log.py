"""Births and deaths of storages: from a log of weak references to columns, bounded however long it gets."""

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

ADOPT, ALLOC, FREE = int(Kind.ADOPT), int(Kind.ALLOC), int(Kind.FREE)
ROOM = 2048
"""So many entries of the log are written into the books at once."""

_UNDATED = np.iinfo(np.int64).max


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage, with what the books need to know; `block` is -1 for a storage of no bytes.

    `time_ns` is -1 for what is older than the log.
    """

    __slots__ = ("birth", "block", "key", "nbytes", "time_ns")
    birth: int
    block: int
    key: int
    nbytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """A block gave way to another of the same storage; the death of the storage is then not this block's."""

    block: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Where the books stand: rows and blocks written, bytes, the row of the peak, and entries taken from the log.

    One value, so that whoever is interrupted leaves the books before an entry or after it.
    """

    row: int = 0
    blocks: int = 0
    adopted: int = 0
    current: int = 0
    peak: int = 0
    base: int = 0
    peak_row: int = -1
    replaced: frozenset[int] = frozenset()
    taken: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of the log as columns, a row for each birth and death; `time_ns` is _UNDATED where nothing dates it."""

    time_ns: Array
    kind: Array
    block: Array
    nbytes: Array
    birth: Array
    key: Array
    replaced: frozenset[int]

    def __len__(self) -> int:
        return len(self.kind)

    def after(self, before: Totals) -> Totals:
        """The totals with this batch in the books."""
        adopted = np.where(self.kind == ADOPT, self.nbytes, 0)
        level = before.current + np.cumsum(np.where(self.kind == FREE, -self.nbytes, self.nbytes))
        # What is adopted late was there all along, at the peak too: it makes no new one.
        above = np.where(self.kind == ALLOC, level - np.cumsum(adopted), -1)
        at = int(np.argmax(above))
        is_peak = above[at] > before.peak
        more = int(adopted.sum())
        return Totals(
            row=before.row + len(self),
            blocks=max(before.blocks, int(self.block.max()) + 1),
            adopted=before.adopted + int((self.kind == ADOPT).sum()),
            current=int(level[-1]),
            peak=(int(above[at]) if is_peak else before.peak) + more,
            base=before.base + more,
            peak_row=before.row + at if is_peak else before.peak_row,
            replaced=self.replaced,
        )


class Books:
    """The events in columns that grow, and that thin themselves out when there are too many.

    `write` takes from a log in which each StorageRef stands twice: at its birth, and where its weak reference reported
    the death. Births are numbered in order. Numbers between them are moments, before which everything in front of them
    happened.
    """

    COLUMNS = ("time_ns", "code", "nbytes", "birth", "key")  # code: 4 * block + kind; the key of a death is 0

    def __init__(self, limit: int, clock: Callable[[], int]) -> None:
        self.limit, self.clock, self.started_ns = limit, clock, 0
        self.totals, self.writing = Totals(), False
        self.lost, self.lost_until_ns, self.lost_largest_bytes = 0, 0, 0
        self._columns = np.empty((len(self.COLUMNS), 0), np.int64)

    def write(self, log: deque[Any]) -> None:
        """Enter what the log holds. Any thread may ask; a second one leaves it to the first."""
        if self.writing:
            return
        self.writing = True  # no call since the look at it: neither a thread nor Ctrl-C gets in between
        try:
            while log or self.totals.taken:
                if self._columns.shape[1] - self.totals.row < ROOM:
                    self._make_room()
                if not self.totals.taken:  # in one piece of C: an entry is in the log or taken, whoever interrupts
                    self.totals.taken.extend(islice(iter(log.popleft, None), min(len(log), ROOM)))
                self._write_taken(self._next_moment(log))
        finally:
            self.writing = False

    def _next_moment(self, log: deque[Any]) -> int:
        """What dates the last deaths of a batch: a moment that was left for the next one, or the time now."""
        try:
            following = log[0]
        except IndexError:
            return self.clock()
        return following if type(following) is int else self.clock()

    def _write_taken(self, now_ns: int) -> None:
        """Enter what was taken. Nothing counts before the last line."""
        before = self.totals
        batch = read_log(before.taken, before.blocks, before.replaced)
        if not len(batch):
            self.totals = dataclasses.replace(before, taken=[])
            return
        times = np.where(batch.time_ns == _UNDATED, now_ns, batch.time_ns)
        times = np.where(batch.kind == ADOPT, self.started_ns, times)
        rows = slice(before.row, before.row + len(batch))
        self._columns[:, rows] = times, 4 * batch.block + batch.kind, batch.nbytes, batch.birth, batch.key
        self.totals = batch.after(before)

    def _make_room(self) -> None:
        """Thin out at the limit, else grow."""
        if self.totals.row >= self.limit:
            self._thin()
        row = self.totals.row
        wanted = row + max(2 * ROOM, min(max(row, 8 * ROOM), self.limit - row))
        more = np.zeros((len(self.COLUMNS), max(0, wanted - self._columns.shape[1])), np.int64)
        self._columns = np.concatenate([self._columns, more], axis=1)

    def _thin(self) -> None:
        """Drop the smallest blocks that were born and died in the older half.

        Blocks alive at the peak stay, so the peak, what held it, and the bytes alive now remain exact; before
        `lost_until_ns` the curve in between lacks the blocks dropped.
        """
        columns, totals = self.columns(), self.totals
        drop = _expendable(columns, totals.row // 2, totals.peak_row)
        keep, kept = ~drop, int((~drop).sum())
        self.lost += totals.row - kept
        self.lost_until_ns = int(columns["time_ns"][totals.row // 2])
        self.lost_largest_bytes = max(self.lost_largest_bytes, int(columns["nbytes"][drop].max(initial=0)))
        peak_row = int(keep[: totals.peak_row + 1].sum()) - 1
        self._columns = self._columns[:, : totals.row][:, keep]
        self.totals = dataclasses.replace(totals, row=kept, peak_row=peak_row)
        self.limit = max(self.limit, kept * 5 // 4)

    def columns(self) -> dict[str, np.ndarray]:
        """Copies of the rows so far."""
        return dict(zip(self.COLUMNS, self._columns[:, : self.totals.row].copy(), strict=True))


def read_log(entries: list[Any], blocks: int, replaced: frozenset[int]) -> Batch:
    """The births and deaths among entries of the log, after the first so many `blocks`.

    A birth is where a number stands that is higher than all before. Each is dated by itself or by what follows.
    """
    number = np.array([~one if type(one) is int else one.block for one in entries], np.int64)
    is_moment = number < -1
    block = np.where(is_moment, -1, number)
    is_birth = block > np.maximum.accumulate(np.concatenate([[blocks - 1], block]))[:-1]
    born = [entries[at] for at in np.flatnonzero(is_birth)]
    times, keys, births = (np.zeros(len(entries), np.int64) for _ in range(3))
    times[is_birth] = [one.time_ns for one in born]
    keys[is_birth], births[is_birth] = [one.key for one in born], [one.birth for one in born]
    dates = np.where(is_moment, ~number, np.where(is_birth & (times >= 0), times, _UNDATED))
    dates = np.minimum.accumulate(dates[::-1])[::-1]
    kind = np.where(is_birth, np.where(times < 0, ADOPT, ALLOC), FREE)
    rest = frozenset[int]()
    if replaced or any(type(one) is Replaced for one in entries):
        block, rest = _without_replaced(entries, block, is_birth, replaced)
    keep = np.flatnonzero(block >= 0)
    nbytes = np.array([entries[at].nbytes for at in keep], np.int64)
    return Batch(dates[keep], kind[keep], block[keep], nbytes, births[keep], keys[keep], rest)


def _without_replaced(
    entries: list[Any], block: Array, is_birth: Array, replaced: frozenset[int]
) -> tuple[Array, frozenset[int]]:
    """The blocks with -1 where a storage died whose block had given way before, and which are still to die."""
    waiting, block = set(replaced), block.copy()
    for at, one in enumerate(entries):
        if type(one) is Replaced:
            waiting.add(one.block)
        elif not is_birth[at] and int(block[at]) in waiting:
            waiting.remove(int(block[at]))
            block[at] = -1
    return block, frozenset(waiting)


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


def tallied(books: Books, births: Births) -> dict[str, Any]:
    """Events and blocks as numpy arrays, and the texts as tuples of str; adopted blocks come first.

    Per event: time_ns (the clock's), kind, block, nbytes, key (id of the storage, 0 at its death). Per block: op,
    dtype, shape (numbers in the texts, -1 for none), and block_id, the raw id that `block_of` gave, ascending.
    `first_row` is the first event after the start, `peak_row` the event that reached the peak (`first_row - 1` if
    nothing rose above the base).
    """
    rows = books.columns()
    block, kind = np.divmod(rows["code"], 4)
    order = np.argsort(kind != ADOPT, kind="stable")
    born = order[kind[order] != FREE]
    block_id, first = np.unique(block[born], return_index=True)
    first_row, peak_row = int((kind == ADOPT).sum()), books.totals.peak_row
    return {
        "time_ns": np.maximum.accumulate(rows["time_ns"][order]),  # readers on other threads date by their own look
        "kind": kind[order].astype("u1"),
        "block": np.searchsorted(block_id, block[order]).astype("i4"),
        "nbytes": rows["nbytes"][order],
        "key": rows["key"][order],
        "block_id": block_id,
        **births.columns(rows["birth"][born[first]]),
        "first_row": first_row,
        "peak_row": int(np.flatnonzero(order == peak_row)[0]) if peak_row >= 0 else first_row - 1,
        "texts": dict(zip(("op", "dtype", "shape"), map(tuple, births.tables), strict=True)),
    }
