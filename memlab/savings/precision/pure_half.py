"""Everything in 16 bits: weights, gradients, optimizer state and activations; the loss alone is taken in float32.

It halves what autocast does not, and rounds what autocast does not: an update smaller than the last bit of a weight is lost.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memlab.errors import DoesNotApply
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job
from memlab.workloads.nested import mapped


def converted(value: Any, dtype: torch.dtype) -> Any:
    """The floats of a batch in another dtype, in whatever holds them."""
    return mapped(value, lambda one: one.to(dtype) if one.is_floating_point() else one)


def _apply(dtype: torch.dtype, job: Job) -> None:
    if not any(one.dtype == torch.float32 for one in job.model.parameters()):
        raise DoesNotApply(f"{type(job.model).__name__} has no float32 weights to halve.")
    job.model.to(dtype)  # parameter by parameter, each the same object as before: the optimizer goes on with it
    job.batch = converted(job.batch, dtype)
    if job.loss is not None:
        job.loss = functools.partial(_in_float32, job.loss)
        job.notes.append("The loss is computed in float32: in 16 bits a mean over many positions would stand still.")


def _in_float32(loss: Any, output: Any, target: Any) -> Tensor:
    value: Tensor = loss(converted(output, torch.float32), converted(target, torch.float32))
    return value


_REFERENCES = (
    "A Study of BFLOAT16 for Deep Learning Training, Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322",
    "Revisiting BFloat16 Training, Zamirai et al. 2020, https://arxiv.org/abs/2010.06192",
)
_CODE = """\
model = model.to(torch.{dtype})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loss = loss_of(model(images.to(torch.{dtype})).float(), labels)  # the loss in float32
loss.backward()
optimizer.step()
"""

TECHNIQUES = (
    Technique(
        name="pure_bf16",
        idea="Keep weights, gradients, optimizer state and activations in bfloat16: half of everything.",
        attacks=("parameter", "gradient", "optimizer", "activation"),
        kind="saving",
        stage="model",
        equality=changes(
            "a weight has 8 significant bits: an update below 1/256 of it is rounded away and never adds up"
        ),
        price="training that learns less with small learning rates, unless updates are rounded at random or a float32 copy"
        " of the weights is kept, which takes back a part.",
        not_when="Learning rates are small, or running statistics and long sums must be exact. Autocast is the safe one.",
        code=_CODE.format(dtype="bfloat16"),
        references=_REFERENCES,
        shown=Shown("mlp", share=0.45),
        tips=("C4",),
        excludes={"pure_fp16": "weights have one dtype"},
        apply=functools.partial(_apply, torch.bfloat16),
    ),
    Technique(
        name="pure_fp16",
        idea="Everything in float16, as it is sometimes advised: half of everything, and training that breaks.",
        attacks=("parameter", "gradient", "optimizer", "activation"),
        kind="practice",
        stage="model",
        equality=changes(
            "Adam's epsilon of 1e-8 is zero in float16, so that a gradient of zero gives no number; gradients below 6e-8 are"
            " zero, values above 65,504 infinite"
        ),
        price="losses that become NaN: it is here to be seen, not to be used.",
        not_when="Training. For inference half the weights are enough: see the techniques of inference.",
        code=_CODE.format(dtype="float16"),
        references=(
            "Mixed Precision Training, Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740",
            "Automatic Mixed Precision, PyTorch documentation, https://docs.pytorch.org/docs/stable/amp.html",
        ),
        tips=("C4",),
        apply=functools.partial(_apply, torch.float16),
    ),
)
