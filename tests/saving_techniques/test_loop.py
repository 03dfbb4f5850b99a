"""What a loop keeps alive: names, graphs and gradients, in a job and in code that knows nothing of memlab."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from job_runs import loop, measured, prepared, ran, training, tried
from torch import Tensor, autograd, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.loop import balanced, names_stay, validation
from memlab.workloads.job import Job, Parts

PATCH = {name: techniques[name].patch for name in ("retain_graph", "set_to_none")}


def layers(width: int = 64, depth: int = 2, rows: int = 256) -> Parts:
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))
    return training(model, torch.randn(rows, width), torch.randn(rows, width))


def deep() -> Parts:
    return layers(32, 8)


# --- names ---


def test_a_name_lives_until_its_line_runs_again() -> None:
    job = Job("cpu")
    job.build(layers)
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
    job = prepared(layers, "delete_loss", "detach_logged", steps=3)
    outputs: list[weakref.ref[Tensor]] = []
    keep = job.keep
    job.keep = lambda output, loss: (outputs.append(weakref.ref(output)), keep(output, loss))[1]
    job.run()
    assert [one() for one in outputs] == [None] * 3
    assert len(job.held) == 3 and not any(one.requires_grad for one in job.held)


@pytest.mark.parametrize(
    ("name", "steps", "least"), [("delete_loss", 3, 256 * 64 * 4 + 64), ("detach_logged", 6, 6 * 64)]
)
def test_after_a_backward_names_keep_little(name: str, steps: int, least: int) -> None:
    """At most the last output and a number, or a few bytes of each loss."""
    before, after = tried(layers, habits=[name], steps=steps), tried(layers, name, steps=steps)
    assert 0 <= before.peak_bytes - after.peak_bytes <= least


def test_a_kept_score_keeps_its_graph_without_one() -> None:
    few, many = (tried(validation, habits=["detach_logged"], steps=steps).peak_bytes for steps in (2, 6))
    graph = 6 * 2 * 4 * 8 * 32 * 32 * 4  # inputs of six convolutions and six BatchNorms
    assert many - few >= 4 * graph * 0.9
    more, fewer = (tried(validation, "detach_logged", steps=steps).peak_bytes for steps in (6, 2))
    assert more - fewer == 4 * 4, "four more numbers"


def test_both_habits_keep_what_the_habit_of_the_other_does() -> None:
    job = ran(layers, (), ["delete_loss", "detach_logged", "retain_graph"])
    assert len(job.held) == 2 and all(one.grad_fn is not None for one in job.held)


# --- graphs that are retained ---


def test_in_a_loop_the_last_graph_waits_for_the_next_loss() -> None:
    before, after = tried(deep, habits=["retain_graph"]), tried(deep, "retain_graph")
    assert before.peak_bytes - after.peak_bytes >= 0.8 * 8 * 256 * 32 * 4


@pytest.mark.parametrize(
    ("name", "make", "how", "share"),
    [
        ("retain_graph", deep, {"backward": lambda loss: loss.backward(retain_graph=True)}, 0.75),
        ("retain_graph", deep, {"backward": lambda loss: autograd.backward(loss, retain_graph=True)}, 0.75),
        ("set_to_none", balanced, {"clear": lambda model, optimizer: optimizer.zero_grad(set_to_none=False)}, 0.8),
        ("set_to_none", balanced, {"clear": lambda model, optimizer: model.zero_grad(set_to_none=False)}, 0.8),
    ],
)
def test_from_outside(name: str, make: Callable[[], Parts], how: dict[str, Any], share: float) -> None:
    plain, before = loop(make, **how), measured(lambda: loop(make, **how))
    with PATCH[name]():
        assert loop(make, **how) == plain
        after = measured(lambda: loop(make, **how))
    assert after < share * before
    assert measured(lambda: loop(make, **how)) == before, "and all is as it was"


def test_from_outside_where_a_backward_needs_the_graph() -> None:
    function = autograd.backward
    with pytest.raises(DoesNotApply, match="another backward"), PATCH["retain_graph"]():
        loop(deep, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward()))
    assert autograd.backward is function


@pytest.mark.filterwarnings("ignore:Using backward")
def test_from_outside_a_graph_of_gradients_stays() -> None:
    """create_graph asks for a second derivative: that graph is needed."""
    with pytest.raises(DoesNotApply, match="no backward retains"), PATCH["retain_graph"]():
        x = torch.ones(1, requires_grad=True)
        (x**3).sum().backward(create_graph=True, inputs=[x])
        assert x.grad is not None
        (second,) = autograd.grad(x.grad.sum(), x)
        assert second.item() == 6.0
        x.grad = None  # it holds its own graph: a cycle


# --- gradients between steps ---


@pytest.mark.parametrize(
    ("habits", "names", "kept"), [(["set_to_none"], [], True), ([], ["set_to_none"], False), ([], [], False)]
)
def test_gradients_are_gone_or_zero_when_forward_begins(habits: list[str], names: list[str], kept: bool) -> None:
    job, found = prepared(balanced, *names, habits=habits, steps=3), []
    forward = job.forward

    def looking(*inputs: Tensor) -> Tensor:
        found.append(next(job.model.parameters()).grad is not None)
        return forward(*inputs)

    job.forward = looking
    job.run()
    assert found == [False, kept, kept]


def test_from_outside_where_nobody_asks_for_zeros() -> None:
    methods = Optimizer.zero_grad, nn.Module.zero_grad
    with pytest.raises(DoesNotApply, match="already"), PATCH["set_to_none"]():
        loop(balanced)
    assert methods == (Optimizer.zero_grad, nn.Module.zero_grad)


@pytest.mark.parametrize("as_none", [True, False])
def test_a_parameter_without_gradient_moves_only_with_zeros(as_none: bool) -> None:
    """What `not_when` warns of: weight decay goes on where a gradient is zero, and stops where it is None."""
    used = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([used], lr=0.1, weight_decay=0.5)
    (used * 0).sum().backward()
    optimizer.zero_grad(set_to_none=as_none)
    optimizer.step()
    assert (used.item() == 1.0) if as_none else (used.item() < 1.0)


# --- what no_grad does around backward and clipping, and what it does not ---


def steep() -> Parts:
    return training(nn.Linear(4, 4), 100 * torch.randn(8, 4), torch.randn(8, 4))


def test_it_clips_either_way() -> None:
    name = "clip_under_no_grad"
    unclipped, habit, wrapped = (
        ran(steep, names, habits).outcome()["weights"] for names, habits in (((), ()), ((), (name,)), ((name,), ()))
    )
    assert torch.equal(habit, wrapped) and not torch.equal(habit, unclipped)
    assert (habit.abs() < 2).all() and (unclipped.abs() > 2).any()


def test_clipping_and_backward_record_nothing_in_either_case() -> None:
    model, _, (x, y), _ = steep()
    loss = functional.mse_loss(model(x), y)
    with torch.no_grad():  # the graph is there already
        loss.backward()
    assert all(one.grad is not None and not one.grad.requires_grad for one in model.parameters())
    assert not nn.utils.clip_grad_norm_(model.parameters(), 1.0).requires_grad
    assert not any(one.grad.requires_grad for one in model.parameters())
    with torch.set_grad_enabled(False):
        loss = functional.mse_loss(model(x), y)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
