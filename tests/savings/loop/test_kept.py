"""What the loop keeps by name: how much that is after a backward, and how much without one."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memlab.savings import techniques
from memlab.savings.loop.kept import first_tensor, names_stay, validation
from memlab.session.trial import trial, work_of
from memlab.workloads.job import Job, Parts


def training() -> Parts:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    batch = torch.randn(256, 64), torch.randn(256, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.MSELoss()


def peak(make, names=(), habits=(), steps=3) -> int:
    return trial(work_of(make), names, habits, steps=steps, timed=False).peak_allocated_bytes


def test_a_name_lives_until_its_line_runs_again() -> None:
    job = Job("cpu")
    job.build(training)
    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    forward = job.forward

    def looking(*inputs: Tensor) -> Tensor:
        alive.append(bool(seen) and seen[-1]() is not None)
        output = forward(*inputs)
        seen.append(weakref.ref(output))
        return output

    job.forward = looking
    names_stay(job)
    job.run()
    assert alive == [False, True, True]
    assert [one() is not None for one in seen] == [False, False, True]


def test_without_the_habit_nothing_lives_on() -> None:
    job = Job("cpu")
    techniques.prepare(job, training, ["delete_loss", "detach_logged"])
    outputs: list[weakref.ref[Tensor]] = []
    keep = job.keep
    job.keep = lambda output, loss: (outputs.append(weakref.ref(output)), keep(output, loss))[1]
    job.run()
    assert [one() for one in outputs] == [None] * 3
    assert len(job.held) == 3 and not any(one.requires_grad for one in job.held)


def test_after_a_backward_there_is_little_to_delete() -> None:
    before, after = peak(training, habits=["delete_loss"]), peak(training, ["delete_loss"])
    assert 0 <= before - after <= 256 * 64 * 4 + 64, "at most the last output and a number"


def test_a_kept_loss_costs_bytes_after_a_backward() -> None:
    before, after = peak(training, habits=["detach_logged"], steps=6), peak(training, ["detach_logged"], steps=6)
    assert 0 <= before - after <= 6 * 64


def test_a_kept_score_keeps_its_graph_without_one() -> None:
    few, many = (peak(validation, habits=["detach_logged"], steps=steps) for steps in (2, 6))
    graph = 6 * 2 * 4 * 8 * 32 * 32 * 4  # inputs of six convolutions and six BatchNorms
    assert many - few >= 4 * graph * 0.9
    more, fewer = (peak(validation, ["detach_logged"], steps=steps) for steps in (6, 2))
    assert more - fewer == 4 * 4, "four more numbers"


def test_both_habits_keep_what_the_habit_of_the_other_does() -> None:
    job = Job("cpu", steps=2)
    techniques.prepare(job, training, (), ["delete_loss", "detach_logged", "retain_graph"])
    job.run()
    assert len(job.held) == 2 and all(one.grad_fn is not None for one in job.held)


@pytest.mark.parametrize("around", [lambda one: (1, [one]), lambda one: {"a": None, "logits": one}, lambda one: one])
def test_outputs_of_many_kinds_have_a_first_tensor(around: Callable[[Tensor], object]) -> None:
    found = first_tensor(around(torch.ones(2)))
    assert found is not None and found.shape == (2,)
    assert first_tensor({"a": [None, "text"]}) is None
