"""How an optimizer goes through the parameters: all in one call (foreach), one after the other, or in one fused kernel.

With foreach, PyTorch's choice on CUDA, an intermediate of the formula exists for all parameters at once: as many bytes as
they have themselves. Which optimizers have one, and how many, depends on the formula: plain SGD has none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import optimizer_of, remade
from memlab.savings.outside import on_optimizers
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts


def _with_foreach(job: Job) -> None:
    """As on CUDA, where it is the default; the CPU takes it when told to."""
    if job.optimizer is not None and "foreach" in job.optimizer.defaults:
        for group in job.optimizer.param_groups:
            group["foreach"] = True


def _one_by_one(optimizer: Optimizer) -> None:
    if "foreach" not in optimizer.defaults:
        raise DoesNotApply(f"{type(optimizer).__name__} has no foreach implementation to switch off.")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise DoesNotApply(f"this {type(optimizer).__name__} is fused, which has no such intermediates.")
    for group in optimizer.param_groups:
        group["foreach"] = False


def _apply_loop(job: Job) -> None:
    _one_by_one(optimizer_of(job, "foreach=False"))


def _check_fused(optimizer: Optimizer) -> None:
    if "fused" not in optimizer.defaults:
        raise DoesNotApply(f"{type(optimizer).__name__} has no fused implementation.")
    if any(not one.is_floating_point() for group in optimizer.param_groups for one in group["params"]):
        raise DoesNotApply("a fused step takes floating-point parameters only.")


def _fuse(optimizer: Optimizer) -> None:
    _check_fused(optimizer)
    for group in optimizer.param_groups:
        group["foreach"], group["fused"] = False, True


def _apply_fused(job: Job) -> None:
    optimizer = optimizer_of(job, "fused=True")
    _check_fused(optimizer)
    job.optimizer = remade(optimizer, foreach=False, fused=True)


def _loop_outside() -> AbstractContextManager[None]:
    return on_optimizers(_one_by_one)


def _fused_outside() -> AbstractContextManager[None]:
    return on_optimizers(_fuse)


def decayed() -> Parts:
    """Sixteen layers and SGD with weight decay: its foreach step adds the decay to a copy of every gradient."""
    layers = [layer for _ in range(16) for layer in (nn.Linear(192, 192), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(192, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)
    batch: tuple[Tensor, Tensor] = (torch.randn(8, 192), torch.randint(0, 10, (8,)))
    return model, optimizer, batch, nn.CrossEntropyLoss()


_ROUNDING = "the same formula; the kernels may round in another order"

TECHNIQUES = (
    Technique(
        name="foreach_off",
        idea="Step one parameter after the other, so that the formula's intermediates exist for one of them at a time.",
        attacks=("temporary",),
        kind="saving",
        stage="optimizer",
        equality=close(1e-6, _ROUNDING),
        price="on a card, many small kernels instead of a few: a slower step for models of many small layers",
        slower=True,
        not_when="the peak is in forward or backward, where the optimizer has no part, or the formula has no intermediates "
        "(plain SGD); on the CPU the loop is the default already",
        code="optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)",
        references=(
            "PyTorch documentation, torch.optim: foreach takes about sizeof(params) more at its peak, 2026, "
            "https://docs.pytorch.org/docs/stable/optim.html",
        ),
        shown=Shown(decayed),
        tips=("C14",),
        excludes={"fused": "a step is either a loop over the parameters or one kernel."},
        habit=_with_foreach,
        apply=_apply_loop,
        outside=_loop_outside,
    ),
    Technique(
        name="fused",
        idea="Do the whole step of the optimizer in one kernel, which keeps its intermediates in registers.",
        attacks=("temporary",),
        kind="saving",
        stage="optimizer",
        equality=close(1e-5, _ROUNDING),
        price="none that is known: it is also the fastest; only some optimizers have it",
        not_when="the peak is in forward or backward; the optimizer is not SGD, Adam, AdamW or Adagrad; parameters on a device "
        "without such kernels",
        code="optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
        references=(
            "PyTorch documentation, torch.optim: for-loop, foreach and fused implementations, 2026, "
            "https://docs.pytorch.org/docs/stable/optim.html",
        ),
        shown=Shown(decayed),
        tips=("C14",),
        excludes={"foreach_off": "a step is either a loop over the parameters or one kernel."},
        habit=_with_foreach,
        apply=_apply_fused,
        outside=_fused_outside,
    ),
)
