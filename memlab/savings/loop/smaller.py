"""Less work in a step: half the batch, or inputs of half the side or half the length. Training is another then.

Which sizes a model takes is tried with one example, in evaluation and without gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.loop.pieces import cut, examples_in
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job
from memlab.workloads.nested import mapped


def _half_batch(job: Job) -> None:
    half = examples_in(job.batch) // 2
    if not half:
        raise DoesNotApply("the batch has one example: it cannot be smaller.")
    job.batch = tuple(_copied(cut(one, 0, half)) for one in job.batch)


def _copied(value: Any) -> Any:
    """Copies, as a view would keep the whole batch alive."""
    return mapped(value, torch.clone)


def _half_input(job: Job) -> None:
    inputs = job.batch[:-1] if job.trains else job.batch
    pictures = [one for one in inputs if _is_picture(one)]
    texts = [one for one in inputs if isinstance(one, Tensor) and one.dim() == 2 and not one.is_floating_point()]
    if pictures:
        smaller = tuple(_smaller_picture(one, pictures[0].shape[-2:]) for one in job.batch)
    elif texts and texts[0].shape[1] > 1:
        smaller = tuple(_shorter(one, texts[0].shape[1]) for one in job.batch)
    else:
        raise DoesNotApply("no input is a batch of pictures (4 dimensions, float) or of token sequences (2, integer).")
    _try(job.model, smaller[:-1] if job.trains else smaller)
    job.batch = smaller


def _is_picture(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point() and min(value.shape[-2:]) > 1


def _smaller_picture(value: Any, side: torch.Size) -> Any:
    """Half as high and wide; targets of every pixel (classes) are picked, not averaged."""
    if not isinstance(value, Tensor) or value.shape[-2:] != side or value.dim() < 3:
        return value
    if not _is_picture(value):
        return value[..., : side[0] // 2 * 2 : 2, : side[1] // 2 * 2 : 2].clone()
    return functional.interpolate(value, size=(side[0] // 2, side[1] // 2), mode="area")


def _shorter(value: Any, time: int) -> Any:
    return (
        value[:, : time // 2].clone()
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == time
        else value
    )


def _try(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    try:
        with trying(model), torch.no_grad():
            model(*(cut(one, 0, 1) for one in inputs))
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        said = str(error).strip().splitlines()
        raise DoesNotApply(f"the model takes no smaller input: {said[0] if said else type(error).__name__}") from error


@contextlib.contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """The model in evaluation, so that a forward leaves no trace: no running statistics, no random numbers."""
    modes = [(one, one.training) for one in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for one, mode in modes:
            one.training = mode


TECHNIQUES = (
    Technique(
        name="smaller_batch",
        idea="Half the batch: activations shrink with it, and nothing else does.",
        attacks=("activation", "input", "temporary"),
        kind="saving",
        stage="step",
        equality=changes("gradients are noisier; the learning rate is usually lowered in proportion"),
        price="more steps for an epoch; kernels that may not fill the card; BatchNorm below 8 examples or so becomes unstable",
        slower=True,
        not_when="weights and optimizer state are the peak; the same batch fits by accumulation, with the same result",
        code="loader = DataLoader(dataset, batch_size=32)          # instead of 64",
        references=(
            "Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, https://arxiv.org/abs/1706.02677",
        ),
        shown=Shown("unet"),
        tips=("C9", "C10"),
        apply=_half_batch,
    ),
    Technique(
        name="smaller_input",
        idea="Pictures of half the side have a quarter of the activations, sequences of half the length half of them.",
        attacks=("activation", "input", "temporary"),
        kind="saving",
        stage="step",
        equality=changes("the model sees less; what it learnt at one size may not hold at another"),
        price="what is small in the picture, or far away in the text, is lost",
        not_when="weights and optimizer state are the peak; the model takes one size only",
        code="""
x = torch.nn.functional.interpolate(x, scale_factor=0.5, mode="area")
tokens = tokens[:, :512]
""",
        references=(
            "Touvron et al., Fixing the train-test resolution discrepancy, 2019, https://arxiv.org/abs/1906.06423",
        ),
        shown=Shown("unet"),
        tips=("C9",),
        apply=_half_input,
    ),
)
