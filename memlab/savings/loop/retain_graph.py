"""`retain_graph=True`: backward leaves the graph's tensors where they are, for another backward through the same graph.

Where nobody takes it, they stay until the last name of the graph is gone: until the next loss, or the end of the function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import autograd

from memlab.errors import DoesNotApply
from memlab.savings.loop.kept import names_stay
from memlab.savings.optimizers.groups import optimizer_of
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job


def _retained(job: Job) -> None:
    """On every backward, as it is written when one of them complained."""
    if job.optimizer is not None:
        job.backward = lambda loss: loss.backward(retain_graph=True)
        names_stay(job)


def _apply(job: Job) -> None:
    optimizer_of(job, "a backward without retain_graph")  # the plain backward lets go: there is nothing else to change


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Every backward lets go; refused where another one needs the graph, or where nobody retained one."""
    ignored: list[bool] = []
    original = autograd.backward  # Tensor.backward calls it too, by this name (torch/_tensor.py)

    def letting_go(
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

    try:
        autograd.backward = letting_go  # type: ignore[assignment]
        yield
    finally:
        autograd.backward = original
    if not any(ignored):
        raise DoesNotApply("no backward retains its graph.")


TECHNIQUES = (
    Technique(
        name="retain_graph",
        idea="Retain the graph on all but the last backward through it; of a GAN's two, detach what the first need not reach.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=EXACT,
        price="none",
        not_when="nothing retains a graph; two losses share a part of a graph, where all but the last backward must retain it",
        code="""
fake = generator(noise)
d_loss = criterion(discriminator(fake.detach()), zeros) + criterion(discriminator(real), ones)
d_loss.backward()                         # not retain_graph=True: it does not reach the generator
g_loss = criterion(discriminator(fake), ones)
g_loss.backward()                         # the last through this graph: it lets go
""",
        references=(
            "PyTorch documentation, Tensor.backward, 2026, "
            "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
            "Goodfellow et al., Generative Adversarial Networks, 2014, https://arxiv.org/abs/1406.2661",
        ),
        shown=Shown("gan"),
        tips=("C12",),
        habit=_retained,
        apply=_apply,
        outside=_outside,
    ),
)
