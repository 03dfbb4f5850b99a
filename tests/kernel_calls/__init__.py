"""Calls of PyTorch for both sides: the simulated GPU, where C++ allocates, and fake CUDA, which says what it would.

`CASES` of each module: name -> setup, which runs the call once and returns a function that runs it again, to be recorded.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {f32: "f32", f16: "f16", bf16: "bf16"}
Setup = Callable[[], Callable[[], None]]
S = (8, 64, 256)


def T(*shape: Any, dtype: torch.dtype = f32, grad: bool = True) -> Any:
    return torch.empty(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def I(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Any:  # noqa: E743
    return torch.randint(0, high, shape, device="cuda", dtype=dtype)


def N(*shape: int, dtype: Any = None) -> Any:
    """An input of a call without a gradient."""
    return lambda of_call: T(*shape, dtype=dtype or of_call, grad=False)


def W(*shape: int) -> Any:
    """One in single precision whatever the call's."""
    return lambda of_call: T(*shape)


def K(high: int, *shape: int, **more: Any) -> Any:
    """One of integers."""
    return lambda of_call: I(high, *shape, **more)


def L(*shape: int, grad: bool = True) -> Any:
    """One that lies channels last."""
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return lambda of_call: T(*shape, dtype=of_call, grad=False).to(memory_format=form).requires_grad_(grad)


def packed(module: Any, x: Any) -> Any:
    """What a recurrent layer makes of a packed sequence of 8 lengths."""
    return module(torch.nn.utils.rnn.pack_padded_sequence(x, [16, 14, 12, 10, 8, 6, 4, 2]))[0].data


class Calls:
    """A table of calls; each is recorded forward and backward, with gradients of the results given.

    `inputs` are shapes or functions of the dtype, or one function for all.
    """

    def __init__(self) -> None:
        self.cases: dict[str, Setup] = {}

    def __call__(self, name: str, inputs: Any, call: Any, dtypes: Any = (f32, bf16), grad: bool = True) -> None:
        for dtype in dtypes:
            self.cases[f"{name} {NAMES[dtype]}"] = _setup(inputs, call, dtype, grad)


def _setup(inputs: Any, call: Any, dtype: torch.dtype, grad: bool) -> Setup:
    def setup() -> Callable[[], None]:
        wanted = inputs(dtype) if callable(inputs) else inputs
        given = [_input(one, dtype) for one in (wanted if isinstance(wanted, list | tuple) else [wanted])]
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


def _input(wanted: Any, dtype: torch.dtype) -> Any:
    if isinstance(wanted, tuple):
        return T(wanted, dtype=dtype)
    return wanted(dtype) if isinstance(wanted, types.FunctionType) else wanted


def _with_grad(out: Any) -> list[Any]:
    out = out if isinstance(out, list | tuple) else [out]
    return [one for one in out if isinstance(one, torch.Tensor) and one.requires_grad]
