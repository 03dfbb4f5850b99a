"""The simulated allocator on small examples, under settings, on devices of every kind: the figures are PyTorch's, not ours."""

from __future__ import annotations

import contextlib
import doctest

import numpy as np
import pytest

from memlab.allocator import CachingAllocator, OutOfMemory, conf, out_of_memory, rules
from memlab.errors import MemlabError
from memlab.trace import Kind
from memlab.units import GiB, MiB

ROOMY = 64 * GiB


def after(*sizes: float, total: int = ROOMY, **options):
    allocator = CachingAllocator(total, **options)
    return allocator, [allocator.malloc(int(size)) for size in sizes]


def figures(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize("module", [rules, conf, out_of_memory])
def test_the_examples_in_the_docstrings_hold(module):
    assert not doctest.testmod(module).failed


# --- twelve vectors, derived from the rules of PyTorch 2.13 ---


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MiB),  # a block of 512 in a segment of 2 MiB
        ([MiB], MiB, 2 * MiB),  # the pools meet at 1 MiB
        ([MiB + 1], MiB + 512, 20 * MiB),
        ([10 * MiB - 1], 10 * MiB, 10 * MiB),  # segments of 20 MiB are for what rounds to less than 10
        ([10 * MiB - 512], 10 * MiB - 512, 20 * MiB),
        ([19.5 * MiB], 20 * MiB, 20 * MiB),  # a rest of up to 1 MiB stays with the block
        ([19 * MiB - 512], 19 * MiB - 512, 20 * MiB),
        ([6 * MiB] * 3, 18 * MiB, 20 * MiB),  # three blocks of 6 MiB share a segment
        ([6 * MiB] * 4, 24 * MiB, 40 * MiB),
    ],
)
def test_what_is_handed_out_and_what_is_asked_of_the_driver(sizes, allocated, reserved):
    allocator, _ = after(*sizes)
    assert (*figures(allocator), allocator.requested_bytes) == (allocated, reserved, sum(map(int, sizes)))
    assert allocator.memory_stats()["inactive_split_bytes.all.current"] == reserved - allocated


def test_no_bytes_take_nothing():
    allocator, [block] = after(0)
    allocator.free(block)
    allocator.record_stream(block, 3)
    assert (block, *figures(allocator)) == (None, 0, 0)


def test_the_text_of_an_out_of_memory_names_the_segment_that_was_asked_for():
    with pytest.raises(OutOfMemory) as caught:
        after(3 * MiB, total=10 * MiB)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 10.00 MiB"
    )
    assert caught.value.requested_bytes == 3 * MiB


# --- what is taken, what goes back ---

