"""The simulated allocator under settings, on devices of every kind, in the versions of PyTorch."""

from __future__ import annotations

import pytest

from memlab.allocator import CachingAllocator, OutOfMemory
from memlab.trace import Kind
from memlab.units import GiB, KiB, MiB

ROOMY = 64 * GiB


def after(*sizes: float, total: int = ROOMY, **options):
    allocator = CachingAllocator(total, **options)
    return allocator, [allocator.malloc(int(size)) for size in sizes]


def figures(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


# --- settings ------------------------------------------------------------------------------------------------------------


def test_oversize_blocks_are_kept_for_oversize_requests():
    allocator, [large] = after(60 * MiB, conf="max_split_size_mb:32")
    allocator.free(large)
    allocator.malloc(20 * MiB)
    assert allocator.reserved_bytes == 80 * MiB, "60 would have to be split"
    assert allocator.malloc(39 * MiB).address != large.address, "more than 20 MiB would be wasted"
    assert allocator.malloc(41 * MiB).address == large.address
    stats = allocator.memory_stats()
    assert (stats["oversize_allocations.current"], stats["oversize_segments.current"]) == (2, 2)
    assert stats["max_split_size"] == 32 * MiB


def test_one_oversize_block_goes_before_the_whole_cache():
    allocator, blocks = after(60 * MiB, 24 * MiB, total=100 * MiB, conf="max_split_size_mb:32")
    for block in blocks:
        allocator.free(block)
    allocator.malloc(30 * MiB)
    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (0, 54 * MiB)


def test_several_oversize_blocks_go_from_the_largest_down():
    gone: list[int] = []
    allocator = CachingAllocator(
        200 * MiB, "max_split_size_mb:32",
        on_event=lambda kind, address, size, stream: gone.append(size // MiB) if kind == Kind.SEGMENT_FREE else None,
    )  # fmt: skip
    for block in [allocator.malloc(size * MiB) for size in (40, 50, 60)]:
        allocator.free(block)
    allocator.malloc(100 * MiB)
    assert (gone, allocator.num_alloc_retries) == ([60, 50], 0)


def test_the_memory_fraction_is_a_limit_that_counts_segments():
    allocator = CachingAllocator(100 * MiB, memory_fraction=0.3)
    allocator.malloc(3 * MiB)
    with pytest.raises(OutOfMemory, match=r"80.00 MiB is free.* 30.00 MiB allowed; "):
        allocator.malloc(18 * MiB)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 1)


def test_the_limit_counts_a_whole_segment_also_where_segments_expand():
    allocator = CachingAllocator(100 * MiB, "expandable_segments:True", memory_fraction=0.3)
    allocator.malloc(3 * MiB)
    allocator.malloc(15 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(12 * MiB)


def test_garbage_is_collected_before_the_driver_is_asked():
    freed: list[int] = []
    allocator = CachingAllocator(
        GiB, "garbage_collection_threshold:0.5", memory_fraction=0.2,
        on_event=lambda kind, address, size, stream: freed.append(size // MiB) if kind == Kind.SEGMENT_FREE else None,
    )  # fmt: skip
    old, young = allocator.malloc(80 * MiB), allocator.malloc(40 * MiB)
    allocator.free(old)
    for _ in range(5):
        allocator.free(allocator.malloc(4 * KiB))
    allocator.free(young)
    allocator.malloc(100 * MiB)
    assert (freed, allocator.num_alloc_retries) == ([80], 0), "the one that waited longest, and no more"


def test_large_segments_may_be_smaller():
    allocator, _ = after(3 * MiB, conf="large_segment_size_mb:12")
    assert allocator.reserved_bytes == 12 * MiB


def test_rounding_to_parts_of_powers_of_two():
    _, [block] = after(1200, conf="roundup_power2_divisions:2")
    assert (block.size, block.requested_bytes) == (1536, 1200)


# --- expandable segments -------------------------------------------------------------------------------------------------


def test_whole_free_pages_go_and_come_back_in_the_gap():
    seen: list[tuple[Kind, int]] = []
    allocator = CachingAllocator(
        GiB, "expandable_segments:True", on_event=lambda kind, address, size, stream: seen.append((kind, size // MiB))
    )
    blocks = [allocator.malloc(30 * MiB) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert seen[4:] == [(Kind.SEGMENT_UNMAP, 20)], "30 to 60 MiB: one page of 20 lies wholly inside"
    assert allocator.reserved_bytes == 100 * MiB
    assert allocator.malloc(30 * MiB).address == blocks[1].address
    assert (seen[-1], allocator.reserved_bytes) == ((Kind.SEGMENT_MAP, 20), 120 * MiB)


def test_pages_of_a_mapping_that_failed_half_way_stay_mapped():
    allocator = CachingAllocator(100 * MiB, "expandable_segments:True")
    rows = [allocator.malloc(20 * MiB) for _ in range(4)]
    allocator.free(rows[1])
    allocator.empty_cache()
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MiB)
    assert figures(allocator) == (60 * MiB, 60 * MiB)


# --- devices that grow, and large ones ---


def test_a_device_that_is_full_may_grow():
    allocator = CachingAllocator(100 * MiB, memory_fraction=0.5)
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MiB)
    allocator.grow(50 * MiB)
    allocator.malloc(60 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(20 * MiB)
    allocator.set_memory_fraction(1.0)
    allocator.malloc(20 * MiB)
    assert (allocator.total_bytes, allocator.free_bytes) == (150 * MiB, 70 * MiB)


def test_a_huge_device_with_expandable_segments_keeps_its_order():
    """Its reservations are larger than what addresses usually are."""
    allocator = CachingAllocator(64 << 40, "expandable_segments:True")
    for stream in range(40):
        blocks = [allocator.malloc(size, stream) for size in (5 * MiB, 300, 5 * MiB, 300, 5 * MiB, 300)]
        first = blocks[0].address
        for block in blocks[:3]:
            allocator.free(block)
        assert allocator.malloc(5 * MiB, stream).address == first
    assert allocator.allocated_bytes == 40 * (10 * MiB + 1024)


def test_the_addresses_of_expandable_segments_are_used_again():
    allocator = CachingAllocator(GiB, "expandable_segments:True")
    seen = set()
    for _ in range(3):
        block = allocator.malloc(30 * MiB)
        seen.add(block.address)
        allocator.free(block)
        allocator.empty_cache()
    assert len(seen) == 1


# --- versions ------------------------------------------------------------------------------------------------------------


def order_of_equals(allocator: CachingAllocator) -> list[int]:
    """In which order the equal free blocks 1 and 3 (first segment) and 5 (second) are taken."""
    blocks = [allocator.malloc(5 * MiB) for _ in range(8)]
    names = {block.address: number for number, block in enumerate(blocks)}
    for number in (5, 3, 1):
        allocator.free(blocks[number])
    return [names[allocator.malloc(5 * MiB).address] for _ in range(3)]


@pytest.mark.parametrize(
    ("version", "order"),
    [
        ("", [3, 1, 5]),  # by age: what was left of the first segment is its first object
        ("2.12.1+cu130", [3, 1, 5]),
        ("2.13.0", [3, 1, 5]),
        ("2.14.0", [1, 3, 5]),
        ("2.15.0+cu132", [1, 3, 5]),
        ("2.11.0", [1, 3, 5]),
    ],
)
def test_versions_take_equal_blocks_in_other_orders(version, order):
    assert order_of_equals(CachingAllocator(ROOMY, torch_version=version)) == order


@pytest.mark.parametrize(("version", "order"), [("2.11.0", [5, 1, 3]), ("2.14.0", [1, 3, 5]), ("2.12.0", [3, 1, 5])])
def test_before_212_it_mattered_where_the_driver_puts_segments(version, order):
    places = iter((1 << 40, 1 << 39))
    allocator = CachingAllocator(ROOMY, torch_version=version, place=lambda size, stream: next(places))
    assert order_of_equals(allocator) == order
