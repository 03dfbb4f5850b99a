"""Optimizers with less state, how a step iterates over the parameters, and the step inside backward.

Per parameter plain SGD keeps nothing between steps, momentum one number, Adam two; Adafactor keeps a row and a column per
matrix. With foreach, PyTorch's default on CUDA, an intermediate of the formula exists for all parameters at once: as many
bytes as they have themselves. How many intermediates there are depends on the formula: plain SGD has none.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import linear_stack
from memlab.saving_techniques.patching import must_happen, optimizer_of, refusing, to_optimizer
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job

SGD, Adafactor = torch.optim.SGD, torch.optim.Adafactor


def _exchange(what: str, kind: Any, lean: tuple[type[Optimizer], ...], settings: dict[str, float], job: Job) -> None:
    """Another optimizer with the job's learning rate; refused if the job's is plain SGD or among `lean`."""
    optimizer = optimizer_of(job, what)
    stateless = type(optimizer) is SGD and not any(one["momentum"] for one in optimizer.param_groups)
    if stateless or isinstance(optimizer, lean):
        raise DoesNotApply(f"{type(optimizer).__name__} keeps no more than {what} would: there is nothing to save.")
    if kind is Adafactor and any(one.is_complex() for one in job.model.parameters()):
        raise DoesNotApply("Adafactor takes no complex parameters.")
    lookups = [one for one in job.model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    if kind is Adafactor and any(one.sparse for one in lookups):
        raise DoesNotApply("Adafactor takes no sparse gradients, which an embedding of this model makes.")
    trained = [one for one in job.model.parameters() if one.requires_grad]
    job.optimizer = kind(trained, lr=optimizer.defaults["lr"], **settings)


adam_of_many_layers = functools.partial(linear_stack, 8, 256, 8, classes=10, optimizer=torch.optim.AdamW, lr=1e-3)
"""Eight layers and Adam: weights, gradients and Adam's two states in equal parts, hardly any activations."""


# --- foreach ---


def _foreach(job: Job) -> None:
    """As on CUDA, where it is the default; the CPU uses it when asked to."""
    if job.optimizer is not None and "foreach" in job.optimizer.defaults:
        _set(job.optimizer, foreach=True)


def _set(optimizer: Optimizer, **settings: bool) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):  # the defaults apply to groups added later
        group.update(settings)


def _one_by_one(optimizer: Optimizer) -> None:
    if "foreach" not in optimizer.defaults:
        raise DoesNotApply(f"{type(optimizer).__name__} has no foreach implementation to switch off.")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise DoesNotApply(f"this {type(optimizer).__name__} is fused, which has no such intermediates.")
    _set(optimizer, foreach=False)


