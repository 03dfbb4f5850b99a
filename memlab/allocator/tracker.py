"""The state of the allocator, followed along the addresses in its history: the true size of each block.

History has the requested size and the address. The allocated size follows from the free block at that address and
the rules for splitting, so following the free ranges gives *allocated* exactly. Nothing is chosen here:
`CachingAllocator` (predictions) chooses addresses, `BlockTracker` only follows them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.allocator.rules import Settings
from memlab.trace.columns import Array, Kind

_ALLOC, _FREE, _PENDING = int(Kind.ALLOC), int(Kind.FREE), int(Kind.FREE_PENDING)
_AT_ONCE = -1  # a free that completes as soon as it is requested
_Column = Sequence[int] | Array


@dataclass(slots=True)
class LiveBlock:
    """A block in use: id, requested and allocated bytes; `pending` while another stream uses it after its free."""

    block: int
    requested_bytes: int
    allocated_bytes: int
    stream: int = 0
    pending: bool = False


@dataclass(frozen=True, slots=True)
class TrackedEvents:
    """The result of `follow`, a row per event kept: its block, requested and allocated bytes.

    `row` is the position in the events followed. A free that is requested and completed at once is one row, FREE.
    """

    row: Array
    kind: Array
    block: Array
    requested_bytes: Array
    allocated_bytes: Array


@dataclass(slots=True)
class BlockTracker:
    """Segments, free ranges and live blocks of one device.

    `inconsistencies` counts events that contradict the rules (a block allocated where nothing was free): they are followed
    as well as possible, and the figures are no longer exact.
    """

    settings: Settings = field(default_factory=Settings)
    held: dict[int, LiveBlock] = field(default_factory=dict)
    free_size: dict[int, int] = field(default_factory=dict)
    free_start_by_end: dict[int, int] = field(default_factory=dict)
    walls: Counter[int] = field(default_factory=Counter)  # ends of segments, which free ranges never cross
    reserved_bytes: int = 0
    next_block: int = 0
    inconsistencies: int = 0
    rounded: dict[int, int] = field(default_factory=dict)  # rounded sizes, cached: programs repeat their requests

    @classmethod
    def from_snapshot(
        cls, segments: Sequence[Mapping[str, Any]], settings: Settings, next_block: int = 0
    ) -> BlockTracker:
        """Begin with the segments of one device, as in a PyTorch memory snapshot."""
        tracker = cls(settings, next_block=next_block)
        for segment in segments:
            address, size = segment["address"], segment["total_size"]
            tracker.reserved_bytes += size
            if not segment.get("is_expandable"):
                tracker.walls.update((address, address + size))
            for block in segment["blocks"]:
                # Snapshots before 2.0 have no addresses: the blocks are in order.
                address = block.get("address", address)
                if block["state"] == "inactive":
                    tracker._put_free(address, block["size"])
                else:
                    requested, stream = block.get("requested_size", block["size"]), segment.get("stream", 0)
                    pending = block["state"] != "active_allocated"
                    tracker.held[address] = LiveBlock(tracker.next_block, requested, block["size"], stream, pending)
                    tracker.next_block += 1
                address += block["size"]
        return tracker

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the allocator counts as allocated."""
        return sum(live.allocated_bytes for live in self.held.values() if not live.pending)

    def follow(self, kinds: _Column, addresses: _Column, sizes: _Column, streams: _Column) -> TrackedEvents:
        """Follow events in order; `sizes` are the requested ones, as in the history."""
        events = np.array([kinds, addresses, sizes, streams], np.int64)
        kind, address = events[:2]
        completes = np.zeros(len(kind), bool)  # frees that the row before requested
        completes[1:] = (kind[:-1] == _PENDING) & (kind[1:] == _FREE) & (address[:-1] == address[1:])
        kind[np.flatnonzero(completes) - 1] = _AT_ONCE
        row = np.flatnonzero(~completes)
        kind, address, asked, stream = events[:, row]
        requests = asked.tolist()
        for size in set(requests) - self.rounded.keys():
            self.rounded[size] = self.settings.round(size)
        # Blocks are numbered: first those in use, then one number per row, for the block that it allocates, if any.
        older = [(b.block, b.requested_bytes, b.allocated_bytes, b.stream, b.pending) for b in self.held.values()]
        first, held = len(older), {at: number for number, at in enumerate(self.held)}
        taken = [block[2] for block in older] + list(map(self.rounded.__getitem__, requests))
        freed, unknown = self._walk(kind.tolist(), address.tolist(), requests, taken, held)
        number, is_new = np.arange(first, len(taken)), kind == _ALLOC
        number[~is_new & (kind <= _PENDING)] = freed
        is_new[unknown] = True
        facts = np.zeros((5, len(taken)), np.int64)  # of each number, as in `older`
        facts[:, :first] = np.array(older, np.int64).reshape(-1, 5).T
        facts[0, first:] = np.where(is_new, self.next_block + np.cumsum(is_new) - 1, -1)
        facts[1, first:], facts[2], facts[3, first:] = asked, taken, np.where(kind == _ALLOC, stream, 0)
        facts[4, number[kind == _PENDING]] = True
        self.next_block += int(is_new.sum())
        alive = zip(held, facts[:, list(held.values())].T.tolist(), strict=True)
        self.held = {at: LiveBlock(of, room, size, on, bool(waits)) for at, (of, room, size, on, waits) in alive}
        block, requested, allocated, _, is_pending = facts[:, number]
        requested[(kind >= _PENDING) & (kind != Kind.OOM)] = 0
        allocated[(kind == _FREE) & (is_pending == 1)] = 0  # it was no longer allocated
        # Of an OOM, history keeps the driver's free bytes as its address.
        others = np.where(kind == Kind.OOM, np.maximum(address, 0), asked)
        allocated = np.where(kind > _PENDING, others, allocated)
        return TrackedEvents(row, np.where(kind == _AT_ONCE, _FREE, kind), block, requested, allocated)

    def _walk(
        self, kinds: list[int], addresses: list[int], sizes: list[int], taken: list[int], held: dict[int, int]
    ) -> tuple[list[int], list[int]]:
        """Update the free ranges, `held` (address -> number) and `taken`, the allocated size of each number (rounded at first).

        Returns the numbers of the freed blocks, and the rows of frees whose allocation was not seen: for those the rounded
        size is assumed. One loop, as it runs for every entry of a history.
        """
        freed, unknown, first = list[int](), list[int](), len(taken) - len(kinds)
        free_size, free_start, put_free = self.free_size, self.free_start_by_end, self._put_free
        splits = functools.cache(self.settings.splits)  # programs repeat their requests
        for number, (kind, address, size) in enumerate(zip(kinds, addresses, taken[first:], strict=True), first):
            if kind == _ALLOC:
                room = free_size.pop(address, -1)
                if room > size and splits(room, size):
                    free_size[address + size] = room - size
                    free_start[address + room] = address + size
                else:
                    if room >= 0:
                        free_start.pop(address + room, None)
                    if room < size:
                        self.inconsistencies += 1
                    else:
                        taken[number] = room
                held[address] = number
            elif kind <= _PENDING:
                found = held.setdefault(address, number) if kind == _PENDING else held.pop(address, number)
                freed.append(found)
                if found == number:
                    self.inconsistencies += 1
                    unknown.append(number - first)
                if kind != _PENDING:
                    put_free(address, taken[found])
            elif kind != Kind.OOM:
                self._segment(kind, address, sizes[number - first])
        return freed, unknown

    def _put_free(self, address: int, size: int) -> None:
        """Add a free range and merge it with its free neighbors, never across segments that are not expandable."""
        end, walls, free_size, free_start = address + size, self.walls, self.free_size, self.free_start_by_end
        if address in free_start and address not in walls:
            before = free_start.pop(address)
            if free_size.pop(before, None) is not None:
                address = before
        if end in free_size and end not in walls:
            end += free_size.pop(end)
        free_size[address] = end - address
        free_start[end] = address

    def _segment(self, kind: int, address: int, size: int) -> None:
        ends = (address, address + size)
        if kind in (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP):
            self.walls.update(ends if kind == Kind.SEGMENT_ALLOC else ())
            self._put_free(address, size)
            self.reserved_bytes += size
        elif kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP):
            self._take_free(address, size)
            self.reserved_bytes -= size
            if kind == Kind.SEGMENT_FREE:  # the end of one segment may be the start of the next
                for end in ends:
                    self.walls[end] -= 1
                    if self.walls[end] <= 0:
                        del self.walls[end]

    def _take_free(self, address: int, size: int) -> None:
        """Cut a range out of the free range around it (an unmapped middle leaves a head and a tail)."""
        start: int | None = address
        if address not in self.free_size:
            around = (start for start, room in self.free_size.items() if start <= address < start + room)
            start = next(around, None)
        if start is None or start + self.free_size[start] < address + size:
            self.inconsistencies += 1
            return
        end = start + self.free_size.pop(start)
        self.free_start_by_end.pop(end, None)
        for head, tail in ((start, address), (address + size, end)):
            if head < tail:
                self.free_size[head] = tail - head
                self.free_start_by_end[tail] = head
