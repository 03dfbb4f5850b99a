"""The optimizer's step inside of backward: each parameter is updated, and its gradient let go, as soon as that is there.

Not for what looks at all gradients together: accumulation, clipping by the global norm, a gradient scaler.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import optimizer_of
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

_TWICE = "a second backward before the step: with the step in backward the weights have moved on by then"


def _apply(job: Job) -> None:
    optimizer = optimizer_of(job, "the step in backward")
    eager = Eager(optimizer)
    clear = job.clear

    def cleared() -> None:
        clear()
        eager.stepped.clear()

    job.clear, job.update = cleared, lambda: None


class Eager:
    """An optimizer that takes its step for each parameter as soon as the gradient is there.

    State and groups stay those of the optimizer, so that a schedule of the learning rate works as before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer) or type(optimizer).step is Optimizer.step:
            raise DoesNotApply(f"{type(optimizer).__name__} is no optimizer of single parameters.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise DoesNotApply("LBFGS looks at all gradients together.")
        self.optimizer = weakref.ref(optimizer)  # which may hold this: without a cycle both go with the last name
        self.stepped: set[int] = set()
        """Which parameters have taken this step's update."""
        self.handles: list[Any] = []
        for place, group in enumerate(optimizer.param_groups):
            for one in group["params"]:
                if one.requires_grad:
                    self.handles.append(one.register_post_accumulate_grad_hook(_hook(weakref.ref(self), place)))

    def take(self, parameter: Tensor, place: int) -> None:
        """Update one parameter of the group at this place, and let go of its gradient."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        if id(parameter) in self.stepped:
            raise DoesNotApply(f"{_TWICE}.")
        self.stepped.add(id(parameter))
        alone(optimizer, optimizer.param_groups[place], parameter).step()
        parameter.grad = None


def _hook(eager: weakref.ref[Eager], place: int) -> Callable[[Tensor], None]:
    """Weak, as the garbage collector does not look into the hooks of a parameter: a cycle through them stays for ever."""

    def hook(parameter: Tensor) -> None:
        if (found := eager()) is not None:
            found.take(parameter, place)

    return hook


def alone(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Optimizer:
    """The same optimizer for one parameter of it: a shallow copy, whose state is that of the original."""
    one = copy.copy(optimizer)
    one.__dict__ = {**optimizer.__dict__, "param_groups": [{**group, "params": [parameter]}]}
    one.__dict__.pop("step", None)  # a schedule's: bound to the original
    return one


def deep() -> Parts:
    """Eight layers and plain SGD: half of the peak is gradients."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, (torch.randn(8, 256), torch.randint(0, 10, (8,))), nn.CrossEntropyLoss()


# --- for code that knows nothing of it --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Every optimizer made from now on steps in backward; what looks at all gradients together is refused."""
    made: list[weakref.ref[Eager]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_eager_from_birth(made))
        stack.enter_context(
            _refused(nn.utils.clip_grad_norm_, "clipping by the global norm needs all gradients together")
        )
        stack.enter_context(_refused(nn.utils.clip_grad_value_, "clipping needs the gradients before the step"))
        stack.enter_context(
            _refused_method(torch.amp.GradScaler, "step", "a gradient scaler looks at all gradients first")
        )
        yield
    if not made:
        raise DoesNotApply("no optimizer was made while it was on.")


@contextlib.contextmanager
def _eager_from_birth(made: list[weakref.ref[Eager]]) -> Iterator[None]:
    init = Optimizer.__init__

    def eager_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        eager = Eager(self)
        made.append(weakref.ref(eager))

        # The loop's own step finds no gradient, and does nothing; a copy's (`alone`) comes by here too.
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is eager.optimizer():
                if len(args) > 1 or kwargs.get("closure") is not None:
                    raise DoesNotApply("a step with a closure runs its own backward.")
                eager.stepped.clear()

        eager.handles.append(self.register_step_pre_hook(before))

    Optimizer.__init__ = eager_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = init  # type: ignore[method-assign]
        for eager in filter(None, (one() for one in made)):
            for handle in eager.handles:
                handle.remove()


@contextlib.contextmanager
def _refused(function: Callable[..., Any], why: str) -> Iterator[None]:
    """Refuse a function under every name by which a module knows it: it may have been imported long ago."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DoesNotApply(f"{why}.")

    known = [
        (vars(module), name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
    for names, name in known:
        names[name] = refuse
    try:
        yield
    finally:
        for names, name in known:
            names[name] = function


@contextlib.contextmanager
def _refused_method(owner: type, name: str, why: str) -> Iterator[None]:
    method = getattr(owner, name)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DoesNotApply(f"{why}.")

    setattr(owner, name, refuse)
    try:
        yield
    finally:
        setattr(owner, name, method)


TECHNIQUES = (
    Technique(
        name="step_in_backward",
        idea="Update each parameter as soon as its gradient is there, and let the gradient go: they never wait for one another.",
        attacks=("gradient",),
        kind="saving",
        stage="optimizer",
        equality=EXACT,
        price="what needs all gradients together is out: accumulation, clipping by the global norm, a gradient scaler; one small "
        "step for each parameter in the place of a few large ones",
        not_when="activations are the peak; a batch is accumulated over several backwards; two losses share parameters",
        code="""
optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

def step_and_let_go(p):
    optimizers[p].step()
    p.grad = None

for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_and_let_go)

loss = criterion(model(x), y)
loss.backward()                     # takes the step too: no optimizer.step(), no zero_grad()
""",
        references=(
            "PyTorch tutorial, How to save memory by fusing the optimizer step into the backward pass, 2023, "
            "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
            "Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources (LOMO), 2023, "
            "https://arxiv.org/abs/2306.09782",
        ),
        shown=Shown(deep),
        excludes={
            "accumulation": "the gradients of all pieces are summed before a step; here the first piece would step.",
            "clip_under_no_grad": "the global norm needs all gradients together.",
        },
        apply=_apply,
        outside=_outside,
    ),
)
