"""Pruning and distillation, in bytes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import memlab
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.workloads.job import Job, Parts, seeded

WIDTH = 128
WEIGHTS = 4 * WIDTH * WIDTH * 4


def stack() -> Parts:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)), nn.MSELoss()


def held(model: nn.Module) -> int:
    """Bytes of what a model keeps, parameters, buffers and the product of weight and mask."""
    products = [one.weight for one in model.modules() if isinstance(one, nn.Linear)]
    return sum({id(one): one.nbytes for one in (*model.parameters(), *model.buffers(), *products)}.values())


def test_pruned_weights_take_three_times_their_bytes_and_zeros_as_much_as_ones() -> None:
    job = Job("cpu", steps=1)
    with seeded():
        techniques.prepare(job, stack, ["pruning"])
        job.run()
    assert held(job.model) == 3 * WEIGHTS
    assert sum(int((one.weight == 0).sum()) for one in job.model) == 4 * WIDTH * WIDTH // 2
    assert "half of 256.0 KiB" in job.notes[0] and "768.0 KiB" in job.notes[0]
    for one in job.model:
        prune.remove(one, "weight")
    assert held(job.model) == WEIGHTS, "half of them zeros"


def peak_of(step) -> int:
    gc.collect()
    with memlab.track(show=False) as run:
        step()
    return run.peak_allocated_bytes


def test_distillation_needs_more_while_it_lasts() -> None:
    def learn(with_teacher: bool) -> None:
        student = nn.Linear(WIDTH, WIDTH, bias=False)
        x = torch.randn(4, WIDTH)
        wanted = x
        if with_teacher:
            teacher = stack()[0]
            with torch.no_grad():
                wanted = teacher(x)
        nn.functional.mse_loss(student(x), wanted).backward()

    assert peak_of(lambda: learn(True)) - peak_of(lambda: learn(False)) >= WEIGHTS
    assert techniques["distillation"].apply is None


def test_nothing_to_prune() -> None:
    with pytest.raises(DoesNotApply, match="no convolution or linear layer"):
        techniques.prepare(Job("cpu"), lambda: (nn.LayerNorm(4), None, (torch.ones(1, 4),), None), ["pruning"])
