"""A graph that is retained: in a GAN, in an ordinary loop, and in code that knows nothing of memlab."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import autograd, nn

import memlab
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.session.trial import trial, work_of
from memlab.workloads.job import Job, Parts, seeded

RETAIN = techniques["retain_graph"]


def deep_stack() -> Parts:
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(256, 32), torch.randn(256, 32)), nn.MSELoss()


def train(how: str) -> float:
    with seeded():
        model, optimizer, (x, y), criterion = deep_stack()
        for _ in range(3):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            if how == "engine":
                autograd.backward(loss, retain_graph=True)
            else:
                loss.backward(retain_graph=how != "plain")
            if how == "twice":
                loss.backward()
            optimizer.step()
        return loss.item()


def peak_of(how: str) -> int:
    gc.collect()
    with memlab.track(show=False) as run:
        train(how)
    return run.peak_allocated_bytes - run.devices[0].levels[0].start_bytes


def test_in_a_loop_the_last_graph_waits_for_the_next_loss() -> None:
    before = trial(work_of(deep_stack), habits=["retain_graph"], timed=False).peak_allocated_bytes
    after = trial(work_of(deep_stack), ["retain_graph"], timed=False).peak_allocated_bytes
    graph = 8 * 256 * 32 * 4
    assert before - after >= 0.8 * graph


@pytest.mark.parametrize("how", ["method", "engine"])
def test_from_outside(how: str) -> None:
    plain, before = train(how), peak_of(how)
    assert RETAIN.outside is not None
    with RETAIN.outside():
        assert train(how) == plain
        after = peak_of(how)
    assert after < 0.75 * before
    assert peak_of(how) == before


def test_from_outside_where_a_backward_needs_the_graph() -> None:
    function = autograd.backward
    assert RETAIN.outside is not None
    with pytest.raises(DoesNotApply, match="another backward"), RETAIN.outside():
        train("twice")
    assert autograd.backward is function


def test_from_outside_where_nothing_is_retained() -> None:
    assert RETAIN.outside is not None
    with pytest.raises(DoesNotApply, match="no backward retains"), RETAIN.outside():
        train("plain")


@pytest.mark.filterwarnings("ignore:Using backward")
def test_from_outside_a_graph_of_gradients_stays() -> None:
    """create_graph asks for a second derivative: that graph is needed."""
    assert RETAIN.outside is not None
    with pytest.raises(DoesNotApply, match="no backward retains"), RETAIN.outside():
        x = torch.ones(1, requires_grad=True)
        (x**3).sum().backward(create_graph=True, inputs=[x])
        assert x.grad is not None
        (second,) = autograd.grad(x.grad.sum(), x)
        assert second.item() == 6.0
        x.grad = None  # it holds its own graph: a cycle


def test_an_inference_retains_nothing() -> None:
    with pytest.raises(DoesNotApply, match="inference"):
        techniques.prepare(Job("cpu"), lambda: (nn.Linear(2, 2), None, (torch.ones(1, 2),), None), ["retain_graph"])
