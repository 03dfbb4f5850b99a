"""Traces written as PyTorch snapshots: what the viewer and torch's own tools need, and nothing lost on the way back."""

from __future__ import annotations

import pickle
import pickletools

import numpy as np
import pytest
from scripted_traces import Script
from snapshot_samples import levels, simulated, small
from torch.cuda import _memory_viz

from memlab.errors import TraceError
from memlab.probes.snapshot import load, trace_of
from memlab.trace import CPU, Category, Device, Kind, Phase, Recategorised
from memlab.trace.snapshot_read import parse
from memlab.trace.snapshot_write import save, snapshot

# What the unpickler of torch/utils/viz/MemoryViz.js knows; anything else stops the viewer.
VIEWER = {
    "PROTO", "FRAME", "MEMOIZE", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS",
    "SETITEM", "SETITEMS", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT",
}  # fmt: skip
CONFS = ("", "expandable_segments:True", "max_split_size_mb:24,roundup_power2_divisions:4")


@pytest.mark.parametrize("conf", CONFS)
def test_the_viewer_can_read_every_opcode(tmp_path, conf):
    data = save(simulated(conf), tmp_path / "a.pickle").read_bytes()
    used = {op.name: argument for op, argument, _ in pickletools.genops(data)}
    assert used.keys() <= VIEWER
    assert used["PROTO"] == 4
    numbers = [argument for op, argument, _ in pickletools.genops(data) if op.name == "LONG1"]
    assert numbers
    assert max(numbers) < 1 << 53, "JavaScript's numbers"


@pytest.mark.parametrize("conf", CONFS)
def test_torchs_own_tools_accept_it(conf):
    shot = snapshot(simulated(conf))
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz.js" in plot(shot)
    assert "TOTAL MEM" in _memory_viz.trace(shot)
    assert f"segments: {len(shot['segments'])}" in _memory_viz.segsum(shot)


def test_a_category_is_unknown_somewhere():
    """The viewer fails on categories of which none is "unknown" (`snapshot.categores.push` in annotate_snapshot)."""
    found = {entry["category"] for entry in snapshot(small())["device_traces"][0]}
    assert "unknown" in found
    assert {"parameter", "gradient", "optimizer_state"} <= found


@pytest.mark.parametrize("conf", CONFS)
def test_the_state_at_the_end_is_that_of_the_trace(conf):
    trace = simulated(conf)
    shot = snapshot(trace)
    allocated, reserved = levels(trace)
    assert sum(segment["total_size"] for segment in shot["segments"]) == reserved[-1]
    assert sum(segment["allocated_size"] for segment in shot["segments"]) == allocated[-1]
    for segment in shot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


@pytest.mark.parametrize("conf", CONFS)
def test_entries_undo_in_the_viewer(conf):
    """The viewer undoes the entries from the end: every one must find what it undoes, and nothing may be left."""
    shot = snapshot(simulated(conf))
    live = {b["address"] for s in shot["segments"] for b in s["blocks"] if b["state"] != "inactive"}
    ranges = {(s["address"], s["address"] + s["total_size"]) for s in shot["segments"]}
    for entry in reversed(shot["device_traces"][0]):
        span = (entry.get("addr", 0), entry.get("addr", 0) + entry["size"])
        if entry["action"] == "alloc":
            live.remove(entry["addr"])
        elif entry["action"] == "free_completed":
            assert entry["addr"] not in live
            live.add(entry["addr"])
        elif entry["action"] == "free_requested":
            assert entry["addr"] in live
        elif entry["action"] == "segment_alloc":
            ranges.remove(span)
        elif entry["action"] == "segment_free":
            ranges.add(span)
    assert not live
    assert "expandable" in conf or not ranges


