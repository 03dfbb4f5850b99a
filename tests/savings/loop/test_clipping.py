"""What no_grad does around backward and clipping, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.workloads.job import Job, Parts, seeded


def steep() -> Parts:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), 0.1), (100 * torch.randn(8, 4), torch.randn(8, 4)), nn.MSELoss()


def weights(names: list[str], habits: list[str]) -> torch.Tensor:
    job = Job("cpu", steps=2)
    with seeded():
        techniques.prepare(job, steep, names, habits)
        job.run()
    return job.outcome()["weights"]


def test_it_clips_either_way() -> None:
    unclipped, habit, wrapped = (
        weights([], []),
        weights([], ["clip_under_no_grad"]),
        weights(["clip_under_no_grad"], []),
    )
    assert torch.equal(habit, wrapped) and not torch.equal(habit, unclipped)
    assert (habit.abs() < 2).all() and (unclipped.abs() > 2).any()


def test_clipping_records_nothing_in_either_case() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    assert not nn.utils.clip_grad_norm_(model.parameters(), 1.0).requires_grad
    assert not any(one.grad.requires_grad for one in model.parameters() if one.grad is not None)


def test_backward_under_no_grad_works_as_the_graph_is_there_already() -> None:
    model, _, (x, y), criterion = steep()
    assert criterion is not None
    loss = criterion(model(x), y)
    with torch.no_grad():
        loss.backward()
    assert all(one.grad is not None for one in model.parameters())


def test_forward_under_no_grad_leaves_nothing_to_go_back_through() -> None:
    model, _, (x, y), criterion = steep()
    assert criterion is not None
    with torch.set_grad_enabled(False):
        loss = criterion(model(x), y)
    assert not loss.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_an_inference_clips_nothing() -> None:
    with pytest.raises(DoesNotApply, match="inference"):
        techniques.prepare(
            Job("cpu"), lambda: (nn.Linear(2, 2), None, (torch.ones(1, 2),), None), ["clip_under_no_grad"]
        )
