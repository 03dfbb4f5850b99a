"""The address ranges that the allocator holds, as segments are allocated and released.

Segments of cudaMalloc stay separate even if adjacent; mapped ranges (expandable segments) are merged and split.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from memlab.trace.columns import Kind

Range = tuple[int, int, int, bool]
"""(start, end, stream, whether it is mapped)"""


class AddressRanges:
    """Ranges held now, by address."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []

    def add(self, address: int, size: int, stream: int, mapped: bool) -> None:
        """Add a segment or a mapped range. Parts already held (which should not happen) are replaced."""
        start, end = address, address + size
        if start >= end:
            return
        self.remove(address, size)
        first = last = self._overlap(start, end)[0]
        if mapped:
            before, after = self._ranges[max(first - 1, 0) : first], self._ranges[first : first + 1]
            if before and before[0][1:] == (start, stream, True):
                first, start = first - 1, before[0][0]
            if after and (after[0][0], *after[0][2:]) == (end, stream, True):
                last, end = last + 1, after[0][1]
        self._ranges[first:last] = [(start, end, stream, mapped)]

    def remove(self, address: int, size: int) -> list[tuple[int, int]]:
        """Remove a segment or an unmapped range; return the parts that were not held."""
        limit = address + size
        missing = self.missing(address, limit)
        first, last = self._overlap(address, limit)
        cut = self._ranges[first:last]
        heads = [(start, address, stream, mapped) for start, _, stream, mapped in cut[:1] if start < address]
        tails = [(limit, end, stream, mapped) for _, end, stream, mapped in cut[-1:] if limit < end]
        self._ranges[first:last] = heads + tails
        return missing

    def missing(self, address: int, limit: int) -> list[tuple[int, int]]:
        """The parts of a range that are not held."""
        first, last = self._overlap(address, limit)
        held = self._ranges[first:last]
        begins = (address, *(end for _, end, *_ in held))
        ends = (*(start for start, *_ in held), limit)
        return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]

    def segments(self) -> Iterator[Range]:
        """Every range, in order."""
        return iter(self._ranges)

    def _overlap(self, address: int, limit: int) -> tuple[int, int]:
        """The positions of the ranges that overlap this one; if there are none, its insertion point."""
        first = bisect_left(self._ranges, (address,))
        if first and address < self._ranges[first - 1][1]:
            first -= 1
        return first, max(first, bisect_left(self._ranges, (limit,))) if address < limit else first

    @staticmethod
    def needed(
        kinds: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """The ranges (start, end, stream) that must have been held before the first event.

        A segment that is released without having been allocated is known exactly; others are as large as their blocks.
        """
        ranges, before, used = AddressRanges(), AddressRanges(), []
        for kind, address, size, stream in zip(kinds, addresses, sizes, streams, strict=True):
            if kind in (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP) and address:
                ranges.add(address, size, stream, mapped=kind == Kind.SEGMENT_MAP)
            elif kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP) and address:
                for start, end in ranges.remove(address, size):
                    before.add(start, end - start, stream, mapped=False)
            elif kind in (Kind.PREEXISTING, Kind.ALLOC) and size:
                used += [(*part, stream) for part in ranges.missing(address, address + size)]
        joined: list[tuple[int, int, int]] = []
        for start, end, stream in sorted(used):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]), joined[-1][2])
            else:
                joined.append((start, end, stream))
        for start, end, stream in joined:
            for part_start, part_end in before.missing(start, end):
                before.add(part_start, part_end - part_start, stream, mapped=False)
        return [(start, end, stream) for start, end, stream, _ in before.segments()]
