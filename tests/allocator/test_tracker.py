"""The allocator's rules and tracker on small examples, without PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

from memlab.allocator import BlockTracker, Settings
from memlab.allocator.rules import round_to_power2_division
from memlab.trace import Kind
from memlab.units import KiB, MiB

BASE = 1 << 32


def segment(*blocks: tuple[int, str], address: int = BASE, **facts: Any) -> dict[str, Any]:
    size = sum(size for size, _ in blocks)
    rows = [{"size": size, "requested_size": size - 5, "state": state} for size, state in blocks]
    return {"address": address, "total_size": size, "blocks": rows, "device": 0, "stream": 0, **facts}


def follow(tracker: BlockTracker, *events: tuple[Kind, int, int]) -> list[tuple[int, ...]]:
    """(row, kind, block, requested, allocated) of the events (kind, address, size)."""
    kinds, addresses, sizes = zip(*events, strict=True)
    found = tracker.follow([int(kind) for kind in kinds], addresses, sizes, [0] * len(kinds))
    return list(zip(*(getattr(found, name).tolist() for name in found.__slots__), strict=True))


def test_rounding():
    rounded = {0: 512, 1: 512, 512: 512, 513: 1024, MiB: MiB, 10 * MiB + 1: 10 * MiB + 512}
    assert {size: Settings().round(size) for size in rounded} == rounded
    parts = {(1200, 4): 1280, (1024, 4): 1024, (1025, 4): 1280, (1793, 4): 2048, (3, 8): 4}
    assert {case: round_to_power2_division(*case) for case in parts} == parts


def test_divisions_by_interval():
    settings = Settings(roundup_power2_divisions=(8, 0, 2, *(0,) * 12, 4))
    assert [settings.divisions(n * MiB) for n in (0, 1, 2, 3, 4, 7, 8, 1 << 15, 1 << 20)] == [8, 8, 0, 0, 2, 2, 0, 4, 4]


def test_settings_of_a_snapshot():
    divisions = {str(1 << i): i for i in range(16)}
    found = Settings.from_snapshot(
        {"max_split_size": 24 * MiB, "expandable_segments": True, "roundup_power2_divisions": divisions}
    )
    assert found == Settings(24 * MiB, True, tuple(range(16)))
    assert Settings.from_snapshot({"max_split_size": -1}) == Settings() == Settings.from_snapshot({})


@pytest.mark.parametrize(
    ("settings", "block", "size", "splits"),
    [
        (Settings(), 2 * MiB, 512, True),
        (Settings(), 2 * MiB, 2 * MiB - 512, False),  # large pool: the rest must be above 1 MiB
        (Settings(), 20 * MiB, 19 * MiB, False),
        (Settings(), 20 * MiB, 19 * MiB - 512, True),
        (Settings(), MiB + 512, MiB, True),  # small pool: a rest of 512 bytes is enough
        (Settings(expandable_segments=True), 20 * MiB, 20 * MiB - 512, True),
        (Settings(max_split_size=10 * MiB), 20 * MiB, 10 * MiB, False),
        (Settings(max_split_size=10 * MiB), 20 * MiB, 10 * MiB - 512, True),
    ],
)
def test_splitting(settings, block, size, splits):
    assert settings.splits(block, size) is splits


def test_an_unsplit_remainder_belongs_to_the_block():
    tracker = BlockTracker.from_snapshot([segment((20 * MiB, "inactive"))], Settings())
    assert follow(tracker, (Kind.ALLOC, BASE, 19 * MiB + 1)) == [(0, Kind.ALLOC, 0, 19 * MiB + 1, 20 * MiB)]


def test_a_free_at_once_is_one_row_and_a_pending_one_two():
    tracker = BlockTracker.from_snapshot([segment((4096, "active_allocated"), (2048, "active_allocated"))], Settings())
    assert tracker.allocated_bytes == 6144
    rows = follow(
        tracker,
        (Kind.FREE_PENDING, BASE, 4091),
        (Kind.FREE_PENDING, BASE + 4096, 2043),
        (Kind.FREE, BASE + 4096, 2043),
        (Kind.FREE, BASE, 4091),
    )
    assert rows == [(0, Kind.FREE_PENDING, 0, 0, 4096), (1, Kind.FREE, 1, 2043, 2048), (3, Kind.FREE, 0, 4091, 0)]
    assert (tracker.free_size, tracker.inconsistencies) == ({BASE: 6144}, 0)


def test_a_block_that_waits_for_another_stream_is_not_allocated():
    tracker = BlockTracker.from_snapshot([segment((512, "active_pending_free"), (512, "inactive"))], Settings())
    assert (tracker.allocated_bytes, tracker.reserved_bytes) == (0, 1024)
    assert follow(tracker, (Kind.FREE, BASE, 507)) == [(0, Kind.FREE, 0, 507, 0)]
    assert tracker.free_size == {BASE: 1024}


def test_free_neighbors_join_but_not_across_segments():
    tracker = BlockTracker.from_snapshot(
        [segment((512, "inactive")), segment((512, "inactive"), address=BASE + 512)], Settings()
    )
    assert tracker.free_size == {BASE: 512, BASE + 512: 512}
    follow(tracker, (Kind.SEGMENT_FREE, BASE, 512))
    assert (tracker.free_size, tracker.reserved_bytes) == ({BASE + 512: 512}, 512)
    follow(tracker, (Kind.SEGMENT_ALLOC, BASE, 512))
    assert tracker.free_size == {BASE: 512, BASE + 512: 512}


def test_a_wall_stands_until_the_segments_on_both_sides_are_freed():
    tracker = BlockTracker()
    both = (BASE, BASE + 2 * MiB)
    follow(tracker, *((Kind.SEGMENT_ALLOC, address, 2 * MiB) for address in both))
    assert tracker.walls == {BASE: 1, BASE + 2 * MiB: 2, BASE + 4 * MiB: 1}
    follow(tracker, (Kind.SEGMENT_FREE, BASE, 2 * MiB))
    assert tracker.walls == {BASE + 2 * MiB: 1, BASE + 4 * MiB: 1}
    follow(tracker, (Kind.SEGMENT_FREE, BASE + 2 * MiB, 2 * MiB))
    assert not tracker.walls


def test_mapped_ranges_of_expandable_segments_join():
    tracker = BlockTracker(Settings(expandable_segments=True))
    follow(tracker, (Kind.SEGMENT_MAP, BASE, 2 * MiB), (Kind.SEGMENT_MAP, BASE + 2 * MiB, 2 * MiB))
    assert tracker.free_size == {BASE: 4 * MiB}
    follow(tracker, (Kind.SEGMENT_UNMAP, BASE + MiB, MiB))
    assert (tracker.free_size, tracker.reserved_bytes) == ({BASE: MiB, BASE + 2 * MiB: 2 * MiB}, 3 * MiB)


@pytest.mark.parametrize(
    "event",
    [(Kind.ALLOC, BASE + 64 * MiB, 512), (Kind.FREE, BASE + 64 * MiB, 512), (Kind.SEGMENT_UNMAP, BASE, 4 * KiB)],
)
def test_what_cannot_happen_is_counted(event):
    tracker = BlockTracker.from_snapshot([segment((2 * KiB, "inactive"))], Settings())
    follow(tracker, event)
    assert tracker.inconsistencies == 1


def test_a_block_larger_than_the_room_at_its_address_is_counted_and_following_goes_on():
    tracker = BlockTracker.from_snapshot([segment((2 * MiB, "inactive"))], Settings())
    follow(tracker, (Kind.ALLOC, BASE, KiB), (Kind.ALLOC, BASE + KiB, KiB), (Kind.FREE, BASE, KiB))
    follow(tracker, (Kind.ALLOC, BASE, 4 * KiB), (Kind.FREE, BASE + KiB, KiB))
    assert tracker.inconsistencies == 1


def test_an_out_of_memory_is_a_row_that_changes_nothing():
    tracker = BlockTracker.from_snapshot([segment((2 * KiB, "inactive"))], Settings())
    assert follow(tracker, (Kind.OOM, 7 * MiB, 1 << 40)) == [(0, Kind.OOM, -1, 1 << 40, 7 * MiB)]
    assert tracker.free_size == {BASE: 2 * KiB}


def test_old_snapshots_without_addresses_of_blocks():
    tracker = BlockTracker.from_snapshot([segment((512, "active_allocated"), (1024, "inactive"))], Settings())
    assert list(tracker.held) == [BASE]
    assert tracker.free_size == {BASE + 512: 1024}
