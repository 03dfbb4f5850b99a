from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

import memlab
from memlab.api import doctor as module
from memlab.api.doctor import Diagnosis, Finding


def by_name(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.what: finding for finding in reversed(diagnosis.findings)}


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return memlab.doctor()


def test_this_machine_is_well(diagnosis):
    assert diagnosis.is_well, str(diagnosis)
    found = by_name(diagnosis)
    assert (found["CPU tensor tracker"].state, found["CPU tensor tracker"].text) == (
        "ok",
        "exact: a tensor of known size was measured to the byte",
    )
    assert torch.__version__ in found["versions"].text
    assert memlab.__version__ in found["versions"].text
    assert found["host memory"].state == "ok"
    assert found["notebook"].state == "absent"


def test_what_cannot_be_seen_is_said(diagnosis):
    assert any(finding.state == "absent" and "scratch" in finding.text for finding in diagnosis.findings)
    if not torch.backends.cuda.is_built():
        assert "built without CUDA" in by_name(diagnosis)["CUDA history"].text


def test_it_prints_shows_itself_and_exports(diagnosis):
    rows = len(diagnosis.findings)
    assert (
        len(str(diagnosis).splitlines()) - 3 == rows == diagnosis.html.count("<tr>") - 1 == len(diagnosis.to_pandas())
    )
    assert repr(diagnosis) == str(diagnosis)
    assert "<script>" not in Diagnosis((Finding("<script>", "ok", "<script>"),)).html


def test_it_does_not_bring_up_cuda_and_keeps_no_run():
    up, before = torch.cuda.is_initialized(), list(memlab.runs)
    memlab.doctor()
    assert torch.cuda.is_initialized() == up
    assert list(memlab.runs) == before


def test_it_can_be_asked_inside_a_track():
    gc.collect()  # what earlier tests left would be freed in between, and the peak would be the start
    with memlab.track("around", show=False) as run:
        kept = torch.ones(1000)
        assert memlab.doctor().is_well
        del kept
    start = run.devices[0].levels[0].start_bytes
    assert run.peak_bytes - start >= 3 << 20  # what it allocates to look at is in the open run like anything else


def test_an_engine_that_measures_wrongly_is_found(monkeypatch):
    real = module.timeline
    monkeypatch.setattr(
        module, "timeline", lambda *args: dataclasses.replace(line := real(*args), bytes=line.bytes[:1])
    )
    found = by_name(Diagnosis(tuple(module.cpu_tracker())))["CPU tensor tracker"]
    assert (found.state, found.text) == ("wrong", "a tensor of 3145728 bytes was measured as 0")


def test_a_self_test_that_raises_is_a_finding_and_the_others_go_on(monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(module, "HostMemory", broken)
    diagnosis = memlab.doctor()
    assert not diagnosis.is_well
    assert "raised OSError: no" in by_name(diagnosis)["host"].text
    assert "notebook" in by_name(diagnosis)


def test_an_untested_torch_is_named(monkeypatch):
    monkeypatch.setattr(module.torch, "__version__", "2.99.0")
    assert by_name(Diagnosis(tuple(module.versions())))["torch"].state == "wrong"


@pytest.mark.simulated
def test_with_cuda_up_its_history_is_tried():
    absent = by_name(memlab.doctor())["CUDA history"] if not torch.cuda.is_initialized() else None
    assert absent is None or "not up yet" in absent.text
    torch.empty(1, device="cuda")
    gc.collect()  # else the doctor may find what earlier tests left to the collector
    allocated = torch.cuda.memory_allocated()
    diagnosis = memlab.doctor()
    assert diagnosis.is_well, str(diagnosis)
    found = by_name(diagnosis)
    assert (found["CUDA history"].state, found["cuda:0"].state) == ("ok", "ok")
    assert torch.cuda.memory_allocated() == allocated
