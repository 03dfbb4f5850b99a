"""Training the last layer alone: the rest asks for no gradient (freezing), or does not even record one (feature extraction).

The last layer is the last module that has parameters of its own. To leave the others out of the optimizer, and no more, lets
autograd go on saving activations and making gradients for all of them. BatchNorm goes on updating its running statistics in a
frozen part, unless that is set to eval().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import only, optimizer_of
from memlab.savings.technique import Equality, Shown, Technique
from memlab.workloads.job import Job


def head_of(model: nn.Module) -> nn.Module:
    """The last module with parameters of its own; refused where that is all there is."""
    found = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
    if len(found) < 2:
        raise DoesNotApply(f"{type(model).__name__} has {len(found)} layers with parameters: there is none to freeze.")
    return found[-1]


def _head(job: Job, what: str) -> nn.Module:
    optimizer_of(job, what)
    if hasattr(job.model, "job_step"):
        raise DoesNotApply(f"{type(job.model).__name__} has a step of its own, with more than one last layer.")
    head = head_of(job.model)
    if not any(one.requires_grad for one in head.parameters()):
        raise DoesNotApply("the last layer is frozen: with the rest frozen too, nothing would be trained.")
    return head


def _left_out(job: Job) -> None:
    """The others are left out of the optimizer, and nothing else is done about them."""
    try:
        head = _head(job, "freezing")
    except DoesNotApply:
        return
    kept = {id(one) for one in head.parameters()}
    only(optimizer_of(job, "freezing"), lambda one: id(one) in kept)


def freeze_but(job: Job, head: nn.Module) -> None:
    """No gradient for any parameter outside of the head; the optimizer forgets them."""
    kept = {id(one) for one in head.parameters()}
    for one in job.model.parameters():
        if id(one) not in kept:
            one.requires_grad_(False)
            one.grad = None
    only(optimizer_of(job, "freezing"), lambda one: id(one) in kept)


def _freeze(job: Job) -> None:
    freeze_but(job, _head(job, "freezing"))


def _refuse_shared(model: nn.Module, head: nn.Module) -> None:
    """A weight that an earlier layer has too is trained there as well, where nothing is recorded any more."""
    own = {id(one) for one in head.parameters()}
    inside = set(head.modules())
    for name, module in model.named_modules():
        if module not in inside and own & {id(one) for one in module.parameters(recurse=False)}:
            raise DoesNotApply(f"the last layer, which is trained, shares its weight with {name}, before it.")


def _extract(job: Job) -> None:
    """Record nothing from the start of forward to the last layer."""
    head = _head(job, "feature extraction")
    _refuse_shared(job.model, head)
    freeze_but(job, head)
    forward = job.forward

    def recording(module: nn.Module, inputs: Any) -> None:
        torch.set_grad_enabled(True)

    def extracted(*inputs: Any) -> Any:
        hook = head.register_forward_pre_hook(recording)
        was = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)
            return forward(*inputs)
        finally:
            torch.set_grad_enabled(was)
            hook.remove()

    job.forward = extracted


_TRANSFER = (
    "Yosinski et al., How transferable are features in deep neural networks?, 2014, https://arxiv.org/abs/1411.1792",
    "PyTorch tutorial, Transfer Learning for Computer Vision, 2026, "
    "https://docs.pytorch.org/tutorials/beginner/transfer_learning_tutorial.html",
)
_SAME = Equality("exact", why="as long as the rest was not in the optimizer before; else it is not trained any more")
_TIED = "the last layer, which is trained, would be the embedding, which is frozen."
_ADAPTED = "adapters are what is trained then, in every layer; the rest is frozen by them."

TECHNIQUES = (
    Technique(
        name="freezing",
        idea="Tell what is not trained by requires_grad_(False): to leave it out of the optimizer saves only the optimizer's part.",
        attacks=("activation", "gradient", "optimizer"),
        kind="saving",
        stage="model",
        equality=_SAME,
        price="none, where those parameters are not to be trained",
        not_when="a trained layer stands before the frozen ones: the way back to it goes through them, with their activations",
        code="""
model.requires_grad_(False)
model.head.requires_grad_(True)
optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
""",
        references=_TRANSFER,
        shown=Shown("resnet50"),
        tips=("C11",),
        excludes={"weight_tying": _TIED, "low_rank": _ADAPTED},
        habit=_left_out,
        apply=_freeze,
    ),
    Technique(
        name="feature_extraction",
        idea="Run the frozen part under no_grad and record from the new last layer on.",
        attacks=("activation", "gradient", "optimizer"),
        kind="saving",
        stage="model",
        equality=_SAME,
        price="none, where only the last layer is trained; features could even be computed once and stored",
        not_when="a layer before the last one is trained; freezing the parameters saves the same, where the input asks for no "
        "gradient either",
        code="""
backbone = torchvision.models.resnet50(weights="DEFAULT")
backbone.fc = torch.nn.Identity()
backbone.eval()                           # else BatchNorm goes on moving its statistics
head = torch.nn.Linear(2048, classes)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)

with torch.no_grad():
    features = backbone(x)
loss = criterion(head(features), y)
loss.backward()
""",
        references=_TRANSFER,
        shown=Shown("resnet50"),
        tips=("C11", "D1"),
        excludes={"weight_tying": _TIED, "low_rank": _ADAPTED},
        habit=_left_out,
        apply=_extract,
    ),
)
