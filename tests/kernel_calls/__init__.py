"""Calls of PyTorch for both sides: the pretend device, where C++ allocates, and pretend CUDA, which says what it would.

`CASES` of each module: name -> setup, which runs the call once and returns a function that runs it again, to be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {f32: "f32", f16: "f16", bf16: "bf16"}
Setup = Callable[[], Callable[[], None]]
S = (8, 64, 256)


def T(*shape: int, dtype: torch.dtype = f32, grad: bool = True) -> Any:
    return torch.empty(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def I(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Any:  # noqa: E743
    return torch.randint(0, high, shape, device="cuda", dtype=dtype)


class Calls:
    """A table of calls; each is recorded forward and backward, with gradients of the results given."""

    def __init__(self) -> None:
        self.cases: dict[str, Setup] = {}

    def __call__(self, name: str, inputs: Any, call: Any, dtypes: Any = (f32, bf16), grad: bool = True) -> None:
        for dtype in dtypes:
            self.cases[f"{name} {NAMES[dtype]}"] = _setup(inputs, call, dtype, grad)


def _setup(inputs: Any, call: Any, dtype: torch.dtype, grad: bool) -> Setup:
    def setup() -> Callable[[], None]:
        given = inputs(dtype)
        given = list(given) if isinstance(given, list | tuple) else [given]
        leaves = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        leaves += [p for one in given if isinstance(one, torch.nn.Module) for p in one.parameters() if p.requires_grad]
        grads = [torch.zeros_like(one) for one in _with_grad(call(*given))] if grad else []

        def body() -> None:
            out = call(*given)
            if grads:
                torch.autograd.grad(_with_grad(out), leaves, grads, allow_unused=True)

        body()
        return body

    return setup


def _with_grad(out: Any) -> list[Any]:
    out = out if isinstance(out, list | tuple) else [out]
    return [one for one in out if isinstance(one, torch.Tensor) and one.requires_grad]
