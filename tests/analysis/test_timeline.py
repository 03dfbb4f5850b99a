from __future__ import annotations

import pytest
from scripted_traces import GPU, Script

from memlab.analysis.timeline import Timeline, timeline
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
