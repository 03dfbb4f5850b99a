"""The simulated allocator on small examples: the figures are PyTorch's (research of its sources), not ours."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest

from memlab.allocator import CachingAllocator, OutOfMemory, conf, oom, rules
from memlab.errors import MemlabError
from memlab.units import GiB, MiB

ROOMY = 64 * GiB


def after(*sizes: float, total: int = ROOMY, **options):
    allocator = CachingAllocator(total, **options)
    return allocator, [allocator.malloc(int(size)) for size in sizes]


def figures(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize("module", [rules, conf, oom])
def test_the_examples_in_the_docstrings_hold(module):
    assert not doctest.testmod(module).failed


# --- twelve vectors, derived from the rules of PyTorch 2.13 ------------------------------------------------------------


def test_1_one_byte_takes_a_block_of_512_in_a_segment_of_2_mib():
    allocator, _ = after(1)
    assert (*figures(allocator), allocator.requested_bytes) == (512, 2 * MiB, 1)
    assert allocator.memory_stats()["inactive_split_bytes.all.current"] == 2 * MiB - 512


def test_2_no_bytes_take_nothing():
    allocator, [block] = after(0)
    allocator.free(block)
    allocator.record_stream(block, 3)
    assert (block, *figures(allocator)) == (None, 0, 0)


def test_3_the_pools_meet_at_1_mib():
    assert after(MiB)[0].reserved_bytes == 2 * MiB
    assert figures(after(MiB + 1)[0]) == (MiB + 512, 20 * MiB)


def test_4_segments_of_20_mib_are_for_what_rounds_to_less_than_10():
    assert after(10 * MiB - 1)[0].reserved_bytes == 10 * MiB
    assert after(10 * MiB - 512)[0].reserved_bytes == 20 * MiB


def test_5_a_rest_of_up_to_1_mib_stays_with_the_block():
    assert figures(after(19.5 * MiB)[0]) == (20 * MiB, 20 * MiB)
    assert figures(after(19 * MiB - 512)[0]) == (19 * MiB - 512, 20 * MiB)


def test_6_three_blocks_of_6_mib_share_a_segment():
    assert after(*[6 * MiB] * 3)[0].reserved_bytes == 20 * MiB
    assert after(*[6 * MiB] * 4)[0].reserved_bytes == 40 * MiB


def test_7_free_neighbours_join_and_go_back_when_the_cache_is_emptied():
    allocator, blocks = after(*[6 * MiB] * 4)
    for block in blocks:
        allocator.free(block)
    assert figures(allocator) == (0, 40 * MiB)
    allocator.empty_cache()
    assert figures(allocator) == (0, 0)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (24 * MiB, 40 * MiB)


def test_8_a_segment_in_use_stays():
    allocator, [first, _] = after(6 * MiB, 6 * MiB)
    allocator.free(first)
    allocator.empty_cache()
    assert figures(allocator) == (6 * MiB, 20 * MiB)


def test_9_the_smallest_free_block_that_is_enough_is_taken():
    allocator, blocks = after(14 * MiB, 12 * MiB)
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(int(11.5 * MiB)).address == blocks[1].address
    assert allocator.allocated_bytes == 12 * MiB


def test_10_the_text_of_an_out_of_memory_names_the_segment_that_was_asked_for():
    with pytest.raises(OutOfMemory) as caught:
        after(3 * MiB, total=10 * MiB)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 10.00 MiB"
    )
    assert caught.value.requested_bytes == 3 * MiB


def test_11_a_full_device_gets_its_cache_back_and_is_asked_again():
    allocator, [block] = after(40 * MiB, total=100 * MiB)
    allocator.free(block)
    allocator.malloc(80 * MiB)
    assert (allocator.num_alloc_retries, allocator.num_ooms, allocator.reserved_bytes) == (1, 0, 80 * MiB)


def test_12_expandable_segments_grow_by_20_mib():
    allocator, blocks = after(*[6 * MiB] * 3, conf="expandable_segments:True")
    assert allocator.reserved_bytes == 20 * MiB
    blocks.append(allocator.malloc(6 * MiB))
    assert allocator.reserved_bytes == 40 * MiB
    assert [later.address - block.address for block, later in itertools.pairwise(blocks)] == [6 * MiB] * 3
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert figures(allocator) == (0, 0)


# --- which block is taken ----------------------------------------------------------------------------------------------


def test_of_equal_blocks_the_one_whose_object_is_older_is_taken():
    """A split gives the low part a new object, so what is left of a segment at its end is older than all before it."""
    allocator, blocks = after(*[5 * MiB] * 4)
    first, _, _, last = (block.address for block in blocks)
    allocator.free(blocks[0])
    allocator.free(blocks[3])
    assert [allocator.malloc(5 * MiB).address for _ in range(2)] == [last, first]


def test_a_merge_keeps_the_object_of_the_block_being_freed():
    allocator, blocks = after(*[2 * MiB] * 20)  # two segments of ten
    first, second = blocks[2:4], blocks[12:14]
    at = first[0].address
    allocator.free(second[0])
    allocator.free(second[1])  # 4 MiB: the object of blocks[13]
    allocator.free(first[1])
    allocator.free(first[0])  # 4 MiB: the object of blocks[2], the older one
    assert allocator.malloc(4 * MiB).address == at


def test_streams_do_not_share():
    allocator, [block] = after(6 * MiB)
    at = block.address
    allocator.free(block)
    other = allocator.malloc(6 * MiB, stream=7)
    assert (other.stream, allocator.reserved_bytes) == (7, 40 * MiB)
    assert allocator.malloc(6 * MiB).address == at


# --- other streams -------------------------------------------------------------------------------------------------------


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
def test_a_synchronisation_ends_the_waiting(how):
    allocator, [block] = after(40 * MiB, total=50 * MiB)
    allocator.waits_for_events = True
    allocator.record_stream(block, 1)
    allocator.free(block)
    if how == "retry":
        allocator.malloc(30 * MiB)
    else:
        allocator.empty_cache()
    assert allocator.reserved_bytes == (30 * MiB if how == "retry" else 0)


# --- what is refused, and what is told -------------------------------------------------------------------------------------


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
def test_impossible_devices(arguments, message):
    with pytest.raises(MemlabError, match=message):
        CachingAllocator(**arguments)


def test_a_negative_size():
    with pytest.raises(MemlabError, match="-5 bytes"):
        CachingAllocator(GiB).malloc(-5)


def test_the_context_is_not_there_to_be_had():
    with pytest.raises(OutOfMemory, match=r"of which 60.00 MiB is free.*this process has 40.00 MiB memory in use"):
        after(80 * MiB, total=100 * MiB, context_bytes=40 * MiB)


def test_it_goes_on_after_an_out_of_memory():
    allocator = CachingAllocator(100 * MiB)
    block = allocator.malloc(50 * MiB)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            allocator.malloc(60 * MiB)
    allocator.free(block)
    allocator.malloc(60 * MiB)
    assert (allocator.num_ooms, allocator.num_alloc_retries, allocator.reserved_bytes) == (2, 3, 60 * MiB)


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
