"""Less at a time: a batch in pieces, a loss in chunks of positions, half the batch, inputs of half the side or length.

The first dimension of every tensor of the batch must be that of its examples. Gradients are accumulated over the pieces, and
outputs of an inference are joined. The shares of the pieces are right for losses that are means: over examples, or over targets
other than -100, as cross_entropy counts them. With less work in a step, the training is a different one.

A loss is taken in chunks for models that end in a Linear layer, and losses that are a plain mean over positions; both are
checked, and anything else is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import conv_stack, vocabulary_stack
from memlab.saving_techniques.patching import evaluating, optimizer_of
from memlab.saving_techniques.technique import Demo, described
from memlab.torch_internals.layers import BatchNorm
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import mapped, tensors_in

PIECES = 4
IGNORED = -100
"""What cross_entropy leaves out of its mean by default."""
Batch = tuple[Any, ...]
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _examples_in(batch: Batch) -> int:
    """The number of examples in a batch; refused if its tensors do not agree."""
    sizes = list(dict.fromkeys(one.shape[0] for one in tensors_in(batch) if one.dim()))
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes)) or "no tensors"
        raise DoesNotApply(f"the batch cannot be split along its first dimension: {found} in its tensors.")
    return sizes[0]


def cut(value: Any, start: int, stop: int) -> Any:
    """The examples from `start` up to `stop`: views."""
    return mapped(value, lambda one: one[start:stop] if one.dim() else one)


def pieces_of(batch: Batch) -> list[Batch]:
    """The batch in pieces that differ by one example at most; a batch of one example cannot be split."""
    examples = _examples_in(batch)
    if examples < 2:
        raise DoesNotApply("the batch has one example: it cannot be split.")
    count = min(PIECES, examples)
    bounds = [examples * index // count for index in range(count + 1)]
    return [tuple(cut(one, start, stop) for one in batch) for start, stop in itertools.pairwise(bounds)]


def shares_of(pieces: list[Batch]) -> list[float]:
    """The weight of each piece in the mean: by counted targets if they are classes, else by examples."""
    examples = weights = [_examples_in(piece) for piece in pieces]
    targets = [piece[-1] for piece in pieces]
    if all(isinstance(one, Tensor) and one.dim() and not one.is_floating_point() for one in targets):
        with contextlib.suppress(RuntimeError):  # a fake tensor holds no numbers to count
            weights = [int((one != IGNORED).sum()) for one in targets]
    weights = weights if sum(weights) else examples  # the simulated GPU reads zeros
    return [one / sum(weights) for one in weights]


def _accumulate(job: Job) -> None:
    optimizer_of(job, "gradient accumulation")
    pieces_of(job.batch)
    feed = job.feed
    known: dict[int, tuple[Batch, list[tuple[float, Batch]]]] = {}

    def split(batch: Batch) -> list[tuple[float, Batch]]:
        if id(batch) not in known:  # read the targets once, not in every step: it waits for the device
            pieces = pieces_of(batch)
            keywords = job.loss.keywords if isinstance(job.loss, functools.partial) else {}
            is_sum = keywords.get("reduction", getattr(job.loss, "reduction", None)) == "sum"
            shares = [1.0] * len(pieces) if is_sum else shares_of(pieces)
            known.clear()
            known[id(batch)] = batch, list(zip(shares, pieces, strict=True))
        return known[id(batch)][1]

    def feed_pieces() -> Iterator[tuple[float, Batch]]:
        for share, batch in feed():
            for part, piece in split(batch):
                if part:  # the mean over no target at all is NaN, and NaN times zero too
                    yield share * part, piece

    job.feed = feed_pieces
    job.notes += _caveats(job.model)


def _caveats(model: nn.Module) -> list[str]:
    """Computations of a model in training over the whole batch, whose result changes with pieces."""
    notes = []
    if norms := [name for name, one in model.named_modules() if isinstance(one, BatchNorm) and one.training]:
        more = f" and {len(norms) - 1} more" * (len(norms) > 1)
        notes.append(
            f"accumulation changes training here: BatchNorm ({norms[0]}{more}) takes mean and variance of each piece, "
            "not of the batch, and updates its running ones for every piece"
        )
    if any(isinstance(one, DROPOUTS) and one.training and one.p for one in model.modules()):
        notes.append("accumulation draws other dropout masks: the results differ by chance, not in kind")
    return notes


_GRAPHS = "micro-batching saves next to nothing while every piece keeps its graph: use it under no_grad"


def _micro(job: Job) -> None:
    if job.trains:
        raise DoesNotApply("in training, a forward in pieces with one backward keeps every piece: use accumulation.")
    if any(isinstance(one, BatchNorm) and not one.track_running_stats for one in job.model.modules()):
        raise DoesNotApply("a BatchNorm without running statistics takes those of each piece: the output would change.")
    pieces_of(job.batch)
    feed, forward = job.feed, job.forward

    def feed_pieces() -> Iterator[tuple[float, Batch]]:
        for share, batch in feed():
            for piece in pieces_of(batch):
                yield share, piece

    def forward_noting_graphs(*inputs: Any) -> Any:
        output = forward(*inputs)
        if getattr(output, "requires_grad", False) and _GRAPHS not in job.notes:
            job.notes.append(_GRAPHS)
        return output

    job.feed, job.forward = feed_pieces, forward_noting_graphs


# --- less ---


def _half_batch(job: Job) -> None:
    half = _examples_in(job.batch) // 2
    if not half:
        raise DoesNotApply("the batch has one example: it cannot be smaller.")
    job.batch = mapped(cut(job.batch, 0, half), torch.clone)  # a view would keep the whole batch alive


def _half_input(job: Job) -> None:
    """Try the smaller input with one example, in evaluation mode and without gradients."""
    tensors = [one for one in (job.batch[:-1] if job.trains else job.batch) if isinstance(one, Tensor)]
    images = [one for one in tensors if _is_image(one)]
    texts = [one for one in tensors if one.dim() == 2 and not one.is_floating_point()]
    if images:
        smaller = tuple(_smaller_image(one, images[0].shape[-2:]) for one in job.batch)
    elif texts and (time := texts[0].shape[1]) > 1:
        is_text = [isinstance(one, Tensor) and one.dim() > 1 and one.shape[1] == time for one in job.batch]
        smaller = tuple(
            one[:, : time // 2].clone() if is_one else one for one, is_one in zip(job.batch, is_text, strict=True)
        )
    else:
        raise DoesNotApply("no input is a batch of images (4 dimensions, float) or of token sequences (2, integer).")
    try:
        with evaluating(job.model), torch.no_grad():
            job.model(*(cut(one, 0, 1) for one in (smaller[:-1] if job.trains else smaller)))
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DoesNotApply(f"the model takes no smaller input: {text}") from error
    job.batch = smaller


def _is_image(one: Tensor) -> bool:
    return one.dim() == 4 and one.is_floating_point() and min(one.shape[-2:]) > 1


def _smaller_image(value: Any, side: torch.Size) -> Any:
    """Half as high and wide; targets of every pixel (classes) are picked, not averaged."""
    if not isinstance(value, Tensor) or value.shape[-2:] != side or value.dim() < 3:
        return value
    if not _is_image(value):
        return value[..., : side[0] // 2 * 2 : 2, : side[1] // 2 * 2 : 2].clone()
    return functional.interpolate(value, size=(side[0] // 2, side[1] // 2), mode="area")


without_norm = functools.partial(conv_stack, 4, 8, lambda width: nn.Tanh(), images=(16, 8, 32))
"""Convolutions without BatchNorm, a batch of 16: nearly all of the peak grows with the batch."""


def without_gradients() -> Parts:
    """The same convolutions, with frozen weights, on 16 images."""
    model, _, batch, _ = without_norm()
    return model.requires_grad_(False), None, batch[:-1], None


# --- the loss in chunks ---

CHUNKS = 8
Loss = Callable[..., Tensor]


class Chunked:
    """A model's last layer, called by the loss instead of by the model, a chunk of positions at a time.

    The logits never exist all at once; each chunk's are recomputed in backward.
    """

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


def _chunk_loss(job: Job) -> None:
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
    described("accumulation", Demo(without_norm), _accumulate),
    described("micro_batching", Demo(without_gradients), _micro),
    described("smaller_batch", Demo("unet"), _half_batch),
    described("smaller_input", Demo("unet"), _half_input),
    # Logits of 4000 words at each position, and little else.
    described("chunked_loss", Demo(functools.partial(vocabulary_stack, 4000, 32, 256), share=0.75), _chunk_loss),
)
