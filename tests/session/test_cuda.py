"""Sessions on the pretend device: what a run says of CUDA, and a tracked cell that runs out of memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from kernel import kernel

import memlab
from memlab.errors import BudgetExceeded
from memlab.units import format_bytes

pytestmark = pytest.mark.fakegpu
MiB = 1 << 20


def grow(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def test_forced_to_cuda_that_is_never_used_the_run_says_so(tmp_path):
    with memlab.track("nothing", device="cuda", save=tmp_path / "x.memlab", show=True) as run:
        torch.ones(10)
    if torch.cuda.is_initialized():
        pytest.skip("another test has brought up CUDA")
    assert (run.peak_bytes, tuple(run.devices)) == (0, ())
    assert "No device of those that were measured was used." in str(run)
    assert memlab.load(tmp_path / "x.memlab").devices == ()


def test_all_levels_of_a_cuda_run(tmp_path):
    grow(1)
    with memlab.track("levels", save=tmp_path / "x.memlab", show=False) as run:
        kept = grow(30 * MiB)
        del kept
        kept = grow(5 * MiB)
    level = run.devices[0].level("allocated")
    assert (level.peak.low_bytes - level.start_bytes, level.left_bytes) == (30 * MiB, 5 * MiB)
    assert run.peak_bytes <= run.peak_reserved_bytes <= run.peak_device_bytes
    assert run.is_exact
    for of in ("allocated", "reserved"):
        assert run.breakdown("line", of=of).total_bytes == getattr(run, f"peak_{of}_bytes")
    assert str(memlab.load(tmp_path / "x.memlab")) == str(run)
    del kept


def test_a_run_of_the_cpu_says_what_lies_on_cuda():
    weights = grow(7 * MiB)
    held = f"PyTorch held {format_bytes(torch.cuda.memory_allocated())} allocated and "
    held += f"{format_bytes(torch.cuda.memory_reserved())} reserved on cuda:0."
    with memlab.track("free", show=False) as run:
        torch.ones(1000)
    assert run.devices[0].device.label == "cpu"
    assert f"Nothing came or went on CUDA in this run. All the while {held}" in str(run)
    with memlab.track("forced", device="cpu", show=False) as run:
        torch.ones(1000)
    assert f"Only the CPU was measured. When this run ended, {held}" in str(run)
    with memlab.track("cuda", show=False) as run:
        grow(MiB)
    assert "PyTorch held" not in str(run)
    del weights


def test_nested_runs_and_budgets_on_cuda():
    with (
        pytest.raises(BudgetExceeded, match=r"cuda:0 peaked at"),
        memlab.track("outer", budget="20MiB", show=False) as outer,
    ):
        grow(40 * MiB)
        with memlab.track("inner", budget="20MiB", show=False) as inner:
            grow(10 * MiB)
    rises = [run.peak_bytes - run.devices[0].levels[0].start_bytes for run in (outer, inner)]
    assert rises == [40 * MiB, 10 * MiB]


def test_a_result_is_copied_to_the_host_and_keeps_nothing_alive():
    with memlab.track("result", show=False) as run:
        value = run.result(grow(MiB))
    gc.collect()  # what other tests have left
    seen, before = weakref.ref(value), torch.cuda.memory_allocated()
    del value
    gc.collect()
    assert seen() is None
    assert before - torch.cuda.memory_allocated() == MiB


def test_a_cell_that_runs_out_of_memory_reports_and_the_next_one_runs(tmp_path):
    with kernel(tmp_path, "import torch", "%load_ext memlab") as notebook:
        body = "kept = [torch.empty(1 << 30, dtype=torch.uint8, device='cuda') for _ in range(10_000)]"
        plain = notebook.run(body)
        tracked = notebook.run(f"%%memtrack --name full\n{body}")
        assert plain.error == tracked.error == "OutOfMemoryError"
        assert [line - 1 for line in tracked.lines][: len(plain.lines)] == plain.lines  # below stands the tally's frame
        assert "Out of memory was raised 1 time(s) by the allocator." in tracked.report
        assert "The cell raised OutOfMemoryError" in tracked.report
        assert "application/vnd.plotly.v1+json" in tracked.shown[0]
        again = notebook.run("%%memtrack --name after\nx = torch.empty(1 << 20, device='cuda')\nx.numel()")
        assert (again.status, again.out) == ("ok", "1048576"), again.traceback
        assert "cuda:0" in again.report
        assert "exact" in again.report
        notebook.run("%unload_ext memlab")
        assert notebook.value("torch._C._cuda_isHistoryEnabled()") is False
        assert notebook.value("torch.cuda.memory._record_memory_history.__module__") == "torch.cuda.memory"
