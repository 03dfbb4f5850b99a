"""A batch in pieces: gradients accumulated over several backwards, or an inference whose outputs are joined.

The first dimension of every tensor of the batch must be that of its examples. The shares of the pieces are right for losses that
are means: over examples, or over targets other than -100, as cross_entropy counts them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import optimizer_of
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import mapped, tensors_in

PIECES = 4
IGNORED = -100
"""What cross_entropy leaves out of its mean, unless told otherwise."""
Batch = tuple[Any, ...]
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor of a batch that has a first dimension."""
    return (one for one in tensors_in(value) if one.dim())


def examples_in(batch: Batch) -> int:
    """How many examples a batch has; refused where its tensors do not agree."""
    sizes = list(dict.fromkeys(one.shape[0] for one in tensors_of(batch)))
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes)) or "no tensors"
        raise DoesNotApply(f"the batch cannot be split along its first dimension: {found} in its tensors.")
    return sizes[0]


def cut(value: Any, start: int, stop: int) -> Any:
    """The examples from `start` up to `stop`: views."""
    return mapped(value, lambda one: one[start:stop] if one.dim() else one)


def pieces_of(batch: Batch, count: int = PIECES) -> list[Batch]:
    """The batch in `count` pieces that differ by one example at most; one of one example cannot be split."""
    examples = examples_in(batch)
    if examples < 2:
        raise DoesNotApply("the batch has one example: it cannot be split.")
    count = min(count, examples)
    bounds = [examples * index // count for index in range(count + 1)]
    return [tuple(cut(one, start, stop) for one in batch) for start, stop in itertools.pairwise(bounds)]


def weight_of(batch: Batch) -> int:
    """Over how much a mean loss goes: the targets that count, where they are classes; else the examples."""
    target = batch[-1]
    if isinstance(target, Tensor) and target.dim() and not target.is_floating_point():
        try:
            return int((target != IGNORED).sum())
        except RuntimeError:  # a pretend tensor holds no numbers to count
            pass
    return examples_in(batch)


def shares_of(pieces: list[Batch]) -> list[float]:
    """What each piece adds to the mean of all."""
    weights = [weight_of(piece) for piece in pieces]
    if not sum(weights):  # the pretend device reads zeros
        weights = [examples_in(piece) for piece in pieces]
    return [one / sum(weights) for one in weights]


def _sums(loss: Any) -> bool:
    kept = loss.keywords.get("reduction") if isinstance(loss, functools.partial) else getattr(loss, "reduction", None)
    return kept == "sum"


def _accumulate(job: Job) -> None:
    optimizer_of(job, "gradient accumulation")
    pieces_of(job.batch)
    feed = job.feed
    known: dict[int, tuple[Batch, list[tuple[float, Batch]]]] = {}

    def split(batch: Batch) -> list[tuple[float, Batch]]:
        if id(batch) not in known:  # read the targets once, not in every step: it waits for the device
            pieces = pieces_of(batch)
            shares = [1.0] * len(pieces) if _sums(job.loss) else shares_of(pieces)
            known.clear()
            known[id(batch)] = batch, list(zip(shares, pieces, strict=True))
        return known[id(batch)][1]

    def fed() -> Iterator[tuple[float, Batch]]:
        for share, batch in feed():
            for part, piece in split(batch):
                if part:  # the mean over no target at all is nan, and nan times nothing too
                    yield share * part, piece

    job.feed = fed
    job.notes += caveats(job.model)


def caveats(model: nn.Module) -> list[str]:
    """What a model in training makes of a batch as a whole, so that pieces of it change the result."""
    found = []
    if norms := [name for name, one in model.named_modules() if isinstance(one, _NORMS) and one.training]:
        found.append(
            f"accumulation changes training here: BatchNorm ({norms[0]}{f' and {len(norms) - 1} more' * (len(norms) > 1)}) "
            "takes mean and variance of each piece, not of the batch, and updates its running ones for every piece"
        )
    if any(isinstance(one, _DROPOUTS) and one.training and one.p for one in model.modules()):
        found.append("accumulation draws other dropout masks: the results differ by chance, not in kind")
    return found


def _micro(job: Job) -> None:
    if job.trains:
        raise DoesNotApply("in training, a forward in pieces with one backward keeps every piece: use accumulation.")
    if any(isinstance(one, _NORMS) and not one.track_running_stats for one in job.model.modules()):
        raise DoesNotApply("a BatchNorm without running statistics takes those of each piece: the output would change.")
    pieces_of(job.batch)
    feed, forward = job.feed, job.forward

    def fed() -> Iterator[tuple[float, Batch]]:
        for share, batch in feed():
            for piece in pieces_of(batch):
                yield share, piece

    def noting(*inputs: Any) -> Any:
        output = forward(*inputs)
        if getattr(output, "requires_grad", False) and _GRAPHS not in job.notes:
            job.notes.append(_GRAPHS)
        return output

    job.feed, job.forward = fed, noting


_GRAPHS = "micro-batching saves next to nothing while every piece keeps its graph: use it under no_grad"


def without_norm() -> Parts:
    """Convolutions without BatchNorm, a batch of 16: nearly all of the peak grows with the batch."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    batch = torch.randn(16, 8, 32, 32), torch.randint(0, 10, (16,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.CrossEntropyLoss()


def without_gradients() -> Parts:
    """The same convolutions, whose weights ask for no gradient, look at 16 pictures."""
    model, _, batch, _ = without_norm()
    return model.requires_grad_(False), None, batch[:-1], None


TECHNIQUES = (
    Technique(
        name="accumulation",
        idea="Split the batch, go forward and backward for each piece, and take one step with the summed gradients.",
        attacks=("activation", "temporary"),
        kind="saving",
        stage="step",
        equality=close(
            1e-3, "sums in another order; with BatchNorm, or dropout, it changes training, which the run's notes say"
        ),
        price="smaller kernels: a longer step where the card is not filled by a piece",
        slower=True,
        not_when="weights and optimizer state are the peak; the loss is no mean over examples (contrastive losses compare them); "
        "BatchNorm then sees small batches: GroupNorm or LayerNorm do not care",
        code="""
optimizer.zero_grad()
for xs, ys in zip(x.chunk(4), y.chunk(4)):
    loss = criterion(model(xs), ys) * len(xs) / len(x)      # the share of this piece in the mean
    loss.backward()                                          # adds to .grad
optimizer.step()
""",
        references=(
            "PyTorch documentation, Automatic mixed precision examples: Gradient accumulation, 2026, "
            "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
            "Ioffe and Szegedy, Batch Normalization, 2015, https://arxiv.org/abs/1502.03167",
        ),
        shown=Shown(without_norm),
        tips=("C8", "C10"),
        excludes={
            "step_in_backward": "the gradients of all pieces are summed before a step; here the first piece would step.",
            "micro_batching": "it is the same for an inference.",
        },
        apply=_accumulate,
    ),
    Technique(
        name="micro_batching",
        idea="Run an inference in pieces and join the outputs: activations of one piece at a time.",
        attacks=("activation", "temporary"),
        kind="saving",
        stage="step",
        equality=close(1e-4, "a kernel may be another one for a smaller batch"),
        price="smaller kernels; at the end the outputs are there twice, in pieces and joined",
        slower=True,
        not_when="gradients are recorded: then every piece keeps its graph; the outputs are what is large",
        code="""
with torch.no_grad():
    output = torch.cat([model(part) for part in x.chunk(4)])
""",
        references=(
            "Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2018, "
            "https://arxiv.org/abs/1811.06965",
        ),
        shown=Shown(without_gradients),
        tips=("C8",),
        excludes={"accumulation": "it is the same for training."},
        apply=_micro,
    ),
)
