from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_traces import GPU, Script

from memlab.analysis.timeline import Pyramid, Timeline, timeline
from memlab.errors import MemlabError
from memlab.trace import Device, Kind


def points(line: Timeline) -> list[tuple[int, int, int]]:
    return list(zip(line.time_ns.tolist(), line.bytes.tolist(), line.row.tolist(), strict=True))


def test_the_level_after_every_event_by_hand():
    script = Script()
    old = script.preexisting(100)
    new = script.alloc(300, at=5, requested=290)
    script.free(old, at=7)
    script.free(new, at=9)
    line = timeline(script.trace(duration=20), 0)
    assert points(line) == [(0, 100, -1), (5, 400, 1), (7, 300, 2), (9, 0, 3)]
    assert (line.start_bytes, line.end_bytes, line.end_ns) == (100, 0, 20)
    assert timeline(script.trace(), 0, "requested").bytes.tolist() == [100, 390, 290, 0]


def test_events_before_the_first_row_are_the_start_and_no_step():
    script = Script()
    script.segment(1000)
    gone = script.alloc(10)
    script.free(gone)
    script.here_it_starts()
    script.segment(500, at=3)
    script.segment(-1000, at=4)
    assert points(timeline(script.trace(), 0, "reserved")) == [(0, 1000, -1), (3, 1500, 3), (4, 500, 4)]
    assert points(timeline(script.trace(), 0)) == [(0, 0, -1)]


def test_devices_do_not_mix_and_rows_are_those_of_the_trace():
    script = Script(GPU, Device(1, "second"))
    script.alloc(1, at=1)
    script.alloc(10, at=2, device=1)
    script.alloc(2, at=3)
    assert points(timeline(script.trace(), 0)) == [(0, 0, -1), (1, 1, 0), (3, 3, 2)]
    assert points(timeline(script.trace(), 1)) == [(0, 0, -1), (2, 10, 1)]


def test_what_is_pending_left_allocated_and_leaves_nothing_later():
    script = Script()
    block = script.alloc(64, at=1)
    script.free(block, at=2, kind=Kind.FREE_PENDING)
    script.blocks[block]["sizes"] = (0, 0)
    script.free(block, at=3)
    assert timeline(script.trace(), 0).bytes.tolist() == [0, 64, 0]


def test_an_empty_trace_is_one_step_at_zero_and_an_unknown_quantity_is_refused():
    assert points(timeline(Script().trace(duration=7), 0)) == [(0, 0, -1)]
    with pytest.raises(MemlabError, match="'used'"):
        timeline(Script().trace(), 0, "used")


@st.composite
def lines(draw: st.DrawFn) -> Timeline:
    changes = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(-1000, 1000)), min_size=1, max_size=400))
    times = np.cumsum([gap for gap, _ in changes])
    level = np.maximum(np.cumsum([change for _, change in changes]), 0)
    end = int(times[-1]) + draw(st.integers(0, 100))
    return Timeline(times - times[0], level, np.arange(len(level)) - 1, end - int(times[0]))


def brute(line: Timeline, begin: int, end: int, reach: int = 0) -> np.ndarray:
    """The levels that hold at some time in [begin, end), and those of so many steps around."""
    first = max(int(np.searchsorted(line.time_ns, begin, side="right")) - 1, 0)
    last = max(int(np.searchsorted(line.time_ns, end)), first + 1)
    return line.bytes[max(first - reach, 0) : last + reach]


@settings(deadline=None, max_examples=60)
@given(lines(), st.integers(-10, 20_000), st.integers(1, 20_000), st.integers(1, 300))
def test_a_window_has_the_extremes_of_brute_force(line, begin, length, bins):
    _, low, high = Pyramid(line).window(begin, begin + length, bins)
    assert len(low) <= bins
    expected = brute(line, begin, begin + length)
    assert (low.min(), high.max()) == (expected.min(), expected.max())
    assert np.all(low <= high)


@pytest.mark.parametrize("seed", range(3))
def test_a_window_of_a_long_line_loses_no_extreme_and_reaches_over_by_less_than_a_bin(seed):
    random = np.random.default_rng(seed)
    level = np.abs(np.cumsum(random.integers(-500, 501, 300_000)))
    times = np.cumsum(random.integers(1, 100, len(level)))
    line = Timeline(times - times[0], level, np.arange(len(level)) - 1, int(times[-1]))
    pyramid = Pyramid(line)
    for _ in range(40):
        begin, end = np.sort(random.integers(0, line.end_ns, 2))
        at, low, high = pyramid.window(float(begin), float(end) + 1, bins=100)
        expected = brute(line, begin, end + 1)
        assert low.min() <= expected.min()
        assert high.max() >= expected.max()
        # Beyond the window a bin may reach, but by no more than a bin's share of the steps inside.
        wide = brute(line, begin, end + 1, len(expected) // 100 + 1)
        assert wide.min() <= low.min()
        assert high.max() <= wide.max()
        assert np.all(np.diff(at) > 0)
