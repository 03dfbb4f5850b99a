"""Where blocks come from when no free one fits: segments of the driver, pages of expandable segments, and how they are returned.

The functions of DeviceCachingAllocator that talk to the driver, in its order of attempts (2.12 to 2.15).
Line numbers are those of c10/cuda/CUDACachingAllocator.cpp in v2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from memlab.allocator.blocks import Block, Segment, StreamPool, absorb, put_between
from memlab.allocator.private_pools import PrivatePools, pool_of
from memlab.allocator.rules import ROUND_LARGE, SMALL_SEGMENT, UNLIMITED, Settings, Ties
from memlab.allocator.statistics import MAP, SEGMENT, Statistics
from memlab.trace.columns import Kind

Observer = Callable[[Kind, int, int, int], None]
"""Called with (kind, address, size, stream) of each segment event."""
Place = Callable[[int, int], int | None]
"""Called with (size, stream), returns the address of a new segment; None where it does not matter."""


@dataclass(slots=True)
class Pool:
    """The small or the large pool: its free blocks by stream; `searches` are counted for garbage collection."""

    is_small: bool
    homes: dict[int, StreamPool] = field(default_factory=dict)
    searches: int = 0

    def open(self, stream: int) -> StreamPool:
        """A new free list for a stream."""
        home = self.homes[stream] = StreamPool(stream, self.is_small)
        return home

    def in_order(self) -> list[Block]:
        """Its free blocks by stream, smallest first."""
        return [block for stream in sorted(self.homes) for block in self.homes[stream].in_order()]


class Segments:
    """The half of the allocator that talks to the driver: it obtains free blocks and returns segments and pages.

    Of `total_bytes` the driver has handed out `_used_bytes`. It never uses the addresses of a segment twice, unless `_place`
    says so; those of expandable segments, which are larger than the device, it does.
    """

    _place: Place | None
    _on_event: Observer | None

    def __init__(self, settings: Settings, total_bytes: int, first_address: int, ties: Ties) -> None:
        self.settings, self.total_bytes = settings, total_bytes
        self.reserved_bytes = self.peak_reserved_bytes = self._used_bytes = 0
        self._next_address, self._ties = first_address, ties
        self._given_back: dict[int, list[int]] = {}
        self._limit_bytes: int | None = None
        self._small, self._large, self.private = Pool(True), Pool(False), PrivatePools()
        self._serials = count()
        self._statistics = Statistics(settings)
        self._journal = self._statistics.journal

    @property
    def free_bytes(self) -> int:
        """Free memory of the device, as cudaMemGetInfo reports it."""
        return max(self.total_bytes - self._used_bytes, 0)

    def _take(self, size: int) -> bool:
        """Take memory from the driver if it has enough."""
        if size > self.total_bytes - self._used_bytes:
            return False
        self._used_bytes += size
        return True

    def _addresses(self, size: int, stream: int) -> int:
        """Reserve a range of addresses, without memory."""
        if self._place is not None and (told := self._place(size, stream)) is not None:
            return told
        if again := self._given_back.get(size):
            return again.pop()
        address = self._next_address
        self._next_address += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address

    def _complete_all(self) -> None:
        """Return the blocks that wait for other streams: called where PyTorch synchronizes."""
        raise NotImplementedError

    def _new_serial(self, parent: Block | None = None) -> int:
        """The number of a new block that is cut from `parent`, or is a segment of its own."""
        if self._ties is Ties.AGE or (parent is None and self._ties is Ties.SEGMENT):
            return next(self._serials)
        return 0 if parent is None else parent.serial

    # --- obtaining ---

    def _obtain(self, home: StreamPool, size: int) -> Block | None:
        """Obtain a free block of at least `size` bytes, trying everything in PyTorch's order (L1803-1850)."""
        if self._limit_bytes is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage(self._limit_bytes)
        block = self._grow(home, size)
        if block is None and self._release_oversize(home, size):
            block = self._grow(home, size)
        if block is None and not self.private.routes:
            self.empty_cache()
            self._statistics.num_alloc_retries += 1
            block = self._grow(home, size)  # no search in between, a known bug: pytorch issue 189504
        return block

    def _grow(self, home: StreamPool, size: int) -> Block | None:
        """alloc_block: the limit is checked for a whole segment even where pages would be enough."""
        segment = self.settings.segment_size(size)
        if self._limit_bytes is not None and self.reserved_bytes + segment > self._limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grow_expandable(home, size)
        # The driver hands out multiples of 2 MiB; the allocator counts what it asked for.
        if not self._take(-(-segment // ROUND_LARGE) * ROUND_LARGE):
            return None
        address = self._addresses(segment, home.stream)
        self._count(Kind.SEGMENT_ALLOC, SEGMENT, address, segment, home)
        return Block(address, segment, home, self._new_serial())

    def _count(self, kind: Kind, what: int, address: int, change: int, home: StreamPool) -> None:
        """Count a segment or pages that are allocated (`change` is positive) or released."""
        self.reserved_bytes += change
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._journal.append((what, home.is_small, change, 0, 0, 0))
        self._statistics.num_device_alloc += change > 0
        self._statistics.num_device_free += change <= 0
        if self._on_event is not None:
            self._on_event(kind, address, abs(change), home.stream)

    # --- expandable segments ---

    def _grow_expandable(self, home: StreamPool, size: int) -> Block | None:
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

    def _find_room(self, home: StreamPool, size: int) -> Block:
        """The lowest unmapped range, with a free block before it, from which on there is room (find_expandable_block).

        Else that of a new expandable segment: addresses for 9/8 of the device.
        """
        for unmapped in home.unmapped:
            before = unmapped.previous
            start = unmapped if before is None or before.is_busy else before
            part: Block | None = start
            room = 0
            while part is not None and not part.is_busy:  # the run of free and unmapped ranges
                room += part.size
                part = part.next
            if room >= size:
                return start
        page = SMALL_SEGMENT if home.is_small else self.settings.large_segment_size
        length = -(-(self.total_bytes + self.total_bytes // 8) // page) * page
        segment = Segment(self._addresses(length, home.stream), page)
        block = Block(segment.address, length, home, self._new_serial(), segment)
        block.is_mapped = False
        home.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map pages for the first `size` bytes of an unmapped range and join it with its free neighbors (map_block)."""
        segment, home = block.segment, block.home
        assert segment is not None
        mapped = -(-size // segment.page) * segment.page
        if not self._take(mapped):
            return False
        address = block.address
        home.remove_unmapped(block)
        block.is_mapped = True
        if mapped < block.size:
            rest = Block(address + mapped, block.size - mapped, home, self._new_serial(block), segment)
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
        """Unmap the whole pages inside a free block; the remainders at both ends stay free (unmap_block)."""
        segment, home = block.segment, block.home
        assert segment is not None
        begin = segment.address + -(-(block.address - segment.address) // segment.page) * segment.page
        end = segment.address + (block.address + block.size - segment.address) // segment.page * segment.page
        if begin >= end:
            return
        home.remove(block)
        if block.address < begin:
            head = Block(block.address, begin - block.address, home, self._new_serial(block), segment)
            put_between(head, block.previous, block)
            self._insert(head)
        if end < block.address + block.size:
            tail = Block(end, block.address + block.size - end, home, self._new_serial(block), segment)
            put_between(tail, block, block.next)
            self._insert(tail)
        block.address, block.size, block.is_mapped = begin, end - begin, False
        absorb(block, block.previous)
        absorb(block, block.next)
        home.add_unmapped(block)
        self._used_bytes -= end - begin
        self._count(Kind.SEGMENT_UNMAP, MAP, begin, begin - end, home)

    def _insert(self, block: Block) -> None:
        block.born = (self._small if block.home.is_small else self._large).searches
        block.home.add(block)

    # --- giving back ---

    def empty_cache(self, only: int | None = None) -> None:
        """Return free memory to the driver, as `torch.cuda.empty_cache`: whole segments, or whole pages.

        release_cached_blocks: every segment that is wholly free and every free page, the large pool first; those of
        private pools that nothing uses any more, too, or those of one private pool alone.
        """
        self._statistics.num_sync_all_streams += 1
        self._complete_all()
        for pool in (self._large, self._small):
            free = pool.in_order()
            if self.private.uses:
                places = {one.home.stream for one in free}
                stay = {one for one in places if self.private.keeps(one) or only not in (None, pool_of(one))}
                free = [one for one in free if one.home.stream not in stay]
            for block in free:
                if block.segment is None and not block.is_split:
                    self._release_segment(block)
            for block in free:
                if block.segment is not None:
                    self._unmap(block)
                    if not block.is_split:  # all of the segment is unmapped: its addresses go, too
                        block.home.remove_unmapped(block)
                        self._given_back.setdefault(block.size, []).append(block.address)

    def _release_segment(self, block: Block) -> None:
        block.home.remove(block)
        self._used_bytes -= -(-block.size // ROUND_LARGE) * ROUND_LARGE
        self._count(Kind.SEGMENT_FREE, SEGMENT, block.address, -block.size, block.home)

    def _release_oversize(self, home: StreamPool, size: int) -> bool:
        """With `max_split_size`: release one oversize block that is enough, or several, largest first (L4026-4077)."""
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
        """Release what has not been used for long, before asking the driver (garbage_collect_cached_blocks)."""
        target = self.reserved_bytes - int(self.settings.garbage_collection_threshold * limit_bytes)
        large = self._large
        ages = {
            block: large.searches - block.born
            for block in large.in_order()
            if not (block.is_split or pool_of(block.stream))
        }
        reclaimed, any_released = 0, True
        while reclaimed < target and any_released and ages:
            average = sum(ages.values()) / len(ages)
            any_released = False
            for block in [block for block, age in ages.items() if block.segment is None and age >= average]:
                any_released = True
                reclaimed += block.size
                del ages[block]
                self._release_segment(block)
