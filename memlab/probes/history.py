"""The recorder of CUDA allocator history: one per process, shared by all open tracks.

It starts history unless it is on, reads it when a track starts or ends (and between modules, backwards and optimizer steps of
long ones, if that is cheap enough), follows the blocks of every device, and stops history with the last track. History that
the user recorded is only read: never started, cleared or stopped.

Limits: history is a ring; entries overwritten before they were read are lost, and the trace names that range with bounds from
the counters. Allocations of other threads are in the history and cannot be distinguished.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab import torch_internals
from memlab.allocator import BlockTracker, LiveBlock, Settings
from memlab.probes import rows
from memlab.probes.counters import cuda_counters
from memlab.probes.rows import ConsistentSnapshot, Counts, DeviceRows, Tail
from memlab.trace.columns import Events, Kind, deltas
from memlab.trace.trace import Gap

RING_ENTRIES = 200_000
"""How many entries the allocator keeps by default: about 690 bytes of host memory each."""
MAX_ROWS = 2_000_000
"""How many rows are kept for one recording (about 150 MB); of older ones only the peaks are kept."""

QUIET_ENTRIES = 20_000  # the minimum of unread entries for a read in a quiet moment
READ_SHARE = 0.03  # the maximum share of time spent on reading in quiet moments
_LOOK_NS_PER_ENTRY = 25  # how often modules are quiet moments: the ring cannot have got much fuller since the last
_READ_S_PER_ENTRY = 8e-6  # the cost of reading and following an entry, rounded up
_HIGHER = 1.05  # by how much a peak rises that is worth reading what there is no time for: of a leak, a few reads
_FIRST_READS = 4  # so many are worth it if the peak rises at all: they may be parts of one step
_INTERVALS = 4  # how many of the last intervals after a kind of moment tell how much the next one may bring


@dataclass(frozen=True, slots=True)
class Lost:
    """A range without rows: lost unread, or dropped to bound memory (then its peaks and its end row are known)."""

    begin_ns: int
    end_ns: int
    lost_events: int
    peak_allocated_bytes: int = -1
    peak_reserved_bytes: int = -1
    end_row: int = -1


@dataclass(frozen=True, slots=True)
class Position:
    """A read position of one device: rows and losses so far."""

    rows: int = 0
    losses: int = 0


@dataclass(slots=True)
class DeviceHistory:
    """The recording of one device: its blocks now, the rows so far, and the read position.

    The first `dropped` rows were dropped; `opening` and `opening_reserved` are the state before the first row kept.
    """

    device: int
    blocks: BlockTracker
    opening: Events
    opening_reserved: int
    parts: list[DeviceRows] = field(default_factory=list)
    losses: list[Lost] = field(default_factory=list)
    dropped: int = 0
    tail: Tail = field(default_factory=Tail)
    read_ns: int = 0
    counts: Counts = (0, 0)
    counts_before: Counts = (0, 0)

    def opening_now(self) -> Events:
        """The rows for the state as of the last read."""
        return rows.opening_rows(self.blocks, self.device)

    def parts_after(self, count: int) -> list[DeviceRows]:
        """The parts after this many rows. A track begins with a read, so that is never within a part."""
        count -= self.dropped
        for index, part in enumerate(self.parts):
            if count <= 0:
                return self.parts[index:]
            count -= len(part.events)
        return []

    @property
    def position(self) -> Position:
        """How far this device has been read."""
        return Position(self.dropped + sum(len(part.events) for part in self.parts), len(self.losses))

    def blocks_by_rows(self) -> BlockTracker:
        """The blocks according to the rows: enough to compare with, not to continue from."""
        alive, change = rows.state_after(self.opening, self.parts)
        columns = (alive.address, alive.block, alive.requested_bytes, alive.allocated_bytes, alive.stream)
        held = {
            address: LiveBlock(block, requested, allocated, stream, not allocated)
            for address, block, requested, allocated, stream in zip(*(one.tolist() for one in columns), strict=True)
        }
        reserved = self.opening_reserved + change
        return BlockTracker(held=held, reserved_bytes=reserved, next_block=self.blocks.next_block)

    def losses_since(self, first: Position) -> list[Lost]:
        """The losses after a position. Rows that were dropped later may precede it."""
        numbered = enumerate(self.losses)
        return [one for at, one in numbered if (one.end_row > first.rows if one.end_row >= 0 else at >= first.losses)]

    def drop_oldest(self) -> None:
        """Drop the oldest rows when there are too many; their peaks are kept."""
        while len(self.parts) > 1 and self.position.rows - self.dropped > MAX_ROWS:
            part = self.parts.pop(0)
            events = part.events
            end_row = self.dropped + len(events)
            if len(events):
                allocated = int(deltas(self.opening, "allocated").sum())
                rise = {of: int(np.cumsum(deltas(events, of)).max(initial=0)) for of in ("allocated", "reserved")}
                lost = Lost(
                    begin_ns=int(events.time_ns[0]),
                    end_ns=int(events.time_ns[-1]),
                    lost_events=len(events),
                    peak_allocated_bytes=allocated + rise["allocated"],
                    peak_reserved_bytes=self.opening_reserved + rise["reserved"],
                    end_row=end_row,
                )
                self.losses.append(lost)
            self.opening, change = rows.state_after(self.opening, [part])
            self.opening_reserved += change
            self.dropped = end_row


class Recorder:
    """Records history while it has users. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.entries = RING_ENTRIES
        self._reset()

    def _reset(self) -> None:
        self.owns_history = False
        self.is_open = False
        self.devices: list[DeviceHistory] = []
        self.stacks = rows.Stacks()
        self.gaps: dict[str, Gap] = {}
        self.is_blind = False
        self.entries_read = 0
        self._spent_s = 0.0
        self._opened_s = 0.0
        self._unread = 0
        self._peaks: list[int] = []
        self._reads = 0
        self._last_moment = ""
        # By the kind of moment: the entries that came from it to the next one.
        self._brought: defaultdict[str, deque[int]] = defaultdict(lambda: deque([0], _INTERVALS))
        self._users_switch: Callable[..., Any] | None = None
        self._our_switch: Callable[..., Any] | None = None

    def acquire(self, entries: int = RING_ENTRIES) -> None:
        """Start recording, or join the other users; if CUDA is not initialized, recording starts when it is."""
        with self.lock:
            self.users += 1
            try:
                if self.users == 1:
                    self.entries = entries
                    torch_internals.when_cuda_starts(self._open)
                else:
                    self.read()
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Stop recording with the last user, and restore history, switch and queue."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
            try:
                torch_internals.forget_when_cuda_starts(self._open)
                try:
                    if self._users_switch is not None and torch_internals.history_switch() is self._our_switch:
                        torch_internals.replace_history_switch(self._users_switch)
                finally:
                    if self.owns_history:
                        torch_internals.stop_history()
            finally:
                self._reset()

    def _open(self) -> None:
        with self.lock:
            if self.is_open or not self.users:
                return
            try:
                self.owns_history = not torch_internals.history_is_on()
                if self.owns_history:
                    torch_internals.record_history(self.entries)
                else:
                    how = "read as it is, never cleared; frames and length are the user's choice"
                    self._note("users history", f"allocator history was on already: {how}")
                look = self._look()
            except RuntimeError as error:
                # This runs inside the user's first use of CUDA and must not fail it.
                if self.owns_history:
                    torch_internals.stop_history()
                self.is_blind, self.owns_history = True, False
                why = str(error).strip().split("\n")[0].split(". ")[0][:120]
                self._note("no history", f"this allocator has no history ({why}): counters and samples only")
                look = self._look()
            self._opened_s = time.monotonic()
            settings = Settings.from_snapshot(look.shot["allocator_settings"])
            for device, entries in enumerate(look.shot["device_traces"]):
                blocks = BlockTracker.from_snapshot(rows.segments_of(look.shot, device), settings)
                opening = rows.held_rows(blocks.held.items(), device)
                self.devices.append(DeviceHistory(device, blocks, opening, blocks.reserved_bytes))
                self._mark_read(self.devices[-1], Tail.of(entries), look)
            self.is_open = True
            if not self.is_blind:
                self._watch_switch()

    def _note(self, name: str, text: str) -> None:
        self.gaps.setdefault(name, Gap(name, text))

    def _watch_switch(self) -> None:
        """Wrap the function with which the user may start or stop history while we record."""
        users = self._users_switch = torch_internals.history_switch()

        @functools.wraps(users)
        def switch(*args: Any, **kwargs: Any) -> None:
            with self.lock:
                if self._our_switch is not switch:  # something kept it for longer than the track
                    users(*args, **kwargs)
                    return
                self.read()
                if self.owns_history:
                    torch_internals.stop_history()  # so that the user's recording does not contain ours
                try:
                    users(*args, **kwargs)
                finally:
                    # History now belongs to the user; when theirs ends, ours continues.
                    self.owns_history = not torch_internals.history_is_on()
                    if self.owns_history:
                        torch_internals.record_history(self.entries)
                    else:
                        whose = "the measured code recorded allocator history itself"
                        self._note("users history", f"{whose}: from there on it was read as it was")
                    self._go_on(is_lost=False)

        self._our_switch = switch
        torch_internals.replace_history_switch(switch)

    def read(self) -> None:
        """Read the new entries, and follow the blocks."""
        with self.lock, rows.pause_gc():
            if self.is_open:
                self._read()  # the snapshot is freed on return, before the garbage collector could traverse it

    def _read(self) -> None:
        begin = time.monotonic()
        with rows.pause_threads():
            look = self._look()
            # The ring is cleared, so that no entry is read twice. An event between the read and this line is lost; the
            # counters show that at the next read.
            is_cleared = self.owns_history and look.is_settled
            if is_cleared:
                torch_internals.record_history(self.entries)
        for history, entries in zip(self.devices, look.shot["device_traces"], strict=True):
            self.entries_read += len(entries)
            self._read_device(history, entries, look)
            self._mark_read(history, Tail() if is_cleared else Tail.of(entries), look)
            history.drop_oldest()
        self.stacks.forget_objects()
        self._spent_s += time.monotonic() - begin

    def _look(self) -> ConsistentSnapshot:
        take = rows.counters_as_snapshot if self.is_blind else torch_internals.snapshot
        return rows.take_consistent_snapshot(take)

    def _read_device(self, history: DeviceHistory, entries: list[dict[str, Any]], look: ConsistentSnapshot) -> None:
        device, shot = history.device, look.shot
        happened = rows.difference(look.before[device], history.counts)
        at_most = rows.difference(look.after[device], history.counts_before)
        first = None if self.is_blind else rows.unread(entries, history.tail, happened, at_most)
        new = rows.columns_of(entries[first:], self.stacks) if first is not None else None
        kinds = (Kind.ALLOC, Kind.FREE_PENDING)
        if new is None or any((new.kinds == kind).sum() < count for kind, count in zip(kinds, happened, strict=True)):
            self._reopen(history, look)
            return
        if not len(new.kinds):
            return
        followed = history.blocks.follow(new.kinds, new.addresses, new.sizes, new.streams)
        is_wrong = bool(history.blocks.inconsistencies)
        if look.is_settled and not is_wrong:  # do the blocks agree with the snapshot?
            segments = rows.segments_of(shot, device)
            sizes = (sum(one[name] for one in segments) for name in ("allocated_size", "total_size"))
            shown = (*sizes, Settings.from_snapshot(shot["allocator_settings"]))
            blocks = history.blocks
            is_wrong = shown != (blocks.allocated_bytes, blocks.reserved_bytes, blocks.settings)
        if is_wrong:
            self._note("rules", "events that do not add up (settings or pools changed on the way?): taken as unread")
            history.blocks = history.blocks_by_rows()
            self._reopen(history, look)
        else:
            history.parts.append(rows.part_of(device, new, followed))

    def _mark_read(self, history: DeviceHistory, tail: Tail, look: ConsistentSnapshot) -> None:
        history.tail = tail
        history.read_ns = time.time_ns()
        history.counts_before, history.counts = look.before[history.device], look.after[history.device]

    def _reopen(self, history: DeviceHistory, look: ConsistentSnapshot) -> None:
        """Entries were lost: add the rows from the known state to the allocator's current state, and continue from there."""
        old, now_ns = history.blocks, time.time_ns()
        settings = Settings.from_snapshot(look.shot["allocator_settings"])
        fresh = BlockTracker.from_snapshot(rows.segments_of(look.shot, history.device), settings, old.next_block)
        lost_events = sum(look.after[history.device]) - sum(history.counts)
        between = rows.resync_rows(old, fresh, history.device, now_ns)
        history.parts.append(rows.part_without_stacks(between))
        history.losses.append(Lost(history.read_ns, now_ns, max(lost_events, 0)))
        history.blocks = fresh

    def _go_on(self, is_lost: bool) -> None:
        """Continue from the allocator's current state: entries were lost, or only the position in the ring has changed."""
        look = self._look()
        for history, entries in zip(self.devices, look.shot["device_traces"], strict=True):
            if is_lost or history.counts != look.after[history.device]:
                self._reopen(history, look)
            self._mark_read(history, Tail.of(entries), look)
            history.drop_oldest()

    def quiet_moment(self, after: str) -> int:
        """After a module, a backward or an optimizer step: read if there is enough to read, and time for it.

        Reading takes microseconds per entry, too much for a loop of tiny steps. There the ring is cleared unread before it
        overflows and the blocks are read again, so that no entry is missing from there to the end of the cell. What may
        hold the peak is read all the same: the first stretch, as steps are alike, and later ones in which the peak rose.
        Returns the time of the Unix clock, in nanoseconds, from which modules are quiet moments again.
        """
        if self.is_open and self.owns_history and self.lock.acquire(blocking=False):
            try:
                self._look_at_ring(after)
            finally:
                self.lock.release()
        return time.time_ns() + self.entries * _LOOK_NS_PER_ENTRY

    def _look_at_ring(self, after: str) -> None:
        unread, peaks = 0, []
        for history in self.devices:
            counters = cuda_counters(history.device)
            counts = counters["alloc_count"], counters["free_count"]
            allocs, frees = rows.difference(counts, history.counts)
            unread += allocs + 2 * frees  # about as many entries: two for a free, few for segments
            peaks.append(counters["peak_allocated"])
        self._brought[self._last_moment].append(unread - (self._unread if self._unread <= unread else 0))
        self._last_moment, self._unread = after, unread
        if unread < min(QUIET_ENTRIES, 0.4 * self.entries):
            return
        has_time = self._spent_s + unread * _READ_S_PER_ENTRY <= READ_SHARE * (time.monotonic() - self._opened_s)
        is_nearly_full = unread > 0.8 * self.entries or unread + max(self._brought[after]) > self.entries
        rise = 1.0 if self._reads < _FIRST_READS else _HIGHER
        is_higher = not self._peaks or any(now > rise * then for now, then in zip(peaks, self._peaks, strict=True))
        if has_time or (is_nearly_full and is_higher):
            self._peaks, self._reads = peaks, self._reads + 1
            self.read()
        elif is_nearly_full:
            torch_internals.record_history(self.entries)
            self._go_on(is_lost=True)
        else:
            return
        self._unread = 0
