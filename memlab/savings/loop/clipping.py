"""Clipping under no_grad: people write it so, and it makes no difference, as PyTorch's clipping is under no_grad itself."""

from __future__ import annotations

import torch
from torch import nn

from memlab.savings.optimizers.groups import optimizer_of, trained
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job

_NORM = 1.0


def _clip(job: Job) -> None:
    """Between backward and step, as it is usually written."""
    if job.optimizer is None:
        return
    update = job.update

    def clipped() -> None:
        nn.utils.clip_grad_norm_(trained(optimizer_of(job, "clipping")), _NORM)
        update()

    job.update = clipped


def _clip_under(job: Job) -> None:
    optimizer_of(job, "clipping")
    update = job.update

    def clipped() -> None:
        with torch.no_grad():
            nn.utils.clip_grad_norm_(trained(optimizer_of(job, "clipping")), _NORM)
        update()

    job.update = clipped


TECHNIQUES = (
    Technique(
        name="clip_under_no_grad",
        idea="Wrap gradient clipping in no_grad: PyTorch's clip_grad_norm_ does so itself.",
        attacks=("none",),
        kind="myth",
        stage="step",
        equality=EXACT,
        price="none; clipping itself needs every gradient alive until the norm is known",
        not_when="always, with PyTorch's function; clipping that is written by hand on .grad records nothing either, as "
        "gradients do not require gradients",
        code="""
loss.backward()
with torch.no_grad():                     # makes no difference
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
""",
        references=(
            "Pascanu et al., On the difficulty of training Recurrent Neural Networks, 2012, https://arxiv.org/abs/1211.5063",
            "PyTorch documentation, clip_grad_norm_, 2026, "
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
        ),
        shown=Shown("mlp", share=0.01),
        tips=("D3",),
        excludes={
            "step_in_backward": "the global norm needs all gradients together.",
            "autocast_fp16": "its gradients are scaled until the step: they would have to be unscaled before they are clipped.",
        },
        habit=_clip,
        apply=_clip_under,
    ),
)
