"""Frozen parts: which they are, that they rest, and that the head learns as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.parameters.freezing import head_of
from memlab.workloads.job import Job, Parts, seeded

BOTH = ("freezing", "feature_extraction")


def backbone() -> Parts:
    body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    model = nn.Sequential(body, nn.ReLU(inplace=True), nn.Linear(8, 3), nn.LogSoftmax(-1))
    batch = torch.randn(4, 8), torch.randint(0, 3, (4,))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), batch, nn.NLLLoss()


def ran(make: Callable[[], Parts], names: tuple[str, ...], habits: tuple[str, ...] = ()) -> Job:
    job = Job("cpu", steps=3)
    with seeded():
        techniques.prepare(job, make, names, habits)
        job.run()
    return job


@pytest.mark.parametrize("name", BOTH)
def test_the_head_learns_what_it_learnt_when_the_rest_was_left_out_of_the_optimizer(name: str) -> None:
    habit, frozen = ran(backbone, (), (name,)), ran(backbone, (name,))
    assert habit.outcome()["digest"] == frozen.outcome()["digest"]
    assert habit.outcome()["losses"] == frozen.outcome()["losses"]
    assert all(torch.equal(a, b) for a, b in zip(habit.model.buffers(), frozen.model.buffers(), strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_only_the_head_gets_gradients_and_state(name: str) -> None:
    job = ran(backbone, (name,))
    head = job.model[2]
    assert [one.grad is not None for one in job.model.parameters()] == [False] * 6 + [True, True]
    assert job.optimizer is not None and set(job.optimizer.state) == set(head.parameters())
    habit = ran(backbone, (), (name,))
    assert all(one.grad is not None for one in habit.model.parameters()), "what the habit costs"


def test_nothing_is_recorded_before_the_head() -> None:
    recorded: dict[str, list[bool]] = {name: [] for name in BOTH}
    for name in BOTH:
        job = Job("cpu", steps=1)
        techniques.prepare(job, backbone, [name])
        job.model[0].register_forward_hook(
            lambda module, x, y, name=name: recorded[name].append(torch.is_grad_enabled())
        )
        job.model[3].register_forward_hook(lambda module, x, y, name=name: recorded[name].append(y.requires_grad))
        job.run()
    assert recorded == {"freezing": [True, True], "feature_extraction": [False, True]}


def test_gradients_are_on_again_also_after_an_error() -> None:
    job = Job("cpu")
    techniques.prepare(job, backbone, ["feature_extraction"])
    job.model[0][0].weight.data = torch.zeros(3, 3)
    with pytest.raises(RuntimeError):
        job.run()
    assert torch.is_grad_enabled()
    assert not any(one._forward_pre_hooks for one in job.model.modules())


def test_the_user_s_groups_stay() -> None:
    def grouped() -> Parts:
        model, _, batch, loss = backbone()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.7}]
        return model, torch.optim.SGD(groups, lr=0.1), batch, loss

    job = ran(grouped, ("freezing",))
    assert job.optimizer is not None
    assert [(len(one["params"]), one["lr"]) for one in job.optimizer.param_groups] == [(0, 0.1), (2, 0.7)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x))


def test_a_head_that_is_also_the_embedding_stays_trained() -> None:
    def tied() -> Parts:
        model = Tied()
        batch = torch.randint(0, 5, (6,)), torch.randint(0, 5, (6,))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.CrossEntropyLoss()

    job = ran(tied, ("freezing",))
    assert all(one.requires_grad for one in job.model.parameters())


@pytest.mark.parametrize("name", BOTH)
def test_refusals(name: str) -> None:
    def one_layer() -> Parts:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(1, 2), torch.ones(1, 2)), nn.MSELoss()

    def frozen_head() -> Parts:
        parts = backbone()
        parts[0][2].requires_grad_(False)
        return parts

    refused = [(one_layer, "1 layers with parameters"), (frozen_head, "nothing would be trained")]
    refused += [
        (workloads["gan"].sized("tiny"), "a step of its own"),
        (lambda: (*one_layer()[:1], None, (torch.ones(1, 2),), None), "inference"),
    ]
    for make, why in refused:
        with pytest.raises(DoesNotApply, match=why):
            techniques.prepare(Job("cpu"), make, [name])


@pytest.mark.parametrize("name", ["resnet18", "gpt", "vit", "lstm"])
def test_the_last_layer_of_workloads(name: str) -> None:
    model = workloads[name].sized("tiny")()[0]
    assert list(model.modules())[-1] is head_of(model) or isinstance(head_of(model), nn.Linear)
