"""The recorder of CUDA allocator history: one per process, shared by every track that is open.

It starts history if nobody else did, reads it at the edges of tracks (and at quiet moments of long ones, where that is
cheap enough), keeps the books of every device along it, and leaves history as it was when the last track ends. History
that the user recorded is only read: never started, cleared or stopped.

Limits: entries that the bounded ring dropped before they were read are lost; the stretch is then named, with what the
counters know of it. What other threads allocate is in the history like everything else, but cannot be told apart.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab import seams
from memlab.allocator import Books, Held, Settings
from memlab.probes.look import (
    Counts,
    Look,
    alloc_and_free_count,
    counters_as_snapshot,
    difference,
    segments_of,
    take_look,
)
from memlab.probes.ring import Tail, unread
from memlab.probes.rows import Part, columns_of, held_rows, part_of, part_without_stacks, resync_rows, state_after
from memlab.probes.stacks import Stacks
from memlab.probes.stillness import collector_paused, uninterrupted
from memlab.trace.columns import Events, Kind, deltas
from memlab.trace.trace import Gap

RING_ENTRIES = 200_000
"""How many entries the allocator keeps by default: about 690 bytes of host memory each."""


MAX_ROWS = 2_000_000
"""How many rows are kept for one recording (about 150 MB); of older ones the peaks stay, the rows go."""

_QUIET_ENTRIES = 20_000  # fewer unread entries than this are not worth a look at a quiet moment
_READ_SHARE = 0.03  # at most this share of the time is spent on reading at quiet moments
_READ_S_PER_ENTRY = 8e-6  # what reading and following an entry costs, rounded up


@dataclass(frozen=True, slots=True)
class Lost:
    """A stretch whose rows are not there: lost unread, or let go to bound memory (then its peaks are known).

    `end_row` is the row, counted from the opening, before which rows that were let go stood.
    """

    device: int
    begin_ns: int
    end_ns: int
    lost_events: int
    peak_allocated_bytes: int = -1
    peak_reserved_bytes: int = -1
    end_row: int = -1


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
    tail: Tail = field(default_factory=Tail)
    read_ns: int = 0
    counts: Counts = (0, 0)
    counts_before: Counts = (0, 0)

    @property
    def position(self) -> Position:
        """How far this device has been read."""
        return Position(self.dropped + sum(len(part.events) for part in self.parts), len(self.losses))

    def books_by_rows(self) -> Books:
        """Books of what the rows kept come to: enough to compare with, not to go on from."""
        alive, change = state_after(self.opening, self.parts)
        columns = (alive.address, alive.block, alive.requested_bytes, alive.allocated_bytes, alive.stream)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        held = {
            address: Held(block, requested, allocated, stream, not allocated)
            for address, block, requested, allocated, stream in rows
        }
        reserved = self.opening_reserved + change
        return Books(held=held, reserved_bytes=reserved, next_block=self.books.next_block)

    def losses_since(self, first: Position) -> list[Lost]:
        """The losses after a position. What was let go later may have stood before it."""
        return [
            lost
            for index, lost in enumerate(self.losses)
            if (lost.end_row > first.rows if lost.end_row >= 0 else index >= first.losses)
        ]


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
        self.is_blind = False
        self.entries_read = 0
        self._spent_s = 0.0
        self._opened_s = 0.0
        self._users_switch: Callable[..., Any] | None = None
        self._our_switch: Callable[..., Any] | None = None

    # --- the life of the recorder ---------------------------------------------------------------------------------

    def acquire(self, entries: int = RING_ENTRIES) -> None:
        """Begin to record, or join those who do; where CUDA is not up yet, recording begins when it comes up."""
        with self.lock:
            self.users += 1
            try:
                if self.users == 1:
                    self.entries = entries
                    seams.when_cuda_starts(self._open)
                else:
                    self.read()
            except BaseException:
                self.release()
                raise

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
        try:
            if self._users_switch is not None and seams.history_switch() is self._our_switch:
                seams.replace_history_switch(self._users_switch)
        finally:
            if self.owns_history:
                seams.stop_history()

    def _open(self) -> None:
        with self.lock:
            if self.is_open or not self.users:
                return
            try:
                self._begin_history()
                look = self._look()
            except RuntimeError as error:
                # It is met inside of the user's first use of CUDA and must not stop it.
                if self.owns_history:
                    seams.stop_history()
                self.is_blind, self.owns_history = True, False
                text = f"this allocator has no history ({_first_line(error)}): counters and samples only"
                self._note("no history", text)
                look = self._look()
            self._opened_s = time.monotonic()
            self._open_devices(look)
            self.is_open = True
            if not self.is_blind:
                self._watch_switch()

    def _begin_history(self) -> None:
        self.owns_history = not seams.history_is_on()
        if self.owns_history:
            seams.record_history(self.entries)
        else:
            text = "allocator history was on already: read as it is, never cleared; frames and length are the user's choice"
            self._note("users history", text)

    def _open_devices(self, look: Look) -> None:
        settings = Settings.from_snapshot(look.shot["allocator_settings"])
        for device, entries in enumerate(look.shot["device_traces"]):
            books = Books.from_snapshot(segments_of(look.shot, device), settings)
            opening = held_rows(books.held, device)
            history = DeviceHistory(device, books, opening, books.reserved_bytes)
            self._mark_read(history, Tail.of(entries), look)
            self.devices.append(history)

    def _note(self, name: str, text: str) -> None:
        self.gaps.setdefault(name, Gap(name, text))

    # --- history that the user starts or stops while we record --------------------------------------------------------

    def _watch_switch(self) -> None:
        users = self._users_switch = seams.history_switch()

        @functools.wraps(users)
        def switch(*args: Any, **kwargs: Any) -> None:
            with self.lock:
                if self._our_switch is not switch:  # somebody wrapped it and kept it for longer than the track
                    users(*args, **kwargs)
                    return
                self.read()
                if self.owns_history:
                    seams.stop_history()  # so that the user's recording does not begin with ours
                try:
                    users(*args, **kwargs)
                finally:
                    self._after_switch()

        self._our_switch = switch
        seams.replace_history_switch(switch)

    def _after_switch(self) -> None:
        """The user's history is the user's from now on; when it ends, ours goes on."""
        self.owns_history = not seams.history_is_on()
        if self.owns_history:
            seams.record_history(self.entries)
        else:
            self._note(
                "users history", "the cell recorded allocator history itself: from there on it was read as it was"
            )
        self._resume()

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the entries nobody has read, and keep the books along them."""
        with self.lock, collector_paused():
            if not self.is_open:
                return
            begin = time.monotonic()
            with uninterrupted():
                look = self._look()
                # What is read leaves the ring, so that no entry is read twice. An event that falls between the look and
                # this line is missing the next time, and missed then: the counters have it.
                is_cleared = self.owns_history and look.is_settled
                if is_cleared:
                    seams.record_history(self.entries)
            for history, entries in zip(self.devices, look.shot["device_traces"], strict=True):
                self.entries_read += len(entries)
                self._read_device(history, entries, look)
                self._mark_read(history, Tail() if is_cleared else Tail.of(entries), look)
                self._bound(history)
            self.stacks.forget_objects()
            self._spent_s += time.monotonic() - begin

    def _look(self) -> Look:
        return take_look(counters_as_snapshot if self.is_blind else seams.snapshot)

    def _happened_since(self, history: DeviceHistory) -> Counts:
        return difference(alloc_and_free_count(history.device), history.counts)

    def _read_device(self, history: DeviceHistory, entries: list[dict[str, Any]], look: Look) -> None:
        if self.is_blind:
            self._reopen(history, look)
            return
        happened = difference(look.before[history.device], history.counts)
        at_most = difference(look.after[history.device], history.counts_before)
        first = unread(entries, history.tail, happened, at_most)
        new = columns_of(entries[first:], self.stacks) if first is not None else None
        if new is None or new.kinds.count(Kind.ALLOC) < happened[0] or new.kinds.count(Kind.FREE_PENDING) < happened[1]:
            self._reopen(history, look)
            return
        if not new.kinds:
            return
        followed = history.books.follow(new.kinds, new.addresses, new.sizes, new.streams)
        if history.books.surprises or (look.is_settled and not _agree(history.books, history.device, look.shot)):
            self._note("rules", "events that do not add up (settings or pools changed on the way?): taken as unread")
            history.books = history.books_by_rows()
            self._reopen(history, look)
        else:
            history.parts.append(part_of(history.device, new, followed))

    def _mark_read(self, history: DeviceHistory, tail: Tail, look: Look) -> None:
        history.tail = tail
        history.read_ns = time.time_ns()
        history.counts_before, history.counts = look.before[history.device], look.after[history.device]

    def _reopen(self, history: DeviceHistory, look: Look) -> None:
        """Entries were lost: close what was known at the state it had, and go on from the allocator's state now."""
        old, now_ns = history.books, time.time_ns()
        settings = Settings.from_snapshot(look.shot["allocator_settings"])
        fresh = Books.from_snapshot(segments_of(look.shot, history.device), settings, old.next_block)
        lost_events = sum(look.after[history.device]) - sum(history.counts)
        history.parts.append(part_without_stacks(resync_rows(old, fresh, history.device, now_ns)))
        history.losses.append(Lost(history.device, history.read_ns, now_ns, max(lost_events, 0)))
        history.books = fresh

    def _resume(self) -> None:
        """Go on from the state of the allocator now, where nothing was lost but the place in the entries is new."""
        look = self._look()
        for history, entries in zip(self.devices, look.shot["device_traces"], strict=True):
            if history.counts != look.after[history.device]:
                self._reopen(history, look)
            self._mark_read(history, Tail.of(entries), look)

    # --- long cells -------------------------------------------------------------------------------------------------

    def quiet_moment(self) -> None:
        """Called where the user's thread is between two pieces of work: read if that is cheap, else keep the end exact.

        Reading costs a few microseconds an entry, too much for a loop of tiny steps. There the ring is emptied unread
        before it overflows and the books are opened again, so that the stretch up to the end of the cell is whole.
        """
        if not self.is_open or not self.owns_history or not self.lock.acquire(blocking=False):
            return
        try:
            unread = sum(_entries_of(*self._happened_since(history)) for history in self.devices)
            if unread < min(_QUIET_ENTRIES, 0.4 * self.entries):
                return
            if self._spent_s + unread * _READ_S_PER_ENTRY <= _READ_SHARE * (time.monotonic() - self._opened_s):
                self.read()
            elif unread > 0.8 * self.entries:
                self._restart()
        finally:
            self.lock.release()

    def _restart(self) -> None:
        seams.record_history(self.entries)
        look = self._look()
        for history, entries in zip(self.devices, look.shot["device_traces"], strict=True):
            self._reopen(history, look)
            self._mark_read(history, Tail.of(entries), look)
            self._bound(history)

    def _bound(self, history: DeviceHistory) -> None:
        """Let the oldest rows go when there are too many; what they peaked at stays known."""
        while len(history.parts) > 1 and history.position.rows - history.dropped > MAX_ROWS:
            part = history.parts.pop(0)
            if len(part.events):
                history.losses.append(_summary(history, part))
            history.opening, change = state_after(history.opening, [part])
            history.opening_reserved += change
            history.dropped += len(part.events)


