"""Channels last: pictures as N x H x W x C in memory, which tensor cores and oneDNN like. It is about time, not bytes.

Limits: converting takes a copy of the weights, one at a time, and of the input; scratch inside of kernels is not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.outside import on_models
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts


def convolutions() -> Parts:
    """A training step of five convolutions."""
    layers = [layer for width in (3, *[16] * 4) for layer in (nn.Conv2d(width, 16, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = torch.randn(8, 3, 48, 48), torch.randint(16, (8,))
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, nn.functional.cross_entropy


def _has_convolutions(model: nn.Module) -> None:
    if not any(isinstance(one, nn.Conv2d | nn.ConvTranspose2d) for one in model.modules()):
        raise DoesNotApply("the model has no two-dimensional convolution.")


def _last(value: Any) -> Any:
    is_picture = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_picture else value


def _apply(job: Job) -> None:
    _has_convolutions(job.model)
    job.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = len(job.batch) - 1 if job.trains else len(job.batch)
    job.batch = tuple(_last(one) if at < inputs else one for at, one in enumerate(job.batch))


def _in_place(model: nn.Module) -> None:
    _has_convolutions(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


TECHNIQUES = (
    Technique(
        name="channels_last",
        idea="Pictures and weights with the channels innermost: faster convolutions, and the same bytes.",
        attacks=("none",),
        kind="practice",
        stage="model",
        equality=close(1e-3, "other kernels add in another order"),
        price="The weights and the input once more while they are converted; none after.",
        not_when="Layers without a channels-last kernel turn tensors back and forth, each time a copy.",
        code="model = model.to(memory_format=torch.channels_last)\nx = x.to(memory_format=torch.channels_last)",
        references=(
            "PyTorch tutorial, Channels Last Memory Format, "
            "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        ),
        shown=Shown(convolutions, share=0.05),
        apply=_apply,
        outside=lambda: on_models(_in_place),
    ),
)
