from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from analysis.random_traces import random_trace, recategorised
from scripted_traces import GPU, HOST, Script

from memlab.analysis.breakdown import breakdown
from memlab.analysis.curves import LAYERS, areas, has_categories
from memlab.analysis.timeline import Timeline, timeline
from memlab.trace import Category, Device, Kind, Trace


def layers(trace: Trace, device: int = 0) -> dict[str, list[int]]:
    return {name: level.tolist() for name, level in areas(trace, device).layers.items()}


def test_the_layers_by_hand():
    script = Script()
    script.preexisting(1024, requested=1000)
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


def test_a_block_that_nobody_saw_coming_is_taken_away_at_its_end():
    script = Script()
    script.free(script.alloc(512, at=1, requested=500, category=Category.INPUT), at=2)
    script.alloc(64, at=3)
    trace = script.trace()
    end_alone = dataclasses.replace(trace, events=trace.events.rows(slice(1, None)))
    assert layers(end_alone) == {"input": [0, -500, -500], "other": [0, 0, 64], "rounding": [0, -12, -12]}


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


@pytest.mark.parametrize("device", [0, 1])
def test_the_layers_are_the_allocated_curve_at_every_step_and_what_the_breakdown_says_at_the_peak(device):
    for seed in range(60):
        trace = random_trace(seed)
        line, found = timeline(trace, device), areas(trace, device)
        assert (found.total_bytes == line.bytes).all()
        assert all((level >= 0).all() and level.any() for level in found.layers.values())
        at = int(line.bytes.argmax())
        held = {name: int(level[at]) for name, level in found.layers.items() if level[at]}
        assert held == dict(breakdown(trace, device))


def test_some_moments_are_those_of_all():
    for seed in range(60):
        random = np.random.default_rng(seed)
        trace = random_trace(seed)
        line, every = timeline(trace, 0), areas(trace, 0)
        some = np.sort(random.integers(0, len(line.bytes), random.integers(9)))
        found = areas(trace, 0, Timeline(line.time_ns[some], line.bytes[some], line.row[some], line.end_ns))
        expected = {name: level.tolist() for name, level in every.at(some).layers.items() if level.any()}
        assert {name: level.tolist() for name, level in found.layers.items()} == expected
        edges = list(found.edges().values())
        assert not edges or edges[-1].tolist() == line.bytes[some].tolist()
