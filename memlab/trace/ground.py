"""The ground that blocks stand on: which ranges of addresses the allocator holds, as its segments come and go.

Segments of cudaMalloc stay apart even where they touch; ranges that are mapped (expandable segments) grow together and are
cut apart again.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

from memlab.trace.columns import Kind


class Ground:
    """Ranges held now, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, tuple[int, int, bool]] = {}  # start -> end, stream, mapped

    def add(self, address: int, size: int, stream: int, mapped: bool) -> None:
        """A segment comes, or a range is mapped. What was held of it already (which cannot be) is taken over."""
        start, end = address, address + size
        if start >= end:
            return
        if self._first_in(start, end) is not None:
            self.remove(address, size)
        if mapped:
            before = self.at(address - 1)
            if before is not None and self._held[before][0] == address and self._joins(before, stream):
                start = before
                self._drop(before)
            after = self._held.get(end)
            if after is not None and self._joins(end, stream):
                self._drop(end)
                end = after[0]
        if start not in self._held:
            insort(self._starts, start)
        self._held[start] = (end, stream, mapped)

    def _joins(self, start: int, stream: int) -> bool:
        _, its_stream, mapped = self._held[start]
        return mapped and its_stream == stream

    def remove(self, address: int, size: int) -> list[tuple[int, int]]:
        """A segment goes, or a range is unmapped; what of it was not held."""
        limit = address + size
        missing = self.missing(address, limit)
        while address < limit and (start := self._first_in(address, limit)) is not None:
            end, stream, mapped = self._held[start]
            self._drop(start)
            for head, tail in ((start, min(address, end)), (max(limit, start), end)):
                if head < tail:
                    insort(self._starts, head)
                    self._held[head] = (tail, stream, mapped)
        return missing

    def missing(self, address: int, limit: int) -> list[tuple[int, int]]:
        """The parts of a range that are not held."""
        parts: list[tuple[int, int]] = []
        while address < limit:
            start = self._first_in(address, limit)
            if start is None:
                return [*parts, (address, limit)]
            if start > address:
                parts.append((address, start))
            address = self._held[start][0]
        return parts

    def _first_in(self, address: int, limit: int) -> int | None:
        """The start of the first range held that has a byte in common with this one."""
        start = self.at(address)
        if start is not None:
            return start
        place = bisect_right(self._starts, address)
        return self._starts[place] if place < len(self._starts) and self._starts[place] < limit else None

    def _drop(self, start: int) -> None:
        del self._held[start]
        del self._starts[bisect_right(self._starts, start) - 1]

    def at(self, address: int) -> int | None:
        """The start of the range that holds an address."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start = self._starts[place]
        return start if address < self._held[start][0] else None

    def segments(self) -> Iterator[tuple[int, int, int, bool]]:
        """Every range in order: start, end, stream, whether it is mapped."""
        for start in self._starts:
            yield start, *self._held[start]

    @staticmethod
    def needed(
        kinds: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """The ranges (start, end, stream) that must have been held before the first event for the others to make sense.

        A segment that goes without having come is known exactly; the others are as large as the blocks in them.
        """
        ground, freed, used = Ground(), [], []
        for kind, address, size, stream in zip(kinds, addresses, sizes, streams, strict=True):
            if kind in (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP) and address:
                ground.add(address, size, stream, mapped=kind == Kind.SEGMENT_MAP)
            elif kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP) and address:
                freed += [(*part, stream) for part in ground.remove(address, size)]
            elif kind in (Kind.ADOPT, Kind.ALLOC) and size:
                used += [(*part, stream) for part in ground.missing(address, address + size)]
        return sorted(freed + _outside(_joined(used), freed))


def _joined(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges that overlap or touch as one."""
    joined: list[tuple[int, int, int]] = []
    for start, end, stream in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]), joined[-1][2])
        else:
            joined.append((start, end, stream))
    return joined


def _outside(ranges: list[tuple[int, int, int]], freed: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """What is left of ranges outside of others."""
    left = ranges
    for cut_start, cut_end, _ in freed:
        parts = [
            part
            for start, end, stream in left
            for part in ((start, min(end, cut_start), stream), (max(start, cut_end), end, stream))
        ]
        left = [part for part in parts if part[0] < part[1]]
    return sorted(set(left))