def _summary(history: DeviceHistory, part: Part) -> Lost:
    """What stays known of rows that are let go."""
    return Lost(
        history.device,
        begin_ns=int(part.events.time_ns[0]),
        end_ns=int(part.events.time_ns[-1]),
        lost_events=len(part.events),
        peak_allocated_bytes=_highest(part, "allocated", int(deltas(history.opening, "allocated").sum())),
        peak_reserved_bytes=_highest(part, "reserved", history.opening_reserved),
        end_row=history.dropped + len(part.events),
    )


def _highest(part: Part, of: str, start: int) -> int:
    return start + int(np.cumsum(deltas(part.events, of)).max(initial=0))


def _entries_of(allocs: int, frees: int) -> int:
    """About how many entries these make: one for an allocation, two for a free, few for segments."""
    return allocs + 2 * frees


def _agree(books: Books, device: int, shot: dict[str, Any]) -> bool:
    """Whether the books, kept along the entries, came to what the snapshot shows."""
    segments = segments_of(shot, device)
    allocated = sum(segment["allocated_size"] for segment in segments)
    reserved = sum(segment["total_size"] for segment in segments)
    settings = Settings.from_snapshot(shot["allocator_settings"])
    return (books.allocated_bytes, books.reserved_bytes, books.settings) == (allocated, reserved, settings)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0][:120]
