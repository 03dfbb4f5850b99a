"""The allocator's books, kept along addresses that are known from its history: what each block really took.

History says what was asked and where it was put. What was handed out follows from the free block at that address and
the rules for splitting, so keeping the free ranges along the addresses gives *allocated* exactly. Nothing is chosen
here: `CachingAllocator` (predictions) chooses addresses, these books only follow them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.allocator.rules import Settings
from memlab.trace.columns import Array, Kind

_ALLOC, _FREE, _PENDING = int(Kind.ALLOC), int(Kind.FREE), int(Kind.FREE_PENDING)


@dataclass(slots=True)
class Held:
    """A block in use: its id, what was asked, what was handed out; `pending` once its owner let go."""

    block: int
    requested_bytes: int
    allocated_bytes: int
    stream: int = 0
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Followed:
    """What `follow` learned, a row per event kept: which block, and what was asked and handed out.

    `row` is the position in the events followed. A free that is requested and completed at once is one row, FREE.
    """

    row: Array
    kind: Array
    block: Array
    requested_bytes: Array
    allocated_bytes: Array


@dataclass(slots=True)
class Books:
    """Segments, free ranges and blocks of one device.

    `surprises` counts events that cannot happen by the rules (a block handed out where nothing was free): they are
    followed as well as possible, and mean that the books are no longer exact.
    """

    settings: Settings = field(default_factory=Settings)
    held: dict[int, Held] = field(default_factory=dict)
    free_size: dict[int, int] = field(default_factory=dict)
    free_start_by_end: dict[int, int] = field(default_factory=dict)
    walls: Counter[int] = field(default_factory=Counter)
    reserved_bytes: int = 0
    next_block: int = 0
    surprises: int = 0
    rounded: dict[int, int] = field(default_factory=dict)  # what requests round up to: programs repeat theirs

    @classmethod
    def from_snapshot(cls, segments: Sequence[Mapping[str, Any]], settings: Settings, next_block: int = 0) -> Books:
        """Open the books with the segments of one device, as in a PyTorch memory snapshot."""
        books = cls(settings, next_block=next_block)
        for segment in segments:
            books._open_segment(segment)
        return books

    def _open_segment(self, segment: Mapping[str, Any]) -> None:
        self.reserved_bytes += segment["total_size"]
        if not segment.get("is_expandable"):
            self._add_walls(segment["address"], segment["total_size"])
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)  # snapshots before 2.0 have no addresses, the blocks are in order
            if block["state"] == "inactive":
                self._put_free(address, block["size"])
            else:
                pending = block["state"] != "active_allocated"
                requested = block.get("requested_size", block["size"])
                self.held[address] = Held(self.next_block, requested, block["size"], segment.get("stream", 0), pending)
                self.next_block += 1
            address += block["size"]

    @property
    def allocated_bytes(self) -> int:
        """What the allocator counts as allocated."""
        return sum(held.allocated_bytes for held in self.held.values() if not held.pending)

    def follow(
        self, kinds: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
    ) -> Followed:
        """Keep the books along events in order; `sizes` are what was asked, as history has them."""
        rows: list[tuple[int, int, int, int, int]] = []
        add, held, alloc = rows.append, self.held, self._alloc
        skip = -1
        last = len(kinds) - 1
        for row, kind in enumerate(kinds):
            if row == skip:
                continue
            address = addresses[row]
            if kind == _ALLOC:
                block = alloc(address, sizes[row], streams[row])
                add((row, kind, block.block, block.requested_bytes, block.allocated_bytes))
            elif kind == _PENDING:
                at_once = row < last and kinds[row + 1] == _FREE and addresses[row + 1] == address
                block = held.get(address) or self._unknown(address, sizes[row])
                if at_once:
                    skip = row + 1
                    self._free(address)
                    add((row, _FREE, block.block, block.requested_bytes, block.allocated_bytes))
                else:
                    block.pending = True
                    add((row, kind, block.block, 0, block.allocated_bytes))
            elif kind == _FREE:
                block = held.get(address) or self._unknown(address, sizes[row])
                self._free(address)
                add((row, kind, block.block, block.requested_bytes, 0 if block.pending else block.allocated_bytes))
            else:
                self._segment(kind, address, sizes[row])
                add((row, kind, -1, *_segment_sizes(kind, address, sizes[row])))
        table = np.array(rows, np.int64).reshape(-1, 5)
        return Followed(*(table[:, column] for column in range(5)))

    def _alloc(self, address: int, requested: int, stream: int) -> Held:
        size = self.rounded.get(requested) or self._round(requested)
        room = self.free_size.pop(address, None)
        if room is None or room < size:
            self.surprises += 1
            room = size
        else:
            end = address + room
            del self.free_start_by_end[end]
            if self.settings.splits(room, size):
                self.free_size[address + size] = room - size
                self.free_start_by_end[end] = address + size
                room = size
        block = self.held[address] = Held(self.next_block, requested, room, stream)
        self.next_block += 1
        return block

    def _round(self, requested: int) -> int:
        size = self.rounded[requested] = self.settings.round(requested)
        return size

    def _unknown(self, address: int, requested: int) -> Held:
        """A block nobody saw coming: take the size its request rounds up to."""
        self.surprises += 1
        block = self.held[address] = Held(self.next_block, requested, self.settings.round(requested))
        self.next_block += 1
        return block

    def _free(self, address: int) -> None:
        self._put_free(address, self.held.pop(address).allocated_bytes)

    def _put_free(self, address: int, size: int) -> None:
        """Add a free range and join it with its free neighbours; segments are walls, expandable ones grow together."""
        end, walls = address + size, self.walls
        before = self.free_start_by_end.pop(address, None) if address not in walls else None
        if before is not None:
            del self.free_size[before]
            address = before
        after = self.free_size.pop(end, None) if end not in walls else None
        if after is not None:
            end += after
        self.free_size[address] = end - address
        self.free_start_by_end[end] = address

    def _segment(self, kind: int, address: int, size: int) -> None:
        if kind == Kind.SEGMENT_ALLOC:
            self._add_walls(address, size)
            self._put_free(address, size)
            self.reserved_bytes += size
        elif kind == Kind.SEGMENT_MAP:
            self._put_free(address, size)
            self.reserved_bytes += size
        elif kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP):
            self._take_free(address, size)
            self.reserved_bytes -= size
            if kind == Kind.SEGMENT_FREE:
                self._remove_walls(address, size)

    def _take_free(self, address: int, size: int) -> None:
        """Cut a range out of the free range around it (an unmapped middle leaves a head and a tail)."""
        start = address if address in self.free_size else self._free_range_around(address)
        if start is None or start + self.free_size[start] < address + size:
            self.surprises += 1
            return
        end = start + self.free_size.pop(start)
        del self.free_start_by_end[end]
        for head, tail in ((start, address), (address + size, end)):
            if head < tail:
                self.free_size[head] = tail - head
                self.free_start_by_end[tail] = head

    def _free_range_around(self, address: int) -> int | None:
        return next((start for start, size in self.free_size.items() if start <= address < start + size), None)

    def _add_walls(self, address: int, size: int) -> None:
        self.walls.update((address, address + size))

    def _remove_walls(self, address: int, size: int) -> None:
        for wall in (address, address + size):
            self.walls[wall] -= 1
            if not self.walls[wall]:
                del self.walls[wall]


def _segment_sizes(kind: int, address: int, size: int) -> tuple[int, int]:
    """(requested, allocated) of a row that is no block; an OOM entry keeps the driver's free bytes as its address."""
    return (size, max(address, 0)) if kind == Kind.OOM else (0, size)
