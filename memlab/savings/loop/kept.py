"""What the loop keeps alive by a name: the last output and loss, and a list of losses for the plot.

How much that is depends on the graph. After backward a graph has let go of its tensors, and what a name keeps is an output and a
number. Without a backward, in a validation loop that forgot no_grad, a name keeps every activation of its forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts


def names_stay(job: Job) -> None:
    """`output = model(x)` and `loss = criterion(output, y)`: each lives until the line gives its name another value."""
    names: dict[str, Any] = {}
    keep, forward, backward = job.keep, job.forward, job.backward

    def named(output: Any, loss: Tensor) -> None:
        keep(output, loss)
        names["output"] = output
        if job.trains:
            names["loss"] = loss

    def rebinding(*inputs: Any) -> Any:
        output = forward(*inputs)
        names.pop("output", None)
        return output

    def rebound(loss: Tensor) -> None:
        names.pop("loss", None)
        backward(loss)

    job.keep, job.forward, job.backward = named, rebinding, rebound


def _apply_delete(job: Job) -> None:
    step = job.step

    def run() -> None:
        job.output = None  # an inference's; a training step deletes its own
        step()

    job.step = run


def _score(job: Job, output: Any, loss: Tensor) -> Tensor | None:
    """What is logged: the loss; in an inference a number made of the output."""
    if job.trains:
        return loss
    found = first_tensor(output)
    return None if found is None else found.float().mean()


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a model's output."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for one in parts if (found := first_tensor(one)) is not None), None)


def _log(job: Job, detached: bool) -> None:
    keep = job.keep

    def logged(output: Any, loss: Tensor) -> None:
        keep(output, loss)
        score = _score(job, output, loss)
        if score is not None:
            job.held.append(score.detach() if detached else score)

    job.keep = logged


def validation() -> Parts:
    """A validation loop that forgot no_grad: its output hangs on every activation."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.Conv2d(8, 1, 1)), None, (torch.randn(4, 8, 32, 32),), None


TECHNIQUES = (
    Technique(
        name="delete_loss",
        idea="Delete output and loss at the end of an iteration, so that they are gone when the next forward begins.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=EXACT,
        price="a line",
        not_when="after backward it frees the last output and a number, no more: little, and nothing where the peak is behind "
        "forward; it is much where there was no backward, as output and loss then hold the whole graph (better: no_grad)",
        code="""
for x, y in loader:
    output = model(x)
    loss = criterion(output, y)
    total += loss.item()
    del output, loss
""",
        references=(
            "PyTorch documentation, FAQ: My model reports out of memory, 2026, "
            "https://docs.pytorch.org/docs/stable/notes/faq.html",
        ),
        shown=Shown(validation),
        tips=("C3", "D2"),
        habit=names_stay,
        apply=_apply_delete,
    ),
    Technique(
        name="detach_logged",
        idea="Log a number (.item()) or a detached tensor: a loss that is kept keeps its graph.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=EXACT,
        price=".item() waits for the device; .detach() does not, and can be read later",
        not_when="after backward the graph has let go of its tensors: a kept loss then costs the device some bytes, and the host "
        "the nodes of its graph; it is much without a backward, after retain_graph, or with what autograd functions keep on ctx",
        code="losses.append(loss.detach())          # or, where a wait does no harm: losses.append(loss.item())",
        references=(
            "PyTorch documentation, FAQ: Don't accumulate history across your training loop, 2026, "
            "https://docs.pytorch.org/docs/stable/notes/faq.html",
        ),
        shown=Shown(validation, share=0.4, steps=5),
        tips=("C3", "D2"),
        habit=lambda job: _log(job, detached=False),
        apply=lambda job: _log(job, detached=True),
    ),
)
