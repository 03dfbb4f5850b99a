"""Calls under the switches of `torch.backends`, each of which may choose another kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_calls import NAMES, Setup, T, bf16, f16, f32, packed

CASES: dict[str, Setup] = {}
no_cudnn = lambda: torch.backends.cudnn.flags(enabled=False)  # noqa: E731


@contextlib.contextmanager
def switched(setters: Any, **values: Any) -> Any:
    """Switches set for a while: name -> what sets it and gives what it was."""
    before = {name: setters(name, value) for name, value in values.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            setters(name, value)


def of_matmul(name: str, value: bool) -> Any:
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    return before


def of_sdp(name: str, value: bool) -> Any:
    before = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
    return before


def of_library(name: str, value: Any) -> Any:
    prefer = getattr(torch.backends.cuda, f"preferred_{name}_library")
    before = prefer()
    prefer(value)
    return before


def case(
    name: str, make: Any, shape: tuple[int, ...], switch: Callable[[], AbstractContextManager[Any]] = no_cudnn,
    dtypes: Any = (f32, f16), call: Any = lambda m, x: m(x), grad: bool = True,
) -> None:  # fmt: skip
    """A module forward and backward, the switch set around both and around its move to the GPU."""
    for dtype in dtypes:

        def setup(dtype: torch.dtype = dtype) -> Callable[[], None]:
            with switch():
                module = make().to("cuda", dtype)
            x = T(*shape, dtype=dtype, grad=grad)

            def body() -> None:
                with switch(), torch.set_grad_enabled(grad):
                    out = call(module, x)
                    out = out[0] if isinstance(out, tuple) else out
                    if grad:
                        out.backward(torch.zeros_like(out))
                del out
                module.zero_grad()
                x.grad = None

            body()
            return body

        CASES[f"{name} {NAMES[dtype]}"] = setup


S_ = (16, 8, 32)
case("lstm", lambda: nn.LSTM(32, 64), S_)
case("lstm batch_first", lambda: nn.LSTM(32, 64, batch_first=True), S_)
case("lstm 2 layers", lambda: nn.LSTM(32, 64, 2, dropout=0.2), S_)
case("lstm bidirectional", lambda: nn.LSTM(32, 64, 2, bidirectional=True), S_)
case("lstm no bias", lambda: nn.LSTM(32, 64, bias=False), S_)
case("lstm projected", lambda: nn.LSTM(32, 64, proj_size=16), S_)
case("lstm no grad", lambda: nn.LSTM(32, 64), S_, grad=False)
case("lstm last", lambda: nn.LSTM(32, 64), S_, call=lambda m, x: m(x)[1][0])
case("lstm packed", lambda: nn.LSTM(32, 64), S_, call=packed)
case("lstm packed bidirectional", lambda: nn.LSTM(32, 64, bidirectional=True), S_, call=packed)
case("gru", lambda: nn.GRU(32, 64), S_)
case("gru bidirectional", lambda: nn.GRU(32, 64, 2, bidirectional=True), S_)
case("gru packed", lambda: nn.GRU(32, 64), S_, call=packed)
case("rnn", lambda: nn.RNN(32, 64), S_)
case("rnn relu bidirectional", lambda: nn.RNN(32, 64, 2, nonlinearity="relu", bidirectional=True), S_)
case("rnn packed", lambda: nn.RNN(32, 64), S_, call=packed)

X = (4, 32, 24, 24)
case("conv", lambda: nn.Conv2d(32, 64, 3, padding=1), X)
case("conv no bias", lambda: nn.Conv2d(32, 64, 3, bias=False), X)
case("conv stride", lambda: nn.Conv2d(32, 64, 3, stride=2), X)
case("conv 1x1", lambda: nn.Conv2d(32, 64, 1), X)
case("conv grouped", lambda: nn.Conv2d(32, 64, 3, groups=4), X)
case("conv depthwise", lambda: nn.Conv2d(32, 32, 3, groups=32), X)
case("conv dilated", lambda: nn.Conv2d(32, 64, 3, dilation=2), X)
case(
    "conv channels_last", lambda: nn.Conv2d(32, 64, 3), X, call=lambda m, x: m(x.to(memory_format=torch.channels_last))
)
case("conv no grad", lambda: nn.Conv2d(32, 64, 3), X, grad=False)
case("conv first", lambda: nn.Conv2d(32, 64, 3), X, call=lambda m, x: m(x.detach()))
case("conv frozen", lambda: nn.Conv2d(32, 64, 3).requires_grad_(False), X)
case("conv dilated grouped", lambda: nn.Conv2d(32, 64, 3, dilation=2, groups=2), X)
case("conv dilated first", lambda: nn.Conv2d(32, 64, 3, dilation=2), X, call=lambda m, x: m(x.detach()))
case("conv transposed grouped", lambda: nn.ConvTranspose2d(32, 16, 2, stride=2, groups=2), X)
case("conv transposed first", lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), X, call=lambda m, x: m(x.detach()))
case("conv channels_last grad", lambda: nn.Conv2d(32, 64, 3), X,
     call=lambda m, x: m(x).to(memory_format=torch.channels_last))  # fmt: skip
case("conv 1d", lambda: nn.Conv1d(32, 64, 3), (4, 32, 100))
case("conv 3d", lambda: nn.Conv3d(8, 16, 3), (2, 8, 8, 12, 12))
case("conv transposed", lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), X)
case("conv transposed 1d", lambda: nn.ConvTranspose1d(32, 16, 4), (4, 32, 50))
case("batch_norm", lambda: nn.BatchNorm2d(32), X)
case("batch_norm channels_last", lambda: nn.BatchNorm2d(32), X,
     call=lambda m, x: m(x.to(memory_format=torch.channels_last)))  # fmt: skip
case("batch_norm eval", lambda: nn.BatchNorm2d(32).eval(), X, grad=False)
case("attention cudnn off", lambda: nn.MultiheadAttention(64, 4), (16, 4, 64),
     call=lambda m, x: m(x, x, x, need_weights=False))  # fmt: skip

cudnn = torch.backends.cudnn
for label, switch in {
    "benchmark": lambda: cudnn.flags(enabled=True, benchmark=True),
    "deterministic": lambda: cudnn.flags(enabled=True, deterministic=True),
    "no tf32": lambda: cudnn.flags(enabled=True, allow_tf32=False),
}.items():
    case(f"conv {label}", lambda: nn.Conv2d(32, 64, 3), X, switch)
    case(f"lstm {label}", lambda: nn.LSTM(32, 64), S_, switch)
for label, switch in {
    "tf32": lambda: switched(of_matmul, allow_tf32=True),
    "no fp16 reduction": lambda: switched(of_matmul, allow_fp16_reduced_precision_reduction=False),
    "no bf16 reduction": lambda: switched(of_matmul, allow_bf16_reduced_precision_reduction=False),
}.items():
    case(f"linear {label}", lambda: nn.Linear(64, 128), (32, 64), switch, (f32, f16, bf16))


def attend(m: Any, x: Any) -> Any:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


A = (2, 4, 128, 64)
for one in ("flash", "mem_efficient", "cudnn"):
    case(f"attention without {one}", nn.Identity, A, lambda one=one: switched(of_sdp, **{one: False}), call=attend)
case(
    "attention without fused",
    nn.Identity,
    A,
    lambda: switched(of_sdp, flash=False, mem_efficient=False, cudnn=False),
    call=attend,
)
case("attention math half", nn.Identity, A, lambda: sdpa_kernel(SDPBackend.MATH), (f16, bf16), attend)
case("attention math reduced", nn.Identity, A, dtypes=(f16, bf16), call=attend, switch=lambda: reduced())
for backend in SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION:
    case(f"attention {backend.name}", nn.Identity, A, lambda b=backend: sdpa_kernel(b), (f32, f16), attend)
case("attention priority", nn.Identity, A, call=attend, switch=lambda: sdpa_kernel(
    [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True))  # fmt: skip


@contextlib.contextmanager
def reduced() -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            yield
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


case("linear cublaslt", lambda: nn.Linear(64, 128), (32, 64), lambda: switched(of_library, blas="cublaslt"))
case(
    "matmul linalg cusolver",
    nn.Identity,
    (4, 16, 16),
    lambda: switched(of_library, linalg="cusolver"),
    (f32,),
    lambda m, x: x @ x,
)
