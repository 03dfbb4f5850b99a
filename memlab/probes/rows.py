"""Rows of a trace from the allocator's history: entries to columns, books to rows, states between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.allocator import Books, Followed, Held
from memlab.probes.stacks import Stacks
from memlab.trace.columns import Array, Events, Kind, deltas

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

# History keeps whole microseconds, cut off; the middle is as far from marks before as from those after.
_HALF_A_MICROSECOND = 500


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of history as columns; an OOM entry has what the driver had free as its address."""

    kinds: list[int]
    addresses: list[int]
    sizes: list[int]
    streams: list[int]
    times_us: list[int]
    stacks: list[int]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one device that follow one another without a loss; `time_ns` is of the Unix clock."""

    events: Events
    stack: Array

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """All rows of `parts`, in order."""
        stacks = [part.stack for part in parts]
        return cls(
            Events.joined([part.events for part in parts]), np.concatenate(stacks) if stacks else np.empty(0, "<i4")
        )


def columns_of(entries: Iterable[Mapping[str, Any]], stacks: Stacks) -> Entries:
    """The entries that change memory, in order."""
    # Column by column, without a tuple for each row: this runs once per entry of a history that may have 200,000.
    kept = [entry for entry in entries if entry["action"] in KIND_OF_ACTION]
    return Entries(
        kinds=[KIND_OF_ACTION[entry["action"]] for entry in kept],
        addresses=[entry["addr"] if "addr" in entry else entry.get("device_free", 0) for entry in kept],
        sizes=[entry["size"] for entry in kept],
        streams=[entry["stream"] for entry in kept],
        times_us=[entry["time_us"] for entry in kept],
        stacks=[stacks.index(entry["frames"]) if "frames" in entry else -1 for entry in kept],
    )


def part_of(device: int, entries: Entries, followed: Followed) -> Part:
    """The rows of one device, from what history said and what the books made of it."""
    rows = followed.row
    events = Events(
        time_ns=np.array(entries.times_us, np.int64)[rows] * 1000 + _HALF_A_MICROSECOND,
        kind=followed.kind,
        block=followed.block,
        requested_bytes=followed.requested_bytes,
        allocated_bytes=followed.allocated_bytes,
        device=np.full(len(rows), device),
        stream=np.array(entries.streams, np.int64)[rows],
        address=np.array(entries.addresses, np.int64)[rows],
    )
    return Part(events, np.array(entries.stacks, "<i4")[rows])


def part_without_stacks(events: Events) -> Part:
    """Rows that no code of the user's made."""
    return Part(events, np.full(len(events), -1, "<i4"))


def held_rows(held: Mapping[int, Held], device: int, time_ns: int = 0) -> Events:
    """An ADOPT row for every block in use. One whose owner let go already is not allocated any more."""
    return _rows_of(held.items(), Kind.ADOPT, device, time_ns)


def _rows_of(held: Iterable[tuple[int, Held]], kind: Kind, device: int, time_ns: int) -> Events:
    rows = [
        (b.block, b.requested_bytes, 0 if b.pending else b.allocated_bytes, b.stream, address) for address, b in held
    ]
    table = np.array(rows, np.int64).reshape(-1, 5)
    times, kinds, devices = (np.full(len(rows), value) for value in (time_ns, kind, device))
    return Events(times, kinds, table[:, 0], table[:, 1], table[:, 2], devices, table[:, 3], table[:, 4])


def reserved_row(change_bytes: int, device: int, time_ns: int = 0) -> Events:
    """One row for a change of *reserved* of which only the sum is known; none where nothing changed."""
    if not change_bytes:
        return Events.empty()
    kind = Kind.SEGMENT_ALLOC if change_bytes > 0 else Kind.SEGMENT_FREE
    row = (time_ns, kind, -1, 0, abs(change_bytes), device, 0, 0)
    return Events(*np.array([row], np.int64).T)


def resync_rows(old: Books, fresh: Books, device: int, time_ns: int) -> Events:
    """The rows that lead from one state of the books to a later one; blocks that are in both keep their id."""
    gone, come = [], []
    for address, block in old.held.items():
        now = fresh.held.get(address)
        if now and _same(now, block):
            now.block = block.block
        else:
            gone.append((address, block))
    known = {block.block for block in old.held.values()}
    come = [(address, block) for address, block in fresh.held.items() if block.block not in known]
    return Events.joined(
        [
            reserved_row(fresh.reserved_bytes - old.reserved_bytes, device, time_ns),
            _rows_of(gone, Kind.FREE, device, time_ns),
            _rows_of(come, Kind.ADOPT, device, time_ns),
        ]
    )


def _same(now: Held, then: Held) -> bool:
    facts = (now.requested_bytes, now.allocated_bytes, now.stream, now.pending)
    return facts == (then.requested_bytes, then.allocated_bytes, then.stream, then.pending)


def state_after(opening: Events, parts: Sequence[Part]) -> tuple[Events, int]:
    """The ADOPT rows for what is in use after `parts`, and by how many bytes *reserved* changed in them."""
    events = Events.joined([opening, *(part.events for part in parts)])
    reserved_change = int(deltas(events, "reserved").sum())
    freed = events.block[(events.kind == Kind.FREE)]
    comes = (events.kind == Kind.ADOPT) | (events.kind == Kind.ALLOC)
    alive = events.rows(comes & ~np.isin(events.block, freed))
    pending = np.isin(alive.block, events.block[events.kind == Kind.FREE_PENDING])
    allocated = np.where(pending, 0, alive.allocated_bytes)
    nothing = np.zeros(len(alive), np.int64)
    return alive.replace(kind=nothing + Kind.ADOPT, time_ns=nothing, allocated_bytes=allocated), reserved_change
