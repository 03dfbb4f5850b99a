"""Blocks of a segment as a linked list by address, and the free blocks of a stream in best-fit order."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

ADDRESS_BITS = 62
RANK_BITS = 102
"""A free block's key: its size, then its serial number, then its address."""


class Segment(NamedTuple):
    """The first address an expandable segment maps pages to, and its page size."""

    address: int
    page: int


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A range of one segment: in use, free, or (in an expandable segment) not mapped.

    `size` is the allocated size, `requested_bytes` the requested one; `serial` decides between free blocks of one size (see
    `rules.Ties`). `is_busy` until its owner has freed it and no other stream uses it; `uses` are the other streams; `born` is
    the number of searches of its pool when it became free, `key` its place among the free ones.
    """

    address: int
    size: int
    home: StreamPool
    serial: int
    segment: Segment | None = None
    requested_bytes: int = 0
    born: int = 0
    key: int = 0
    is_allocated: bool = False
    is_busy: bool = False
    is_mapped: bool = True
    previous: Block | None = None
    next: Block | None = None
    uses: set[int] | None = None

    def __repr__(self) -> str:
        return f"<Block of {self.size} bytes at {self.address:#x}>"

    @property
    def stream(self) -> int:
        """The stream it was allocated on."""
        return self.home.stream

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with others."""
        return self.previous is not None or self.next is not None

    @property
    def room(self) -> int:
        """The size of a free block, including the unmapped range after it that it can grow into."""
        after = self.next
        return self.size + (after.size if after is not None and not after.is_mapped else 0)


@dataclass(slots=True, eq=False)
class StreamPool:
    """The free blocks of one pool and one stream; blocks never move to another.

    `unmapped` has what expandable segments have not mapped, by address.
    """

    stream: int
    is_small: bool
    keys: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    unmapped: list[Block] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Add a block to the free list."""
        key = block.key = block.size << RANK_BITS | block.serial << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a block from the free list."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def first(self, size: int) -> int:
        """The position of the smallest free block of at least this size; the length of the list if there is none."""
        return bisect_left(self.keys, size << RANK_BITS)

    def at(self, position: int) -> Block | None:
        """The free block at a position in best-fit order."""
        return self.blocks[self.keys[position]] if 0 <= position < len(self.keys) else None

    def in_order(self) -> list[Block]:
        """The free blocks now, smallest first."""
        return [self.blocks[key] for key in self.keys]

    def add_unmapped(self, block: Block) -> None:
        """Add an unmapped range."""
        insort(self.unmapped, block, key=_address)

    def remove_unmapped(self, block: Block) -> None:
        """Remove an unmapped range."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]


_address = attrgetter("address")


def put_between(block: Block, before: Block | None, after: Block | None) -> None:
    """Link a block between two neighbors."""
    block.previous = before
    block.next = after
    if before is not None:
        before.next = block
    if after is not None:
        after.previous = block


def absorb(block: Block, neighbor: Block | None) -> int:
    """Merge a free neighbor into `block`, whose object stays (try_merge_blocks); return the bytes gained."""
    if neighbor is None or neighbor.is_busy or neighbor.is_mapped != block.is_mapped:
        return 0
    if neighbor.is_mapped:
        neighbor.home.remove(neighbor)
    else:
        neighbor.home.remove_unmapped(neighbor)
    if neighbor is block.previous:
        block.address = neighbor.address
        put_between(block, neighbor.previous, block.next)
    else:
        put_between(block, block.previous, neighbor.next)
    block.size += neighbor.size
    return neighbor.size
