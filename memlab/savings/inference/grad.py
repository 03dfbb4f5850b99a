"""Inference without a graph: `no_grad`, `inference_mode`, and what is often taken for them.

Limits: an output that is kept is kept with or without a graph; what is told here is of the graph alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.technique import EXACT, Shown, Technique, changes
from memlab.workloads.job import Job, Parts

_DOCS = "PyTorch docs, Autograd mechanics, 2024, https://docs.pytorch.org/docs/stable/notes/autograd.html"


def pictures() -> Parts:
    """An inference by six convolutions with BatchNorm, as written without a thought of gradients."""
    layers: list[nn.Module] = []
    for width in (3, *[16] * 5):
        layers += [nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), None, (torch.randn(8, 3, 48, 48),), None


def layers_that_train() -> Parts:
    """A training step of four linear layers."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    batch = torch.randn(512, 64), torch.randn(512, 64)
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, nn.functional.mse_loss


@contextlib.contextmanager
def refusing_backward(mode: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """The mode around code that knows nothing of it; DoesNotApply where that code goes backward."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DoesNotApply("this calls backward, and it is for inference.")

    patches = mock.patch.object(torch.autograd, "backward", refuse), mock.patch.object(torch.autograd, "grad", refuse)
    with patches[0], patches[1], mode():
        yield


def only_inference(job: Job) -> None:
    """DoesNotApply to a job that trains."""
    if job.trains:
        raise DoesNotApply("this job goes backward, and it is for inference.")


def _no_grad(job: Job) -> None:
    only_inference(job)
    job.contexts.append(torch.no_grad)


def _inference_mode(job: Job) -> None:
    only_inference(job)
    job.contexts.append(torch.inference_mode)


def _eval(job: Job) -> None:
    only_inference(job)
    job.model.eval()


def _left_in_training(job: Job) -> None:
    job.model.train()


def _volatile(job: Job) -> None:
    feed = job.feed

    def marked() -> Iterator[tuple[float, tuple[Any, ...]]]:
        for share, batch in feed():
            yield share, tuple(_as_volatile(one) for one in batch)

    job.feed = marked


def _as_volatile(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "volatile was removed and now has no effect"
        return torch.autograd.Variable(value, volatile=True)


def _backward_without_grad(job: Job) -> None:
    if not job.trains:
        raise DoesNotApply("an inference has no backward.")
    backward = job.backward

    def wrapped(loss: Tensor) -> None:
        with torch.no_grad():
            backward(loss)

    job.backward = wrapped


TECHNIQUES = (
    Technique(
        name="no_grad",
        idea="A forward that no backward follows runs under no_grad: nothing is kept for a backward.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=EXACT,
        price="None: it is a little faster.",
        not_when="Something calls backward on the result; or all parameters are frozen and no input needs a gradient.",
        code="model.eval()\nwith torch.no_grad():\n    output = model(x)",
        references=(_DOCS,),
        shown=Shown(pictures, share=0.5),
        tips=("D1", "D2", "D3", "D4"),
        excludes={"inference_mode": "inference_mode is no_grad and more"},
        apply=_no_grad,
        outside=lambda: refusing_backward(torch.no_grad),
    ),
    Technique(
        name="inference_mode",
        idea="no_grad that also keeps no versions and views for autograd: results can never enter a graph again.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=EXACT,
        price="Results are inference tensors: autograd refuses to save them for a backward. Bytes are those of no_grad.",
        not_when="A result is used in training later; the bytes saved are the same as with no_grad.",
        code="model.eval()\nwith torch.inference_mode():\n    output = model(x)",
        references=(_DOCS,),
        shown=Shown(pictures, share=0.5),
        tips=("D1", "D2"),
        excludes={"no_grad": "inference_mode is no_grad and more"},
        apply=_inference_mode,
        outside=lambda: refusing_backward(torch.inference_mode),
    ),
    Technique(
        name="eval_mode",
        idea="Said to save as no_grad does. model.eval() switches BatchNorm and dropout, and the graph is kept all the same.",
        attacks=("none",),
        kind="myth",
        stage="step",
        equality=changes("BatchNorm takes its running statistics instead of the batch's, dropout drops nothing"),
        price="None. It is needed for right results, not for memory.",
        not_when="Always for memory, but for dropout's own outputs and masks, which are not made. Use no_grad beside it.",
        code="model.eval()              # for the results\nwith torch.no_grad():     # for the memory\n    output = model(x)",
        references=(_DOCS,),
        shown=Shown(pictures, share=0.01),
        tips=("D1",),
        apply=_eval,
        habit=_left_in_training,
    ),
    Technique(
        name="volatile",
        idea="Variable(x, volatile=True) of old tutorials: without effect since PyTorch 0.4. no_grad took its place.",
        attacks=("none",),
        kind="myth",
        stage="step",
        equality=EXACT,
        price="A warning.",
        not_when="Always: it does nothing since 2018.",
        code="# was: x = Variable(x, volatile=True)\nwith torch.no_grad():\n    output = model(x)",
        references=("PyTorch 0.4.0 migration guide, 2018, https://pytorch.org/blog/pytorch-0_4_0-migration-guide/",),
        shown=Shown(pictures, share=0.0),
        tips=("D1",),
        apply=_volatile,
    ),
    Technique(
        name="no_grad_backward",
        idea="loss.backward() inside of no_grad: it works, as the graph is there already, and saves nothing.",
        attacks=("none",),
        kind="myth",
        stage="step",
        equality=EXACT,
        price="None.",
        not_when="Always: backward records no graph anyway, unless it is asked to by create_graph=True.",
        code="with torch.no_grad():     # no use here: the graph was made in forward\n    loss.backward()",
        references=(_DOCS,),
        shown=Shown(layers_that_train, share=0.0),
        tips=("D3",),
        apply=_backward_without_grad,
    ),
)
