"""Buckets of a DistributedDataParallel that was made before the run, on the CPU; on two gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import python

SCRIPT = """
import gc, json, sys, warnings
import torch, torch.distributed as dist
from torch import nn
import memlab

def work(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for is_view in (False, True):
        for before in range(3):
            for training in (False, True):
                inner = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
                model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=is_view, bucket_cap_mb=2)
                optimizer, x = torch.optim.SGD(model.parameters()), torch.randn(2, 512)
                def step():
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                for _ in range(before):
                    step()
                with memlab.track("run", show=False) as run:
                    for _ in range(3):
                        step() if training else model(x)
                level, gaps = run.devices[0].levels[0], [gap.name for gap in run.trace.gaps]
                own = sum(one.numel() * one.element_size() for one in model.parameters())
                named = dict(run.breakdown("tensor")).get("gradient buckets of DistributedDataParallel", 0)
                held = level.start_bytes, level.peak.bytes.low, level.peak.bytes.high
                found[f"{is_view} {before} {training}"] = own, *held, named, gaps
                del model, inner, optimizer, step
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()

if __name__ == "__main__":
    import torch._dynamo  # by every optimizer
    with memlab.track("imports", show=False):
        torch.ones(1)
    gc.freeze()  # each search for names would look through all of it
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "job.py").write_text(SCRIPT)
    python(folder / "job.py", folder)
    return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("is_view", [False, True])
def test_they_are_there_from_the_start(found, is_view, before, training):
    own, start, low, high, named, gaps = found[f"{is_view} {before} {training}"]
    few = 64 * 1024  # inputs and activations
    assert 2 * own <= start <= 2 * own + few  # parameters and buckets
    copies = training and not is_view  # gradients of their own
    assert (2 + copies) * own <= low == high <= (2 + copies) * own + own // 4 + few
    assert "gradient buckets" not in gaps
    assert is_view or named == own
