"""The books against PyTorch's real allocator: random programs, compared block by block after every operation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memlab import seams
from memlab.allocator import Books, Settings
from memlab.probes.rows import columns_of
from memlab.probes.stacks import Stacks
from memlab.trace import Kind

pytestmark = [pytest.mark.fakegpu, pytest.mark.filterwarnings("ignore:.*_set_allocator_settings:FutureWarning")]
KiB, MiB = 1 << 10, 1 << 20

NO_ROUNDUP = "roundup_power2_divisions:[1:0,>:0]"
PLAIN = f"expandable_segments:False,max_split_size_mb:100000,{NO_ROUNDUP}"
SETTINGS = {
    "default": PLAIN,
    "expandable": f"expandable_segments:True,max_split_size_mb:100000,{NO_ROUNDUP}",
    "max_split": f"expandable_segments:False,max_split_size_mb:21,{NO_ROUNDUP}",
    "roundup": "expandable_segments:False,max_split_size_mb:100000,roundup_power2_divisions:[1:4,2:0,8:2,>:8]",
    "expandable_roundup": "expandable_segments:True,max_split_size_mb:100000,roundup_power2_divisions:[1:2,>:16]",
}


@pytest.fixture
def allocator() -> Iterator[Any]:
    """The real allocator under settings of the test's choice, recording; afterwards as it was."""
    torch.cuda.init()
    torch.cuda.empty_cache()

    def use(settings: str) -> None:
        torch.cuda.memory._set_allocator_settings(settings)
        seams.record_history(100_000)

    yield use
    seams.stop_history()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(PLAIN)


class Player:
    """Makes and frees blocks at random, as users do: sizes of every pool, two streams, the cache emptied."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
        self.held: list[torch.Tensor] = []

    def size(self) -> int:
        low, high = self.random.choice(
            [(1, 2 * KiB), (KiB, MiB), (MiB - 600, MiB + 600), (MiB, 12 * MiB), (9 * MiB, 70 * MiB)]
        )
        return self.random.randint(low, high)

    def play(self) -> None:
        what = self.random.random()
        if what < 0.02:
            torch.cuda.empty_cache()
        elif what < 0.55 or not self.held:
            with torch.cuda.stream(self.random.choice(self.streams)):
                self.held.append(torch.empty(self.size(), dtype=torch.uint8, device="cuda"))
        elif what < 0.65:
            self.random.choice(self.held).record_stream(self.random.choice(self.streams))
        else:
            for _ in range(self.random.choice((1, 1, 2, 5))):
                if self.held:
                    self.held.pop(self.random.randrange(len(self.held)))


def real_blocks(shot: dict[str, Any]) -> tuple[dict[int, tuple[int, int, bool]], dict[int, int]]:
    """(address -> requested, size, pending) of the blocks in use, (address -> size) of the free ones."""
    used, free = {}, {}
    for segment in shot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                free[block["address"]] = block["size"]
            else:
                pending = block["state"] != "active_allocated"
                used[block["address"]] = (block["requested_size"], block["size"], pending)
    return used, free


def books_blocks(books: Books) -> tuple[dict[int, tuple[int, int, bool]], dict[int, int]]:
    used = {at: (held.requested_bytes, held.allocated_bytes, held.pending) for at, held in books.held.items()}
    return used, dict(books.free_size)


def level(followed: Any, start: int) -> int:
    """Where the rows lead from `start` bytes."""
    for kind, size in zip(followed.kind.tolist(), followed.allocated_bytes.tolist(), strict=True):
        start += size if kind == Kind.ALLOC else -size if kind in (Kind.FREE, Kind.FREE_PENDING) else 0
    return start


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_books_agree_with_the_allocator_after_every_operation(settings, seed, allocator):
    allocator(SETTINGS[settings])
    player, read, stacks = Player(seed), 0, Stacks()
    shot = seams.snapshot()
    books = Books.from_snapshot(shot["segments"], Settings.from_snapshot(shot["allocator_settings"]))
    allocated, events = books.allocated_bytes, 0
    for _ in range(250):
        player.play()
        shot = seams.snapshot()
        entries = shot["device_traces"][0]
        new = columns_of(entries[read:], stacks)
        read, events = len(entries), events + len(new.kinds)
        followed = books.follow(new.kinds, new.addresses, new.sizes, new.streams)
        allocated = level(followed, allocated)
        assert books_blocks(books) == real_blocks(shot)
        assert allocated == books.allocated_bytes == torch.cuda.memory_allocated()
        assert books.reserved_bytes == torch.cuda.memory_reserved()
        assert not books.surprises
    assert events > 300


@pytest.mark.parametrize("settings", SETTINGS)
def test_reading_all_at_once_comes_to_the_same(settings, allocator):
    allocator(SETTINGS[settings])
    torch.cuda.reset_peak_memory_stats()
    shot = seams.snapshot()
    books = Books.from_snapshot(shot["segments"], Settings.from_snapshot(shot["allocator_settings"]))
    now = books.allocated_bytes
    player = Player(99)
    for _ in range(1500):
        player.play()
    shot = seams.snapshot()
    new = columns_of(shot["device_traces"][0], Stacks())
    followed = books.follow(new.kinds, new.addresses, new.sizes, new.streams)
    highest = now
    for kind, size in zip(followed.kind.tolist(), followed.allocated_bytes.tolist(), strict=True):
        now += size if kind == Kind.ALLOC else -size if kind in (Kind.FREE, Kind.FREE_PENDING) else 0
        highest = max(highest, now)
    assert highest == torch.cuda.max_memory_allocated()
    assert books_blocks(books) == real_blocks(shot)
    assert not books.surprises


def test_an_unmapped_middle_leaves_its_neighbours(allocator):
    """Expandable: a full card unmaps free pages between blocks in use, and maps them again elsewhere."""
    allocator(SETTINGS["expandable"])
    shot = seams.snapshot()
    books = Books.from_snapshot(shot["segments"], Settings.from_snapshot(shot["allocator_settings"]))
    rows = [torch.empty(40 * MiB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del rows[1::2]
    torch.cuda.empty_cache()
    rows.append(torch.empty(100 * MiB, dtype=torch.uint8, device="cuda"))
    shot = seams.snapshot()
    new = columns_of(shot["device_traces"][0], Stacks())
    assert {Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP} <= set(new.kinds)
    books.follow(new.kinds, new.addresses, new.sizes, new.streams)
    assert books_blocks(books) == real_blocks(shot)
    assert not books.surprises
