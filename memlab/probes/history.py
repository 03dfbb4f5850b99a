"""The recorder of CUDA allocator history: one per process, shared by every track that is open.

It starts history if nobody else did, reads it at the edges of tracks (and at quiet moments of long ones, where that is
cheap enough), keeps the books of every device along it, and leaves history as it was when the last track ends. History
that the user recorded is only read: never started, cleared or stopped.

Limits: entries that the bounded ring dropped before they were read are lost; the stretch is then named, with what the
counters know of it. What other threads allocate is in the history like everything else, but cannot be told apart.
"""

from __future__ import annotations

import bisect
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab import seams
from memlab.allocator import Books, Settings
from memlab.probes.rows import Part, columns_of, held_rows, part_of, part_without_stacks, resync_rows, state_after
from memlab.probes.stacks import Stacks
from memlab.trace.columns import Events, Kind, deltas
from memlab.trace.trace import Gap

RING_ENTRIES = 200_000
"""How many entries the allocator keeps by default: about 690 bytes of host memory each."""


MAX_ROWS = 2_000_000
"""How many rows are kept for one recording (about 150 MB); of older ones the peaks stay, the rows go."""

_QUIET_ENTRIES = 20_000  # fewer unread entries than this are not worth a look at a quiet moment
_READ_SHARE = 0.03  # at most this share of the time is spent on reading at quiet moments
_READ_S_PER_ENTRY = 8e-6  # what reading and following an entry costs, rounded up
_TAIL = 4  # so many entries in a row are compared to find the place up to which was read


@dataclass(frozen=True, slots=True)
class Lost:
    """A stretch whose rows are not there: lost unread, or let go to bound memory (then its peaks are known)."""

    device: int
    begin_ns: int
    end_ns: int
    lost_events: int
    peak_allocated_bytes: int = -1
    peak_reserved_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Position:
    """How far one device had been read at some moment: rows so far, and losses so far."""

    rows: int = 0
    losses: int = 0


@dataclass(slots=True)
class DeviceHistory:
    """What was read of one device: its books, the rows since it was opened, and how far its entries were read.

    `dropped` rows at the front were let go; `opening` are the rows that describe the state before the first one kept.
    """

    device: int
    books: Books
    opening: Events
    opening_reserved: int
    parts: list[Part] = field(default_factory=list)
    losses: list[Lost] = field(default_factory=list)
    dropped: int = 0
    tail: tuple[tuple[Any, ...], ...] = ()
    read_ns: int = 0
    counts: tuple[int, int] = (0, 0)

    @property
    def position(self) -> Position:
        """How far this device has been read."""
        return Position(self.dropped + sum(len(part.events) for part in self.parts), len(self.losses))


