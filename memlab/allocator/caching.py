"""PyTorch's CUDA caching allocator in pure Python: the same blocks, segments, retries and failures for the same requests.

It chooses addresses as `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp does (2.12 to 2.15), for one device.

Limits: no CUDA IPC; the driver's own fragmentation is not known. Work on other
streams (`record_stream`) is considered finished at the next allocation, unless `waits_for_events` is set.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NoReturn

from memlab.allocator.blocks import RANK_BITS, Block, StreamPool, absorb
from memlab.allocator.conf import parse_conf
from memlab.allocator.out_of_memory import OutOfMemory, advice
from memlab.allocator.private_pools import pool_of, stream_of
from memlab.allocator.rules import SMALL_SIZE, UNLIMITED, Settings, Ties
from memlab.allocator.segments import Observer, Place, Segments
from memlab.allocator.statistics import ALLOC, COMPLETE, FOLD_AT, FREE, FREE_PENDING
from memlab.errors import MemlabError
from memlab.trace.columns import Kind

FIRST_ADDRESS = 0x7F00_0000_0000
"""The address of the first segment: similar to the driver's, and below 2**53 for viewers written in JavaScript."""


class CachingAllocator(Segments):
    """The allocator of one device with `total_bytes`, of which `context_bytes` are taken by the driver.

    `conf` is written as in PYTORCH_CUDA_ALLOC_CONF (or is a `Settings`), `memory_fraction` as in
    `torch.cuda.set_per_process_memory_fraction`; `on_event(kind, address, size, stream)` is called for every segment
    event and for an OOM (whose address is what the driver had free, as in PyTorch's history). `torch_version`
    matters where free blocks of one size compete (see `Ties`; without it as in 2.12), before 2.12 also where the
    driver puts segments: `place(size, stream)` may say so; otherwise they are consecutive from `first_address` on. `device` is
    its number in the text of an OOM.

    `total_bytes` is the memory of the device, `reserved_bytes` the reserved part of it, `peak_reserved_bytes` its peak.
    """

    def __init__(
        self,
        total_bytes: int,
        conf: str | Settings = "",
        context_bytes: int = 0,
        *,
        first_address: int = FIRST_ADDRESS,
        memory_fraction: float | None = None,
        on_event: Observer | None = None,
        torch_version: str = "",
        place: Place | None = None,
        device: int = 0,
    ) -> None:
        settings = parse_conf(conf, torch_version) if isinstance(conf, str) else conf
        if total_bytes <= 0 or not 0 <= context_bytes <= total_bytes:
            what = f"a device of {total_bytes} bytes cannot hold a context of {context_bytes}"
            raise MemlabError(f"{what}: give sizes in bytes")
        super().__init__(settings, total_bytes, first_address, Ties.of(torch_version))
        self._place, self._on_event = place, on_event
        self.context_bytes = self._used_bytes = context_bytes
        self.device, self.waits_for_events = device, False
        self.allocated_bytes = self.requested_bytes = self.peak_allocated_bytes = 0
        self._numbers = self._serials if self._ties is Ties.AGE else None
        self._advice = advice(settings.expandable_segments, torch_version)
        self._pending: dict[Block, None] = {}
        self._rounded: dict[int, int] = {}
        self._best_fit_is_enough = not settings.expandable_segments and settings.max_split_size == UNLIMITED
        self.set_memory_fraction(settings.memory_fraction if memory_fraction is None else memory_fraction)

    def __repr__(self) -> str:
        return f"<CachingAllocator: {self.allocated_bytes} bytes allocated, {self.reserved_bytes} reserved>"

    def set_memory_fraction(self, fraction: float) -> None:
        """Use at most this fraction of the device, as `torch.cuda.set_per_process_memory_fraction`."""
        if not 0 <= fraction <= 1:
            raise MemlabError(f"memory_fraction must lie between 0 and 1, got {fraction}")
        self.memory_fraction = fraction
        self._limit_bytes = int(fraction * self.total_bytes) if fraction < 1 else None
        self._ages = fraction < 1 and self.settings.garbage_collection_threshold > 0

    def grow(self, nbytes: int) -> None:
        """Give the device more memory: for dry runs that should continue when it is full."""
        self.total_bytes += nbytes
        self.set_memory_fraction(self.memory_fraction)

    # --- figures ---

    @property
    def num_alloc_retries(self) -> int:
        """How often the driver refused and all cached memory was returned to it (num_alloc_retries)."""
        return self._statistics.num_alloc_retries

    @property
    def num_ooms(self) -> int:
        """How often that did not help either (num_ooms)."""
        return self._statistics.num_ooms

    def memory_stats(self) -> dict[str, int]:
        """The same dictionary as `torch.cuda.memory_stats`, without private pools."""
        return self._statistics.as_dict()

    def reset_peaks(self) -> None:
        """Reset the peaks, as `torch.cuda.reset_peak_memory_stats`."""
        self._statistics.reset_peaks()
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def reset_accumulated(self) -> None:
        """Reset totals, retries and failures, as `torch.cuda.reset_accumulated_memory_stats`."""
        self._statistics.reset_accumulated()

    # --- allocating ---

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """Allocate a block; None for 0 bytes, like PyTorch's null pointer. Raises `OutOfMemory`."""
        size = self._rounded.get(nbytes) or self._round(nbytes)
        if not size:
            return None
        if self._pending and not self.waits_for_events and not self.private.routes:
            self._complete_all()
        pool = self._small if size <= SMALL_SIZE else self._large
        home = pool.homes.get(stream) or pool.open(stream)
        if self._best_fit_is_enough and not self._ages:
            at = bisect_left(home.keys, size << RANK_BITS)
            block = home.blocks.pop(home.keys.pop(at)) if at < len(home.keys) else None
        else:
            pool.searches += self._ages
            block = self._search(home, size)
        if block is None:
            block = self._obtain(home, size)
            if block is None:
                self._fail(nbytes, size, stream)
        return self._hand_out(block, size, nbytes)

    def _round(self, nbytes: int) -> int:
        if nbytes < 0:
            raise MemlabError(f"a block cannot have {nbytes} bytes: give 0 or more")
        if len(self._rounded) > 1 << 16:
            self._rounded.clear()
        size = self._rounded[nbytes] = self.settings.round(int(nbytes)) if nbytes else 0
        return size

    def _search(self, home: StreamPool, size: int) -> Block | None:
        """The free block that fits best (get_free_block), with the exceptions for expandable segments and oversize blocks."""
        position = home.first(size)
        block = home.at(position)
        if block is None:
            return None
        if self.settings.expandable_segments:
            # A block counts with the size it can grow to, so the search continues while the next one can grow less.
            while (larger := home.at(position + 1)) is not None and larger.room < block.room:
                position, block = position + 1, larger
        if not self.settings.fits(block.size, size):
            return None
        home.remove(block)
        return block

    def _hand_out(self, block: Block, size: int, nbytes: int) -> Block:
        """Split the block if it is too large, and count it (alloc_found_block): the low part becomes a new block."""
        home, before = block.home, block.previous
        rest = block.size - size
        splits = split_bytes = 0
        counts = block.segment is None
        was_split = before is not None or block.next is not None
        if rest and self.settings.splits(block.size, size) and pool_of(home.stream) not in self.private.whole:
            serial = block.serial if self._numbers is None else next(self._numbers)
            low = Block(block.address, size, home, serial, block.segment)
            low.previous = before
            if before is not None:
                before.next = low
            low.next = block
            block.previous = low
            block.address += size
            block.size = rest
            if self._ages:
                self._insert(block)
            else:
                home.add(block)
            if counts:
                splits, split_bytes = (0, -size) if was_split else (1, rest)
            block = low
        elif was_split and counts:
            splits, split_bytes = -1, -block.size
        block.is_allocated = block.is_busy = True
        block.requested_bytes = nbytes
        self.requested_bytes += nbytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        self._journal.append((ALLOC, home.is_small, block.size, nbytes, splits, split_bytes))
        if len(self._journal) > FOLD_AT:
            self._statistics.fold()
        return block

    def _fail(self, nbytes: int, size: int, stream: int) -> NoReturn:
        if self._on_event is not None:
            self._on_event(Kind.OOM, self.free_bytes, size, stream)
        self._statistics.num_ooms += 1
        free = (*self._small.in_order(), *self._large.in_order())
        raise OutOfMemory(
            nbytes,
            tried_bytes=self.settings.segment_size(size),
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes,
            process_bytes=self._used_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            private_bytes=sum(block.size for block in free if pool_of(block.stream)),
            limit_bytes=self._limit_bytes,
            device=self.device,
            advice=self._advice,
        )

    # --- freeing ---

    def free(self, block: Block | None) -> None:
        """Free a block. If another stream has used it, it is no longer *allocated* but cannot be reused yet."""
        if block is None:
            return
        if not block.is_allocated:
            raise MemlabError(f"{block!r} is not allocated: it was freed before, or belongs to another allocator")
        block.is_allocated = False
        self.allocated_bytes -= block.size
        if block.uses:
            self._journal.append((FREE_PENDING, block.home.is_small, block.size, block.requested_bytes, 0, 0))
            self._pending[block] = None
        else:
            self._release(block, FREE)

    def record_stream(self, block: Block | None, stream: int) -> None:
        """Record that another stream uses a block: once freed it waits for that stream. Its own stream is ignored."""
        if block is not None and stream_of(stream) != stream_of(block.home.stream):
            block.uses = {*(block.uses or ()), stream}

    def complete(self, block: Block) -> None:
        """The other streams have finished with a freed block: it can be reused."""
        if block not in self._pending:
            raise MemlabError(f"{block!r} does not wait for another stream")
        del self._pending[block]
        block.uses = None
        self._release(block, COMPLETE)

    @property
    def pending(self) -> tuple[Block, ...]:
        """Blocks that were freed while another stream used them."""
        return tuple(self._pending)

    def _complete_all(self) -> None:
        for block in self.pending:
            self.complete(block)

    def _release(self, block: Block, what: int) -> None:
        """Merge a block with its free neighbors and add it to the free list (free_block); its object stays."""
        home, size, requested = block.home, block.size, block.requested_bytes
        block.is_busy = False
        self.requested_bytes -= requested
        splits = split_bytes = 0
        if (before := block.previous) is not None and not before.is_busy and (joined := absorb(block, before)):
            splits, split_bytes = -1, -joined
        if (after := block.next) is not None and not after.is_busy and (joined := absorb(block, after)):
            splits, split_bytes = splits - 1, split_bytes - joined
        if self._ages:
            self._insert(block)
        else:
            home.add(block)
        if block.segment is not None:
            splits = split_bytes = 0  # PyTorch excludes expandable segments: their pages can always be returned
        elif block.previous is not None or block.next is not None:
            splits, split_bytes = splits + 1, split_bytes + block.size
        self._journal.append((what, home.is_small, size, requested, splits, split_bytes))