EXPANDABLE, SPLIT = {"conf": "expandable_segments:True"}, {"conf": "max_split_size_mb:32"}
GARBAGE = {"conf": "garbage_collection_threshold:0.5", "memory_fraction": 0.2, "total": GiB}
PLAYED: dict[str, tuple[str, dict, dict]] = {
    "free neighbors join": ("6 6 6 6 -0 -1 -2 -3", {}, {"allocated_bytes": 0, "reserved_bytes": 40}),
    "and go back when the cache is emptied": (
        "6 6 6 6 -0 -1 -2 -3 E", {}, {"reserved_bytes": 0, "peak_allocated_bytes": 24, "peak_reserved_bytes": 40},
    ),
    "a segment in use stays": ("6 6 -0 E", {}, {"allocated_bytes": 6, "reserved_bytes": 20}),
    "the smallest free block that is enough": ("14 12 -0 -1 11.5", {}, {"offsets": [14], "allocated_bytes": 12}),
    # A split gives the low part a new object, so what is left of a segment at its end is older than all before it.
    "of equal blocks the older object": ("5 5 5 5 -0 -3 5 5", {}, {"offsets": [0, 5, 10, 15, 15, 0]}),
    # Two segments of ten: the object of block 13 is made larger, and that of block 2, which is older.
    "a merge keeps the object of the block being freed": ("2 " * 20 + "-12 -13 -3 -2 4", {}, {"offsets": [4]}),
    "streams do not share": ("6 -0 6@7 6", {}, {"offsets": [0, 20, 0], "reserved_bytes": 40}),
    "a full device gets its cache back and is asked again": (
        "40 -0 80", {"total": 100 * MiB}, {"num_alloc_retries": 1, "num_ooms": 0, "reserved_bytes": 80},
    ),
    "it goes on after an OOM": (
        "50 60! 60! -0 60", {"total": 100 * MiB}, {"num_ooms": 2, "num_alloc_retries": 3, "reserved_bytes": 60},
    ),
    "oversize blocks are kept": ("60 -0 20", SPLIT, {"offsets": [0, 60], "reserved_bytes": 80}),  # 60 would be split
    "for oversize requests": (  # for 39 more than 20 would be wasted
        "60 -0 20 39 41 32", SPLIT,
        {"offsets": [80, 0, 120], "oversize_allocations.current": 3, "oversize_segments.current": 3, "max_split_size": 32 * MiB},
    ),
    "one oversize block goes before the whole cache": (
        "60 24 -0 -1 30", {**SPLIT, "total": 100 * MiB}, {"num_alloc_retries": 0, "reserved_bytes": 54},
    ),
    "several oversize blocks go, from the largest down": (
        "40 50 60 -0 -1 -2 110", {**SPLIT, "total": 150 * MiB},
        {"events": ["free 60", "free 50", "alloc 110"], "num_alloc_retries": 0},
    ),
    "garbage goes before the driver is asked: what waited longest, and no more": (
        "40 30 20 -0 5@7 5@7 -1 50", GARBAGE,
        {"events": ["free 40", "alloc 50"], "num_alloc_retries": 0},
    ),
    "garbage that is as old as all other": ("40 65 -0 90", GARBAGE, {"events": ["free 40", "alloc 90"]}),
    "expandable segments grow by 20 MiB": ("6 6 6", EXPANDABLE, {"events": ["map 20"], "reserved_bytes": 20}),
    "and blocks lie across their pages": ("6 6 6 6", EXPANDABLE, {"offsets": [0, 6, 12, 18], "reserved_bytes": 40}),
    "they are given back whole": ("6 6 6 6 -0 -1 -2 -3 E", EXPANDABLE, {"events": ["unmap 40"], "reserved_bytes": 0}),
    "of 30 to 60 MiB one page lies wholly inside": (
        "30 30 30 30 -1 E", EXPANDABLE, {"events": ["map 40", "map 20", "unmap 20"], "reserved_bytes": 100},
    ),
    "it comes back in the gap": (
        "30 30 30 30 -1 E 30", EXPANDABLE, {"events": ["unmap 20", "map 20"], "offsets": [30], "reserved_bytes": 120},
    ),
    "pages of a mapping that failed half way stay mapped": (
        "20 20 20 20 -1 E 60!", {**EXPANDABLE, "total": 100 * MiB}, {"allocated_bytes": 60, "reserved_bytes": 60},
    ),
    "the limit counts a whole segment also where segments expand": (
        "3 15 9!", {**EXPANDABLE, "total": 100 * MiB, "memory_fraction": 0.3}, {"allocated_bytes": 18},
    ),
    "addresses of expandable segments are used again": ("30 -0 E 30 -1 E 30", EXPANDABLE, {"offsets": [0, 0, 0]}),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "options", "expected"), PLAYED.values(), ids=PLAYED)
def test_what_is_taken_and_what_goes_back(steps, options, expected):
    """Steps: `6` asks for 6 MiB (`6@7` on stream 7, `6!` in vain), `-0` frees the first block, `E` empties the cache.

    Sizes are MiB, of `offsets` (of blocks, from the first one) and `events` (of segments) the last so many.
    """
    events: list[str] = []
    names = {kind: kind.name.removeprefix("SEGMENT_").lower() for kind in Kind}
    allocator = CachingAllocator(
        options.get("total", ROOMY),
        on_event=lambda kind, address, size, stream: events.append(f"{names[kind]} {size // MiB}"),
        **{name: value for name, value in options.items() if name != "total"},
    )
    blocks, addresses = [], []
    for step in steps.split():
        if step == "E":
            allocator.empty_cache()
        elif step.startswith("-"):
            allocator.free(blocks[int(step[1:])])
        else:
            size, _, stream = step.rstrip("!").partition("@")
            with pytest.raises(OutOfMemory) if step.endswith("!") else contextlib.nullcontext():
                blocks.append(allocator.malloc(int(float(size) * MiB), int(stream or 0)))
                addresses.append(blocks[-1].address)
    found = {"events": events, "offsets": [(address - addresses[0]) / MiB for address in addresses]}
    found = {name: values[-len(expected.get(name, ())) :] for name, values in found.items()}
    found |= {name: getattr(allocator, name) / MiB for name in expected if name.endswith("_bytes")}
    assert {name: found.get(name, allocator.memory_stats().get(name)) for name in expected} == expected


# --- other streams ---


def test_a_block_that_another_stream_used_comes_free_with_the_next_request():
    allocator, [block] = after(6 * MiB)
    allocator.record_stream(block, 0)
    assert block.uses is None, "its own stream does not count"
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    at = block.address
    allocator.free(block)
    stats = allocator.memory_stats()
    assert allocator.pending == (block,)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (0, 6 * MiB)
    assert (stats["active_bytes.all.current"], stats["allocated_bytes.all.current"]) == (6 * MiB, 0)
    assert allocator.malloc(6 * MiB).address == at
    assert not allocator.pending


def test_events_can_be_waited_for():
    allocator, [block] = after(6 * MiB)
    allocator.waits_for_events = True
    allocator.record_stream(block, 1)
    at = block.address
    allocator.free(block)
    assert allocator.malloc(6 * MiB).address == at + 6 * MiB
    allocator.complete(block)
    assert allocator.malloc(6 * MiB).address == at


