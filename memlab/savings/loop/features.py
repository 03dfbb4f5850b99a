"""Features of several layers collected into lists, as for style transfer.

Under no_grad a list costs what is in it; else each feature keeps everything that autograd saved on the way to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.inference import inference
from memlab.workloads.job import Job, Parts
from memlab.workloads.registry import KNOWN

_LAYERS = 4
"""From how many layers features are taken."""


def layers_of(model: nn.Module, count: int = _LAYERS) -> list[nn.Module]:
    """Layers without children, evenly spaced through the model."""
    leaves = [one for one in model.modules() if not any(True for _ in one.children())]
    every = max(1, len(leaves) // count)
    return leaves[every - 1 :: every][:count]


def _collect(job: Job) -> None:
    """Keep the features of every step in a list, until the next step makes a new one."""
    if job.trains:
        return
    features: list[Tensor] = []

    def taken(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            features.append(output)

    @contextlib.contextmanager
    def collecting() -> Iterator[None]:
        features.clear()
        hooks = [one.register_forward_hook(taken) for one in layers_of(job.model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    job.contexts.append(collecting)
    job.held.append(features)


def _apply(job: Job) -> None:
    if job.trains:
        raise DoesNotApply("features are extracted without training; this job trains, and needs its graph.")
    _collect(job)
    job.contexts.append(torch.no_grad)


def pictures() -> Parts:
    """VGG-16 looks at pictures; nobody said no_grad."""
    return inference(KNOWN["vgg16"].sized("tiny"))()


TECHNIQUES = (
    Technique(
        name="feature_lists",
        idea="Collect features of several layers under no_grad: each of them else keeps the whole graph that leads to it.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=EXACT,
        price="none, where no gradient is wanted through the features",
        not_when="the picture itself is optimised (style transfer): its features need the graph; those of the fixed content and "
        "style pictures do not",
        code="""
style_features = []
with torch.no_grad():
    x = style_picture
    for index, layer in enumerate(vgg19.features):
        x = layer(x)
        if index in (1, 3, 5, 9):
            style_features.append(x)
""",
        references=(
            "Gatys et al., A Neural Algorithm of Artistic Style, 2015, https://arxiv.org/abs/1508.06576",
            "PyTorch tutorial, Neural Transfer Using PyTorch, 2026, "
            "https://docs.pytorch.org/tutorials/advanced/neural_style_tutorial.html",
        ),
        shown=Shown(pictures),
        tips=("D4",),
        habit=_collect,
        apply=_apply,
    ),
)
