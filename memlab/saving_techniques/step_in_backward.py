"""The optimizer's step inside backward: each parameter is updated, and its gradient freed, as soon as it is computed.

Not for what needs all gradients at once: accumulation, clipping by the global norm, a gradient scaler.
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
from memlab.saving_techniques.param_groups import optimizer_of
from memlab.saving_techniques.patching import must_happen, refusing
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job


class Eager:
    """An optimizer that updates each parameter as soon as its gradient is computed.

    State and groups stay those of the optimizer, so that a learning rate schedule works as before.
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


def _apply(job: Job) -> None:
    eager = Eager(optimizer_of(job, "the step in backward"))
    clear = job.clear

    def clear_and_begin() -> None:
        clear()
        eager.stepped.clear()

    job.clear, job.update = clear_and_begin, lambda: None


@contextlib.contextmanager
def _patch() -> Iterator[None]:
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
TECHNIQUES = (described("step_in_backward", Demo(deep), _apply, patch=_patch),)
