"""Ranks on two simulated GPUs: the rank whose GPU is full failed first."""

from __future__ import annotations

import pytest
from processes import memlab_ran
from simulated_machines import machine_at

import memlab

pytestmark = pytest.mark.simulated

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(200):
    output = model(torch.randn(32 * 1024, 1024, device="cuda"))
    if rank == 1:
        kept.append(output.detach())
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
"""


def test_the_rank_whose_gpu_is_full_failed_first_and_names_what_it_held(tmp_path):
    (tmp_path / "leaks.py").write_text(SCRIPT)
    machine = machine_at(tmp_path / "gpus", total_mb=4096, devices=2)
    status, _, err = memlab_ran(tmp_path, "run", "--nproc-per-node", "2", "--out", "runs", "leaks.py", **machine)
    assert status == 1
    found = memlab.ranks(tmp_path / "runs")
    first = found.first_failed
    assert (first.rank, first.ran_out) == (1, True)
    assert [one.device.label for one in found.ranks] == ["cuda:0", "cuda:1"]
    assert first.held.named[0][0] == "kept"
    assert first.held.allocated_bytes > 3 << 30
    assert found.job.provenance == "simulated"
    assert "simulated GPU: bytes are real" in err
    assert "by name kept" in err
    assert found.growth[0].ranks == (1,)
    assert "leaks.py:" in found.growth[0].text
