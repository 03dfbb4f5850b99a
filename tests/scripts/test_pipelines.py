"""Pipelines of torch.distributed, of two gloo processes, under `memlab run --nproc-per-node 2`."""

from __future__ import annotations

import json

import pytest
from processes import memlab_ran
from unnamed import LIMIT, unnamed

import memlab

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
part = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[sys.argv[1]](stage, 4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters())
for _ in range(4):
    if rank == 0:
        schedule.step(torch.randn(1024, 256))
    else:
        schedule.step(target=torch.randn(1024, 256), losses=[])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["gpipe", "1f1b"])
def job(request, tmp_path_factory):
    """Which schedule it is, the ranks as JSON, and the run of each."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "train.py").write_text(SCRIPT)
    status, _, err = memlab_ran(
        folder, "run", "--json", "--nproc-per-node", "2", "--out", "runs", "train.py", request.param
    )
    assert status == 0, err
    facts = json.loads(next(line for line in err.splitlines() if line.startswith("{")))
    return request.param, facts, [memlab.load(folder / "runs" / f"train.rank{rank}.memlab") for rank in range(2)]


@pytest.mark.slow
def test_both_stages_are_measured_and_their_modules_named(job):
    which, facts, _ = job
    assert (facts["world_size"], facts["missing"], facts["first_failed"]) == (2, [], None)
    assert [one["steps"] for one in facts["ranks"]] == [4, 4]
    peaks = [one["peak_low_bytes"] for one in facts["ranks"]]
    weights = 2 * (256 * 256 + 256) * 4
    by = {one["name"]: one for one in facts["peak_by"]["category"]}
    assert by["parameter"]["worst_bytes"] == by["parameter"]["lowest_bytes"] == weights
    assert by["optimizer"]["worst_bytes"] == 2 * weights + 4 * 4  # AdamW: two moments, and the number of steps of each
    assert {"part.0", "part.1", "part.2"} <= {one["name"] for one in facts["peak_by"]["module"]}
    # A micro-batch of a stage is 256 rows of 256 floats in the input, the hidden layer twice, and the output.
    rows, stored = 256 * 256 * 4, {"gpipe": 4, "1f1b": 2}[which]
    assert peaks[0] >= 4 * weights + stored * 2 * rows


@pytest.mark.slow
def test_what_a_stage_receives_keeps_and_sends_has_names(job):
    which, _, (first, last) = job
    assert max(map(unnamed, (first, last))) <= LIMIT, [first.breakdown("tensor"), last.breakdown("tensor")]
    chunk = 256 * 256 * 4  # one micro-batch of rows between the stages
    held = {name: dict(run.breakdown("tensor")) for name, run in (("first", first), ("last", last))}
    assert held["first"]["gradient received by part"] == 4 * chunk
    assert held["last"]["received by part"] == held["last"]["target of part"] == 4 * chunk
    assert held["last"]["gradient to send by part"] >= chunk
    assert held["last"]["loss of part"] >= {"gpipe": 4, "1f1b": 1}[which] * 4
    assert first.breakdown("category")["gradient"] >= 4 * chunk
