"""Conditions on jobs shared by techniques, and changing a job's optimizer without losing the user's settings."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.workloads.job import Job


def only_training(job: Job) -> None:
    """Refuse inference: there is no backward that tensors would be kept for."""
    if not job.trains:
        raise DoesNotApply("this is an inference: switch gradients off instead, then nothing is kept for a backward.")


def only_inference(job: Job) -> None:
    """Refuse a job that trains."""
    if job.trains:
        raise DoesNotApply("this job goes backward, and it is for inference.")


def only_plain_step(job: Job) -> None:
    """Refuse a model with its own step, such as a GAN, of which one forward is only a part."""
    if hasattr(job.model, "job_step"):
        raise DoesNotApply(f"{type(job.model).__name__} has a step of its own, with more than one forward.")


def optimizer_of(job: Job, what: str) -> Optimizer:
    """The optimizer; refused if the job is inference."""
    if job.optimizer is None:
        raise DoesNotApply(f"{what} changes how a model is trained, and this job is an inference.")
    return job.optimizer


def keep_parameters_of(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Remove all other parameters from the optimizer, which would keep them and their state alive; `model` may be a submodule."""
    if optimizer is None:
        return
    kept = {id(one) for one in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if id(one) in kept]
    for one in [one for one in optimizer.state if id(one) not in kept]:
        del optimizer.state[one]


def rebuild(optimizer: Optimizer, groups: list[dict[str, Any]] | None = None, **settings: Any) -> Optimizer:
    """An optimizer of the same kind and groups that has not taken a step; `settings` replace those of every group."""
    kept = [{**group, **settings} for group in groups or optimizer.param_groups]
    # AdamW's defaults include an argument that its constructor does not take (decoupled_weight_decay, torch/optim/adamw.py).
    takes = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in {**optimizer.defaults, **settings}.items() if key in takes}
    try:
        return type(optimizer)(kept, **defaults)
    except Exception as error:  # the user's own optimizer may require anything
        raise DoesNotApply(f"{type(optimizer).__name__} cannot be rebuilt from its settings: {error}") from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, so that a forward changes nothing: no running statistics, no random numbers."""
    modes = [(one, one.training) for one in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for one, mode in modes:
            one.training = mode
