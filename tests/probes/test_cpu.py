"""The CPU probe of a run: what fails at its ends loses neither the run nor the user's memory, and resized storages."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import memlab
from memlab.analysis.curves import curves
from memlab.analysis.leak import leaks
from memlab.analysis.peak import peak
from memlab.probes import storage_tracker, tensor_labels
from memlab.probes.cpu import CpuProbe
from memlab.probes.host import HostMemory
from memlab.probes.line_marks import Lines
from memlab.probes.marks import marker
from memlab.probes.measurement import Measurement, Target
from memlab.probes.sampler import Reading
from memlab.torch_internals import dispatch
from memlab.trace import CPU


def out_of_memory():
    raise MemoryError


def test_a_heap_walk_that_fails_at_the_end_is_a_gap_and_leaves_no_mode(monkeypatch):
    with memlab.track(show=False, device="cpu") as run:
        kept = torch.ones(1000)
        monkeypatch.setattr(tensor_labels, "live_tensors", out_of_memory)
    assert run.peak_allocated_bytes >= kept.nbytes
    assert any("MemoryError" in gap.text for gap in run.gaps), run.gaps
    assert (dispatch.mode_count(), marker.users, tensor_labels.tensor_labels.users) == (0, 0, 0)


def test_a_trace_that_fails_leaves_no_mode(monkeypatch):
    probe = CpuProbe()
    probe.start()
    monkeypatch.setattr(probe, "build_trace", out_of_memory)
    monkeypatch.setattr(tensor_labels.tensor_labels, "label_at_end", out_of_memory)
    with pytest.raises(MemoryError):
        probe.stop()
    assert (dispatch.mode_count(), marker.users, marker.clocks) == (0, 0, ())


def test_the_capacity_is_what_the_machine_may_use():
    assert Measurement(Target.parse("cpu")).capacity_bytes == HostMemory().read().total_bytes > 1 << 28


def test_the_peak_so_far_is_exact():
    measurement = Measurement(Target.parse("cpu"))
    measurement.start()
    start_bytes, _ = measurement.peak_so_far(Reading(CPU))
    torch.ones(1000)  # gone at once
    found = measurement.peak_so_far(Reading(CPU))
    trace = measurement.stop()
    assert found == (start_bytes + 4000, True)
    assert peak(trace, CPU).high_bytes == found[0]


def test_lines_that_cannot_be_made_out_leave_the_run(monkeypatch):
    monkeypatch.setattr(Lines, "into", lambda *_: 1 / 0)
    with memlab.track(show=False, device="cpu", lines=True) as run:
        torch.ones(1000)
    assert run.peak_bytes >= 4000
    assert [gap.text for gap in run.gaps if gap.name == "lines"] == [
        "lines or shapes could not be made out (ZeroDivisionError('division by zero'))"
    ]


def test_the_error_of_a_failed_start_keeps_no_tensor_alive(monkeypatch):
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    monkeypatch.setattr(storage_tracker.StorageTracker, "add_preexisting", lambda *_: out_of_memory())
    measurement = Measurement(Target.parse("cpu"))
    with pytest.raises(MemoryError) as caught:
        measurement.start()
    del tensor
    gc.collect()
    assert caught.value.__traceback__ is not None and alive() is None
    assert (dispatch.mode_count(), marker.users, marker.clocks) == (0, 0, ())


def test_a_storage_resized_by_no_operator_is_followed():
    """As FSDP gathers parameters: the memory is there from one resize to the other."""
    before = vars(torch.UntypedStorage).get("resize_")
    old = torch.ones(4_000_000).untyped_storage()
    with memlab.track(show=False, device="cpu") as run:
        with memlab.track(show=False, device="cpu") as inner:
            gathered = torch.empty(2_000_000)
            gathered.untyped_storage().resize_(0)
            old.resize_(0)
            gathered.untyped_storage().resize_(8_000_000)
            view = gathered + 1
            gathered.untyped_storage().resize_(12_000_000)
            del view
        gathered.untyped_storage().resize_(0)
    assert vars(torch.UntypedStorage).get("resize_") is before and not storage_tracker.resizes.trackers
    for one in (run, inner):
        base = one.devices[0].levels[0].start_bytes
        assert one.peak_allocated_bytes == base - 16_000_000 + 8_000_000 + 8_000_000 + 12_000_000
        assert one.devices[0].levels[0].peak.is_exact
        assert not {gap.name for gap in one.trace.made_by.gaps} & {"resized unseen", "seen late"}
    ends = [one.devices[0].levels[0].end_bytes - one.devices[0].levels[0].start_bytes for one in (inner, run)]
    assert ends == [12_000_000 - 16_000_000, -16_000_000]


def test_a_storage_that_another_thread_resized_leaves_the_rows_of_the_run_whole():
    kept = []
    with memlab.track(show=False, device="cpu") as run:
        resized = torch.ones(1000)
        thread = threading.Thread(target=resized.untyped_storage().resize_, args=(8000,))
        thread.start()
        thread.join()
        for _ in range(8):
            weight = torch.ones(50_000, requires_grad=True)
            kept.append((weight * 2).sum())
            kept.append(weight)
            kept[-2].backward()
    trace = run.trace
    peak = run.devices[0].levels[0].peak
    assert not peak.is_exact and peak.high_bytes > peak.low_bytes >= 8 * 200_000
    assert [leak.kind for leak in leaks(trace, CPU)] == ["kept"]
    assert curves(trace, trace.made_by.devices[0]).lost == ()
