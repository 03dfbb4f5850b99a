"""The ledger on the pretend device, against PyTorch's own counters."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
from celling import Cells, take_your_time

from memlab.session.ledger.gauge import Polls, Reading, peak_between

MiB = 1 << 20
fakegpu = pytest.mark.fakegpu


# --- peaks from counters; these need no device ---


def peaks(before: Reading, after: Reading, polled: int = 0) -> tuple[int, int]:
    found = peak_between(before, after, polled)
    return found.low_bytes, min(found.high_bytes, 1 << 40)


def test_a_counter_that_rose_is_the_peak_of_the_cell():
    assert peaks(Reading(5, 10), Reading(6, 30)) == (30, 30)


def test_one_that_did_not_rise_is_the_upper_end_of_a_range():
    assert peaks(Reading(5, 10), Reading(6, 10)) == (6, 10)
    assert peaks(Reading(5, 10), Reading(6, 10), polled=9) == (9, 10)
    assert peaks(Reading(5, 10), Reading(10, 10)) == (10, 10)


def test_one_that_the_user_reset_proves_no_upper_end():
    assert peaks(Reading(5, 100), Reading(6, 8), polled=7) == (8, 1 << 40)


def test_without_a_counter_of_peaks_readings_are_a_lower_end():
    assert peaks(Reading(5, -1), Reading(6, -1), polled=9) == (9, 1 << 40)


def test_nothing_is_polled_where_there_is_nothing_to_read():
    if torch.cuda.is_initialized():
        pytest.skip("another test has brought up CUDA")
    polls, before = Polls(), threading.active_count()
    polls.start()
    assert (threading.active_count(), polls.stop()) == (before, {})
    assert not torch.cuda.is_initialized()


# --- cells on the device ---


@pytest.fixture
def cells(monkeypatch):
    take_your_time(monkeypatch)
    gc.collect()
    torch.zeros(1, device="cuda")
    notebook = Cells()
    yield notebook
    notebook.close()
    gc.collect()


def level(entry, device="cuda:0"):
    return next(one for one in entry.levels if one.device == device)


@fakegpu
def test_before_and_after_are_the_counters(cells):
    for code in ("x = torch.ones(9999, device='cuda')", "y = x[1:]", "z = y * 2; del x", "del y", "1"):
        before = torch.cuda.memory_allocated()
        cells.run(code)
        one = level(cells.last)
        assert (one.before_bytes, one.after_bytes) == (before, torch.cuda.memory_allocated()), code


@fakegpu
def test_the_peak_is_exact_when_it_passed_the_earlier_maximum_and_else_a_range(cells):
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    cells.run("torch.ones(20 << 18, device='cuda') + 1; None")
    peak = level(cells.last).peak
    assert (peak.low_bytes, peak.is_exact) == (torch.cuda.max_memory_allocated(), True)
    assert peak.low_bytes == start + 40 * MiB
    cells.run("a = torch.ones(5 << 18, device='cuda'); b = a + 1; del b")
    peak = level(cells.last).peak
    assert (peak.low_bytes, peak.high_bytes) == (start + 5 * MiB, start + 40 * MiB)
    assert torch.cuda.max_memory_allocated() == start + 40 * MiB  # nothing was reset


@fakegpu
def test_polls_raise_the_lower_end(cells):
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    cells.run("torch.ones(40 << 18, device='cuda'); None")
    seen = threading.Event()
    original = Polls._read

    def read(self):
        sample = original(self)
        if self.highest.get("cuda:0", 0) >= start + 8 * MiB:
            seen.set()
        return sample

    cells.names["seen"] = seen
    try:
        Polls._read = read
        cells.run("x = torch.ones(8 << 18, device='cuda'); seen.wait(30); del x")
    finally:
        Polls._read = original
    peak = level(cells.last).peak
    assert (peak.low_bytes, peak.high_bytes) == (start + 8 * MiB, start + 40 * MiB)


@fakegpu
def test_no_thread_stays_between_cells(cells):
    cells.run("x = 1")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memlab")]
    cells.run("raise KeyboardInterrupt", told="nothing")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memlab")]


@fakegpu
def test_a_list_of_losses_that_keep_their_graphs(cells):
    cells.run("model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).cuda(); losses = []")
    cells.run("x = torch.randn(64, 256, device='cuda'); model(x).sum().item()")  # and cuBLAS's workspace
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        cells.run("losses.append(model(x).square().mean())")
    added = torch.cuda.memory_allocated() - before
    entry = cells.last
    assert {one.root for one in entry.left} == {"losses"}
    assert sum(one.nbytes for one in entry.left) == pytest.approx(added, abs=512 * len(entry.left))
    assert cells.flags() == [("losses", sum(one.nbytes for one in entry.left))]


@fakegpu
def test_what_python_does_not_see_is_a_remainder(cells):
    cells.run("a = torch.randn(300, 300, device='cuda'); b = a @ a")  # the first product makes a workspace
    entry = cells.last
    left = level(entry).left_bytes
    seen = sum(one.nbytes for one in entry.left if one.device == "cuda:0")
    assert seen == 2 * 360_000
    assert entry.unnamed_bytes("cuda:0") == left - seen


@fakegpu
def test_gradients_of_an_older_graph(cells):
    cells.run("w = torch.ones(1 << 18, device='cuda', requires_grad=True); y = w.sum()")
    cells.run("(lambda: getattr(y, 'back' + 'ward'))()()")
    assert [(one.path, one.nbytes) for one in cells.last.left] == [("w.grad", MiB)]


@fakegpu
def test_a_cell_that_ran_out_of_memory_has_its_entry(cells):
    total = torch.cuda.get_device_properties(0).total_memory
    code = f"hoard = [torch.ones(4 << 18, device='cuda')]\ntorch.empty({2 * total}, dtype=torch.uint8, device='cuda')"
    error = cells.run(code)
    assert cells.last.status == "OutOfMemoryError"
    assert [(one.path, one.nbytes) for one in cells.last.left] == [("hoard[0]", 4 * MiB)]
    assert level(cells.last).left_bytes == 4 * MiB
    del error


@fakegpu
def test_a_cell_that_uses_the_cpu_alone_leaves_cuda_down():
    code = """
import sys, torch
sys.path.insert(0, "tests")
from celling import Cells
cells = Cells()
cells.run("x = torch.ones(1000)")
cells.run("%s")
print([[one.device for one in entry.levels] for entry in cells.entries], torch.cuda.is_initialized())
"""
    done = [
        subprocess.run([sys.executable, "-c", code % cell], capture_output=True, text=True, check=True).stdout.strip()
        for cell in ("y = 1", "y = torch.ones(1000, device='cuda')")
    ]
    assert done == ["[['cpu'], ['cpu']] False", "[['cpu'], ['cuda:0', 'cpu']] True"]


@fakegpu
def test_the_first_cell_on_cuda_has_an_exact_peak():
    code = """
import sys, torch
sys.path.insert(0, "tests")
from celling import Cells
cells = Cells()
cells.run("y = torch.ones(1 << 18, device='cuda') * 2")
peak = cells.last.levels[0].peak
print(peak.low_bytes == torch.cuda.max_memory_allocated() == 2 << 20, peak.is_exact)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True"
