"""Snapshots read into traces: undone to their start and followed again, they give the levels that were."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from snapshot_samples import levels, simulated

from memlab.analysis.summary import summary
from memlab.errors import TraceError
from memlab.probes.snapshot import trace_of
from memlab.trace import Category, Kind
from memlab.trace.snapshot_read import parse
from memlab.trace.snapshot_write import snapshot

CONFS = ("", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4")


def foreign(conf: str, seed: int = 0, skip: int = 0) -> dict:
    """A snapshot as PyTorch would have written it, whose first entries fell out of the ring."""
    shot = copy.deepcopy(snapshot(simulated(conf, seed)))
    del shot["memlab"]
    settings = shot["allocator_settings"]
    if "max_split" in conf:
        settings["max_split_size"] = 24 << 20
    if "roundup" in conf:
        settings["roundup_power2_divisions"] = dict.fromkeys(settings["roundup_power2_divisions"], 4)
    for entry in shot["device_traces"][0]:
        for key in ("allocated_size", "category", "categories", "name", "module", "op", "dtype", "shape", "phase"):
            entry.pop(key, None)
    del shot["device_traces"][0][:skip]
    return shot


def read(shot: dict):
    return trace_of(parse(pickle.dumps(shot, protocol=4)), "a.pickle")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("conf", CONFS)
def test_the_levels_are_those_that_were(conf, seed):
    trace = simulated(conf, seed)
    again = read(foreign(conf, seed))
    for was, now in zip(levels(trace), levels(again), strict=True):
        assert np.array_equal(was, now[-len(was) :])
    assert [gap.name for gap in again.gaps] == ["snapshot"]


@pytest.mark.parametrize("skip", range(0, 900, 41))
@pytest.mark.parametrize("conf", CONFS)
def test_the_levels_after_any_beginning(conf, skip):
    """A ring that is full has lost the first entries: the state where it begins follows from the end."""
    whole = levels(simulated(conf))
    cut = levels(read(foreign(conf, skip=skip)))
    for was, now in zip(whole, cut, strict=True):
        shared = min(len(was), len(now)) - 1  # a free may be cut in two: then its first half was before the first row
        assert np.array_equal(was[-shared:], now[-shared:])


def test_the_figures_are_those_of_the_counters():
    trace = simulated()
    (was,), (now,) = (summary(each, "x").devices for each in (trace, read(foreign(""))))
    assert now.level("reserved").peak.high_bytes == max(levels(trace)[1])
    assert now.device.end_allocated_bytes == was.device.end_allocated_bytes
    assert now.device.name == "cuda:0 of a.pickle"


def test_categories_of_the_profiler_are_taken():
    shot = foreign("")
    shot["device_traces"][0][-1:] = []
    names = ("parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "autograd_detail", "<b>")
    allocs = [entry for entry in shot["device_traces"][0] if entry["action"] == "alloc"]
    for name, entry in zip(names, allocs, strict=False):
        entry["category"] = name
    again = read(shot)
    found = again.blocks.category[again.events.block[again.events.kind == Kind.ALLOC]][: len(names)].tolist()
    expected = ("PARAMETER", "OPTIMIZER", "INPUT", "TEMPORARY", "ACTIVATION", "GRADIENT", "OTHER", "OTHER")
    assert found == [Category[name] for name in expected]


def test_the_users_own_line_is_found():
    shot = foreign("")
    frames = [
        {"filename": "/x/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
        {"filename": "/home/me/train.py", "line": 7, "name": "step"},
    ]
    entry = next(entry for entry in shot["device_traces"][0] if entry["action"] == "alloc")
    entry["frames"] = frames
    again = read(shot)
    block = int(again.events.block[again.events.kind == Kind.ALLOC][0])
    assert again.text("line", int(again.blocks.line[block])) == "/home/me/train.py:7"
    assert again.text("stack", int(again.blocks.stack[block])).endswith("/home/me/train.py:7 step")


def test_entries_without_times_stacks_and_actions_that_mean_nothing_are_read():
    shot = foreign("")
    for entry in shot["device_traces"][0]:
        del entry["time_us"], entry["frames"], entry["pool_id"]
    shot["device_traces"][0].insert(3, {"action": "snapshot", "size": 0, "stream": 0})
    again = read(shot)
    assert np.array_equal(levels(simulated())[0], levels(again)[0][-len(levels(simulated())[0]) :])


def test_entries_that_do_not_add_up_are_named():
    shot = foreign("")
    entries = shot["device_traces"][0]
    at = next(i for i, entry in enumerate(entries) if entry["action"] == "alloc")
    entries[at] = {**entries[at], "addr": entries[at]["addr"] + 13 * (1 << 40)}
    assert "rules" in [gap.name for gap in read(shot).gaps]


def test_a_snapshot_without_history_is_its_state():
    shot = foreign("")
    shot["device_traces"] = [[]]
    again = read(shot)
    assert len(again.events) == again.first_row > 0
    assert levels(again)[0][-1] == levels(simulated())[0][-1]


def test_nothing_at_all_is_an_empty_trace():
    again = read({"segments": [], "device_traces": []})
    assert len(again.events) == 0
    assert again.made_by.devices == ()


def test_devices_without_anything_are_left_out():
    shot = foreign("")
    shot["device_traces"] = [[], *shot["device_traces"]]
    for segment in shot["segments"]:
        segment["device"] = 1
    assert read(shot).device_indices == (1,)


def made_up(seed: int) -> dict:
    """Entries and segments that nobody's allocator wrote."""
    random = np.random.default_rng(seed)
    actions = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
               "segment_unmap", "oom", "snapshot", "free")  # fmt: skip

    def size() -> int:
        return int(random.choice([0, 1, 511, 512, 4096, 1 << 20, 20 << 20]))

    def address() -> int:
        return int(random.choice([0, 512, 1024, 4096, 1 << 30, (1 << 62) - 1]))

    def one_entry() -> dict:
        facts = {"action": str(random.choice(actions)), "addr": address(), "size": size(), "stream": 0, "time_us": 5}
        own = {"allocated_size": size(), "categories": [[int(random.integers(40)), "gradient"]]}
        return facts | (own if facts["action"] == "alloc" and seed % 2 else {})

    def one_segment() -> dict:
        blocks = [
            {"size": size(), "state": str(random.choice(["inactive", "?", "active_allocated"]))} for _ in range(3)
        ]
        flags = {"is_expandable": bool(random.integers(2)), "stream": 0, "blocks": blocks}
        return {"device": int(random.integers(2)), "address": address(), "total_size": size(), **flags}

    extra = {"version": 1, "devices": [{"index": 0, "opening_rows": int(random.integers(30)), "capacity_bytes": -7}]}
    return {
        "segments": [one_segment() for _ in range(int(random.integers(4)))],
        "device_traces": [[one_entry() for _ in range(int(random.integers(25)))]],
        "memlab": {**extra, "gaps": 3, "bounded": [{"device": "x"}], "duration_ns": 1 << 70} if seed % 2 else {},
    }


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_what_somebody_made_up_is_read_or_refused(seed):
    for each in range(seed, seed + 100):
        try:
            trace = read(made_up(each))
        except TraceError as error:
            assert "\n" not in str(error)
        else:
            summary(trace, "x")
            if trace.device_indices:
                snapshot(trace)