@pytest.mark.parametrize("conf", CONFS)
def test_everything_comes_back(tmp_path, conf):
    trace = simulated(conf)
    again = load(save(trace, tmp_path / "a.pickle"))
    for was, now in zip(levels(trace), levels(again), strict=True):
        assert np.array_equal(was, now)
    run, run_again = trace.events.rows(slice(trace.first_row, None)), again.events.rows(slice(again.first_row, None))
    for column in ("kind", "requested_bytes", "allocated_bytes", "stream"):
        assert np.array_equal(getattr(run, column), getattr(run_again, column)), column
    assert again.made_by.devices == trace.made_by.devices
    assert again.made_by.duration_ns == trace.made_by.duration_ns
    assert set(trace.gaps) <= set(again.gaps)


def test_what_is_known_of_blocks_comes_back(tmp_path):
    trace = small()
    again = load(save(trace, tmp_path / "a.pickle"))
    for column in ("category", "phase"):
        assert getattr(again.blocks, column).tolist() == getattr(trace.blocks, column).tolist()
    for column in ("module", "line"):
        was = [trace.text(column, index) for index in getattr(trace.blocks, column).tolist()]
        assert [again.text(column, index) for index in getattr(again.blocks, column).tolist()] == was
    assert again.blocks.phase[1] == Phase.BACKWARD


def test_a_category_that_changes_comes_back(tmp_path):
    trace = small()
    changes = Recategorised([1], [4], [Category.GRADIENT])
    trace = trace.with_blocks(trace.blocks, changes=changes)
    shot = snapshot(trace)
    entry = next(e for e in shot["device_traces"][0] if "categories" in e)
    assert entry["category"] == "gradient", "the viewer shows one colour: the last"
    again = load(save(trace, tmp_path / "a.pickle"))
    shift = again.first_row - trace.first_row
    columns = (again.recategorised.block, again.recategorised.row - shift, again.recategorised.category)
    assert [column.tolist() for column in columns] == [[1], [4], [Category.GRADIENT]]


def test_two_devices_are_two_traces(tmp_path):
    script = Script(Device(0, "a"), Device(1, "b"))
    one, other = script.alloc(512, at=1000), script.alloc(1024, at=2000, device=1)
    script.free(one, at=3000)
    script.free(other, at=4000)
    trace = script.trace()
    shot = snapshot(trace)
    assert [len(entries) for entries in shot["device_traces"]] == [4, 4]
    again = trace_of(parse(pickle.dumps(shot, protocol=4)))
    kinds = [
        (int(kind), int(device))
        for kind, device in zip(again.events.kind, again.events.device, strict=True)
        if kind < 4
    ]
    assert kinds == [(Kind.ALLOC, 0), (Kind.ALLOC, 1), (Kind.FREE, 0), (Kind.FREE, 1)]


def test_a_pending_block_and_an_oom_keep_their_shape(tmp_path):
    script = Script()
    block = script.alloc(1 << 20, at=0)
    script.free(block, kind=Kind.FREE_PENDING)
    script.rows.append((40, Kind.OOM, -1, 1 << 40, 777, 0, 0, 0))
    script.now = 40
    trace = script.trace()
    actions = [entry["action"] for entry in snapshot(trace)["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "oom"]
    assert snapshot(trace)["segments"][0]["blocks"][0]["state"] == "active_pending_free"
    assert snapshot(trace)["device_traces"][0][-1]["device_free"] == 777
    again = load(save(trace, tmp_path / "a.pickle"))
    assert again.events.kind.tolist()[1:] == [Kind.ALLOC, Kind.FREE_PENDING, Kind.OOM]
    assert again.made_by.devices[0].num_ooms == trace.made_by.devices[0].num_ooms


def test_a_trace_of_the_cpu_is_refused():
    script = Script(Device(CPU, "cpu"))
    script.alloc(512)
    with pytest.raises(TraceError, match="CUDA devices"):
        snapshot(script.trace())


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = save(small(), tmp_path / "a.pickle")
    before = path.read_bytes()
    monkeypatch.setattr("os.umask", lambda mask: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(TraceError, match="No space left"):
        save(small(), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.pickle"]


@pytest.mark.parametrize("where", ["missing/a.pickle", ""])
def test_where_it_cannot_be_saved_is_said(tmp_path, where):
    with pytest.raises(TraceError, match="cannot save"):
        save(small(), tmp_path / where)
