"""Inference in half precision: weights, inputs and all between take two bytes instead of four.

On the CPU it is bfloat16, which has float32's range; on CUDA float16, which has three more bits and ends at 65504.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memlab.errors import DoesNotApply
from memlab.savings.inference.grad import only_inference, refusing_backward
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import mapped


def served() -> Parts:
    """Sixteen wide linear layers that serve a batch under no_grad: weights of 16 MiB, 5 MiB before and after each."""
    return Served(), None, (torch.randn(2560, 512),), None


class Served(nn.Sequential):
    """Linear layers with ReLU whose forward keeps no graph."""

    def __init__(self, width: int = 512, depth: int = 16) -> None:
        layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)) for _ in range(depth))
        super().__init__(*layers, nn.Linear(width, 16))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """What the last layer gives."""
        return super().forward(x)


def half_of(device: torch.device) -> torch.dtype:
    """The half precision that is at home there."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def halved(value: Any, dtype: torch.dtype) -> Any:
    """Float32 and float64 tensors in that dtype, in whatever holds them; the rest as it is."""
    return mapped(value, lambda one: one.to(dtype) if one.dtype in (torch.float32, torch.float64) else one)


def _is_full(model: nn.Module) -> bool:
    return any(one.dtype in (torch.float32, torch.float64) for one in (*model.parameters(), *model.buffers()))


def _apply(job: Job) -> None:
    only_inference(job)
    if not _is_full(job.model):
        raise DoesNotApply("no parameter of the model is float32 or float64.")
    dtype = half_of(job.device)
    job.model.to(dtype)
    job.batch = halved(job.batch, dtype)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    changed, seen = False, set[int]()

    def before(module: nn.Module, args: Any) -> Any:
        nonlocal changed
        first = next(module.parameters(), None)
        dtype = half_of(first.device if first is not None else torch.device("cpu"))
        if id(module) not in seen:
            changed = changed or _is_full(module)
            module.to(dtype)
            seen.update(map(id, module.modules()))
        return halved(args, dtype)

    hook = register_module_forward_pre_hook(before)
    try:
        with refusing_backward(contextlib.nullcontext):
            yield
    finally:
        hook.remove()
    if not changed:
        raise DoesNotApply("no module with parameters in float32 was called.")


TECHNIQUES = (
    Technique(
        name="half_inference",
        idea="Weights and inputs in float16 (bfloat16 on the CPU) at inference: half the bytes of everything.",
        attacks=("parameter", "activation", "input", "temporary"),
        kind="saving",
        stage="model",
        equality=close(0.05, "8 (bfloat16) or 11 (float16) bits of each number are left"),
        price="Accuracy: about three decimal digits. On a CPU without half-precision units it is slower.",
        not_when="Values beyond 65504 turn to infinity in float16; or the model is half already. Not for training alone.",
        code="model = model.half().eval()      # on a CPU: model.bfloat16()\n"
        "with torch.no_grad():\n    output = model(x.half())",
        references=(
            "PyTorch docs, torch.nn.Module.half, https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
            "Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740",
        ),
        shown=Shown(served, share=0.25),
        tips=("G2",),
        apply=_apply,
        outside=_outside,
    ),
)
