"""The allocator's rules and books on small examples, without PyTorch."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from memlab.allocator import Books, Settings, rules
from memlab.allocator.rules import round_to_power2_division
from memlab.trace import Kind
from memlab.units import KiB, MiB

BASE = 1 << 32


def segment(*blocks: tuple[int, str], address: int = BASE, **facts: Any) -> dict[str, Any]:
    size = sum(size for size, _ in blocks)
    rows = [{"size": size, "requested_size": size - 5, "state": state} for size, state in blocks]
    return {"address": address, "total_size": size, "blocks": rows, "device": 0, "stream": 0, **facts}


def follow(books: Books, *events: tuple[Kind, int, int]) -> list[tuple[int, ...]]:
    """(row, kind, block, requested, allocated) of the events (kind, address, size)."""
    kinds, addresses, sizes = zip(*events, strict=True)
    found = books.follow([int(kind) for kind in kinds], addresses, sizes, [0] * len(kinds))
    return list(zip(*(getattr(found, name).tolist() for name in found.__slots__), strict=True))


def test_the_examples_in_the_docstrings_hold():
    assert not doctest.testmod(rules).failed


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MiB, MiB), (10 * MiB + 1, 10 * MiB + 512)]
)
def test_rounding(size, rounded):
    assert Settings().round(size) == rounded


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"), [(1200, 4, 1280), (1024, 4, 1024), (1025, 4, 1280), (1793, 4, 2048), (3, 8, 4)]
)
def test_rounding_to_parts_of_a_power_of_two(size, divisions, rounded):
    assert round_to_power2_division(size, divisions) == rounded


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
    books = Books.from_snapshot([segment((20 * MiB, "inactive"))], Settings())
    assert follow(books, (Kind.ALLOC, BASE, 19 * MiB + 1)) == [(0, Kind.ALLOC, 0, 19 * MiB + 1, 20 * MiB)]


def test_a_free_at_once_is_one_row_and_a_pending_one_two():
    books = Books.from_snapshot([segment((4096, "active_allocated"), (2048, "active_allocated"))], Settings())
    assert books.allocated_bytes == 6144
    rows = follow(
        books,
        (Kind.FREE_PENDING, BASE, 4091),
        (Kind.FREE_PENDING, BASE + 4096, 2043),
        (Kind.FREE, BASE + 4096, 2043),
        (Kind.FREE, BASE, 4091),
    )
    assert rows == [(0, Kind.FREE_PENDING, 0, 0, 4096), (1, Kind.FREE, 1, 2043, 2048), (3, Kind.FREE, 0, 4091, 0)]
    assert (books.free_size, books.surprises) == ({BASE: 6144}, 0)


def test_a_block_that_waits_for_another_stream_is_not_allocated():
    books = Books.from_snapshot([segment((512, "active_pending_free"), (512, "inactive"))], Settings())
    assert (books.allocated_bytes, books.reserved_bytes) == (0, 1024)
    assert follow(books, (Kind.FREE, BASE, 507)) == [(0, Kind.FREE, 0, 507, 0)]
    assert books.free_size == {BASE: 1024}


def test_free_neighbours_join_but_not_across_segments():
    books = Books.from_snapshot(
        [segment((512, "inactive")), segment((512, "inactive"), address=BASE + 512)], Settings()
    )
    assert books.free_size == {BASE: 512, BASE + 512: 512}
    follow(books, (Kind.SEGMENT_FREE, BASE, 512))
    assert (books.free_size, books.reserved_bytes) == ({BASE + 512: 512}, 512)
    follow(books, (Kind.SEGMENT_ALLOC, BASE, 512))
    assert books.free_size == {BASE: 512, BASE + 512: 512}


def test_mapped_ranges_of_expandable_segments_join():
    books = Books(Settings(expandable_segments=True))
    follow(books, (Kind.SEGMENT_MAP, BASE, 2 * MiB), (Kind.SEGMENT_MAP, BASE + 2 * MiB, 2 * MiB))
    assert books.free_size == {BASE: 4 * MiB}
    follow(books, (Kind.SEGMENT_UNMAP, BASE + MiB, MiB))
    assert (books.free_size, books.reserved_bytes) == ({BASE: MiB, BASE + 2 * MiB: 2 * MiB}, 3 * MiB)


@pytest.mark.parametrize(
    "event",
    [(Kind.ALLOC, BASE + 64 * MiB, 512), (Kind.FREE, BASE + 64 * MiB, 512), (Kind.SEGMENT_UNMAP, BASE, 4 * KiB)],
)
def test_what_cannot_happen_is_counted(event):
    books = Books.from_snapshot([segment((2 * KiB, "inactive"))], Settings())
    follow(books, event)
    assert books.surprises == 1


def test_an_out_of_memory_is_a_row_that_changes_nothing():
    books = Books.from_snapshot([segment((2 * KiB, "inactive"))], Settings())
    assert follow(books, (Kind.OOM, 7 * MiB, 1 << 40)) == [(0, Kind.OOM, -1, 1 << 40, 7 * MiB)]
    assert books.free_size == {BASE: 2 * KiB}


def test_old_snapshots_without_addresses_of_blocks():
    books = Books.from_snapshot([segment((512, "active_allocated"), (1024, "inactive"))], Settings())
    assert list(books.held) == [BASE]
    assert books.free_size == {BASE + 512: 1024}
