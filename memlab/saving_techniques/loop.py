"""What a training loop keeps alive: outputs and losses by name, a retained graph, gradients between steps.

How much a name keeps depends on the graph. Backward frees the tensors of a graph, so that a name keeps an output and a
number. Without a backward, in a validation loop that forgot no_grad, a name keeps every activation of its forward. With
`retain_graph=True` backward leaves them alive too, until the last name of the graph is gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, autograd, nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import conv_stack, linear_stack, relu
from memlab.saving_techniques.patching import must_happen, optimizer_of
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import tensors_in

# --- names ---


def names_stay(job: Job) -> None:
    """`output = model(x)` and `loss = criterion(output, y)`: each lives until its name is assigned again."""
    names: dict[str, Any] = {}
    keep, forward, backward = job.keep, job.forward, job.backward

    def keep_names(output: Any, loss: Tensor) -> None:
        keep(output, loss)
        names["output"] = output
        if job.trains:
            names["loss"] = loss

    def forward_then_rebind(*inputs: Any) -> Any:
        output = forward(*inputs)
        names.pop("output", None)
        return output

    def rebind_then_backward(loss: Tensor) -> None:
        names.pop("loss", None)
        backward(loss)

    job.keep, job.forward, job.backward = keep_names, forward_then_rebind, rebind_then_backward


def _delete(job: Job) -> None:
    step = job.step

    def run() -> None:
        job.output = None  # an inference's; a training step deletes its own
        step()

    job.step = run


def _log(job: Job, detached: bool) -> None:
    """Keep a number of every step: the loss; in an inference the mean of the output."""
    keep = job.keep

    def log(output: Any, loss: Tensor) -> None:
        keep(output, loss)
        score = loss if job.trains else next((one.float().mean() for one in tensors_in(output)), None)
        if score is not None:
            job.held.append(score.detach() if detached else score)

    job.keep = log


def validation() -> Parts:
    """A validation loop that forgot no_grad: its output holds every activation."""
    model, *rest = conv_stack(6, 8, nn.BatchNorm2d, relu, images=(4, 8, 32), head=False, training=False)
    return nn.Sequential(*model.children(), nn.Conv2d(8, 1, 1)), *rest  # type: ignore[return-value]


# --- a graph that is retained ---


def _retain(job: Job) -> None:
    """On every backward, as it is often written after one of them complained."""
    if job.trains:
        job.backward = lambda loss: loss.backward(retain_graph=True)
        names_stay(job)


def _free_graph(job: Job) -> None:
    """The plain backward frees the graph: there is nothing to change."""
    optimizer_of(job, "a backward without retain_graph")


@contextlib.contextmanager
def _patch_retain() -> Iterator[None]:
    """Every backward frees its graph; refused where another one needs the graph, or where nothing retained one."""
    original = autograd.backward  # Tensor.backward calls it too, by this name (torch/_tensor.py)

    def freeing(
        tensors: Any, gradients: Any = None, retain: bool | None = None, create: bool = False, *args: Any, **rest: Any
    ) -> None:
        gradients = rest.pop("grad_tensors", gradients)
        retain, create = rest.pop("retain_graph", retain), rest.pop("create_graph", create)
        ignored.append(bool(retain) and not create)
        try:
            original(tensors, gradients, retain if create else False, create, *args, **rest)
        except RuntimeError as error:
            if "a second time" not in str(error):
                raise
            raise DoesNotApply("another backward goes through the graph that was retained.") from error

    with must_happen("no backward retains its graph.") as ignored, mock.patch.object(autograd, "backward", freeing):
        yield


# --- gradients ---


def _keep_zeros(job: Job) -> None:
    """As it was PyTorch's default until 2.0."""
    if job.trains:
        job.clear = lambda: optimizer_of(job, "zero_grad").zero_grad(set_to_none=False)


def _set_to_none(job: Job) -> None:
    optimizer_of(job, "set_to_none")
    clear = job.clear

    def free() -> None:
        clear()
        for one in _trained(job):
            one.grad = None

    job.clear = free


def _trained(job: Job) -> list[Tensor]:
    """Every parameter that the current optimizer updates, once."""
    groups = optimizer_of(job, "a training loop").param_groups
    return list({id(one): one for group in groups for one in group["params"]}.values())


@contextlib.contextmanager
def _patch_zeros() -> Iterator[None]:
    """Make every zero_grad set gradients to None; raises DoesNotApply at the end if none wanted zeros."""

    def freeing(original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            asked_for_zeros.append(not set_to_none)
            original(self, set_to_none=True)

        return zero_grad

    otherwise = "gradients are freed already: nothing calls zero_grad(set_to_none=False)."
    with must_happen(otherwise) as asked_for_zeros, contextlib.ExitStack() as stack:
        for owner in (Optimizer, nn.Module):
            stack.enter_context(mock.patch.object(owner, "zero_grad", freeing(owner.zero_grad)))
        yield


balanced = functools.partial(linear_stack, 40, 96, 100, activation=nn.Tanh)
"""Weights and activations of equal size, plain SGD: gradients kept during forward add to all of its activations."""


def _clip(job: Job, context: Callable[[], Any]) -> None:
    """Clip between backward and step; PyTorch's clipping is under no_grad itself."""
    optimizer_of(job, "clipping")
    update = job.update

    def clipped() -> None:
        with context():
            nn.utils.clip_grad_norm_(_trained(job), 1.0)
        update()

    job.update = clipped


TECHNIQUES = (
    described("delete_loss", Demo(validation), _delete, baseline_pattern=names_stay),
    described(
        "detach_logged",
        Demo(validation, share=0.4, steps=5),
        lambda job: _log(job, detached=True),
        baseline_pattern=lambda job: _log(job, detached=False),
    ),
    described("retain_graph", Demo("gan"), _free_graph, baseline_pattern=_retain, patch=_patch_retain),
    described("set_to_none", Demo(balanced), _set_to_none, baseline_pattern=_keep_zeros, patch=_patch_zeros),
    described(
        "clip_under_no_grad",
        Demo("mlp", share=0.01),
        lambda job: _clip(job, torch.no_grad),
        baseline_pattern=lambda job: _clip(job, contextlib.nullcontext) if job.trains else None,
    ),
)
