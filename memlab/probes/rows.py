"""Allocator history as rows: a snapshot with the counters around it, the ring of entries, and rows of a trace from both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice, repeat
from operator import itemgetter, ne
from types import FrameType
from typing import Any

import numpy as np

from memlab import torch_internals
from memlab.allocator import BlockTracker, LiveBlock, TrackedEvents
from memlab.probes.counters import cuda_counters
from memlab.torch_internals.frames import OWN_FILES
from memlab.trace.columns import Array, Events, Kind, deltas
from memlab.trace.snapshot_read import python_frames

KIND_OF_ACTION = {
    "alloc": int(Kind.ALLOC),
    "free_requested": int(Kind.FREE_PENDING),
    "free_completed": int(Kind.FREE),
    "segment_alloc": int(Kind.SEGMENT_ALLOC),
    "segment_free": int(Kind.SEGMENT_FREE),
    "segment_map": int(Kind.SEGMENT_MAP),
    "segment_unmap": int(Kind.SEGMENT_UNMAP),
    "oom": int(Kind.OOM),
}
"""Entries of history that change memory; "snapshot" and annotations do not."""

_MACHINERY = ("/IPython/core/interactiveshell.py", "/ipykernel/", "/ipykernel_launcher.py", "/asyncio/", "/tornado/")
_LIBRARIES = ("/torch/", OWN_FILES, "/site-packages/", "/dist-packages/", "<frozen ", "<string>", "/lib/python3")

# History has whole microseconds, truncated; the middle is equally far from the marks before and after.
_HALF_A_MICROSECOND = 500
_PIECE = 2000  # how many entries at a time become columns
_LENGTH = 8  # how many consecutive entries are compared to find the read position

Counts = tuple[int, int]
"""Allocations and frees that a device has ever seen, by its counters."""
Stack = Sequence[Mapping[str, Any]]


# --- a snapshot and its counters --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsistentSnapshot:
    """A snapshot, and the counts of each device before and after it."""

    shot: dict[str, Any]
    before: list[Counts]
    after: list[Counts]

    @property
    def is_settled(self) -> bool:
        """Whether nothing was allocated meanwhile: segments and entries are read one after the other."""
        return self.before == self.after


def take_consistent_snapshot(snapshot: Callable[[], dict[str, Any]]) -> ConsistentSnapshot:
    """A snapshot during which no other thread allocated, if a few tries give one."""
    with pause_threads():
        for _ in range(4):
            before = all_counts()
            look = ConsistentSnapshot(snapshot(), before, all_counts())
            if look.is_settled:
                break
    return look


def alloc_and_free_count(device: int) -> Counts:
    """How many allocations and frees a device has ever seen."""
    counts = cuda_counters(device)
    return counts["alloc_count"], counts["free_count"]


def all_counts() -> list[Counts]:
    """The counts of every device."""
    return [alloc_and_free_count(device) for device in range(torch_internals.device_count())]


def difference(now: Counts, before: Counts) -> Counts:
    """How many allocations and frees lie between two counts."""
    return now[0] - before[0], now[1] - before[1]


def segments_of(shot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    """The segments of one device in a snapshot."""
    return [segment for segment in shot["segments"] if segment["device"] == device]


def counters_as_snapshot() -> dict[str, Any]:
    """For an allocator without snapshots: everything allocated as one block, everything reserved as one segment."""
    segments = []
    for device in range(torch_internals.device_count()):
        counters = cuda_counters(device)
        allocated, reserved = (max(counters[name], 0) for name in ("allocated", "reserved"))
        blocks = [{"address": 0, "size": allocated, "state": "active_allocated"}] if allocated else []
        facts = {"device": device, "address": 0, "total_size": reserved, "allocated_size": allocated}
        segments.append({**facts, "blocks": blocks})
    return {"segments": segments, "device_traces": [[] for _ in segments], "allocator_settings": {}}


@contextlib.contextmanager
def pause_threads() -> Iterator[None]:
    """Keep the other Python threads waiting, for a few milliseconds at most."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector, which would walk hundreds of thousands of new entries repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- the ring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tail:
    """The last entries read, to find them again in the ring; without them everything in it is new."""

    entries: tuple[tuple[Any, ...], ...] = ()
    time_us: int = 0

    @classmethod
    def of(cls, entries: Stack) -> Tail:
        """The tail of the entries that were just read."""
        if not entries:
            return cls()
        return cls(tuple(map(_identity, entries[-_LENGTH:])), entries[-1]["time_us"])


def _identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    # Without the time: PyTorch converts it from a cycle counter for each snapshot, not always to the same value.
    return entry["action"], entry.get("addr"), entry["size"], entry["stream"]


