"""FSDP2 as a technique: predicted for one of several GPUs. tests/prediction/test_ranks.py compares it with NCCL."""

from __future__ import annotations

import pytest
import torch
from job_runs import prepared
from torch import Tensor, nn

import memlab
from memlab import workloads
from memlab.api.compare import compare
from memlab.api.predict import StepToPredict, first_rank, predict_ranks
from memlab.api.prediction import Prediction
from memlab.api.runs import runs
from memlab.api.workload_run import run_workload, work_of
from memlab.errors import DoesNotApply, MemlabError, PredictionError
from memlab.prediction.cards import find
from memlab.saving_techniques import techniques
from memlab.saving_techniques.fsdp import weights
from memlab.units import MiB
from memlab.workloads.job import Job, Parts

WEIGHTS = 8 * 4 * (1024**2 + 1024)
"""Bytes of the weights of the demonstration."""


def sharded(make, world_size: int, *others: str) -> Prediction:
    run = run_workload(
        work_of(make), [*others, "fsdp2"], on=find("RTX 4060"), steps=2, keep=False, world_size=world_size
    )
    assert isinstance(run, Prediction) and run.job is not None and run.job.world_size == world_size
    return run


def test_each_rank_has_its_slice() -> None:
    plain = run_workload(work_of(weights), on=find("RTX 4060"), steps=2, keep=False)
    peaks = {size: sharded(weights, size).allocated_bytes.high for size in (2, 8, 64)}
    # Weights, gradients and both states of Adam; in addition blocks that are gathered, and their whole gradients
    assert plain.peak_allocated_bytes > 4 * WEIGHTS
    for size, peak in peaks.items():
        assert 4 * WEIGHTS / size < peak < 4 * WEIGHTS / size + WEIGHTS + 10 * MiB
    assert "Rank 0 of 64" in sharded(weights, 64).trace.notes["notes"][0]


def test_it_is_said_with_its_number_of_gpus() -> None:
    plain = run_workload(work_of("mlp", "tiny"), on=find("RTX 4060"), steps=1, keep=False)
    four = run_workload(work_of("mlp", "tiny"), ["fsdp2"], on=find("RTX 4060"), steps=1, keep=False, world_size=4)
    assert four.name == "mlp tiny + fsdp2 over 4 GPUs"
    assert compare(plain, four).sentence.startswith("with fsdp2 over 4 GPUs, per rank: ")
    assert "--nproc-per-node 4" in techniques["fsdp2"].code_over(4)