class Recorder:
    """The one reference-counted recorder of a process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.entries = RING_ENTRIES
        self._reset()

    def _reset(self) -> None:
        self.owns_history = False
        self.is_open = False
        self.devices: list[DeviceHistory] = []
        self.stacks = Stacks()
        self.gaps: dict[str, Gap] = {}
        self._spent_s = 0.0
        self._opened_s = 0.0
        self._users_switch: Callable[..., Any] | None = None
        self._our_switch: Callable[..., Any] | None = None

    # --- the life of the recorder ---------------------------------------------------------------------------------

    def acquire(self, entries: int = RING_ENTRIES) -> None:
        """Begin to record, or join those who do; where CUDA is not up yet, recording begins when it comes up."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.entries = entries
                seams.when_cuda_starts(self._open)
            else:
                self.read()

    def release(self) -> None:
        """Stop recording with the last user, and leave history, switch and queue as they were."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
            try:
                self._close()
            finally:
                self._reset()

    def _close(self) -> None:
        seams.forget_when_cuda_starts(self._open)
        if self._our_switch is not None and seams.history_switch() is self._our_switch:
            seams.replace_history_switch(self._users_switch)
        if self.is_open and self.owns_history:
            seams.stop_history()

    def _open(self) -> None:
        with self.lock:
            if self.is_open or not self.users:
                return
            self.owns_history = not seams.history_is_on()
            if self.owns_history:
                seams.record_history(self.entries)
            else:
                self._note(
                    "users history",
                    "allocator history was on already: it is read as it is, never cleared; its frames and length are the user's choice",
                )
            self._opened_s = time.monotonic()
            self._open_devices(_settled_snapshot())
            self.is_open = True
            self._watch_switch()

    def _open_devices(self, shot: dict[str, Any]) -> None:
        settings = Settings.from_snapshot(shot.get("allocator_settings", {}))
        for device, entries in enumerate(shot["device_traces"]):
            books = Books.from_snapshot(_segments(shot, device), settings)
            opening = held_rows(books.held, device)
            history = DeviceHistory(device, books, opening, books.reserved_bytes)
            self._mark_read(history, entries)
            self.devices.append(history)

    def _note(self, name: str, text: str) -> None:
        self.gaps.setdefault(name, Gap(name, text))

    # --- history that the user starts or stops while we record --------------------------------------------------------

    def _watch_switch(self) -> None:
        users = self._users_switch = seams.history_switch()

        @functools.wraps(users)
        def switch(enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
            with self.lock:
                self.read()
                users(enabled, *args, **kwargs)
                self._after_switch(bool(enabled))

        self._our_switch = switch
        seams.replace_history_switch(switch)

    def _after_switch(self, on: bool) -> None:
        """The user's history is the user's from now on; when it ends, ours goes on."""
        if on:
            self.owns_history = False
            self._note(
                "users history", "the cell recorded allocator history itself: from there on it was read as it was"
            )
        else:
            self.owns_history = True
            seams.record_history(self.entries)
        self._resume()

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the entries nobody has read, and keep the books along them."""
        with self.lock:
            if not self.is_open:
                return
            begin = time.monotonic()
            # Counted before the snapshot: what other threads do meanwhile can only make more entries than expected.
            expected = [self._happened_since(history) for history in self.devices]
            shot = seams.snapshot()
            for history, entries, counts in zip(self.devices, shot["device_traces"], expected, strict=True):
                self._read_device(history, entries, counts, shot)
            self.stacks.forget_objects()
            self._spent_s += time.monotonic() - begin

    def _happened_since(self, history: DeviceHistory) -> tuple[int, int]:
        allocs, frees = alloc_and_free_count(history.device)
        return allocs - history.counts[0], frees - history.counts[1]

    def _read_device(
        self, history: DeviceHistory, entries: list[dict[str, Any]], happened: tuple[int, int], shot: dict[str, Any]
    ) -> None:
        first = _unread(entries, history.tail)
        new = columns_of(entries[first:], self.stacks) if first is not None else None
        if new is None or new.kinds.count(Kind.ALLOC) < happened[0] or new.kinds.count(Kind.FREE_PENDING) < happened[1]:
            self._reopen(history, entries, shot)
        elif new.kinds:
            followed = history.books.follow(new.kinds, new.addresses, new.sizes, new.streams)
            history.parts.append(part_of(history.device, new, followed))
            self._mark_read(history, entries)
            self._bound(history)

    def _mark_read(self, history: DeviceHistory, entries: list[dict[str, Any]]) -> None:
        history.tail = tuple(_identity(entry) for entry in entries[-_TAIL:])
        history.read_ns = time.time_ns()
        history.counts = alloc_and_free_count(history.device)

    def _reopen(self, history: DeviceHistory, entries: list[dict[str, Any]], shot: dict[str, Any]) -> None:
        """Entries were lost: close what was known at the state it had, and go on from the state the allocator has now."""
        begin_ns, before = history.read_ns, sum(history.counts)
        old = history.books
        fresh = Books.from_snapshot(_segments(shot, history.device), old.settings, old.next_block)
        self._mark_read(history, entries)
        rows = resync_rows(old, fresh, history.device, history.read_ns)
        history.books = fresh
        history.parts.append(part_without_stacks(rows))
        history.losses.append(Lost(history.device, begin_ns, history.read_ns, sum(history.counts) - before))

    def _resume(self) -> None:
        """Go on from the state of the allocator now, where nothing was lost but the place in the entries is new."""
        shot = _settled_snapshot()
        for history, entries in zip(self.devices, shot["device_traces"], strict=True):
            before = history.counts
            if before == alloc_and_free_count(history.device):
                self._mark_read(history, entries)
            else:
                self._reopen(history, entries, shot)

    # --- long cells -------------------------------------------------------------------------------------------------

    def quiet_moment(self) -> None:
        """Called where the user's thread is between two pieces of work: read if that is cheap, else keep the end exact.

        Reading costs a few microseconds an entry, too much for a loop of tiny steps. There the ring is emptied unread
        before it overflows and the books are opened again, so that the stretch up to the end of the cell is always whole.
        """
        if not self.is_open or not self.owns_history or not self.lock.acquire(blocking=False):
            return
        try:
            unread = sum(_entries_of(*self._happened_since(history)) for history in self.devices)
            if unread < min(_QUIET_ENTRIES, 0.4 * self.entries):
                return
            if self._spent_s + unread * _READ_S_PER_ENTRY <= _READ_SHARE * (time.monotonic() - self._opened_s):
                self._read_and_clear()
            elif unread > 0.8 * self.entries:
                self._restart()
        finally:
            self.lock.release()

    def _read_and_clear(self) -> None:
        self.read()
        seams.record_history(self.entries)
        self._resume()

    def _restart(self) -> None:
        seams.record_history(self.entries)
        shot = _settled_snapshot()
        for history, entries in zip(self.devices, shot["device_traces"], strict=True):
            self._reopen(history, entries, shot)

    def _bound(self, history: DeviceHistory) -> None:
        """Let the oldest rows go when there are too many; what they peaked at stays known."""
        while len(history.parts) > 1 and history.position.rows - history.dropped > MAX_ROWS:
            part = history.parts.pop(0)
            history.losses.append(_summary(history, part))
            history.opening, change = state_after(history.opening, [part])
            history.opening_reserved += change
            history.dropped += len(part.events)


