from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from handmade import GPU, HOST, Script
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.analysis.areas import LAYERS, areas, has_categories
from memlab.analysis.breakdown import breakdown
from memlab.analysis.timeline import Timeline, timeline
from memlab.trace import Category, Device, Kind, Trace
from memlab.trace.columns import Recategorised


def recategorised(trace: Trace, *changes: tuple[int, int, Category]) -> Trace:
    """The same trace with changes (block, row, category)."""
    return dataclasses.replace(trace, recategorised=Recategorised(*np.array(changes, "i8").reshape(-1, 3).T))


def layers(trace: Trace, device: int = 0) -> dict[str, list[int]]:
    return {name: level.tolist() for name, level in areas(trace, device).layers.items()}


def test_the_layers_by_hand():
    script = Script()
    script.adopt(1024, requested=1000)
    kept = script.alloc(512, at=1, requested=500, category=Category.PARAMETER)
    script.free(script.alloc(2048, at=2, requested=2048, category=Category.ACTIVATION), at=3)
    script.free(kept, at=4)
    assert layers(script.trace()) == {
        "parameter": [0, 500, 500, 500, 0],
        "activation": [0, 0, 2048, 0, 0],
        "other": [1000, 1000, 1000, 1000, 1000],
        "rounding": [24, 36, 36, 36, 24],
    }


def test_they_lie_in_one_order_whatever_came_first():
    script = Script()
    for category in reversed(Category):
        script.alloc(512, requested=500, category=category)
    assert tuple(areas(script.trace(), 0).layers) == LAYERS
    assert set(LAYERS) == {category.name.lower() for category in Category} | {"rounding"}


def test_a_category_that_changes_moves_the_bytes_at_its_row_and_takes_them_away_at_the_end():
    script = Script()
    block = script.alloc(512, at=1, requested=500, category=Category.ACTIVATION)
    script.alloc(100, at=2)
    script.alloc(100, at=3)
    script.free(block, at=4)
    trace = recategorised(script.trace(), (block, 2, Category.GRADIENT), (block, 1, Category.TEMPORARY))
    assert layers(trace) == {
        "gradient": [0, 0, 0, 500, 0],
        "activation": [0, 500, 0, 0, 0],
        "temporary": [0, 0, 500, 0, 0],
        "other": [0, 0, 100, 200, 200],
        "rounding": [0, 12, 12, 12, 0],
    }


@pytest.mark.parametrize("row", [0, 2])
def test_a_change_before_the_birth_holds_from_it_and_one_after_the_end_is_nothing(row):
    script = Script()
    script.alloc(1, at=1)
    script.free(script.alloc(64, at=2), at=3)
    script.alloc(1, at=4)
    early = recategorised(script.trace(), (1, 0, Category.BUFFER))
    late = recategorised(script.trace(), (1, 3, Category.BUFFER))
    assert layers(early)["buffer"] == [0, 0, 64, 0, 0]
    assert layers(late) == {"other": [0, 1, 65, 1, 2]}


def test_what_waits_for_another_stream_is_no_longer_allocated():
    script = Script()
    block = script.alloc(512, at=1, requested=500, category=Category.INPUT)
    script.blocks[block]["sizes"] = (0, 512)
    script.free(block, at=2, kind=Kind.FREE_PENDING)
    script.blocks[block]["sizes"] = (500, 0)
    script.free(block, at=3)
    assert layers(script.trace()) == {"input": [0, 500, 0], "rounding": [0, 12, 0]}


def test_devices_do_not_mix():
    script = Script(GPU, Device(1, "second"))
    script.alloc(1, at=1, category=Category.BUFFER)
    script.alloc(10, at=2, device=1, category=Category.INPUT)
    assert layers(script.trace()) == {"buffer": [0, 1]}
    assert layers(script.trace(), 1) == {"input": [0, 10]}


def test_it_can_be_told_whether_anything_is_known():
    script = Script(GPU, HOST)
    script.alloc(1, at=1)
    script.alloc(1, at=1, device=-1, category=Category.INPUT)
    trace = script.trace()
    assert not has_categories(trace, 0)
    assert has_categories(trace, -1)
    assert has_categories(recategorised(trace, (0, 0, Category.BUFFER)), 0)
    assert not has_categories(Script().trace(), 0)


def test_an_empty_trace_has_no_layers():
    found = areas(Script().trace(), 0)
    assert (found.layers, found.edges(), found.total_bytes.tolist()) == ({}, {}, [0])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    script = Script(GPU, Device(1, "second"))
    alive: list[int] = []
    for step in range(draw(st.integers(0, 60))):
        size = draw(st.integers(1, 5000))
        known = {"requested": draw(st.integers(0, size)), "device": draw(st.sampled_from([0, 0, 1]))}
        what = draw(st.sampled_from(["alloc", "alloc", "free", "adopt"]))
        if what == "free" and alive:
            script.free(alive.pop(draw(st.integers(0, len(alive) - 1))))
        elif what == "adopt" and step < 10:
            alive.append(script.adopt(size, **known))
        else:
            alive.append(script.alloc(size, **known, category=draw(st.sampled_from(Category))))
    trace = script.trace()
    count, rows = len(trace.blocks), len(trace.events)
    change = st.tuples(st.integers(0, max(count - 1, 0)), st.integers(0, rows), st.sampled_from(Category))
    return recategorised(trace, *(draw(st.lists(change, max_size=12)) if count else []))


@settings(deadline=None)
@given(trace=traces(), device=st.sampled_from([0, 1]))
def test_the_layers_are_the_allocated_curve_at_every_step_and_what_the_breakdown_says_at_the_peak(trace, device):
    line = timeline(trace, device)
    found = areas(trace, device)
    assert (found.total_bytes == line.bytes).all()
    assert all((level >= 0).all() and level.any() for level in found.layers.values())
    at = int(line.bytes.argmax())
    assert {name: int(level[at]) for name, level in found.layers.items() if level[at]} == dict(breakdown(trace, device))


@settings(deadline=None)
@given(trace=traces(), data=st.data())
def test_some_moments_are_those_of_all(trace, data):
    line, every = timeline(trace, 0), areas(trace, 0)
    some = np.sort(data.draw(st.lists(st.integers(0, len(line.bytes) - 1), max_size=9))).astype(int)
    found = areas(trace, 0, Timeline(line.time_ns[some], line.bytes[some], line.row[some], line.end_ns))
    same = every.at(some)
    assert {name: level.tolist() for name, level in found.layers.items()} == {
        name: level.tolist() for name, level in same.layers.items() if level.any()
    }
    edges = list(found.edges().values())
    assert not edges or edges[-1].tolist() == line.bytes[some].tolist()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_events_that_are_read_in_several_pieces_give_the_same(rows, monkeypatch):
    script, random = Script(), np.random.default_rng(0)
    script.adopt(100)
    for _ in range(30):
        script.free(script.alloc(int(random.integers(1, 99)), requested=1, category=int(random.integers(8))))
    trace = recategorised(script.trace(), (3, 5, Category.INPUT), (4, 8, Category.INPUT))
    whole = layers(trace)
    monkeypatch.setattr("memlab.analysis.areas._ROWS_AT_ONCE", rows)
    assert layers(trace) == whole
