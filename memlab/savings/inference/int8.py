"""Weights in int8 at inference: one byte each, with a scale for every row, unfolded one layer at a time.

Limits: of linear layers only, which hold nearly all weights of a language model. `dynamic_quantization` multiplies in
int8 on the CPU instead; its packed weights are no tensors, so no tally sees them: they are counted in what is saved to a file.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.inference.grad import only_inference, refusing_backward
from memlab.savings.inference.half import served
from memlab.savings.outside import on_models
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job

_WHY = "each weight is rounded to one of 255 steps of its row"


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 with a scale for each row; it only predicts."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        largest = torch.maximum(weight.amax(1, keepdim=True), -weight.amin(1, keepdim=True)).float()
        scale = largest.clamp_(min=1e-12).div_(127)  # in float32, as 1e-12 is 0 in float16, and 128 steps would wrap
        self.register_buffer("weight", (weight.float() / scale).round_().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the unfolded weight, which lives as long as it takes."""
        return functional.linear(x, self.weight.to(x.dtype).mul_(self.scale), self.bias)


def quantized(model: nn.Module) -> nn.Module:
    """The model with every linear layer in int8, one after another; what is shared stays shared, tied weights stay."""
    uses = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    if type(model) is nn.Linear:
        return Int8Linear(model)
    made: dict[int, nn.Module] = {}  # by id, and no list of layers: whoever holds one here keeps its weight alive
    for parent in [one for one in model.modules() if type(one) is not nn.Linear]:
        for name in list(parent._modules):
            child = parent._modules[name]
            if type(child) is nn.Linear and uses[id(child.weight)] == 1:
                made[id(child)] = made.get(id(child)) or Int8Linear(child)
                setattr(parent, name, made[id(child)])
    if not made:
        raise DoesNotApply("the model has no nn.Linear with a weight of its own.")
    return model


def _apply(job: Job) -> None:
    only_inference(job)
    job.model = quantized(job.model).requires_grad_(False)


def _in_place(model: nn.Module) -> None:
    if type(model) is nn.Linear:
        raise DoesNotApply("the model is one nn.Linear, which cannot be replaced from outside.")
    quantized(model).requires_grad_(False)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    with refusing_backward(contextlib.nullcontext), on_models(_in_place):
        yield


def _dynamic(job: Job) -> None:
    only_inference(job)
    if job.device.type != "cpu":
        raise DoesNotApply("dynamic quantization has kernels for the CPU only.")
    if not any(type(one) in (nn.Linear, nn.LSTM) for one in job.model.modules()):
        raise DoesNotApply("the model has no nn.Linear or nn.LSTM.")
    try:
        from torch.ao.quantization import quantize_dynamic
    except ImportError:
        raise DoesNotApply("this PyTorch has no torch.ao.quantization any more: torchao took its place.") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "will be removed", said since 2.8, there in 2.13
        warnings.simplefilter("ignore", UserWarning)  # quantized dtypes, pytorch issue 184982
        job.model = quantize_dynamic(job.model, {nn.Linear, nn.LSTM}, dtype=torch.qint8)
    job.notes.append("Packed int8 weights are no tensors: the tally of tensors does not see them.")


TECHNIQUES = (
    Technique(
        name="int8_weights",
        idea="Linear weights rest as int8 with a scale per row and are unfolded one layer at a time.",
        attacks=("parameter",),
        kind="saving",
        stage="model",
        equality=close(0.05, _WHY),
        price="Accuracy, and the time to unfold each weight in each forward; one layer's weight as a temporary.",
        slower=True,
        not_when="Activations are the larger part; weights are not in nn.Linear; something is to be trained.",
        code="scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127\n"
        "weight = (linear.weight.detach() / scale).round().to(torch.int8)     # keep these two, drop linear.weight\n"
        "output = torch.nn.functional.linear(x, weight.to(x.dtype) * scale, linear.bias)",
        references=(
            "Dettmers et al., LLM.int8(), 2022, https://arxiv.org/abs/2208.07339",
            "torchao, quantize_, https://github.com/pytorch/ao",
        ),
        shown=Shown(served, share=0.25),
        tips=("G2", "A2"),
        excludes={"dynamic_quantization": "both replace the same linear layers"},
        apply=_apply,
        outside=_outside,
    ),
    Technique(
        name="dynamic_quantization",
        idea="Linear and LSTM weights packed as int8 for the CPU's int8 products; inputs are quantised as they come.",
        attacks=("parameter", "host memory"),
        kind="practice",
        stage="model",
        equality=close(0.1, f"{_WHY}, and so is each input"),
        price="Accuracy. The original is there until the copy is made: the peak of conversion is above that of the model.",
        not_when="On a GPU (no kernels); torch.ao.quantization is deprecated, and its successor torchao a package of its own.",
        code="from torch.ao.quantization import quantize_dynamic\n\n"
        "model = quantize_dynamic(model.eval(), {torch.nn.Linear, torch.nn.LSTM}, dtype=torch.qint8)",
        references=(
            "PyTorch docs, Quantization, https://docs.pytorch.org/docs/stable/quantization.html",
            "torchao migration, 2025, https://github.com/pytorch/ao/issues/2259",
        ),
        tips=("G2",),
        excludes={
            "int8_weights": "both replace the same linear layers",
            "half_inference": "its int8 products take inputs in float32",
        },
        apply=_dynamic,
    ),
)
