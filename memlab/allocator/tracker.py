"""The state of the allocator, followed along the addresses in its history: the true size of each block.

History has the requested size and the address. The allocated size follows from the free block at that address and
the rules for splitting, so following the free ranges gives *allocated* exactly. Nothing is chosen here:
`CachingAllocator` (predictions) chooses addresses, `BlockTracker` only follows them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.allocator.rules import Settings
from memlab.trace.columns import Array, Kind

_ALLOC, _FREE, _PENDING = int(Kind.ALLOC), int(Kind.FREE), int(Kind.FREE_PENDING)


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
                    live = tracker._hand_out(address, requested, block["size"], stream)
                    live.pending = block["state"] != "active_allocated"
                address += block["size"]
        return tracker

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the allocator counts as allocated."""
        return sum(live.allocated_bytes for live in self.held.values() if not live.pending)

    def follow(
        self, kinds: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
    ) -> TrackedEvents:
        """Follow events in order; `sizes` are the requested ones, as in the history."""
        rows: list[tuple[int, int, int, int, int]] = []
        add, held, alloc = rows.append, self.held, self._alloc
        skip = -1
        last = len(kinds) - 1
        for row, kind in enumerate(kinds):
            if row == skip:
                continue
            address = addresses[row]
            if kind == _ALLOC:
                live = alloc(address, sizes[row], streams[row])
                add((row, kind, live.block, live.requested_bytes, live.allocated_bytes))
            elif kind == _PENDING:
                live = held.get(address) or self._unknown(address, sizes[row])
                if row < last and kinds[row + 1] == _FREE and addresses[row + 1] == address:  # completed at once
                    skip = row + 1
                    self._put_free(address, held.pop(address).allocated_bytes)
                    add((row, _FREE, live.block, live.requested_bytes, live.allocated_bytes))
                else:
                    live.pending = True
                    add((row, kind, live.block, 0, live.allocated_bytes))
            elif kind == _FREE:
                live = held.get(address) or self._unknown(address, sizes[row])
                self._put_free(address, held.pop(address).allocated_bytes)
                add((row, kind, live.block, live.requested_bytes, 0 if live.pending else live.allocated_bytes))
            elif kind == Kind.OOM:  # history keeps the driver's free bytes as its address
                add((row, kind, -1, sizes[row], max(address, 0)))
            else:
                self._segment(kind, address, sizes[row])
                add((row, kind, -1, 0, sizes[row]))
        table = np.fromiter(itertools.chain.from_iterable(rows), np.int64, 5 * len(rows)).reshape(-1, 5)
        return TrackedEvents(*(table[:, column] for column in range(5)))

    def _alloc(self, address: int, requested: int, stream: int) -> LiveBlock:
        size = self.rounded.get(requested)
        if size is None:
            size = self.rounded[requested] = self.settings.round(requested)
        room = self.free_size.pop(address, None)
        end = address + (room or 0)
        if room is not None:
            self.free_start_by_end.pop(end, None)
        if room is None or room < size:
            self.inconsistencies += 1
            room = size
        elif self.settings.splits(room, size):
            self.free_size[address + size] = room - size
            self.free_start_by_end[end] = address + size
            room = size
        return self._hand_out(address, requested, room, stream)

    def _hand_out(self, address: int, requested: int, size: int, stream: int) -> LiveBlock:
        live = self.held[address] = LiveBlock(self.next_block, requested, size, stream)
        self.next_block += 1
        return live

    def _unknown(self, address: int, requested: int) -> LiveBlock:
        """A block whose allocation was not seen: assume the rounded size of its request."""
        self.inconsistencies += 1
        return self._hand_out(address, requested, self.settings.round(requested), 0)

    def _put_free(self, address: int, size: int) -> None:
        """Add a free range and merge it with its free neighbours, never across segments that are not expandable."""
        end, walls = address + size, self.walls
        before = self.free_start_by_end.pop(address, None) if address not in walls else None
        if before is not None and self.free_size.pop(before, None) is not None:
            address = before
        after = self.free_size.pop(end, None) if end not in walls else None
        if after is not None:
            end += after
        self.free_size[address] = end - address
        self.free_start_by_end[end] = address

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
