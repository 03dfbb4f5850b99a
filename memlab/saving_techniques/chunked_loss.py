"""Cross-entropy over a large vocabulary in chunks of positions: the logits never exist all at once.

For models that end in a Linear layer and losses that are a plain mean over positions; both are checked, and anything else is
refused. Each chunk's logits are recomputed in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memlab.errors import DoesNotApply
from memlab.saving_techniques.batches import IGNORED
from memlab.saving_techniques.demos import vocabulary_stack
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job

CHUNKS = 8
Loss = Callable[..., Tensor]


class Chunked:
    """A model's last layer, called by the loss instead of by the model, a chunk of positions at a time."""

    def __init__(self, head: nn.Linear, loss: Loss, forward: Callable[..., Any]) -> None:
        self.head, self.project, self.loss, self.model_forward = head, head.forward, loss, forward
        self._hidden: Any = None
        head.forward = self._pass_on  # type: ignore[method-assign, assignment]

    def _pass_on(self, hidden: Tensor) -> Tensor:
        self._hidden = hidden
        return hidden

    def forward(self, *inputs: Any) -> Any:
        """The model's forward without its last layer."""
        output = self.model_forward(*inputs)
        hidden, self._hidden = self._hidden, None
        if output is not hidden:
            raise DoesNotApply(
                "the model does something after its last Linear layer: its loss cannot be taken in chunks."
            )
        return output

    def __call__(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss: the mean of the chunks' losses, weighted by their share of the positions."""
        dim = 1 if hidden.dim() > 2 and target.dim() > 1 else 0
        if hidden.shape[: dim + 1] != target.shape[: dim + 1]:
            raise DoesNotApply(
                f"targets {tuple(target.shape)} do not match outputs {tuple(hidden.shape)} position by position."
            )
        losses = [
            checkpoint(self._loss_of, part, wanted, use_reentrant=False) * (part.shape[dim] / hidden.shape[dim])
            for part, wanted in zip(hidden.chunk(CHUNKS, dim), target.chunk(CHUNKS, dim), strict=True)
        ]
        return sum(losses[1:], losses[0])

    def _loss_of(self, hidden: Tensor, target: Tensor) -> Tensor:
        dtype = self.head.weight.dtype
        if torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == dtype:
            return self.loss(self.project(hidden), target)
        # Another technique may compute the loss in another dtype than the model's.
        return self.loss(self.project(hidden.to(dtype)).to(hidden.dtype), target)


def _refuse_other_losses(loss: Loss, target: Any, classes: int) -> None:
    """Try the loss on a few numbers: is it the mean of its halves?"""
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise DoesNotApply("the target is no tensor of class numbers: its loss is no cross-entropy over a vocabulary.")
    has_numbers = target.device.type == "cpu"
    if has_numbers and bool((target == IGNORED).any()):  # a mean over the rest is not the mean of the chunks' means
        raise DoesNotApply(
            f"some targets are {IGNORED}, which the mean leaves out: chunks would need their own weights."
        )
    shape = (1, 4) if target.dim() > 1 else (4,)
    with torch.no_grad(), torch.device(target.device):
        logits = torch.linspace(-2, 3, 4 * classes).sin().mul(7).reshape(*shape, classes)
        labels = torch.arange(4).mul(3).remainder(classes).reshape(shape)
        try:
            whole = loss(logits, labels)
            halves = [loss(a, b) for a, b in zip(logits.chunk(2, -2), labels.chunk(2, -1), strict=True)]
        except Exception as error:  # the user's function, with inputs it may not expect
            raise DoesNotApply(
                f"the loss is not of logits alone, so it cannot be taken in chunks ({type(error).__name__})."
            ) from error
        if has_numbers and not torch.allclose(whole, torch.stack(halves).mean(), rtol=1e-4):
            raise DoesNotApply("the loss is no mean over positions: in chunks it would be another one.")


def _apply(job: Job) -> None:
    if not job.trains or job.loss is None:
        raise DoesNotApply("an inference has no loss to take in chunks.")
    linears = [one for one in job.model.modules() if isinstance(one, nn.Linear)]
    if not linears or linears[-1].out_features <= linears[-1].in_features:
        raise DoesNotApply(
            f"{type(job.model).__name__} does not end in a Linear layer that makes its input larger, as logits over a"
            " vocabulary do."
        )
    head = linears[-1]
    _refuse_other_losses(job.loss, job.batch[-1], head.out_features)
    chunked = Chunked(head, job.loss, job.forward)
    job.forward, job.loss = chunked.forward, chunked


TECHNIQUES = (
    # Logits of 4000 words at each position, and little else.
    described("chunked_loss", Demo(functools.partial(vocabulary_stack, 4000, 32, 256), share=0.75), _apply),
)
