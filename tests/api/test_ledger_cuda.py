"""The ledger on the simulated GPU, against PyTorch's own counters."""

from __future__ import annotations

import threading

import pytest
import torch
from ledger_cells import cells, level, paths  # noqa: F401
from processes import python

from memlab.api.ledger import Polls

pytestmark = pytest.mark.simulated
MiB = 1 << 20


@pytest.fixture(autouse=True)
def cuda_is_up():
    torch.zeros(1, device="cuda")


def test_before_and_after_are_the_counters(cells):
    for code in ("x = torch.ones(9999, device='cuda')", "y = x[1:]", "z = y * 2; del x", "del y", "1"):
        before = torch.cuda.memory_allocated()
        cells.run(code)
        one = level(cells.last, "cuda:0")
        assert (one.before_bytes, one.after_bytes) == (before, torch.cuda.memory_allocated()), code


def test_the_peak_is_exact_when_it_passed_the_earlier_maximum_and_else_a_range(cells):
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    cells.run("torch.ones(20 << 18, device='cuda') + 1; None")
    peak = level(cells.last, "cuda:0").peak
    assert (peak.low_bytes, peak.is_exact) == (torch.cuda.max_memory_allocated(), True)
    assert peak.low_bytes == start + 40 * MiB
    cells.run("a = torch.ones(5 << 18, device='cuda'); b = a + 1; del b")
    peak = level(cells.last, "cuda:0").peak
    assert (peak.low_bytes, peak.high_bytes) == (start + 5 * MiB, start + 40 * MiB)
    assert torch.cuda.max_memory_allocated() == start + 40 * MiB  # nothing was reset


def test_polls_raise_the_lower_end(cells):
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    cells.run("torch.ones(40 << 18, device='cuda'); None")
    seen = threading.Event()
    original = Polls.read

    def read(self):
        sample = original(self)
        if self.highest.get("cuda:0", 0) >= start + 8 * MiB:
            seen.set()
        return sample

    cells.names["seen"] = seen
    try:
        Polls.read = read
        cells.run("x = torch.ones(8 << 18, device='cuda'); seen.wait(120); del x")
    finally:
        Polls.read = original
    peak = level(cells.last, "cuda:0").peak
    assert (peak.low_bytes, peak.high_bytes) == (start + 8 * MiB, start + 40 * MiB)


def test_no_thread_stays_between_cells(cells):
    cells.run("x = 1")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memlab")]
    cells.run("raise KeyboardInterrupt", told="nothing")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memlab")]


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


def test_what_python_does_not_see_is_a_remainder(cells):
    cells.run("a = torch.randn(300, 300, device='cuda'); b = a @ a")  # the first product makes a workspace
    entry = cells.last
    left = level(entry, "cuda:0").left_bytes
    seen = sum(one.nbytes for one in entry.left if one.device == "cuda:0")
    assert seen == 2 * 360_000
    assert entry.unnamed_bytes("cuda:0") == left - seen


def test_gradients_of_an_older_graph(cells):
    cells.run("w = torch.ones(1 << 18, device='cuda', requires_grad=True); y = w.sum()")
    cells.run("(lambda: getattr(y, 'back' + 'ward'))()()")
    assert paths(cells.last) == {"w.grad": MiB}


def test_a_cell_that_ran_out_of_memory_has_its_entry(cells):
    total = torch.cuda.get_device_properties(0).total_memory
    code = f"hoard = [torch.ones(4 << 18, device='cuda')]\ntorch.empty({2 * total}, dtype=torch.uint8, device='cuda')"
    error = cells.run(code)
    assert cells.last.status == "OutOfMemoryError"
    assert paths(cells.last) == {"hoard[0]": 4 * MiB}
    assert level(cells.last, "cuda:0").left_bytes == 4 * MiB
    del error


def said(*more: str) -> str:
    """What a new process prints that has cells of its own."""
    return python("-c", "\n".join(["import torch", "from ledger_cells import Cells", "cells = Cells()", *more])).strip()


@pytest.mark.parametrize(
    ("cell", "devices", "is_up"), [("y = 1", "['cpu']", False), ("y = x.cuda()", "['cuda:0', 'cpu']", True)]
)
def test_a_cell_that_uses_the_cpu_alone_leaves_cuda_down(cell, devices, is_up):
    run = f"cells.run('x = torch.ones(1000)'); cells.run({cell!r})"
    show = "print([[one.device for one in entry.levels] for entry in cells.entries], torch.cuda.is_initialized())"
    assert said(run, show) == f"[['cpu'], {devices}] {is_up}"


def test_the_first_cell_on_cuda_has_an_exact_peak():
    run = "cells.run('y = torch.ones(1 << 18, device=\"cuda\") * 2'); peak = cells.last.levels[0].peak"
    show = "print(peak.low_bytes == torch.cuda.max_memory_allocated() == 2 << 20, peak.is_exact)"
    assert said(run, show) == "True True"
