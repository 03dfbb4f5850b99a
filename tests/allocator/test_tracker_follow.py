"""The tracker against PyTorch's real allocator: random programs, compared block by block after every operation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memlab import torch_internals
from memlab.allocator import BlockTracker, Settings
from memlab.probes.rows import Stacks, columns_of
from memlab.trace import Kind

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore:.*_set_allocator_settings:FutureWarning")]
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
        torch_internals.record_history(100_000)

    yield use
    torch_internals.stop_history()
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


def books_blocks(tracker: BlockTracker) -> tuple[dict[int, tuple[int, int, bool]], dict[int, int]]:
    used = {at: (held.requested_bytes, held.allocated_bytes, held.pending) for at, held in tracker.held.items()}
    return used, dict(tracker.free_size)


def levels(followed: Any, start: int) -> list[int]:
    """Where the rows lead from `start` bytes, one by one."""
    signs = {Kind.ALLOC: 1, Kind.FREE: -1, Kind.FREE_PENDING: -1}
    rows = zip(followed.kind.tolist(), followed.allocated_bytes.tolist(), strict=True)
    return list(itertools.accumulate((signs.get(kind, 0) * size for kind, size in rows), initial=start))


def follow(tracker: BlockTracker, entries: list[dict[str, Any]], stacks: Stacks) -> Any:
    new = columns_of(entries, stacks)
    return tracker.follow(new.kinds, new.addresses, new.sizes, new.streams)


def begun() -> BlockTracker:
    """A tracker of what there is now."""
    shot = torch_internals.snapshot()
    return BlockTracker.from_snapshot(shot["segments"], Settings.from_snapshot(shot["allocator_settings"]))


def agrees(tracker: BlockTracker, shot: dict[str, Any]) -> bool:
    return books_blocks(tracker) == real_blocks(shot) and not tracker.inconsistencies


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_books_agree_with_the_allocator_after_every_operation(settings, seed, allocator):
    allocator(SETTINGS[settings])
    player, read, stacks, tracker = Player(seed), 0, Stacks(), begun()
    allocated = tracker.allocated_bytes
    for _ in range(250):
        player.play()
        shot = torch_internals.snapshot()
        entries = shot["device_traces"][0]
        allocated = levels(follow(tracker, entries[read:], stacks), allocated)[-1]
        read = len(entries)
        assert agrees(tracker, shot)
        assert allocated == tracker.allocated_bytes == torch.cuda.memory_allocated()
        assert tracker.reserved_bytes == torch.cuda.memory_reserved()
    assert read > 300


@pytest.mark.parametrize("settings", SETTINGS)
def test_reading_all_at_once_comes_to_the_same(settings, allocator):
    allocator(SETTINGS[settings])
    torch.cuda.reset_peak_memory_stats()
    player, tracker = Player(99), begun()
    start = tracker.allocated_bytes
    for _ in range(1500):
        player.play()
    shot = torch_internals.snapshot()
    followed = follow(tracker, shot["device_traces"][0], Stacks())
    assert max(levels(followed, start)) == torch.cuda.max_memory_allocated()
    assert agrees(tracker, shot)


def test_an_unmapped_middle_leaves_its_neighbors(allocator):
    """Expandable: a full card unmaps free pages between blocks in use, and maps them again elsewhere."""
    allocator(SETTINGS["expandable"])
    tracker = begun()
    rows = [torch.empty(40 * MiB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del rows[1::2]
    torch.cuda.empty_cache()
    rows.append(torch.empty(100 * MiB, dtype=torch.uint8, device="cuda"))
    shot = torch_internals.snapshot()
    followed = follow(tracker, shot["device_traces"][0], Stacks())
    assert {Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP} <= set(followed.kind.tolist())
    assert agrees(tracker, shot)
