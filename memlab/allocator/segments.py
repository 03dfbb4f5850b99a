"""Where blocks come from when no free one fits: segments of the driver, pages of expandable segments, and the way back.

The functions of DeviceCachingAllocator that talk to the driver, in its order of attempts (research of the sources of
2.12 to 2.15). Line numbers are those of c10/cuda/CUDACachingAllocator.cpp in v2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from memlab.allocator.blocks import Block, Home, Segment, absorb, put_between
from memlab.allocator.rules import ROUND_LARGE, UNLIMITED, Settings, Ties
from memlab.allocator.statistics import MAP, SEGMENT, Statistics, code
from memlab.trace.columns import Kind

Observer = Callable[[Kind, int, int, int], None]
"""Called with (kind, address, size, stream) of each segment event."""
Place = Callable[[int, int], int | None]
"""Asked with (size, stream) where a new segment lies; None where it does not matter."""


@dataclass(slots=True)
class Pool:
    """The homes of the small or the large pool, by stream; `searches` are counted for garbage collection."""

    is_small: bool
    homes: dict[int, Home] = field(default_factory=dict)
    searches: int = 0

    def open(self, stream: int) -> Home:
        """A home for blocks of a stream that had none."""
        home = self.homes[stream] = Home(stream, self.is_small)
        return home

    def in_order(self) -> list[Block]:
        """Its free blocks: by stream, then smallest first."""
        return [block for stream in sorted(self.homes) for block in self.homes[stream].in_order()]


@dataclass(slots=True)
class Driver:
    """The device's memory: so many bytes, of which segments and pages are taken.

    Addresses of segments are never used twice, unless `place` tells them; those of expandable segments, which are larger
    than the device, are.
    """

    total_bytes: int
    used_bytes: int
    next_address: int
    place: Place | None = None
    given_back: dict[int, list[int]] = field(default_factory=dict)

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo would call free."""
        return max(self.total_bytes - self.used_bytes, 0)

    def take(self, size: int) -> bool:
        """Take memory, if there is so much."""
        if size > self.total_bytes - self.used_bytes:
            return False
        self.used_bytes += size
        return True

    def addresses(self, size: int, stream: int) -> int:
        """A range of addresses, without memory behind it."""
        if self.place is not None and (told := self.place(size, stream)) is not None:
            return told
        if again := self.given_back.get(size):
            return again.pop()
        address = self.next_address
        self.next_address += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address


