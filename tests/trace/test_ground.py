"""The ground against a model that knows every unit of it."""

from __future__ import annotations

import numpy as np
import pytest

from memlab.trace import Kind
from memlab.trace.ground import Ground


def held(ground: Ground) -> set[int]:
    return {unit for start, end, *_ in ground.segments() for unit in range(start, end)}


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_what_a_set_of_units_holds(seed):
    random, ground, units = np.random.default_rng(seed), Ground(), set()
    for _ in range(200):
        start, size = int(random.integers(60)), int(random.integers(12))
        span = set(range(start, start + size))
        if random.random() < 0.55:
            ground.add(start, size, int(random.integers(2)), mapped=bool(random.random() < 0.5))
            units |= span
        else:
            missing = ground.remove(start, size)
            assert {unit for a, b in missing for unit in range(a, b)} == span - units
            units -= span
        assert held(ground) == units
        probe = int(random.integers(70))
        assert (ground.at(probe) is not None) == (probe in units)
        ends = [(a, b) for a, b, *_ in ground.segments()]
        assert ends == sorted(ends)
        assert all(a < b for a, b in ends)


def test_segments_that_touch_stay_apart_and_mapped_ranges_join():
    ground = Ground()
    for start in (0, 10):
        ground.add(start, 10, 0, mapped=False)
    for start in (20, 40, 30):
        ground.add(start, 10, 0, mapped=True)
    ground.add(50, 10, 7, mapped=True)
    assert list(ground.segments()) == [(0, 10, 0, False), (10, 20, 0, False), (20, 50, 0, True), (50, 60, 7, True)]
    ground.remove(30, 5)
    assert [span[:2] for span in ground.segments()][2:4] == [(20, 30), (35, 50)]


def test_what_must_have_been_there_is_found():
    rows = [
        (Kind.ALLOC, 100, 20, 3),  # in a segment that nobody saw coming
        (Kind.ALLOC, 120, 10, 3),
        (Kind.SEGMENT_FREE, 300, 50, 0),  # known to the byte
        (Kind.ADOPT, 310, 10, 0),
        (Kind.SEGMENT_ALLOC, 500, 40, 0),
        (Kind.ALLOC, 510, 10, 0),
        (Kind.SEGMENT_FREE, 500, 40, 0),
        (Kind.SEGMENT_ALLOC, 0, 99, 0),  # a lump without an address
    ]
    assert Ground.needed(*zip(*rows, strict=True)) == [(100, 130, 3), (300, 350, 0)]


def test_a_block_over_an_edge_needs_the_part_before_it():
    rows = [(Kind.SEGMENT_MAP, 200, 100, 0), (Kind.ALLOC, 150, 100, 0), (Kind.SEGMENT_UNMAP, 100, 150, 0)]
    assert Ground.needed(*zip(*rows, strict=True)) == [(100, 200, 0)]
