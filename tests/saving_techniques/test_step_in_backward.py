"""The step in backward: bit for bit the same, for many optimizers; what it refuses; code that knows nothing of memlab."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from job_runs import loop, prepared, ran
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import Optimizer

from memlab import torch_internals, workloads
from memlab.errors import DoesNotApply, MemlabError
from memlab.saving_techniques import techniques
from memlab.saving_techniques.optimizers import Eager, deep
from memlab.workloads.job import Job, Parts, seeded

NAME = "step_in_backward"
OUTSIDE = techniques[NAME].patch


def small(kind: type[Optimizer], **settings: object) -> Parts:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), shared, nn.Linear(8, 2))
    groups = [{"params": list(shared.parameters()), "lr": 0.2}, {"params": list(model[4].parameters())}]
    return model, kind(groups, **settings), (torch.randn(4, 8), torch.randint(0, 2, (4,))), nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
        (torch.optim.Adam, {"lr": 0.1, "fused": True}),
        (torch.optim.Adafactor, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
)
def test_the_same_bits(kind: type[Optimizer], settings: dict[str, object]) -> None:
    def make() -> Parts:
        return small(kind, **settings)

    plain, eager = ran(make, steps=3), ran(make, [NAME], steps=3)
    assert plain.outcome()["digest"] == eager.outcome()["digest"]
    assert plain.outcome()["losses"] == eager.outcome()["losses"]
    assert all(one.grad is None for one in eager.model.parameters())


def test_a_schedule_of_the_learning_rate_goes_on_working() -> None:
    def make() -> Parts:
        return small(torch.optim.SGD, lr=0.1)

    found = []
    for names in ([], [NAME]):
        job = Job("cpu", steps=3)
        with seeded():
            techniques.prepare(job, make, names)
            assert job.optimizer is not None
            schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.1)
            update = job.update
            job.update = lambda update=update, schedule=schedule: (update(), schedule.step())[0]
            job.optimizer._opt_called = True  # type: ignore[attr-defined]  # else it warns that nobody stepped
            job.run()
        found.append(job.outcome()["digest"])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gan", "gpt"])
def test_on_workloads_with_two_turns_and_shared_weights(name: str) -> None:
    make = workloads[name].sized("tiny", batch=2)
    assert ran(make).outcome()["digest"] == ran(make, [NAME]).outcome()["digest"]


def test_a_second_backward_is_refused() -> None:
    job = prepared(deep, NAME, steps=1)
    feed = job.feed
    job.feed = lambda: iter([*feed(), *feed()])
    with pytest.raises(DoesNotApply, match="a second backward before the step"):
        job.run()
    torch_internals.forget_unfinished_backward()


def test_what_looks_at_all_gradients_is_refused() -> None:
    def newton() -> Parts:
        model = nn.Linear(2, 2)
        return model, torch.optim.LBFGS(model.parameters()), (torch.ones(1, 2), torch.ones(1, 2)), nn.MSELoss()

    with pytest.raises(MemlabError, match="steps without a closure, got LBFGS"):
        techniques.prepare(Job("cpu"), newton, [NAME])
    for other in ("accumulation", "clip_under_no_grad", "autocast_fp16"):
        assert techniques.conflict([NAME, other]), other


def test_a_model_goes_with_its_job() -> None:
    def used() -> weakref.ref[torch.Tensor]:
        model, optimizer, (x, y), loss = deep()
        eager = Eager(optimizer)
        loss(model(x), y).backward()
        assert len(eager.stepped) == len(list(model.parameters()))
        return weakref.ref(next(model.parameters()))

    parameter = used()
    gc.collect()
    assert parameter() is None, "no cycle through a hook, where the collector does not look"


# --- from outside ---


@pytest.mark.parametrize(
    ("before_step", "why"),
    [
        (lambda model, loss: clip_grad_norm_(model.parameters(), 1.0), "global norm"),
        (lambda model, loss: loss().backward(), "second backward"),
    ],
)
def test_from_outside_it_refuses_and_puts_everything_back(before_step: Callable[..., object], why: str) -> None:
    init, clip = Optimizer.__init__, nn.utils.clip_grad_norm_
    with pytest.raises(DoesNotApply, match=why), OUTSIDE():
        loop(deep, before_step=before_step)
    assert Optimizer.__init__ is init and nn.utils.clip_grad_norm_ is clip is clip_grad_norm_
    assert loop(deep, before_step=before_step), "and it goes on as before"


def test_from_outside_scalers_and_closures_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(DoesNotApply, match="gradient scaler"), OUTSIDE():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        torch.amp.GradScaler("cpu").step(optimizer)
    with pytest.raises(DoesNotApply, match="closure"), OUTSIDE():
        torch.optim.SGD([parameter], lr=0.1).step(lambda: 0.0)
    optimizer.step()
    assert not parameter._post_accumulate_grad_hooks


def test_from_outside_with_a_schedule_and_an_optimizer_that_goes_early() -> None:
    def scheduled() -> list[torch.Tensor]:
        with seeded():
            model, optimizer, (x, y), loss = small(torch.optim.SGD, lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
            return [one.detach() for one in model.parameters()]

    plain = scheduled()
    with OUTSIDE():
        assert all(torch.equal(a, b) for a, b in zip(plain, scheduled(), strict=True))
        gone = weakref.ref(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        assert gone() is None, "not kept alive by having been watched"
