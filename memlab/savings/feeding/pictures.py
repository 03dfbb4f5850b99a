"""Pictures on the way to the model: resized once or in every epoch, prepared on the host or on the card.

Limits: decoding itself (JPEG) is left out, as it needs another package: what counts here is what lies decoded in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.feeding.source import Batch, batch_of, each, needs_cuda, source
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import tensors_in


def photographs() -> Parts:
    """A small classifier of 8 pictures of 64 x 64."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, stride=4), torch.nn.ReLU(), torch.nn.Flatten())
    model.append(torch.nn.Linear(4 * 16 * 16, 8))
    batch = torch.randn(8, 3, 64, 64), torch.randint(8, (8,))
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, functional.cross_entropy


def _pictures(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The inputs that are pictures changed: floats of four dimensions."""
    return tuple(
        change(one) if isinstance(one, Tensor) and one.dim() == 4 and one.is_floating_point() else one for one in batch
    )


def _has_pictures(job: Job) -> None:
    if not any(one.dim() == 4 and one.is_floating_point() for one in tensors_in(batch_of(job))):
        raise DoesNotApply("no input is a batch of pictures (floats of four dimensions).")


def _resize_each_time(job: Job) -> None:
    """What is kept has twice the height and width: each step it becomes what the model wants, to the bit."""
    _has_pictures(job)
    feed = source(job)
    feed.host = _pictures(feed.host, lambda one: functional.interpolate(one, scale_factor=2, mode="nearest"))
    feed.read = lambda: _pictures(feed.host, lambda one: functional.avg_pool2d(one, 2))


def _resized(job: Job) -> None:
    _has_pictures(job)
    source(job)


def _floats(job: Job) -> None:
    needs_cuda(job)
    if not any(one.is_floating_point() for one in tensors_in(batch_of(job)[:1])):
        raise DoesNotApply("the first input has no floats to normalise.")


def _scaled(batch: Batch, factor: float = 0.5) -> Batch:
    """As (x - mean) / std: here a halving, which is exact."""
    return (each(batch[0], lambda one: one * factor if one.is_floating_point() else one), *batch[1:])


def _raw(job: Job, on_card: bool) -> None:
    _floats(job)
    feed = source(job)
    read = feed.read
    feed.read = lambda: _scaled(read(), 2)
    feed.prepare, feed.on_card = _scaled, on_card


TECHNIQUES = (
    Technique(
        name="resize_once",
        idea="Pictures are resized once and kept small, instead of kept large and resized in every epoch.",
        attacks=("host memory", "input"),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="A step before training, and the small copies on the disk.",
        not_when="Random crops want the large picture: keep it somewhat larger than the crop.",
        code="for path in paths:\n"
        "    small = Image.open(path).convert('RGB').resize((256, 256))      # open() alone decodes nothing\n"
        "    small.save(folder / path.name)",
        references=("Pillow docs, Image.open, https://pillow.readthedocs.io/en/stable/reference/Image.html",),
        shown=Shown(photographs, share=0.0),
        tips=("F3",),
        excludes={"memory_mapped_data": "both say what is read", "pack_small_files": "both say what is read"},
        apply=_resized,
        habit=_resize_each_time,
    ),
    Technique(
        name="preprocess_on_card",
        idea="Raw pictures go to the card and are normalised there: host time is saved, and device memory paid.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="Raw and normalised batch are on the card at once, before the step; sent as uint8 the raw one is a quarter.",
        not_when="The card is what is full or busy; or workers keep up with it.",
        code="x = x.to('cuda', non_blocking=True)              # uint8 on the way\n"
        "x = (x.float() / 255 - mean) / std                # three more batches of float32 for a moment",
        references=("NVIDIA DALI, https://docs.nvidia.com/deeplearning/dali/user-guide/docs/",),
        tips=("F5",),
        apply=lambda job: _raw(job, on_card=True),
        habit=lambda job: _raw(job, on_card=False),
    ),
)
