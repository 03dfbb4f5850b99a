"""Which optimizer: what each one remembers of every parameter between two steps.

Plain SGD keeps nothing, momentum one number for each parameter, Adam two; Adafactor keeps a row and a column of each matrix, and
the 8-bit ones keep Adam's two in a byte each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import has_sparse_gradients, optimizer_of
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job, Parts

_LIBRARIES = ("bitsandbytes.optim", "torchao.optim")
"""Where an 8-bit Adam may be found, under the name AdamW8bit in both."""


def _leaner(job: Job, what: str, *lean: type[torch.optim.Optimizer]) -> None:
    """Refuse where the optimizer of the job keeps no more than the one that would replace it."""
    optimizer = optimizer_of(job, what)
    stateless = type(optimizer) is torch.optim.SGD and not any(one["momentum"] for one in optimizer.param_groups)
    if stateless or isinstance(optimizer, lean):
        raise DoesNotApply(f"{type(optimizer).__name__} keeps no more than {what} would: there is nothing to save.")


def _sgd(job: Job) -> None:
    _leaner(job, "plain SGD")
    job.new_optimizer(torch.optim.SGD)


def _momentum(job: Job) -> None:
    _leaner(job, "SGD with momentum", torch.optim.SGD, torch.optim.Adafactor)
    job.new_optimizer(torch.optim.SGD, momentum=0.9)


def _adafactor(job: Job) -> None:
    _leaner(job, "Adafactor", torch.optim.Adafactor)
    if any(one.is_complex() for one in job.model.parameters()):
        raise DoesNotApply("Adafactor takes no complex parameters.")
    if has_sparse_gradients(job.model):
        raise DoesNotApply("Adafactor takes no sparse gradients, which an embedding of this model makes.")
    job.new_optimizer(torch.optim.Adafactor)


def _eight_bit(job: Job) -> None:
    _leaner(job, "8-bit Adam", torch.optim.SGD, torch.optim.Adafactor)
    job.new_optimizer(eight_bit_adam())


def eight_bit_adam() -> type[torch.optim.Optimizer]:
    """AdamW8bit of the first library that is there."""
    for library in _LIBRARIES:
        try:
            return importlib.import_module(library).AdamW8bit
        except Exception:  # absent, or present and unable to load its kernels: both mean that there is none
            continue
    raise DoesNotApply("8-bit Adam comes with a library that is not installed: bitsandbytes or torchao.")


def adam_of_many_layers() -> Parts:
    """Eight layers and Adam: weights, gradients and Adam's two states in equal parts, activations next to nothing."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, (torch.randn(8, 256), torch.randint(0, 10, (8,))), nn.CrossEntropyLoss()


_FORMULA = "another formula: it needs a learning rate of its own and may end elsewhere"
_DOCS = "PyTorch documentation, torch.optim, 2026, https://docs.pytorch.org/docs/stable/optim.html"


def _chosen(name: str, idea: str, apply: Callable[[Job], None], code: str, **facts: Any) -> Technique:
    """What all choices have in common."""
    others = {
        "sgd": "plain SGD",
        "momentum": "SGD with momentum",
        "adafactor": "Adafactor",
        "adam_8bit": "8-bit Adam",
    }
    excludes = {
        one: f"a model has one optimizer, and {said} is another." for one, said in others.items() if one != name
    }
    excludes |= facts.pop("excludes", {})
    return Technique(
        name=name,
        idea=idea,
        attacks=("optimizer",),
        kind=facts.pop("kind", "saving"),
        stage="optimizer",
        equality=changes(_FORMULA),
        code=code,
        tips=("A5",),
        excludes=excludes,
        apply=apply,
        **facts,
    )


TECHNIQUES = (
    _chosen(
        "sgd",
        "Plain SGD remembers nothing: the two states of Adam, twice the parameters, are gone.",
        _sgd,
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        price="usually more steps, and a schedule of the learning rate that has to be found; transformers rarely train well",
        not_when="activations are the peak; the parameters are few; plain SGD is used already",
        references=(_DOCS,),
        shown=Shown(adam_of_many_layers),
    ),
    _chosen(
        "momentum",
        "SGD with momentum remembers one number for each parameter, half of what Adam does.",
        _momentum,
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        price="a learning rate and a schedule that have to be found",
        not_when="activations are the peak; the parameters are few; the optimizer is SGD already",
        references=(_DOCS,),
        shown=Shown(adam_of_many_layers),
    ),
    _chosen(
        "adafactor",
        "Adafactor keeps a row and a column in the place of each matrix of squared gradients, and no momentum.",
        _adafactor,
        "optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)",
        price="a slower step; the update of a parameter is a temporary of the parameter's size (foreach: of all)",
        not_when="activations are the peak; the model is mostly vectors, which are not factored",
        references=(
            "Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018, "
            "https://arxiv.org/abs/1804.04235",
            _DOCS,
        ),
        shown=Shown(adam_of_many_layers),
        excludes={
            "fused": "Adafactor has no fused implementation.",
            "contiguous_parameters": "it needs each matrix whole.",
        },
    ),
    _chosen(
        "adam_8bit",
        "Adam's two states in one byte each, with a scale for every block: a quarter of the bytes.",
        _eight_bit,
        kind="practice",  # a saving is one that was shown, and without the library this one cannot be
        code="import bitsandbytes\noptimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3)",
        price="a library (bitsandbytes or torchao); the states are rounded, which is usually not seen in the result",
        not_when="activations are the peak; no library is installed; parameters of fewer than 4,096 numbers, which stay at 32 bits",
        references=(
            "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, https://arxiv.org/abs/2110.02861",
        ),
        excludes={
            "fused": "the library has its own kernels.",
            "foreach_off": "the library has its own kernels.",
            "contiguous_parameters": "the library scales each parameter in blocks of its own.",
            "step_in_backward": "the library keeps its states by parameter in an optimizer of its own.",
        },
    ),
)