@pytest.mark.parametrize("how", ["empty_cache", "retry"])
def test_a_synchronization_ends_the_waiting(how):
    allocator, [block] = after(40 * MiB, total=50 * MiB)
    allocator.waits_for_events = True
    allocator.record_stream(block, 1)
    allocator.free(block)
    if how == "retry":
        allocator.malloc(30 * MiB)
    else:
        allocator.empty_cache()
    assert allocator.reserved_bytes == (30 * MiB if how == "retry" else 0)


# --- what is refused, and what is told ---


def test_a_block_is_freed_once():
    allocator, [block] = after(5)
    allocator.free(block)
    with pytest.raises(MemlabError, match="is not allocated"):
        allocator.free(block)
    with pytest.raises(MemlabError, match="does not wait"):
        allocator.complete(block)


def test_sizes_of_numpy_do_as_well():
    """A shift of numpy's integers overflows without a word."""
    allocator, [block] = after(6 * MiB)
    allocator.free(block)
    assert allocator.malloc(np.int64(6 * MiB)).size == 6 * MiB
    assert allocator.malloc(np.int64(30 * MiB)).size == 30 * MiB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_bytes": 0}, "a device of 0 bytes"),
        ({"total_bytes": 5, "context_bytes": 6}, "a context of 6"),
        ({"total_bytes": 5, "memory_fraction": 1.5}, "between 0 and 1, got 1.5"),
    ],
)
def test_impossible_devices_and_sizes(arguments, message):
    with pytest.raises(MemlabError, match=message):
        CachingAllocator(**arguments)
    with pytest.raises(MemlabError, match="-5 bytes"):
        CachingAllocator(GiB).malloc(-5)


def test_the_context_is_not_there_to_be_had():
    with pytest.raises(OutOfMemory, match=r"of which 60.00 MiB is free.*this process has 40.00 MiB memory in use"):
        after(80 * MiB, total=100 * MiB, context_bytes=40 * MiB)


def test_peaks_can_be_counted_anew():
    allocator, blocks = after(6 * MiB, 300)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    allocator.reset_peaks()
    allocator.reset_accumulated()
    allocator.malloc(1000)
    stats = allocator.memory_stats()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (1024, 2 * MiB)
    assert (stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.allocated"]) == (1024, 1024)
    assert (stats["reserved_bytes.large_pool.peak"], stats["num_device_alloc"], stats["num_device_free"]) == (0, 1, 0)


def test_many_events_are_counted_as_few_are():
    allocator = CachingAllocator(GiB)
    for _ in range(70_000):  # the journal of the statistics is folded on the way
        allocator.free(allocator.malloc(1000))
    stats = allocator.memory_stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (70_000, 70_000)
    assert (stats["allocation.all.peak"], stats["requested_bytes.all.peak"]) == (1, 1000)


# --- settings ---


def test_the_memory_fraction_is_a_limit_that_counts_segments():
    allocator = CachingAllocator(100 * MiB, memory_fraction=0.3)
    allocator.malloc(3 * MiB)
    with pytest.raises(OutOfMemory, match=r"80.00 MiB is free.* 30.00 MiB allowed; "):
        allocator.malloc(18 * MiB)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 1)


def test_large_segments_may_be_smaller_and_sizes_rounded_to_parts_of_powers_of_two():
    assert after(3 * MiB, conf="large_segment_size_mb:12")[0].reserved_bytes == 12 * MiB
    _, [block] = after(1200, conf="roundup_power2_divisions:2")
    assert (block.size, block.requested_bytes) == (1536, 1200)


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


# --- versions ---


def order_of_equals(allocator: CachingAllocator) -> list[int]:
    """In which order the equal free blocks 1 and 3 (first segment) and 5 (second) are taken."""
    blocks = [allocator.malloc(5 * MiB) for _ in range(8)]
    names = {block.address: number for number, block in enumerate(blocks)}
    for number in (5, 3, 1):
        allocator.free(blocks[number])
    return [names[allocator.malloc(5 * MiB).address] for _ in range(3)]


@pytest.mark.parametrize(
    ("version", "order", "downwards"),
    [
        ("", [3, 1, 5], [3, 1, 5]),  # by age: what was left of the first segment is its first object
        ("2.12.1+cu130", [3, 1, 5], [3, 1, 5]),
        ("2.13.0", [1, 3, 5], [1, 3, 5]),
        ("2.14.0", [1, 3, 5], [1, 3, 5]),
        ("2.15.0+cu132", [1, 3, 5], [1, 3, 5]),
        ("2.11.0", [1, 3, 5], [5, 1, 3]),  # before 2.12 it mattered where the driver puts segments
        ("2.10.0+cu128", [1, 3, 5], [5, 1, 3]),
    ],
)
def test_versions_take_equal_blocks_in_other_orders(version, order, downwards):
    assert order_of_equals(CachingAllocator(ROOMY, torch_version=version)) == order
    places = iter((1 << 40, 1 << 39))
    allocator = CachingAllocator(ROOMY, torch_version=version, place=lambda size, stream: next(places))
    assert order_of_equals(allocator) == downwards
