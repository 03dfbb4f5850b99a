from __future__ import annotations

import dataclasses

import pytest
from scripted_traces import GPU, HOST, Script

from memlab.analysis.summary import has_raised, summary
from memlab.trace import Bounded, Category, Device, Phase


def step() -> Script:
    script = Script()
    script.preexisting(100)
    script.segment(4096, at=1)
    a = script.alloc(300, at=2, phase=Phase.FORWARD, module="net", line="t.py:7")
    script.alloc(50, at=3, phase=Phase.BACKWARD, module="net.last", line="t.py:9")
    script.free(a, at=4)
    return script


def test_the_levels_of_an_accelerator_by_hand():
    script = step()
    script.sample(0, 0, 0, 9000, -1, -1)
    script.sample(9, 0, 4096, 13000)
    script.sample(0, -1, -1, -1, 7000, 10, device=-1)
    script.sample(9, -1, -1, -1, 6500, 10, device=-1)
    (device,) = summary(script.trace(duration=2_000_000_000), "first").devices
    levels = {level.of: (level.start_bytes, level.peak.low_bytes, level.end_bytes) for level in device.levels}
    assert levels == {
        "allocated": (100, 450, 150),
        "reserved": (0, 4096, 4096),
        "device used": (9000, 13000, 13000),
        "host RSS": (7000, 7000, 6500),
    }
    assert device.level("allocated").left_bytes == 50
    assert device.level("host RSS").left_bytes == -500
    assert not device.level("host RSS").peak.is_exact
    assert device.level("nonsense") is None


def test_the_operation_that_made_the_peak_is_named():
    (device,) = summary(step().trace()).devices
    assert device.at == {"phase": "backward", "module": "net.last", "line": "t.py:9"}


def test_shares_are_by_category_only_where_somebody_knows_one():
    script = step()
    assert [share.by for share in summary(script.trace()).devices[0].shares] == ["phase", "module", "line"]
    script.blocks[0]["category"] = Category.PARAMETER
    assert [share.by for share in summary(script.trace()).devices[0].shares] == ["category", "phase", "module", "line"]


def test_the_device_with_the_largest_peak_comes_first():
    script = Script(GPU, Device(1, "second"))
    script.alloc(5, at=1)
    script.alloc(50, at=2, device=1)
    assert [device.device.index for device in summary(script.trace()).devices] == [1, 0]


def test_an_empty_trace_the_host_which_has_no_reserved_and_a_trace_without_devices():
    assert [level.of for level in summary(Script(HOST).trace()).devices[0].levels] == ["allocated"]
    (device,) = summary(Script().trace()).devices
    assert [(level.of, level.peak.low_bytes) for level in device.levels] == [("allocated", 0), ("reserved", 0)]
    assert device.at == {}
    script = Script()
    script.devices = ()
    nobody = summary(script.trace(), "none")
    assert (nobody.devices, nobody.name) == ((), "none")
    assert len(nobody.to_pandas()) == 0


def test_where_events_were_lost_nobody_says_who_held_the_peak():
    script = step()
    script.sample(3, 1 << 20)
    (device,) = summary(script.trace(bounded=(Bounded(0, 1, 4, 5),))).devices
    assert (device.shares, device.at) == ((), {})
    assert (device.levels[0].peak.low_bytes, device.levels[0].peak.high_bytes) == (1 << 20, GPU.capacity_bytes)


def test_where_early_rows_were_dropped_the_start_is_the_counters():
    # The rows that are left begin at 100 allocated; the run began at 40.
    facts = dataclasses.replace(GPU, start_allocated_bytes=40, start_reserved_bytes=4096)
    script = step()
    script.devices = (facts,)
    stretch = Bounded(0, 0, 1, 9, peak_allocated_bytes=120, peak_reserved_bytes=4096)
    (device,) = summary(script.trace(bounded=(stretch,))).devices
    assert [level.start_bytes for level in device.levels] == [40, 4096]
    assert device.level("allocated").left_bytes == 110


def test_notes_and_gaps_come_along_and_the_table_exports():
    found = summary(step().trace(duration=1, notes={"notes": ["careful", 3]}), "x")
    assert found.notes == ("careful", "3")
    assert found.gaps[0].name == "hand"
    frame = found.to_pandas().set_index("of")
    assert frame.loc["allocated", "peak_low_bytes"] == 450
    assert frame.loc["allocated", "peak_time_s"] == pytest.approx(3e-9)
    assert frame.loc["allocated", "left_bytes"] == 50


@pytest.mark.parametrize(
    ("engine", "provenance"),
    [
        ("fake CUDA", "predicted"),
        ("pretend CUDA", "predicted"),
        ("fake CUDA, from a snapshot", "predicted"),
        ("pretend CUDA, from a snapshot", "predicted"),
        ("CUDA allocator history", "measured"),
    ],
)
def test_what_fake_cuda_made_is_predicted_also_without_its_notes(engine, provenance):
    trace = step().trace()
    made_by = dataclasses.replace(trace.made_by, engine=engine)
    assert summary(dataclasses.replace(trace, made_by=made_by)).provenance == provenance


@pytest.mark.parametrize(
    ("notes", "raised"),
    [
        ({"raised": True}, True),
        ({"raised": False, "notes": ["The cell raised its hand."]}, False),
        ({"notes": ["careful", "The cell raised ValueError: mine."]}, True),  # saved before there was a key
        ({"notes": ["careful"]}, False),
        ({}, False),
    ],
)
def test_a_run_that_raised_is_known_by_a_key_and_in_older_files_by_its_sentence(notes, raised):
    assert has_raised(step().trace(notes=notes)) is raised
