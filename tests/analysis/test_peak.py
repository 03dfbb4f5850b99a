from __future__ import annotations

import dataclasses

import pytest
from analysis.random_traces import random_trace
from scripted_traces import GPU, Script

from memlab.analysis.peak import Peak, alive_at, device_peak, peak
from memlab.analysis.timeline import timeline
from memlab.errors import MemlabError
from memlab.trace import Bounded, Device
from memlab.units import UNBOUNDED

LOST = Bounded(0, 12, 18, lost_events=1000)


def found_in(
    *bounded: Bounded, start: int = -1, end: int = -1, sampled: int = 0, of: str = "allocated", **facts
) -> Peak:
    """The peak of a run with one block of 300 bytes; PyTorch's counter said `start` and `end`, a sample `sampled`."""
    script = Script(dataclasses.replace(GPU, start_peak_allocated_bytes=start, end_peak_allocated_bytes=end, **facts))
    script.free(script.alloc(300, at=10), at=20)
    if sampled:
        script.sample(15, sampled)
    return peak(script.trace(bounded=bounded), 0, of)


def test_the_first_of_equal_peaks_is_the_peak():
    script = Script()
    script.free(script.alloc(100, at=1), at=2)
    script.alloc(100, at=3)
    found = peak(script.trace(), 0)
    assert (found.low_bytes, found.high_bytes, found.time_ns, found.row) == (100, 100, 1, 0)
    assert found.is_exact
    assert found.source.startswith("every event")


def test_without_events_the_start_is_the_peak_and_an_empty_trace_peaks_at_nothing():
    script = Script()
    script.preexisting(70)
    found = peak(script.trace(duration=5), 0)
    assert (found.low_bytes, found.time_ns, found.row) == (70, 0, -1)
    assert peak(Script().trace(), 0).low_bytes == 0
    assert len(alive_at(Script().trace(), 0, -1)) == 0


def test_each_device_has_its_own_peak_and_an_unknown_one_is_refused():
    script = Script(GPU, Device(1, "second"))
    script.alloc(5, at=1)
    script.alloc(50, at=2, device=1)
    trace = script.trace(bounded=(Bounded(1, 0, 9, 4),))
    assert (peak(trace, 0).low_bytes, peak(trace, 0).is_exact) == (5, True)
    assert (peak(trace, 1).low_bytes, peak(trace, 1).is_exact) == (50, False)
    with pytest.raises(MemlabError, match="no device 2"):
        peak(trace, 2)


# --- PyTorch's counters ---


@pytest.mark.parametrize(
    ("start", "end", "low", "row"),
    [
        (-1, -1, 300, 0),
        (100, 900, 900, -1),  # it rose beyond every event: it is believed
        (5000, 5000, 300, 0),  # it did not rise: it says nothing of this run
        (150, 200, 300, 0),  # the user reset it after 300 bytes: it ends above its start and below the truth
        (5000, 310, 300, 0),  # it fell
    ],
)
def test_a_counter_is_believed_where_this_run_raised_it(start, end, low, row):
    found = found_in(start=start, end=end)
    assert (found.low_bytes, found.high_bytes, found.row) == (low, low, row)
    assert ("counter" in found.source) == (row < 0)


# --- stretches whose events are not there ---


@pytest.mark.parametrize(
    ("known", "low", "high"),
    [
        ({"sampled": 700}, 700, GPU.capacity_bytes),
        ({"start": 5000, "end": 5000}, 300, 5000),  # lost events cannot have passed a counter that did not rise
        ({"start": 100, "end": 900}, 900, 900),
        ({"capacity_bytes": -1}, 300, UNBOUNDED),
        # A sample is more than the counter says at the end: it was reset, and bounds nothing.
        ({"start": 150, "end": 200, "sampled": 700}, 700, GPU.capacity_bytes),
        ({"start": 5000, "end": 310, "sampled": 700}, 700, GPU.capacity_bytes),
        ({"start": 150, "end": 600, "sampled": 700}, 700, GPU.capacity_bytes),
    ],
)
def test_lost_events_make_the_peak_a_range_that_a_counter_or_the_capacity_bounds(known, low, high):
    found = found_in(LOST, **known)
    assert (found.low_bytes, found.high_bytes, found.time_ns, found.row) == (low, high, -1, -1)


def test_the_peak_of_rows_that_were_dropped_is_exact_and_has_no_place():
    stretch = Bounded(0, 0, 5, 1000, peak_allocated_bytes=4000, peak_reserved_bytes=8000)
    found = found_in(stretch)
    assert (found.low_bytes, found.is_exact, found.time_ns, found.row) == (4000, True, -1, -1)
    assert found_in(stretch, of="reserved").low_bytes == 8000
    below = found_in(Bounded(0, 0, 5, 1000, peak_allocated_bytes=40, peak_reserved_bytes=80))
    assert (below.low_bytes, below.row) == (300, 0)


# --- who was there ---


def test_who_is_alive_after_each_row():
    script = Script()
    old = script.preexisting(100)  # row 0
    a = script.alloc(10, at=1)  # row 1
    script.segment(4096, at=2)
    script.free(old, at=3)
    script.alloc(20, at=4)  # row 4
    script.free(a, at=5)
    trace = script.trace()
    rows = [alive_at(trace, 0, row).tolist() for row in range(-1, 6)]
    assert rows == [[0], [0], [0, 1], [0, 1], [1], [1, 4], [4]]


def test_the_level_at_each_row_is_the_sum_of_who_is_alive():
    for trace in map(random_trace, range(30)):
        line = timeline(trace, 0)
        for row, level in zip(line.row.tolist(), line.bytes.tolist(), strict=True):
            assert trace.events.allocated_bytes[alive_at(trace, 0, row)].sum() == level


# --- the whole device, from samples ---


def test_the_device_peak_is_at_least_what_samples_and_reserved_tell():
    script = Script()
    script.segment(1000, at=5)
    script.segment(-400, at=6)
    script.sample(15, 100, 200)  # the driver was not read
    assert device_peak(script.trace(), 0) is None
    script.sample(0, 0, 0, 50)
    script.sample(10, 0, 600, 680)
    found = device_peak(script.trace(), 0)
    assert (found.low_bytes, found.high_bytes) == (1050, UNBOUNDED)


def test_without_reserved_the_samples_stand_alone():
    script = Script()
    script.sample(3, -1, -1, 700)
    script.sample(4, -1, -1, 500)
    found = device_peak(script.trace(), 0)
    assert (found.low_bytes, found.time_ns, found.source) == (700, 3, "samples")
