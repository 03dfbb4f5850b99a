"""Blocks of a segment, linked in the order of their addresses, and the free ones of a stream in the order of best fit."""

from __future__ import annotations

from bisect import bisect_left, insort

ADDRESS_BITS = 62
RANK_BITS = 102
"""A free block's key: its size, then its serial number, then its address."""


class Segment:
    """A reservation of addresses that an expandable segment maps pages into."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address = address
        self.size = size
        self.page = page


class Block:
    """A range of one segment: in use, free, or (in an expandable segment) not mapped.

    `size` is what it takes, `requested_bytes` what was asked; `serial` decides between free blocks of one size (see
    `rules.Ties`). `is_busy` until the owner let go and no other stream uses it; `uses` are the other streams; `born` is
    the number of searches of its pool when it became free, `key` its place among the free ones.
    """

    __slots__ = (
        "address", "born", "home", "is_allocated", "is_busy", "is_mapped", "key", "next", "previous",
        "requested_bytes", "segment", "serial", "size", "uses",
    )  # fmt: skip

    def __init__(self, address: int, size: int, home: Home, serial: int, segment: Segment | None = None) -> None:
        self.address = address
        self.size = size
        self.home = home
        self.serial = serial
        self.segment = segment
        self.requested_bytes = self.born = self.key = 0
        self.is_allocated = self.is_busy = False
        self.is_mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.uses: set[int] | None = None

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


class Home:
    """The free blocks of one pool and one stream. Blocks never leave their home."""

    __slots__ = ("blocks", "is_small", "keys", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[tuple[int, Block]] = []
        """(address, block) of what expandable segments have not mapped, by address."""

    def add(self, block: Block) -> None:
        """Make a block one of the free ones."""
        key = block.key = block.size << RANK_BITS | block.serial << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a block out of the free ones."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def first(self, size: int) -> int:
        """The position of the smallest free block of at least this size; the number of them where there is none."""
        return bisect_left(self.keys, size << RANK_BITS)

    def at(self, position: int) -> Block | None:
        """The free block at a position of the order of best fit."""
        return self.blocks[self.keys[position]] if 0 <= position < len(self.keys) else None

    def in_order(self) -> list[Block]:
        """The free blocks now, smallest first."""
        return [self.blocks[key] for key in self.keys]

    def add_unmapped(self, block: Block) -> None:
        """Note a range that is not mapped."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Forget a range that is not mapped."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=lambda pair: pair[0])]


def put_between(block: Block, before: Block | None, after: Block | None) -> None:
    """Link a block between two neighbours."""
    block.previous = before
    block.next = after
    if before is not None:
        before.next = block
    if after is not None:
        after.previous = block


def absorb(block: Block, neighbour: Block | None) -> int:
    """Join a free neighbour into `block`, whose object stays (try_merge_blocks): what it brought, in bytes."""
    if neighbour is None or neighbour.is_busy or neighbour.is_mapped != block.is_mapped:
        return 0
    if neighbour.is_mapped:
        neighbour.home.remove(neighbour)
    else:
        neighbour.home.remove_unmapped(neighbour)
    if neighbour is block.previous:
        block.address = neighbour.address
        put_between(block, neighbour.previous, block.next)
    else:
        put_between(block, block.previous, neighbour.next)
    block.size += neighbour.size
    return neighbour.size
