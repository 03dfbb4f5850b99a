"""Layers that are initialised and never used: their parameters take memory all the same.

Which ones those are is found with one example, in evaluation: neither called, nor reached by the graph of the output. A layer that
is used in training alone, or for some inputs only, looks unused then: the run says which ones went.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.loop.pieces import cut, tensors_of
from memlab.savings.loop.smaller import trying
from memlab.savings.optimizers.groups import only
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job, Parts


def unused_in(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, nn.Module]:
    """Path -> outermost module with parameters of which nothing is used in a forward."""
    called: set[int] = set()
    hooks = [one.register_forward_pre_hook(lambda module, _: called.add(id(module))) for one in model.modules()]
    try:
        with trying(model), _all_asking(model), torch.enable_grad():
            reached = reached_from(model(*(cut(one, 0, 1) for one in inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        parts = list(module.parameters())
        used = any(id(one) in called for one in module.modules()) or any(id(one) in reached for one in parts)
        if parts and not used and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


@contextlib.contextmanager
def _all_asking(model: nn.Module) -> Iterator[None]:
    """Every parameter in the graph, also a frozen one."""
    frozen = [one for one in model.parameters() if not one.requires_grad and one.is_floating_point()]
    try:
        for one in frozen:
            one.requires_grad_(True)
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)


def reached_from(output: Any) -> set[int]:
    """The ids of the parameters that the graph of an output ends at."""
    open_nodes = [one.grad_fn for one in tensors_of(output) if one.grad_fn is not None]
    open_nodes += [output.grad_fn] if isinstance(output, Tensor) and output.grad_fn is not None else []
    seen, reached = set(open_nodes), set[int]()
    while open_nodes:
        node = open_nodes.pop()
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return reached


def _apply(job: Job) -> None:
    if hasattr(job.model, "job_step"):
        raise DoesNotApply(f"{type(job.model).__name__} has a step of its own, of which a forward is only a part.")
    try:
        found = unused_in(job.model, job.batch[:-1] if job.trains else job.batch)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DoesNotApply(f"the model could not be tried with one example: {error}") from error
    if not found:
        raise DoesNotApply("every layer with parameters is used.")
    for path in found:
        parent, _, name = path.rpartition(".")
        setattr(job.model.get_submodule(parent), name, nn.Identity())  # the others keep their places in a list
    if job.optimizer is not None:
        kept = {id(one) for one in job.model.parameters()}
        only(job.optimizer, lambda one: id(one) in kept)
    job.notes.append(f"never used, and left out: {', '.join(found)}")


class Heads(nn.Module):
    """Two deep heads, for two tasks, of which one is trained."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(*(nn.Linear(width, width) for _ in range(6))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """What the first head says."""
        return self.heads[0](x)


def several_heads() -> Parts:
    """One head of two waits for a task that never comes; the peak with all of them made is that of the start."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, (torch.randn(8, 256), torch.randn(8, 256)), nn.MSELoss()


TECHNIQUES = (
    Technique(
        name="unused_layers",
        idea="Do not initialise layers that are not used: their parameters are there all the same.",
        attacks=("parameter",),
        kind="saving",
        stage="model",
        equality=changes("what is used stays bit for bit; the layers that go are not there to be compared"),
        price="none; a checkpoint that has them is loaded with strict=False",
        not_when="every layer is used; a layer is used in training alone, or for some inputs only",
        code="""
self.heads = torch.nn.ModuleDict({task: Head(width) for task in tasks_that_are_trained})
unused = [name for name, p in model.named_parameters() if p.grad is None]     # after one backward
""",
        references=(
            "PyTorch documentation, DistributedDataParallel: find_unused_parameters, 2026, "
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
        ),
        shown=Shown(several_heads),
        tips=("C13",),
        apply=_apply,
    ),
)
