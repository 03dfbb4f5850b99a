"""Gradients between two steps: let go (None), or kept as zeros all through the next forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import optimizer_of, trained
from memlab.savings.technique import Equality, Shown, Technique
from memlab.workloads.job import Job, Parts


def _zeroed(job: Job) -> None:
    """As it was PyTorch's default until 2.0."""
    if job.optimizer is not None:
        job.clear = lambda: job.optimizer.zero_grad(set_to_none=False)  # type: ignore[union-attr]


def _apply(job: Job) -> None:
    optimizer_of(job, "set_to_none")
    clear = job.clear

    def let_go() -> None:
        clear()
        for one in trained(optimizer_of(job, "set_to_none")):
            one.grad = None

    job.clear = let_go


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Whoever asks for zeros gets None; raises DoesNotApply at the end where nobody asked for zeros."""
    asked: list[bool] = []
    originals = {owner: owner.zero_grad for owner in (Optimizer, nn.Module)}

    def letting_go(original: Any) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            asked.append(not set_to_none)
            original(self, set_to_none=True)

        return zero_grad

    try:
        for owner, original in originals.items():
            owner.zero_grad = letting_go(original)  # type: ignore[method-assign]
        yield
    finally:
        for owner, original in originals.items():
            owner.zero_grad = original  # type: ignore[method-assign]
    if not any(asked):
        raise DoesNotApply("gradients are let go already: nothing calls zero_grad(set_to_none=False).")


def balanced() -> Parts:
    """Weights and activations of one size, plain SGD: gradients that wait through forward meet all of its activations."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(96, 96), nn.Tanh())]
    model = nn.Sequential(*layers)
    batch = torch.randn(100, 96), torch.randn(100, 96)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.MSELoss()


TECHNIQUES = (
    Technique(
        name="set_to_none",
        idea="Let go of the gradients before the next forward, instead of filling them with zeros that wait for backward.",
        attacks=("gradient",),
        kind="saving",
        stage="step",
        equality=Equality("exact", why="where every parameter gets a gradient in every step"),
        price="none; it is the default since PyTorch 2.0",
        not_when="zero_grad() is called without an argument, as it lets go already; the peak is in the optimizer's step; "
        "code reads .grad between the steps; a parameter that gets no gradient is skipped now, where with zeros momentum and "
        "weight decay went on moving it",
        code="optimizer.zero_grad(set_to_none=True)      # before forward; the default",
        references=(
            "PyTorch documentation, Optimizer.zero_grad, 2026, "
            "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
        ),
        shown=Shown(balanced),
        excludes={"contiguous_parameters": "gradients that live in one buffer are zeroed; they cannot be let go."},
        habit=_zeroed,
        apply=_apply,
        outside=_outside,
    ),
)
