"""What techniques share: conditions on jobs, changing an optimizer without losing the user's settings, and patches.

Patches switch a technique on for unmodified code, for `advise`; they are only used in a child process.
Models and optimizers are changed in place just before they are first used: outermost modules when they are called, optimizers
when they step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from memlab import torch_internals
from memlab.errors import DoesNotApply
from memlab.workloads.job import Job

T = TypeVar("T")


@contextlib.contextmanager
def must_happen(otherwise: str) -> Iterator[list[bool]]:
    """Yield a list that records changes by the technique; raise DoesNotApply at the end if there are none."""
    happened: list[bool] = []
    yield happened
    if not any(happened):
        raise DoesNotApply(otherwise)


def to_model(
    change: Callable[[nn.Module], nn.Module | None],
    condition: Callable[[Job], None] = lambda job: None,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Callable[..., Any]]:
    """Apply a change of a model to a job that meets the condition, and patch it into other code.

    `change` works in place, or returns another model, and raises DoesNotApply if it finds nothing. `around` is for the patch.
    """

    def apply(job: Job) -> None:
        condition(job)
        job.model = _changed(change, job.model)

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        with around(), on_models(change):
            yield

    return {"apply": apply, "patch": patch, "change": change}


def _changed(change: Callable[[nn.Module], nn.Module | None], model: nn.Module) -> nn.Module:
    other = change(model)
    return model if other is None else other


def to_optimizer(change: Callable[[Optimizer], None], what: str) -> dict[str, Callable[..., Any]]:
    """Apply an in-place change of an optimizer to a job that has one, and patch it into other code."""
    return {"apply": lambda job: change(optimizer_of(job, what)), "patch": lambda: on_optimizers(change)}


@contextlib.contextmanager
def on_models(change: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    """Change every outermost module before its first call; raise DoesNotApply at the end if none could be changed."""

    def in_place(model: nn.Module) -> None:
        if _changed(change, model) is not model:
            raise DoesNotApply(f"the model is one {type(model).__name__}, which cannot be replaced from outside.")

    with _each_once(in_place, "no module was called") as changed:

        def call(module: nn.Module, forward: Callable[[], Any]) -> Any:
            changed(module)
            return forward()

        with outermost_calls(call):
            yield


@contextlib.contextmanager
def on_optimizers(change: Callable[[Optimizer], None]) -> Iterator[None]:
    """Change every optimizer before its first step; raise DoesNotApply at the end if none could be changed."""
    with _each_once(change, "no optimizer took a step") as changed:
        hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: changed(optimizer))
        try:
            yield
        finally:
            hook.remove()


@contextlib.contextmanager
def _each_once(change: Callable[[T], None], nothing: str) -> Iterator[Callable[[T], None]]:
    """Yield the change, made once per object; raise the first reason at the end if it could never be made."""
    seen: set[int] = set()
    reasons: list[str] = []

    def changed(target: T) -> None:
        if id(target) in seen:
            return
        seen.add(id(target))
        try:
            change(target)
            reasons.append("")
        except DoesNotApply as error:
            reasons.append(str(error))

    yield changed
    if "" not in reasons:
        raise DoesNotApply(reasons[0] if reasons else nothing)


@contextlib.contextmanager
def outermost_calls(around: Callable[[nn.Module, Callable[[], Any]], Any]) -> Iterator[None]:
    """Call `around(module, forward)` for each module that no other module calls; it returns the module's output.

    The call itself is replaced, as a module that runs its hooks has already looked up its forward. A forward recomputed in
    backward, as by a checkpoint, is part of the model that was called before.
    """
    depth = 0
    engine, plain = torch_internals.engine_entry(), nn.Module.__call__

    def inside(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1

    is_on = True

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not is_on:  # something has kept it
            return plain(self, *args, **kwargs)
        forward = functools.partial(plain, self, *args, **kwargs)
        return inside(forward) if depth else inside(around, self, forward)

    torch_internals.replace_engine_entry(functools.partial(inside, engine))
    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        is_on = False
        if nn.Module.__call__ is call:  # else other code has replaced it meanwhile
            nn.Module.__call__ = plain  # type: ignore[method-assign]
        torch_internals.replace_engine_entry(engine)


def refusing(why: str) -> Callable[..., None]:
    """A function that always raises DoesNotApply."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DoesNotApply(why)  # a new one each time: a Mock would keep the arguments, a single instance the frames

    return refuse


@contextlib.contextmanager
def refusing_backward(mode: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> Iterator[None]:
    """Run unmodified code in this mode; DoesNotApply if it calls backward."""
    refuse = refusing("this calls backward, and it is for inference.")
    with mock.patch.multiple(torch.autograd, backward=refuse, grad=refuse), mode():
        yield


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
