"""The ranges against a model that knows every unit of it."""

from __future__ import annotations

import numpy as np
import pytest

from memlab.trace import Kind
from memlab.trace.address_ranges import AddressRanges


def held(ranges: AddressRanges) -> set[int]:
    return {unit for start, end, *_ in ranges.segments() for unit in range(start, end)}


@pytest.mark.parametrize("seed", range(8))
def test_it_holds_what_a_set_of_units_holds(seed):
    random, ranges, units = np.random.default_rng(seed), AddressRanges(), set()
    for _ in range(200):
        start, size = int(random.integers(60)), int(random.integers(12))
        span = set(range(start, start + size))
        if random.random() < 0.55:
            ranges.add(start, size, int(random.integers(2)), mapped=bool(random.random() < 0.5))
            units |= span
        else:
            missing = ranges.remove(start, size)
            assert {unit for a, b in missing for unit in range(a, b)} == span - units
            units -= span
        assert held(ranges) == units
        probe = int(random.integers(70))
        assert (not ranges.missing(probe, probe + 1)) == (probe in units)
        ends = [(a, b) for a, b, *_ in ranges.segments()]
        assert ends == sorted(ends)
        assert all(a < b for a, b in ends)


def test_segments_that_touch_stay_apart_and_mapped_ranges_join():
    ranges = AddressRanges()
    for start in (0, 10):
        ranges.add(start, 10, 0, mapped=False)
    for start in (20, 40, 30):
        ranges.add(start, 10, 0, mapped=True)
    ranges.add(50, 10, 7, mapped=True)
    assert list(ranges.segments()) == [(0, 10, 0, False), (10, 20, 0, False), (20, 50, 0, True), (50, 60, 7, True)]
    ranges.remove(30, 5)
    assert [span[:2] for span in ranges.segments()][2:4] == [(20, 30), (35, 50)]


def test_what_must_have_been_there_is_found():
    rows = [
        (Kind.ALLOC, 100, 20, 3),  # in a segment that nobody saw coming
        (Kind.ALLOC, 120, 10, 3),
        (Kind.SEGMENT_FREE, 300, 50, 0),  # known to the byte
        (Kind.PREEXISTING, 310, 10, 0),
        (Kind.SEGMENT_ALLOC, 500, 40, 0),
        (Kind.ALLOC, 510, 10, 0),
        (Kind.SEGMENT_FREE, 500, 40, 0),
        (Kind.SEGMENT_ALLOC, 0, 99, 0),  # a lump without an address
    ]
    assert AddressRanges.needed(*zip(*rows, strict=True)) == [(100, 130, 3), (300, 350, 0)]


def test_a_block_over_an_edge_needs_the_part_before_it():
    rows = [(Kind.SEGMENT_MAP, 200, 100, 0), (Kind.ALLOC, 150, 100, 0), (Kind.SEGMENT_UNMAP, 100, 150, 0)]
    assert AddressRanges.needed(*zip(*rows, strict=True)) == [(100, 200, 0)]