@dataclass(slots=True)
class Segments:
    """Obtains free blocks from the driver, and gives them back."""

    settings: Settings
    driver: Driver
    statistics: Statistics
    on_event: Observer | None
    ties: Ties = Ties.AGE
    limit_bytes: int | None = None
    small: Pool = field(default_factory=lambda: Pool(True))
    large: Pool = field(default_factory=lambda: Pool(False))
    serials: count[int] = field(default_factory=count)
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0

    def new_serial(self, parent: Block | None = None) -> int:
        """The number of a new block that is cut from `parent`, or is a segment of its own."""
        if self.ties is Ties.AGE or (parent is None and self.ties is Ties.SEGMENT):
            return next(self.serials)
        return 0 if parent is None else parent.serial

    # --- obtaining --------------------------------------------------------------------------------------------------

    def obtain(self, home: Home, size: int, complete: Callable[[], None]) -> Block | None:
        """A free block of at least `size` bytes from the driver, by all means in PyTorch's order (L1803-1850).

        `complete` returns the blocks that wait for other streams: it is called where PyTorch synchronises.
        """
        if self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage(self.limit_bytes)
        block = self._grow(home, size)
        if block is None and self._release_oversize(home, size):
            block = self._grow(home, size)
        if block is None:
            self.release_cached(complete)
            self.statistics.num_alloc_retries += 1
            block = self._grow(home, size)  # no search in between: a known bug, pytorch issue 189504
        return block

    def _grow(self, home: Home, size: int) -> Block | None:
        """alloc_block: the limit counts whole segments also where pages would do."""
        segment = self.settings.segment_size(size)
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grow_expandable(home, size)
        # The driver hands out multiples of 2 MiB; the allocator counts what it asked for.
        if not self.driver.take(-(-segment // ROUND_LARGE) * ROUND_LARGE):
            return None
        address = self.driver.addresses(segment, home.stream)
        block = Block(address, segment, home, self.new_serial())
        self._count(Kind.SEGMENT_ALLOC, SEGMENT, block.address, segment, home)
        return block

    def _count(self, kind: Kind, what: int, address: int, change: int, home: Home) -> None:
        """Keep the figures of a segment or of pages that come (`change` is positive) or go."""
        self.reserved_bytes += change
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.statistics.journal.append((code(what, home.is_small), change, 0, 0, 0))
        if change > 0:
            self.statistics.num_device_alloc += 1
        else:
            self.statistics.num_device_free += 1
        if self.on_event is not None:
            self.on_event(kind, address, abs(change), home.stream)

    # --- expandable segments ------------------------------------------------------------------------------------------

    def _grow_expandable(self, home: Home, size: int) -> Block | None:
        """try_allocate_expandable_block: map what is missing behind the first run of free and unmapped ranges."""
        block = self._find_room(home, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None and not following.is_mapped
            if not self._map(following, min(size - block.size, following.size)):
                return None  # what was mapped so far stays, as a free block
            block = following
        home.remove(block)
        return block

    def _find_room(self, home: Home, size: int) -> Block:
        """The lowest unmapped range, with a free block before it, from which on there is room (find_expandable_block)."""
        for _, unmapped in home.unmapped:
            before = unmapped.previous
            start = unmapped if before is None or before.is_busy else before
            if _has_room(start, size):
                return start
        return self._reserve(home)

    def _reserve(self, home: Home) -> Block:
        """A new expandable segment: addresses for 9/8 of the device."""
        page = self.settings.page_size(home.is_small)
        total = self.driver.total_bytes
        size = -(-(total + total // 8) // page) * page
        segment = Segment(self.driver.addresses(size, home.stream), size, page)
        block = Block(segment.address, size, home, self.new_serial(), segment)
        block.is_mapped = False
        home.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put pages behind the first `size` bytes of an unmapped range and join it with its free neighbours (map_block)."""
        segment, home = block.segment, block.home
        assert segment is not None
        mapped = -(-size // segment.page) * segment.page
        if not self.driver.take(mapped):
            return False
        address = block.address
        home.remove_unmapped(block)
        block.is_mapped = True
        if mapped < block.size:
            rest = Block(address + mapped, block.size - mapped, home, self.new_serial(block), segment)
            rest.is_mapped = False
            put_between(rest, block, block.next)
            home.add_unmapped(rest)
            block.size = mapped
        absorb(block, block.previous)
        absorb(block, block.next)
        self._insert(block)
        self._count(Kind.SEGMENT_MAP, MAP, address, mapped, home)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the whole pages inside a free block away; what is left of it at both ends stays free (unmap_block)."""
        segment, home = block.segment, block.home
        assert segment is not None
        begin = segment.address + -(-(block.address - segment.address) // segment.page) * segment.page
        end = segment.address + (block.address + block.size - segment.address) // segment.page * segment.page
        if begin >= end:
            return
        home.remove(block)
        if block.address < begin:
            head = Block(block.address, begin - block.address, home, self.new_serial(block), segment)
            put_between(head, block.previous, block)
            self._insert(head)
        if end < block.address + block.size:
            tail = Block(end, block.address + block.size - end, home, self.new_serial(block), segment)
            put_between(tail, block, block.next)
            self._insert(tail)
        block.address, block.size, block.is_mapped = begin, end - begin, False
        absorb(block, block.previous)
        absorb(block, block.next)
        home.add_unmapped(block)
        self.driver.used_bytes -= end - begin
        self._count(Kind.SEGMENT_UNMAP, MAP, begin, begin - end, home)

    # --- giving back --------------------------------------------------------------------------------------------------

    def release_cached(self, complete: Callable[[], None]) -> None:
        """Give every segment that is wholly free and every free page back (release_cached_blocks)."""
        self.statistics.num_sync_all_streams += 1
        complete()
        for pool in (self.large, self.small):
            self._release(pool)

    def _release(self, pool: Pool) -> None:
        free = pool.in_order()
        for block in free:
            if block.segment is None and not block.is_split:
                self._release_segment(block)
        for block in free:
            if block.segment is not None:
                self._unmap(block)
                if not block.is_split:  # all of the segment is unmapped: its addresses go, too
                    block.home.remove_unmapped(block)
                    self.driver.given_back.setdefault(block.size, []).append(block.address)

    def _release_segment(self, block: Block) -> None:
        block.home.remove(block)
        self.driver.used_bytes -= -(-block.size // ROUND_LARGE) * ROUND_LARGE
        self._count(Kind.SEGMENT_FREE, SEGMENT, block.address, -block.size, block.home)

    def _release_oversize(self, home: Home, size: int) -> bool:
        """With `max_split_size`: one oversize block that is enough, or several from the largest on (L4026-4077)."""
        least = self.settings.max_split_size
        if least == UNLIMITED:
            return False
        wanted = max(size, least)
        position = home.first(wanted)
        enough = home.at(position)
        if enough is not None and enough.segment is None:
            self._release_segment(enough)
            return True
        released = 0
        while released < wanted and (block := home.at(position := position - 1)) is not None and block.size >= least:
            if block.segment is None:
                released += block.size
                self._release_segment(block)
        return released >= wanted

    def _collect_garbage(self, limit_bytes: int) -> None:
        """Give back what was not used for long, before the driver is asked (garbage_collect_cached_blocks)."""
        threshold = int(self.settings.garbage_collection_threshold * limit_bytes)
        if self.reserved_bytes <= threshold:
            return
        target = self.reserved_bytes - threshold
        candidates = {block: self.large.searches - block.born for block in self.large.in_order() if not block.is_split}
        reclaimed, any_released = 0, True
        while reclaimed < target and any_released and candidates:
            average = sum(candidates.values()) / len(candidates)
            any_released = False
            for block in [block for block, age in candidates.items() if block.segment is None and age >= average]:
                any_released = True
                reclaimed += block.size
                del candidates[block]
                self._release_segment(block)

    def _insert(self, block: Block) -> None:
        block.born = (self.small if block.home.is_small else self.large).searches
        block.home.add(block)


def _has_room(block: Block, size: int) -> bool:
    """Whether the run of free and unmapped ranges from here on is so long."""
    return sum(part.size for part in _run(block)) >= size


def _run(block: Block | None) -> Iterator[Block]:
    while block is not None and not block.is_busy:
        yield block
        block = block.next
