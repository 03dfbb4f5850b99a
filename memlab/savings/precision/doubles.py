"""float64 by accident: numpy makes doubles, and one `.double()` for their sake doubles everything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.savings.precision.pure_half import converted
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job
from memlab.workloads.nested import mapped


def _apply(job: Job) -> None:
    """Doubles become singles; a job that has none is what this one should have been."""
    if any(one.dtype == torch.float64 for one in job.model.parameters()):
        job.model.float()
    if isinstance(job.loss, nn.Module) and any(one.dtype == torch.float64 for one in _tensors(job.loss)):
        job.loss.float()
    job.batch = mapped(job.batch, lambda one: one.float() if one.dtype == torch.float64 else one)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _habit(job: Job) -> None:
    """A batch that came from numpy, and a model made to fit it."""
    job.batch = converted(job.batch, torch.float64)
    job.model.double()
    if isinstance(job.loss, nn.Module):  # its weights of classes, say
        job.loss.double()


TECHNIQUES = (
    Technique(
        name="float32",
        idea="Make numpy's doubles float32 where they come in, instead of making the model double to fit them.",
        attacks=("parameter", "gradient", "optimizer", "activation", "input"),
        kind="saving",
        stage="model",
        equality=close(1e-4, "float32 has 24 significant bits, float64 53"),
        price="none for training. On most cards doubles are 2 to 64 times slower as well.",
        not_when="The sums need it: physics, ill-conditioned solves, checks of gradients.",
        code="""\
import numpy as np
import torch

x = torch.from_numpy(np.asarray(table, dtype=np.float32))  # not: from_numpy(table) and model.double()
""",
        references=(
            "torch.from_numpy, PyTorch documentation, https://docs.pytorch.org/docs/stable/generated/torch.from_numpy.html",
        ),
        shown=Shown("mlp", share=0.45),
        tips=("A2",),
        apply=_apply,
        habit=_habit,
    ),
)
