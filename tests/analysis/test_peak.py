from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from handmade import GPU, Script

from memlab.analysis.peak import UNKNOWN_BYTES, alive_at, device_peak, peak
from memlab.errors import MemlabError
from memlab.trace import Bounded, Device


def counted(**counters: int) -> Device:
    return dataclasses.replace(GPU, **counters)


def one_block(device: Device = GPU, size: int = 300) -> Script:
    script = Script(device)
    script.free(script.alloc(size, at=10), at=20)
    return script


def test_the_first_of_equal_peaks_is_the_peak():
    script = Script()
    a = script.alloc(100, at=1)
    script.free(a, at=2)
    script.alloc(100, at=3)
    found = peak(script.trace(), 0)
    assert (found.low_bytes, found.high_bytes, found.time_ns, found.row) == (100, 100, 1, 0)
    assert found.is_exact
    assert found.source.startswith("every event")


def test_without_events_the_start_is_the_peak():
    script = Script()
    script.adopt(70)
    found = peak(script.trace(duration=5), 0)
    assert (found.low_bytes, found.time_ns, found.row) == (70, 0, -1)


def test_an_empty_trace_peaks_at_nothing():
    assert peak(Script().trace(), 0).low_bytes == 0
    assert len(alive_at(Script().trace(), 0, -1)) == 0


def test_a_single_event_is_the_peak():
    assert peak(one_block().trace(), 0).low_bytes == 300


def test_each_device_has_its_own_peak_and_an_unknown_one_is_refused():
    script = Script(GPU, Device(1, "second"))
    script.alloc(5, at=1)
    script.alloc(50, at=2, device=1)
    assert peak(script.trace(), 0).low_bytes == 5
    assert peak(script.trace(), 1).low_bytes == 50
    with pytest.raises(MemlabError, match="no device 2"):
        peak(script.trace(), 2)


# --- PyTorch's counters ---


def test_a_counter_that_rose_beyond_every_event_is_believed():
    facts = counted(start_peak_allocated_bytes=100, end_peak_allocated_bytes=900)
    found = peak(one_block(facts).trace(), 0)
    assert (found.low_bytes, found.is_exact, found.row) == (900, True, -1)
    assert "counter" in found.source


def test_a_counter_that_did_not_rise_says_nothing_of_this_run():
    facts = counted(start_peak_allocated_bytes=5000, end_peak_allocated_bytes=5000)
    assert peak(one_block(facts).trace(), 0).low_bytes == 300


def test_a_counter_that_the_user_reset_does_not_lower_the_peak():
    # 300 bytes, then reset_peak_memory_stats(), then 200: the counter ends above its start and below the truth.
    facts = counted(start_peak_allocated_bytes=150, end_peak_allocated_bytes=200)
    found = peak(one_block(facts).trace(), 0)
    assert (found.low_bytes, found.high_bytes, found.row) == (300, 300, 0)


def test_a_counter_that_fell_proves_nothing():
    facts = counted(start_peak_allocated_bytes=5000, end_peak_allocated_bytes=310)
    assert peak(one_block(facts).trace(), 0).low_bytes == 300


# --- stretches whose events are not there ---

LOST = Bounded(0, 12, 18, lost_events=1000)


def test_lost_events_make_the_peak_a_range_up_to_the_capacity():
    script = one_block()
    script.sample(15, 700)
    found = peak(script.trace(bounded=(LOST,)), 0)
    assert (found.low_bytes, found.high_bytes) == (700, GPU.capacity_bytes)
    assert (found.time_ns, found.row) == (-1, -1)


def test_lost_events_cannot_have_passed_a_counter_that_did_not_rise():
    facts = counted(start_peak_allocated_bytes=5000, end_peak_allocated_bytes=5000)
    found = peak(one_block(facts).trace(bounded=(LOST,)), 0)
    assert (found.low_bytes, found.high_bytes) == (300, 5000)


def test_a_counter_that_rose_makes_lost_events_exact():
    facts = counted(start_peak_allocated_bytes=100, end_peak_allocated_bytes=900)
    assert peak(one_block(facts).trace(bounded=(LOST,)), 0).is_exact


