"""Results and comparisons where the CUDA build runs; on the pretend device no value is ever passed."""

from __future__ import annotations

import gc

import pytest
import torch

import memlab
from memlab.analysis.comparison import Difference
from memlab.analysis.noted import devices_of, value_of
from memlab.session.compare import compare
from memlab.session.results import noted
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.units import MiB

pytestmark = pytest.mark.fakegpu


@pytest.fixture(autouse=True)
def clean():
    gc.collect()
    yield
    for name in [*runs]:
        runs.discard(runs[name])


def tracked(name: str, size: int, note: bool = True, **options) -> Run:
    with memlab.track(name, show=False, **options) as run:
        kept = torch.empty(size, dtype=torch.uint8, device="cuda")
        if note:
            run.result([kept[:10], kept[::1000]])
        del kept
    return run


def test_values_of_the_pretend_device_are_never_passed():
    a, b = tracked("a", 8 * MiB), tracked("b", 4 * MiB)
    found = compare(a, b)
    assert found.saved_bytes == 4 * MiB
    assert found.results.verdict == "not checked"
    assert found.results.short == "not checked (pretend device)"
    assert found.seconds is None
    assert "ran on a pretend device" in found.text
    assert found.by("category").total == Difference(a.peak_bytes, b.peak_bytes)


def test_a_value_that_comes_from_the_pretend_device_is_known_by_its_name_in_runs_of_the_cpu_too():
    with memlab.track("cpu", device="cpu", show=False) as run:
        torch.ones(5)
        run.result({"x": [torch.ones(3, device="cuda")]})
    assert devices_of(run.trace.notes["result"])[0].startswith("FakeGPU")
    with memlab.track("other", device="cpu", show=False) as other:
        torch.ones(5)
        other.result({"x": [torch.ones(3)]})
    assert compare(run, other).results.short == "not checked (pretend device)"
    assert compare(other, other).results.verdict == "equal"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x, lambda x: x.t(), lambda x: x[::3], lambda x: x[:, ::2], lambda x: x.bfloat16().t(),
        lambda x: x.expand(2, *x.shape), lambda x: torch.complex(x, x).conj(), lambda x: x[:0],
        lambda x: x.permute(1, 0)[5:, 7:], lambda x: torch.complex(x, x).conj().imag, torch._neg_view,
        lambda x: torch.complex(x, x).conj()[::2].t(),
    ],
)  # fmt: skip
def test_noting_takes_no_memory_of_the_device(make):
    value = make(torch.empty(300, 700, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    note = noted(value)
    after = torch.cuda.memory_stats()
    for figure in ("allocation.all.allocated", "allocated_bytes.all.peak", "reserved_bytes.all.peak"):
        assert after[figure] == before[figure], figure
    assert value_of(note).shape == tuple(value.shape)


def test_noting_a_tensor_too_large_to_be_read_takes_none_either(monkeypatch):
    from memlab.session import results

    monkeypatch.setattr(results, "READ_BYTES", MiB)
    value = torch.empty(3000, 700, device="cuda").t()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert value_of(noted(value)).sha256 == ""
    assert value_of(noted(value[::2, ::2])).sha256 == ""
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_result_inside_of_a_run_does_not_change_its_figures():
    runs_ = [tracked("plain", 8 * MiB, note=False), tracked("noted", 8 * MiB)]
    assert runs_[0].peak_bytes == runs_[1].peak_bytes
    assert len({run.peak_reserved_bytes for run in runs_}) == 1


def test_a_run_of_the_cpu_against_one_of_cuda_and_against_a_prediction():
    with memlab.track("cpu", device="cpu", show=False) as cpu:
        torch.ones(MiB)
    predicted = memlab.predict(lambda: torch.empty(MiB, device="cuda"), "RTX 4060", name="foretold")
    for other in (tracked("cuda", 8 * MiB), predicted):
        found = compare(cpu, other)
        assert found.results.verdict == "not checked"
        assert found.by("category").total.b_bytes == found.side_b.low_bytes
        assert "cuda:0" in found.text
        assert found.seconds is None