def _fuse(optimizer: Optimizer) -> None:
    if "fused" not in optimizer.defaults:
        raise DoesNotApply(f"{type(optimizer).__name__} has no fused implementation.")
    if any(not one.is_floating_point() for group in optimizer.param_groups for one in group["params"]):
        raise DoesNotApply("a fused step takes floating-point parameters only.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise DoesNotApply("a fused step is not differentiable.")
    _set(optimizer, foreach=False, fused=True)


decayed = functools.partial(linear_stack, 16, 192, 8, classes=10, lr=0.01, weight_decay=1e-4)
"""Sixteen layers and SGD with weight decay: its foreach step adds the decay to a copy of every gradient."""


# --- the step inside backward ---


class Eager:
    """An optimizer that updates each parameter, and frees its gradient, as soon as that is computed.

    Not for what needs all gradients at once: accumulation, clipping by the global norm, a gradient scaler. State and groups
    stay those of the optimizer, so that a learning rate schedule works as before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer) or type(optimizer).step is Optimizer.step:
            raise DoesNotApply(f"{type(optimizer).__name__} is no optimizer of single parameters.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise DoesNotApply("LBFGS looks at all gradients together.")
        self.optimizer = weakref.ref(optimizer)  # which may hold this object: avoid a cycle
        self.stepped: set[int] = set()
        """The parameters already updated in this step."""
        self.handles: list[Any] = []
        # Weak, as the garbage collector does not look into the hooks of a parameter: a cycle through them stays forever.
        eager = weakref.ref(self)

        def hook_of(place: int) -> Callable[[Tensor], None]:
            return lambda parameter: found.update(parameter, place) if (found := eager()) is not None else None

        for place, group in enumerate(optimizer.param_groups):
            for one in group["params"]:
                if one.requires_grad:
                    self.handles.append(one.register_post_accumulate_grad_hook(hook_of(place)))

    def update(self, parameter: Tensor, place: int) -> None:
        """Update one parameter of the group at this place, and free its gradient."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        if id(parameter) in self.stepped:
            raise DoesNotApply(
                "a second backward before the step: with the step in backward the weights have changed by then."
            )
        self.stepped.add(id(parameter))
        one = copy.copy(optimizer)  # a shallow copy, whose state is that of the original, for one parameter
        group = {**optimizer.param_groups[place], "params": [parameter]}
        one.__dict__ = {**optimizer.__dict__, "param_groups": [group]}
        one.__dict__.pop("step", None)  # a schedule's: bound to the original
        one.step()
        parameter.grad = None


def _step_in_backward(job: Job) -> None:
    eager = Eager(optimizer_of(job, "the step in backward"))
    clear = job.clear

    def clear_and_begin() -> None:
        clear()
        eager.stepped.clear()

    job.clear, job.update = clear_and_begin, lambda: None


@contextlib.contextmanager
def _patch_new_optimizers() -> Iterator[None]:
    """Make every new optimizer step in backward; refuse what needs all gradients at once."""
    init, made = Optimizer.__init__, list[weakref.ref[Eager]]()

    def eager_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        eager = Eager(self)
        made.append(weakref.ref(eager))

        # The loop's own step finds no gradients and does nothing; copies for one parameter are handled here too.
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is eager.optimizer():
                if len(args) > 1 or kwargs.get("closure") is not None:
                    raise DoesNotApply("a step with a closure runs its own backward.")
                eager.stepped.clear()

        eager.handles.append(self.register_step_pre_hook(before_step))

    with must_happen("no optimizer was made while it was on.") as happened, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Optimizer, "__init__", eager_init))
        for function, why in (
            (nn.utils.clip_grad_norm_, "clipping by the global norm needs all gradients together."),
            (nn.utils.clip_grad_value_, "clipping needs the gradients before the step."),
        ):
            # Under every name in every module: it may have been imported long ago.
            for module in list(sys.modules.values()):
                for name in [key for key, value in getattr(module, "__dict__", {}).items() if value is function]:
                    stack.enter_context(mock.patch.object(module, name, refusing(why)))
        why = "a gradient scaler looks at all gradients first."
        stack.enter_context(mock.patch.object(torch.amp.GradScaler, "step", refusing(why)))
        try:
            yield
        finally:
            happened.append(bool(made))
            for eager in filter(None, (one() for one in made)):
                for handle in eager.handles:
                    handle.remove()


deep = functools.partial(linear_stack, 8, 256, 8, classes=10)
"""Eight layers and plain SGD: half of the peak is gradients."""
TECHNIQUES = (
    *(
        described(name, Demo(adam_of_many_layers), functools.partial(_exchange, what, kind, lean, settings))
        for name, what, kind, lean, settings in (
            ("sgd", "plain SGD", SGD, (), {}),
            ("momentum", "SGD with momentum", SGD, (SGD, Adafactor), {"momentum": 0.9}),
            ("adafactor", "Adafactor", Adafactor, (Adafactor,), {}),
        )
    ),
    *(
        described(name, Demo(decayed), baseline_pattern=_foreach, **to_optimizer(change, what))
        for name, what, change in (("foreach_off", "foreach=False", _one_by_one), ("fused", "fused=True", _fuse))
    ),
    described("step_in_backward", Demo(deep), _step_in_backward, patch=_patch_new_optimizers),
)