@pytest.mark.parametrize(("start", "end"), [(150, 200), (5000, 310), (150, 600)])
def test_a_counter_that_was_reset_bounds_nothing_when_events_were_lost(start, end):
    facts = counted(start_peak_allocated_bytes=start, end_peak_allocated_bytes=end)
    script = one_block(facts)
    script.sample(15, 700)  # more than the counter says at the end: it was reset
    found = peak(script.trace(bounded=(LOST,)), 0)
    assert (found.low_bytes, found.high_bytes) == (700, GPU.capacity_bytes)


def test_without_capacity_nothing_bounds_what_was_lost():
    facts = dataclasses.replace(GPU, capacity_bytes=-1)
    assert peak(one_block(facts).trace(bounded=(LOST,)), 0).high_bytes == UNKNOWN_BYTES


def test_lost_events_of_another_device_change_nothing():
    script = Script(GPU, Device(1, "second"))
    script.alloc(5, at=1)
    assert peak(script.trace(bounded=(Bounded(1, 0, 9, 4),)), 0).is_exact


def test_the_peak_of_rows_that_were_let_go_is_exact_and_has_no_place():
    stretch = Bounded(0, 0, 5, 1000, peak_allocated_bytes=4000, peak_reserved_bytes=8000)
    found = peak(one_block().trace(bounded=(stretch,)), 0)
    assert (found.low_bytes, found.is_exact, found.time_ns, found.row) == (4000, True, -1, -1)
    assert peak(one_block().trace(bounded=(stretch,)), 0, "reserved").low_bytes == 8000


def test_rows_that_were_let_go_below_the_peak_change_nothing():
    stretch = Bounded(0, 0, 5, 1000, peak_allocated_bytes=40, peak_reserved_bytes=80)
    found = peak(one_block().trace(bounded=(stretch,)), 0)
    assert (found.low_bytes, found.row) == (300, 0)


# --- who was there ---


def test_who_is_alive_after_each_row():
    script = Script()
    old = script.adopt(100)  # row 0
    a = script.alloc(10, at=1)  # row 1
    script.segment(4096, at=2)
    script.free(old, at=3)
    script.alloc(20, at=4)  # row 4
    script.free(a, at=5)
    trace = script.trace()
    rows = [alive_at(trace, 0, row).tolist() for row in range(-1, 6)]
    assert rows == [[0], [0], [0, 1], [0, 1], [1], [1, 4], [4]]


def test_the_level_at_each_row_is_the_sum_of_who_is_alive():
    random = np.random.default_rng(1)
    script = Script()
    alive = [script.adopt(int(size)) for size in random.integers(1, 99, 5)]
    for _ in range(200):
        if alive and random.random() < 0.5:
            script.free(alive.pop(int(random.integers(len(alive)))))
        else:
            alive.append(script.alloc(int(random.integers(1, 99))))
    trace = script.trace()
    from memlab.analysis.timeline import timeline

    line = timeline(trace, 0)
    for row, level in zip(line.row.tolist(), line.bytes.tolist(), strict=True):
        assert trace.events.allocated_bytes[alive_at(trace, 0, row)].sum() == level


# --- the whole device, from samples ---


def test_the_device_was_never_read():
    script = one_block()
    script.sample(15, 100, 200)
    assert device_peak(script.trace(), 0) is None


def test_the_device_peak_is_at_least_what_samples_and_reserved_tell():
    script = Script()
    script.segment(1000, at=5)
    script.segment(-400, at=6)
    script.sample(0, 0, 0, 50)
    script.sample(10, 0, 600, 680)
    found = device_peak(script.trace(), 0)
    assert (found.low_bytes, found.high_bytes) == (1050, UNKNOWN_BYTES)


def test_without_reserved_the_samples_stand_alone():
    script = Script()
    script.sample(3, -1, -1, 700)
    script.sample(4, -1, -1, 500)
    found = device_peak(script.trace(), 0)
    assert (found.low_bytes, found.time_ns, found.source) == (700, 3, "samples")
