"""Gradients between steps, in a job and in code that knows nothing of memlab."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import memlab
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.loop.set_to_none import balanced
from memlab.workloads.job import Job, seeded

SET_TO_NONE = techniques["set_to_none"]


def train(zero: str) -> list[float]:
    """A training loop as somebody wrote it, with zeros."""
    with seeded():
        model, optimizer, (x, y), loss = balanced()
        losses = []
        for _ in range(3):
            if zero == "optimizer":
                optimizer.zero_grad(set_to_none=False)
            elif zero == "model":
                model.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad()
            found = loss(model(x), y)
            found.backward()
            optimizer.step()
            losses.append(found.item())
        return losses


def peak_of(zero: str) -> int:
    gc.collect()
    with memlab.track(show=False) as run:
        train(zero)
    return run.peak_allocated_bytes - run.devices[0].levels[0].start_bytes


def test_gradients_are_gone_or_zero_when_forward_begins() -> None:
    for habits, names, kept in ((["set_to_none"], [], True), ([], ["set_to_none"], False), ([], [], False)):
        job = Job("cpu")
        techniques.prepare(job, balanced, names, habits)
        found: list[bool] = []
        forward = job.forward
        job.forward = lambda *inputs, job=job, found=found, forward=forward: (
            found.append(next(job.model.parameters()).grad is not None),
            forward(*inputs),
        )[1]
        job.run()
        assert found == [False, kept, kept]


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_from_outside(zero: str) -> None:
    plain, before = train(zero), peak_of(zero)
    assert SET_TO_NONE.outside is not None
    with SET_TO_NONE.outside():
        assert train(zero) == plain
        after = peak_of(zero)
    assert after < 0.8 * before
    assert peak_of(zero) == before, "the zeros are back"


def test_from_outside_where_nobody_asks_for_zeros() -> None:
    methods = Optimizer.zero_grad, nn.Module.zero_grad
    assert SET_TO_NONE.outside is not None
    with pytest.raises(DoesNotApply, match="already"), SET_TO_NONE.outside():
        train("default")
    assert methods == (Optimizer.zero_grad, nn.Module.zero_grad)


def test_from_outside_an_error_passes_and_all_is_put_back() -> None:
    methods = Optimizer.zero_grad, nn.Module.zero_grad
    assert SET_TO_NONE.outside is not None
    with pytest.raises(KeyboardInterrupt), SET_TO_NONE.outside():
        raise KeyboardInterrupt
    assert methods == (Optimizer.zero_grad, nn.Module.zero_grad)


def test_an_inference_has_no_gradients() -> None:
    with pytest.raises(DoesNotApply, match="inference"):
        techniques.prepare(Job("cpu"), lambda: (nn.Linear(2, 2), None, (torch.ones(1, 2),), None), ["set_to_none"])


def test_a_parameter_without_gradient_moves_only_with_zeros() -> None:
    """What `not_when` warns of: weight decay goes on where a gradient is zero, and stops where it is None."""

    def last_value(as_none: bool) -> float:
        used = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([used], lr=0.1, weight_decay=0.5)
        (used * 0).sum().backward()
        optimizer.zero_grad(set_to_none=as_none)
        optimizer.step()
        return used.item()

    assert last_value(as_none=True) == 1.0
    assert last_value(as_none=False) < 1.0
