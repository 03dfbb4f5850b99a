"""Cross-entropy over a large vocabulary in chunks of positions: the logits never exist all at once.

For models whose last layer is a Linear and whose loss is a mean over positions without exceptions; both are checked, and
what does not fit is refused. Each chunk's logits are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memlab.errors import DoesNotApply
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts

CHUNKS = 8
IGNORED = -100
"""What cross_entropy leaves out by itself; a mean over what is left is no mean of the chunks' means."""


class Chunked:
    """A model's last layer, called by the loss instead of by the model, a chunk of positions at a time."""

    def __init__(self, head: nn.Linear, loss: Callable[..., Tensor], forward: Callable[..., Any]) -> None:
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
        """The loss: the mean of the chunks' losses by their share of the positions."""
        dim = 1 if hidden.dim() > 2 and target.dim() > 1 else 0
        if hidden.shape[: dim + 1] != target.shape[: dim + 1]:
            raise DoesNotApply(
                f"targets {tuple(target.shape)} do not lie beside outputs {tuple(hidden.shape)}, position by position."
            )
        size, total = hidden.shape[dim], None
        for part, wanted in zip(hidden.chunk(CHUNKS, dim), target.chunk(CHUNKS, dim), strict=True):
            loss = checkpoint(self._part, part, wanted, use_reentrant=False) * (part.shape[dim] / size)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _part(self, hidden: Tensor, target: Tensor) -> Tensor:
        if torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == self.head.weight.dtype:
            return self.loss(self.project(hidden), target)
        scores = self.project(
            hidden.to(self.head.weight.dtype)
        )  # someone takes the loss in another dtype than the model's
        return self.loss(scores.to(hidden.dtype), target)


def _last_layer(model: nn.Module) -> nn.Linear:
    linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
    if not linears or linears[-1].out_features <= linears[-1].in_features:
        raise DoesNotApply(
            f"{type(model).__name__} does not end in a Linear layer that makes its input larger, as logits over a"
            " vocabulary do."
        )
    return linears[-1]


def _refuse_other_losses(loss: Callable[..., Tensor], target: Any, classes: int) -> None:
    """Try the loss on a few numbers: is it the mean of its halves?"""
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise DoesNotApply("the target is no tensor of class numbers: its loss is no cross-entropy over a vocabulary.")
    if target.device.type == "cpu" and bool((target == IGNORED).any()):
        raise DoesNotApply(
            f"some targets are {IGNORED}, which the mean leaves out: chunks would need weights of their own."
        )
    shape = (1, 4) if target.dim() > 1 else (4,)
    with torch.no_grad(), torch.device(target.device):
        numbers = torch.linspace(-2, 3, 4 * classes).sin().mul(7).reshape(*shape, classes)
        wanted = torch.arange(4).mul(3).remainder(classes).reshape(shape)
        whole = _tried(loss, numbers, wanted)
        halves = [_tried(loss, a, b) for a, b in zip(numbers.chunk(2, -2), wanted.chunk(2, -1), strict=True)]
        if target.device.type == "cpu" and not torch.allclose(whole, torch.stack(halves).mean(), rtol=1e-4):
            raise DoesNotApply("the loss is no mean over positions: in chunks it would be another one.")


def _tried(loss: Callable[..., Tensor], logits: Tensor, target: Tensor) -> Tensor:
    try:
        return loss(logits, target)
    except Exception as error:  # the user's own function, given what it may not know
        raise DoesNotApply(
            f"the loss is not of logits alone, so it cannot be taken in chunks ({type(error).__name__})."
        ) from error


def _apply(job: Job) -> None:
    if not job.trains or job.loss is None:
        raise DoesNotApply("an inference has no loss to take in chunks.")
    head = _last_layer(job.model)
    _refuse_other_losses(job.loss, job.batch[-1], head.out_features)
    chunked = Chunked(head, job.loss, job.forward)
    job.forward, job.loss = chunked.forward, chunked


class _Language(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.token, self.body = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.token(tokens))))


def _next_token(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def large_vocabulary(vocabulary: int = 4000, width: int = 32, time: int = 256) -> Parts:
    """A language model that is little but its vocabulary."""
    torch.manual_seed(0)
    model = _Language(vocabulary, width)
    batch = torch.randint(0, vocabulary, (2, time)), torch.randint(0, vocabulary, (2, time))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, _next_token


TECHNIQUES = (
    Technique(
        name="chunked_loss",
        idea="Compute logits and cross-entropy a chunk of positions at a time, and each chunk again in backward.",
        attacks=("activation", "temporary"),
        kind="saving",
        stage="model",
        equality=close(1e-4, "the loss and the last layer's gradient are summed by chunks"),
        price="the last layer's product once more, and smaller products; a few percent where the model is deep.",
        slower=True,
        not_when="The vocabulary is small against the width, or positions are left out of the mean (padding): then chunks"
        " need weights by what they count.",
        code=f"""\
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

def chunk_loss(hidden, labels):
    return F.cross_entropy(head(hidden), labels, reduction="sum")

hidden, labels = body(tokens).flatten(0, 1), labels.flatten()
loss = sum(
    checkpoint(chunk_loss, h, y, use_reentrant=False) for h, y in zip(hidden.chunk({CHUNKS}), labels.chunk({CHUNKS}))
) / labels.numel()
""",
        references=(
            "Cut Your Losses in Large-Vocabulary Language Models, Wijmans et al. 2024, https://arxiv.org/abs/2411.09009",
            "Liger Kernel: Efficient Triton Kernels for LLM Training, Hsu et al. 2024, https://arxiv.org/abs/2410.10989",
        ),
        shown=Shown(large_vocabulary, share=0.75),
        apply=_apply,
    ),
)
