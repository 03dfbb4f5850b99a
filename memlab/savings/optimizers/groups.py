"""The optimizer of a job and its groups of parameters, changed without losing what the user set; no technique of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.savings.technique import Technique
from memlab.workloads.job import Job

TECHNIQUES: tuple[Technique, ...] = ()


def optimizer_of(job: Job, what: str) -> Optimizer:
    """The optimizer; refused where the job is an inference."""
    if job.optimizer is None:
        raise DoesNotApply(f"{what} changes how a model is trained, and this job is an inference.")
    return job.optimizer


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether an embedding gives its gradient as the rows that were looked up alone."""
    return any(isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse for one in model.modules())


def trained(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that it updates, once."""
    return list({id(one): one for group in optimizer.param_groups for one in group["params"]}.values())


def only(optimizer: Optimizer, stays: Callable[[Tensor], bool]) -> None:
    """Take the other parameters out of the optimizer: it would keep them and their state alive."""
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if stays(one)]
    for one in [one for one in optimizer.state if not stays(one)]:
        del optimizer.state[one]


def replaced(optimizer: Optimizer, new: Mapping[int, Tensor]) -> None:
    """Put parameters in the place of others; `new` has them under the id of the old."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(one), one) for one in group["params"]]


def remade(optimizer: Optimizer, groups: list[dict[str, Any]] | None = None, **settings: Any) -> Optimizer:
    """An optimizer of the same kind and groups that has not taken a step; `settings` go over those of every group."""
    kept = [{**group, **settings} for group in groups or optimizer.param_groups]
    # AdamW has among its defaults what its constructor does not take (decoupled_weight_decay, torch/optim/adamw.py).
    takes = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in {**optimizer.defaults, **settings}.items() if key in takes}
    try:
        return type(optimizer)(kept, **defaults)
    except Exception as error:  # an optimizer of the user's own may want anything
        raise DoesNotApply(f"{type(optimizer).__name__} cannot be made anew from its settings: {error}") from error