class WithBuffers(nn.Module):
    """An order made with the module, a norm's statistics, one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(64, 64)
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("order", torch.tensor([2, 0, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.token(x)))[:, self.order]


def test_what_else_a_model_has_stays_as_it_was() -> None:
    def make() -> Parts:
        model = WithBuffers()
        groups = [{"params": [model.token.weight], "weight_decay": 0.5}, {"params": model.norm.parameters(), "lr": 0.5}]
        return model, torch.optim.AdamW(groups, lr=0.1), (torch.arange(64), torch.zeros(64, 3)), nn.functional.mse_loss

    def step() -> None:
        job = Job("cuda", 1)
        techniques.prepare(job, make, ["fsdp2"])
        model, (first, second) = job.model, job.optimizer.param_groups
        assert model.order.is_cuda and model.order.tolist() == [2, 0, 1]
        assert model.norm.running_var.is_cuda and "order" not in model.state_dict()
        assert [first["params"][0] is model.token.weight, len(first["params"]), first["weight_decay"]] == [True, 1, 0.5]
        assert {id(one) for one in second["params"]} == {id(one) for one in model.norm.parameters()}
        assert second["lr"] == 0.5 and model.head.weight is model.token.weight
        assert all(type(one).__name__ == "DTensor" and one.is_cuda for one in model.parameters())
        job.run()

    run = predict_ranks(StepToPredict(step, find("RTX 4060"), "step", ""), first_rank(4, None))
    assert run.peak_allocated_bytes


class Scaled(nn.Linear):
    """Its weights are read as it is made."""

    def __init__(self) -> None:
        super().__init__(512, 512)
        self.scale = float(self.weight.detach().norm())


def test_a_model_that_reads_its_weights_is_made_whole_and_says_so() -> None:
    def make() -> Parts:
        model = nn.Sequential(Scaled(), Scaled())
        batch = torch.ones(2, 512), torch.ones(2, 512)
        return model, torch.optim.SGD(model.parameters()), batch, nn.functional.mse_loss

    notes = " ".join(sharded(make, 4).trace.notes["notes"])
    assert "The whole model was on each GPU before it was sharded" in notes
    assert "whole model" not in " ".join(sharded(weights, 4).trace.notes["notes"])


def test_where_it_cannot_be_tried(monkeypatch) -> None:
    with pytest.raises(DoesNotApply, match="for a job of several GPUs"):
        prepared(workloads["mlp"].sized("tiny"), "fsdp2")
    monkeypatch.setenv("WORLD_SIZE", "2")  # under torchrun, but not on a GPU
    with pytest.raises(DoesNotApply, match="for a job of several GPUs"):
        prepared(workloads["mlp"].sized("tiny"), "fsdp2")
    with pytest.raises(DoesNotApply, match="fsdp2: is for several GPUs: it can be predicted"):
        run_workload(work_of("mlp", "tiny"), ["fsdp2"], keep=False)
    with pytest.raises(PredictionError, match="world_size is a number of ranks, 1 to 1,048,576, got 0"):
        run_workload(work_of("mlp", "tiny"), ["fsdp2"], on=find("RTX 4060"), keep=False, world_size=0)
    with pytest.raises(DoesNotApply, match="fsdp2: the model has no parameters to shard"):
        nothing = nn.ReLU()
        nothing.weightless = torch.nn.Parameter(torch.ones(4))
        del nothing.weightless
        sharded(lambda: (nothing, None, (torch.ones(4),), None), 2)


def test_together_with_others() -> None:
    alone = sharded(weights, 8).allocated_bytes.high
    assert sharded(weights, 8, "sgd").allocated_bytes.high < alone
    assert sharded(weights, 8, "checkpoint_sequential").allocated_bytes.high <= alone + MiB
    with pytest.raises(MemlabError, match=r"adafactor and fsdp2 exclude|fsdp2 and adafactor exclude"):
        sharded(weights, 8, "adafactor")


# --- in `advise` and the Lab ---


def test_advise_shards_when_it_is_told_how_many_gpus_there_are() -> None:
    more = {"card": "RTX 4060", "techniques": ["fsdp2", "checkpoint_sequential"], "steps": 1}
    advice = memlab.advise(weights, world_size=8, **more)
    assert advice.recommended[-1] == "fsdp2"
    text = str(advice)
    assert "fsdp2 over 8 GPUs: peak of allocated" in text and " per rank instead of " in text
    assert "--nproc-per-node 8" in advice.code and ".measure()" not in text
    with pytest.raises(MemlabError, match="fsdp2 is for several GPUs"):
        advice.measure()
    alone = memlab.advise(weights, **more)
    assert alone.recommended != advice.recommended
    assert dict(alone.findings.left_out)["fsdp2"] == "is for several GPUs: world_size=8 tries it"
    with pytest.raises(MemlabError, match='name the GPUs, card="RTX 4060"'):
        memlab.advise(weights, world_size=8)


def test_several_gpus_are_the_last_resort() -> None:
    reached = memlab.advise("gpt", "560MiB", card="RTX 4060", techniques=["fsdp2", "checkpoint"], world_size=8)
    assert reached.reaches and reached.recommended == ("checkpoint",)


def test_the_lab_has_it_with_a_number_of_gpus() -> None:
    lab = memlab.Lab()
    kept = list(runs)
    lab.state = {"workload": "mlp", "size": "tiny", "device": "cpu"}
    assert "several GPUs" in lab.choices.excluded(lab.chosen)["fsdp2"]
    lab.state = {"card": "RTX 4060", "techniques": ["fsdp2"], "world_size": 2, "steps": 1}
    assert "fsdp2" not in lab.choices.excluded(lab.chosen)
    lab.run()
    assert lab.rows[-1].name == "mlp tiny + fsdp2 over 2 GPUs on RTX 4060" and "per rank" in lab.sentence
    assert "'world_size': 2" in lab.code() and "--nproc-per-node 2" in lab.code()
    lab.run(world_size=4)
    assert [row.name for row in lab.rows if not row.techniques] == ["mlp tiny on RTX 4060"], "one baseline for both"
    assert lab.rows[-1].name == "mlp tiny + fsdp2 over 4 GPUs on RTX 4060"
    assert lab.code("mlp tiny + fsdp2 over 2 GPUs on RTX 4060").count("'world_size': 2") == 1
    for wrong in (0, "8", 2.5, True, 1 << 30):
        with pytest.raises(MemlabError, match="world_size is a number of ranks"):
            lab.state = {"world_size": wrong}
    lab.state = {"techniques": []}
    assert "world_size" not in lab.code()
    for name in [one for one in runs if one not in kept]:
        runs.discard(runs[name])
