"""Ranks that other libraries start or shard: accelerate's launcher, DeepSpeed and Ray Train, on the CPU with two gloo processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unnamed import LIMIT, unnamed

import memlab

REPOSITORY = Path(__file__).resolve().parents[2]
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 100)), batch_size=8)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
for (batch,) in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""
DEEPSPEED = """
import sys, torch, deepspeed

deepspeed.init_distributed("gloo")
zero = {"stage": int(sys.argv[1]), "reduce_bucket_size": 100000, "stage3_param_persistence_threshold": 0}
adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": adam, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    engine.backward(engine(torch.randn(8, 256)).square().mean())
    engine.step()
torch.distributed.destroy_process_group()
"""
RAY = """
import ray, torch, memlab
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model

def work(config):
    model = prepare_model(torch.nn.Linear(500, 500))
    with memlab.track("job", save=f"{config['out']}/job.rank{get_context().get_world_rank()}.memlab", show=False):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(64, 500)).square().mean().backward()
            optimizer.step()

import os
ray.init(num_cpus=3, include_dashboard=False)
TorchTrainer(work, train_loop_config={"out": os.path.abspath("out")}, scaling_config=ScalingConfig(num_workers=2)).fit()
"""
RUN = ("-m", "memlab", "run", "--nproc-per-node", "2", "--quiet", "--out", "out", "train.py")


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:  # importing some leaves threads behind
        pytest.skip(f"needs {library}")


def ranks(folder: Path, script: str, *words: str, **environment: str) -> Any:
    """What the two ranks of a script have left in `out`."""
    (folder / "train.py").write_text(script)
    (folder / "out").mkdir()
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = memlab.ranks(folder / "out")
    assert [one.rank for one in found.ranks] == [0, 1] and not found.missing
    assert all(one.peak.is_exact for one in found.ranks)
    return found


@pytest.mark.parametrize(
    "words",
    [
        RUN,
        (
            "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
            "-m", "memlab", "run", "--quiet", "--out", "out", "train.py",
        ),
    ],
)  # fmt: skip
def test_accelerate(tmp_path, words):
    needs("accelerate")
    found = ranks(tmp_path, ACCELERATE, *words)
    assert "model.module.0" in {one.name for one in found.by("module")}


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed_zero(tmp_path, stage):
    needs("deepspeed")
    found = ranks(tmp_path, DEEPSPEED, *RUN, stage, DS_ACCELERATOR="cpu")
    parameters = 4 * (256 * 256 + 256) * 4
    runs = [memlab.load(tmp_path / "out" / f"train.rank{rank}.memlab") for rank in range(2)]
    assert max(map(unnamed, runs)) <= LIMIT, runs[0].breakdown("tensor")
    held = {one.name: one.worst_bytes for one in found.by("category")}
    assert 0.9 * parameters <= held["optimizer"] <= 1.1 * parameters  # both moments, of a half


def test_ray_train(tmp_path):
    needs("ray")
    found = ranks(tmp_path, RAY, "train.py")
    assert "DistributedDataParallel" in {one.name for one in found.by("module")}