def _summary(history: DeviceHistory, part: Part) -> Lost:
    """What stays known of rows that are let go."""
    base = int(deltas(history.opening, "allocated").sum())
    peaks = [
        start + max(int(np.cumsum(deltas(part.events, of)).max(initial=0)), 0)
        for start, of in ((base, "allocated"), (history.opening_reserved, "reserved"))
    ]
    begin_ns, end_ns = int(part.events.time_ns[0]), int(part.events.time_ns[-1])
    return Lost(history.device, begin_ns, end_ns, len(part.events), *peaks)


def _entries_of(allocs: int, frees: int) -> int:
    """About how many entries these make: one for an allocation, two for a free, few for segments."""
    return allocs + 2 * frees


def alloc_and_free_count(device: int) -> tuple[int, int]:
    """How many allocations and frees a device has ever seen: equal before and after means that nothing happened."""
    counts = seams.cuda_stats(device)["allocation"]["all"]
    return counts["allocated"], counts["freed"]


def _settled_snapshot() -> dict[str, Any]:
    """A snapshot during which no other thread allocated, if one can be had within a few tries.

    Segments and entries are read one after the other, so what happens between would be in the entries only.
    """
    for _ in range(10):
        before = _all_counts()
        shot = seams.snapshot()
        if before == _all_counts():
            break
    return shot


def _all_counts() -> list[tuple[int, int]]:
    import torch

    return [alloc_and_free_count(device) for device in range(torch._C._cuda_getDeviceCount())]


def _segments(shot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    return [segment for segment in shot["segments"] if segment["device"] == device]


def _identity(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["time_us"], entry["action"], entry.get("addr"), entry["size"], entry["stream"]


def _unread(entries: list[dict[str, Any]], tail: tuple[tuple[Any, ...], ...]) -> int | None:
    """The index of the first entry after those read before; None where they are no longer in the ring."""
    if not tail:
        return 0
    at = bisect.bisect_right(entries, tail[-1][0], key=lambda entry: entry["time_us"])
    while at >= len(tail) and entries[at - 1]["time_us"] == tail[-1][0]:
        if all(_identity(entries[at - len(tail) + i]) == tail[i] for i in range(len(tail))):
            return at
        at -= 1
    return None