def unread(entries: Stack, tail: Tail, at_least: Counts, at_most: Counts) -> int | None:
    """The index of the first unread entry; None if the tail is no longer in the ring.

    In a loop several places may look like the tail. After it there must be as many allocations and frees as the counters
    say; of the matching places, the nearest in time is used.
    """
    if not tail.entries:
        return 0
    size, after, found = len(tail.entries), 0, []
    for at in range(len(entries), size - 1, -1):
        if sum(at_least) <= after <= sum(at_most):
            looks = map(_identity, entries[at - size : at])
            if all(one == known for one, known in zip(looks, tail.entries, strict=True)):
                found.append((abs(entries[at - 1]["time_us"] - tail.time_us), at))
        after += entries[at - 1]["action"] in ("alloc", "free_requested")
        if after > sum(at_most):
            break
    return min(found)[1] if found else None


@functools.lru_cache(4096)
def _is_part(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def users_line(frame: FrameType | None) -> str:
    """The innermost user line of a frame and its callers, as `Stacks` writes it; "" for none."""
    while frame is not None and not _is_part(frame.f_code.co_filename, _MACHINERY):
        if not _is_part(frame.f_code.co_filename, _LIBRARIES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --- entries to columns -----------------------------------------------------------------------------------------------


class Stacks:
    """Numbers Python stacks: `texts` has the text of each, `line_of` the index of the user's own line in `lines`.

    Within one snapshot equal frames are the same object, so a stack is identified by the ids of its frames. When the snapshot
    is freed, `forget_objects` must be called, as ids are then reused.
    """

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.lines: dict[str, int] = {}
        self.line_of: list[int] = []
        self.forget_objects()

    def forget_objects(self) -> None:
        """Forget the ids of frames, keep the texts."""
        self._seen: dict[tuple[int, ...], int] = {(): -1}

    def indices(self, stacks: Sequence[Stack]) -> Array:
        """The number of each of these stacks (innermost frame first), -1 for an empty one."""
        # A long history has 100,000 stacks, and most equal the one before: comparing in C is faster than a key for each.
        is_other = np.ones(len(stacks), bool)
        is_other[1:] = list(map(ne, stacks, islice(stacks, 1, None)))
        others = list(compress(stacks, is_other))
        keys = [tuple(map(id, stack)) for stack in others]
        for key, stack in zip(keys, others, strict=True):
            if key not in self._seen:
                self._seen[key] = self._add(stack)
        numbers: Array = np.array([self._seen[key] for key in keys], np.int64)[np.cumsum(is_other) - 1]
        return numbers

    def _add(self, frames: Stack) -> int:
        frames = list(python_frames(frames))
        depths = (depth for depth, frame in enumerate(frames) if _is_part(frame["filename"], _MACHINERY))
        own = frames[: next(depths, len(frames))]  # inside the notebook's own call of the cell
        text = "\n".join(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in own)
        index = self.texts.setdefault(text, len(self.texts))
        if index == len(self.line_of):
            # The innermost user line: not PyTorch's, not a library's.
            users = (frame for frame in own if not _is_part(frame["filename"], _LIBRARIES))
            line = next((f"{frame['filename']}:{frame['line']}" for frame in users), None)
            self.line_of.append(-1 if line is None else self.lines.setdefault(line, len(self.lines)))
        return index


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of history as columns; an OOM entry has what the driver had free as its address."""

    kinds: Array
    addresses: Array
    sizes: Array
    streams: Array
    times_us: Array
    stacks: Array


def columns_of(entries: Sequence[Mapping[str, Any]], stacks: Stacks) -> Entries:
    """The entries that change memory, in order."""
    # In pieces that stay in the CPU's cache from one column to the next: a history may have 200,000 entries.
    pieces = (entries[start : start + _PIECE] for start in range(0, max(len(entries), 1), _PIECE))
    return Entries(*map(np.concatenate, zip(*(_columns(piece, stacks) for piece in pieces), strict=True)))


def _columns(entries: Sequence[Mapping[str, Any]], stacks: Stacks) -> list[Array]:
    # Column by column and in C as far as possible.
    kinds = np.fromiter(map(KIND_OF_ACTION.get, map(itemgetter("action"), entries), repeat(-1)), np.int64, len(entries))
    if (kinds < 0).any():
        entries, kinds = list(compress(entries, kinds >= 0)), kinds[kinds >= 0]
    if (kinds == Kind.OOM).any():
        addresses: Iterable[int] = (one["addr"] if "addr" in one else one.get("device_free", 0) for one in entries)
    else:
        addresses = map(itemgetter("addr"), entries)
    sizes, streams, times_us = (map(itemgetter(name), entries) for name in ("size", "stream", "time_us"))
    numbers = (np.fromiter(column, np.int64, len(entries)) for column in (addresses, sizes, streams, times_us))
    # Frees repeat the stack of their allocation, which is not needed; a third of the entries are allocations.
    made = kinds == Kind.ALLOC
    stack = np.full(len(kinds), -1, "<i4")
    stack[made] = stacks.indices([entry.get("frames", ()) for entry in compress(entries, made)])
    return [kinds, *numbers, stack]


# --- columns and states to rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Events of one device without losses, and the stack of each; `time_ns` is of the Unix clock."""

    events: Events
    stack: Array

    @classmethod
    def joined(cls, parts: Sequence[DeviceRows]) -> DeviceRows:
        """All rows of `parts`, in order."""
        stacks = [np.empty(0, "<i4"), *(part.stack for part in parts)]
        return cls(Events.joined([part.events for part in parts]), np.concatenate(stacks))

    def rows(self, selection: Array | slice) -> DeviceRows:
        """The selected rows."""
        return DeviceRows(self.events.rows(selection), self.stack[selection])


def part_of(device: int, entries: Entries, followed: TrackedEvents) -> DeviceRows:
    """The rows of one device, from entries and the blocks that followed them."""
    rows = followed.row
    events = Events(
        time_ns=entries.times_us[rows] * 1000 + _HALF_A_MICROSECOND,
        kind=followed.kind,
        block=followed.block,
        requested_bytes=followed.requested_bytes,
        allocated_bytes=followed.allocated_bytes,
        device=np.full(len(rows), device),
        stream=entries.streams[rows],
        address=entries.addresses[rows],
    )
    return DeviceRows(events, entries.stacks[rows])


def part_without_stacks(events: Events) -> DeviceRows:
    """Rows without a stack."""
    return DeviceRows(events, np.full(len(events), -1, "<i4"))


def held_rows(
    held: Iterable[tuple[int, LiveBlock]], device: int, time_ns: int = 0, kind: Kind = Kind.PREEXISTING
) -> Events:
    """A row for every (address, block) in use. A block whose free is pending is no longer allocated."""
    rows = [
        (b.block, b.requested_bytes, 0 if b.pending else b.allocated_bytes, b.stream, address) for address, b in held
    ]
    table = np.array(rows, np.int64).reshape(-1, 5)
    times, kinds, devices = (np.full(len(rows), value) for value in (time_ns, kind, device))
    return Events(times, kinds, table[:, 0], table[:, 1], table[:, 2], devices, table[:, 3], table[:, 4])


def reserved_row(change_bytes: int, device: int, time_ns: int = 0) -> Events:
    """One row for a change of *reserved* of which only the sum is known; none if nothing changed."""
    if not change_bytes:
        return Events.empty()
    kind = Kind.SEGMENT_ALLOC if change_bytes > 0 else Kind.SEGMENT_FREE
    row = (time_ns, kind, -1, 0, abs(change_bytes), device, 0, 0)
    return Events(*np.array([row], np.int64).T)


def opening_rows(blocks: BlockTracker, device: int) -> Events:
    """The rows for a state."""
    return Events.joined([reserved_row(blocks.reserved_bytes, device), held_rows(blocks.held.items(), device)])


def resync_rows(old: BlockTracker, fresh: BlockTracker, device: int, time_ns: int) -> Events:
    """The rows that lead from one state to a later one. Blocks that are in both keep their id."""
    gone = []
    for address, block in old.held.items():
        now = fresh.held.get(address)
        if now and dataclasses.replace(now, block=block.block) == block:
            now.block = block.block
        else:
            gone.append((address, block))
    known = {block.block for block in old.held.values()}
    come = [(address, block) for address, block in fresh.held.items() if block.block not in known]
    reserved = reserved_row(fresh.reserved_bytes - old.reserved_bytes, device, time_ns)
    return Events.joined([reserved, held_rows(gone, device, time_ns, Kind.FREE), held_rows(come, device, time_ns)])


def state_after(opening: Events, parts: Sequence[DeviceRows]) -> tuple[Events, int]:
    """The PREEXISTING rows for the blocks in use after `parts`, and the change of *reserved* in them."""
    events = Events.joined([opening, *(part.events for part in parts)])
    freed = events.block[events.kind == Kind.FREE]
    comes = (events.kind == Kind.PREEXISTING) | (events.kind == Kind.ALLOC)
    alive = events.rows(comes & ~np.isin(events.block, freed))
    pending = np.isin(alive.block, events.block[events.kind == Kind.FREE_PENDING])
    allocated = np.where(pending, 0, alive.allocated_bytes)
    nothing = np.zeros(len(alive), np.int64)
    alive = alive.replace(kind=nothing + Kind.PREEXISTING, time_ns=nothing, allocated_bytes=allocated)
    return alive, int(deltas(events, "reserved").sum())
