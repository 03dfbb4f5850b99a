"""Optimizers with less state, and how a step iterates over the parameters.

Per parameter plain SGD keeps nothing between steps, momentum one number, Adam two; Adafactor keeps a row and a column per
matrix. With foreach, PyTorch's default on CUDA, an intermediate of the formula exists for all parameters at once: as many
bytes as they have themselves. How many intermediates there are depends on the formula: plain SGD has none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import linear_stack
from memlab.saving_techniques.param_groups import optimizer_of
from memlab.saving_techniques.patching import to_optimizer
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job

SGD, Adafactor = torch.optim.SGD, torch.optim.Adafactor


def _exchange(what: str, kind: Any, lean: tuple[type[Optimizer], ...], settings: dict[str, float], job: Job) -> None:
    """Another optimizer with the job's learning rate; refused if the job's is plain SGD or among `lean`."""
    optimizer = optimizer_of(job, what)
    stateless = type(optimizer) is SGD and not any(one["momentum"] for one in optimizer.param_groups)
    if stateless or isinstance(optimizer, lean):
        raise DoesNotApply(f"{type(optimizer).__name__} keeps no more than {what} would: there is nothing to save.")
    if kind is Adafactor and any(one.is_complex() for one in job.model.parameters()):
        raise DoesNotApply("Adafactor takes no complex parameters.")
    lookups = [one for one in job.model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    if kind is Adafactor and any(one.sparse for one in lookups):
        raise DoesNotApply("Adafactor takes no sparse gradients, which an embedding of this model makes.")
    trained = [one for one in job.model.parameters() if one.requires_grad]
    job.optimizer = kind(trained, lr=optimizer.defaults["lr"], **settings)


adam_of_many_layers = functools.partial(linear_stack, 8, 256, 8, classes=10, optimizer=torch.optim.AdamW, lr=1e-3)
"""Eight layers and Adam: weights, gradients and Adam's two states in equal parts, hardly any activations."""


# --- foreach ---


def _foreach(job: Job) -> None:
    """As on CUDA, where it is the default; the CPU uses it when asked to."""
    if job.optimizer is not None and "foreach" in job.optimizer.defaults:
        _set(job.optimizer, foreach=True)


def _set(optimizer: Optimizer, **settings: bool) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):  # the defaults apply to groups added later
        group.update(settings)


def _one_by_one(optimizer: Optimizer) -> None:
    if "foreach" not in optimizer.defaults:
        raise DoesNotApply(f"{type(optimizer).__name__} has no foreach implementation to switch off.")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise DoesNotApply(f"this {type(optimizer).__name__} is fused, which has no such intermediates.")
    _set(optimizer, foreach=False)


def _fuse(optimizer: Optimizer) -> None:
    if "fused" not in optimizer.defaults:
        raise DoesNotApply(f"{type(optimizer).__name__} has no fused implementation.")
    if any(not one.is_floating_point() for group in optimizer.param_groups for one in group["params"]):
        raise DoesNotApply("a fused step takes floating-point parameters only.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise DoesNotApply("a fused step is not differentiable.")
    _set(optimizer, foreach=False, fused=True)


decayed = functools.partial(linear_stack, 16, 192, 8, classes=10, lr=0.01, weight_decay=1e-4)
"""Sixteen layers and SGD with weight decay: its foreach step adds the decay to a copy of every gradient."""
TECHNIQUES = (
    *(
        described(name, Demo(adam_of_many_layers), functools.partial(_exchange, what, kind, lean, settings))
        for name, what, kind, lean, settings in (
            ("sgd", "plain SGD", SGD, (), {}),
            ("momentum", "SGD with momentum", SGD, (SGD, Adafactor), {"momentum": 0.9}),
            ("adafactor", "Adafactor", Adafactor, (Adafactor,), {}),
        )
    ),
    *(
        described(name, Demo(decayed), baseline_pattern=_foreach, **to_optimizer(change, what))
        for name, what, change in (("foreach_off", "foreach=False", _one_by_one), ("fused", "fused=True", _fuse))
    ),
)
