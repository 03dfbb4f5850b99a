"""Loop, foreach and fused: settings that stay, optimizers that have none of it, code that knows nothing of memlab."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import memlab
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.optimizers.foreach import decayed
from memlab.savings.optimizers.groups import remade
from memlab.workloads.job import Job, Parts, seeded


def made_with(kind: type[torch.optim.Optimizer], **settings: object) -> Callable[[], Parts]:
    def make() -> Parts:
        model, _, batch, loss = decayed()
        layers = list(model.parameters())
        groups = [{"params": layers[:2], "lr": 0.02}, {"params": layers[2:]}]
        return model, kind(groups, **settings), batch, loss  # type: ignore[call-arg]

    return make


def prepared(make: Callable[[], Parts], names: tuple[str, ...], habits: tuple[str, ...] = ()) -> Job:
    job = Job("cpu", steps=2)
    with seeded():
        techniques.prepare(job, make, names, habits)
        job.run()
    return job


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_the_user_s_settings_stay(kind: type[torch.optim.Optimizer]) -> None:
    make = made_with(kind, lr=0.01, weight_decay=0.05)
    plain, fused = prepared(make, (), ("fused",)), prepared(make, ("fused",))
    assert plain.optimizer is not None and fused.optimizer is not None
    for before, after in zip(plain.optimizer.param_groups, fused.optimizer.param_groups, strict=True):
        for key in before.keys() - {"params", "foreach", "fused"}:
            assert before[key] == after[key], key
        assert (before["foreach"], after["foreach"], after["fused"]) == (True, False, True)
    assert torch.allclose(plain.outcome()["weights"], fused.outcome()["weights"], atol=1e-5)


def test_what_has_no_such_implementation() -> None:
    refused = [
        ("fused", made_with(torch.optim.RMSprop), "RMSprop has no fused"),
        ("foreach_off", made_with(torch.optim.SparseAdam), "SparseAdam has no foreach"),
        ("foreach_off", made_with(torch.optim.SGD, lr=0.1, fused=True), "is fused"),
    ]
    for name, make, why in refused:
        with pytest.raises(DoesNotApply, match=why):
            techniques.prepare(Job("cpu"), make, [name])


def train(foreach: bool) -> tuple[list[float], torch.Tensor]:
    """A training loop as somebody wrote it."""
    with seeded():
        model, _, (x, y), loss = decayed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4, foreach=foreach)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            found = loss(model(x), y)
            found.backward()
            optimizer.step()
            losses.append(found.item())
        return losses, next(model.parameters()).detach().clone()


def peak_of(foreach: bool) -> int:
    gc.collect()
    with memlab.track(show=False) as run:
        train(foreach)
    return run.peak_allocated_bytes - run.devices[0].levels[0].start_bytes


@pytest.mark.parametrize("name", ["foreach_off", "fused"])
def test_from_outside(name: str) -> None:
    (losses, weights), before = train(True), peak_of(True)
    outside = techniques[name].outside
    assert outside is not None
    with outside():
        changed_losses, changed = train(True)
        after = peak_of(True)
    assert changed_losses == pytest.approx(losses, rel=1e-5) and torch.allclose(weights, changed, atol=1e-6)
    assert after < 0.8 * before and peak_of(True) >= before


def test_from_outside_where_no_optimizer_steps() -> None:
    for name in ("foreach_off", "fused"):
        outside = techniques[name].outside
        assert outside is not None
        with pytest.raises(DoesNotApply, match="no optimizer"), outside():
            pass


def test_an_optimizer_that_cannot_be_made_anew_says_so() -> None:
    class Strange(torch.optim.SGD):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1)

    with pytest.raises(DoesNotApply, match="Strange cannot be made anew"):
        remade(Strange(torch.nn.Linear(2, 2)), fused=True)
