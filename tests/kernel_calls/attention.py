"""scaled_dot_product_attention in every way that chooses another kernel, and the layers made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend as B
from torch.nn.attention import sdpa_kernel

from kernel_calls import NAMES, Calls, Setup, T, bf16, f16, f32

case = Calls()
CASES: dict[str, Setup] = case.cases


def qkv(
    dt: Any, b: int = 2, h: int = 4, s: int = 128, d: int = 64, dv: Any = None, kv: Any = None, skv: Any = None
) -> Any:
    q = T(b, s, h, d, dtype=dt)
    return q, T(b, skv or s, kv or h, d, dtype=dt), T(b, skv or s, kv or h, dv or d, dtype=dt)


def sd(
    name: str,
    mk: Any,
    dtypes: Any = (f32, f16, bf16),
    layout: str = "bshd",
    ctx: Any = None,
    kw: Any = None,
    grad: bool = True,
    extra: Any = None,
) -> None:
    def setup(dt: torch.dtype) -> Callable[[], None]:
        tensors = [one if grad else one.detach() for one in mk(dt)]
        more = {**(kw or {}), **(extra(dt) if extra else {})}

        def call() -> Any:
            given = (one.transpose(1, 2) if layout == "bshd" else one for one in tensors)
            if ctx is None:
                return F.scaled_dot_product_attention(*given, **more)
            with sdpa_kernel(ctx):
                return F.scaled_dot_product_attention(*given, **more)

        grads = torch.zeros_like(call())

        def body() -> None:
            out = call()
            if grad:
                torch.autograd.grad(out, tensors, grads)

        body()
        return body

    for dt in dtypes:
        CASES[f"{name} {NAMES[dt]}"] = lambda dt=dt: setup(dt)


sd("plain", lambda dt: qkv(dt))
sd("plain bhsd", lambda dt: [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv(dt)], layout="bhsd")
sd("causal", lambda dt: qkv(dt), kw={"is_causal": True})
sd("dropout", lambda dt: qkv(dt), kw={"dropout_p": 0.1})
sd("nograd", lambda dt: qkv(dt), grad=False)
sd("odd s", lambda dt: qkv(dt, s=100))
sd("long s", lambda dt: qkv(dt, s=1000))
sd("cross", lambda dt: qkv(dt, s=100, skv=77))
sd("d32", lambda dt: qkv(dt, d=32))
sd("d80", lambda dt: qkv(dt, d=80))
sd("d96", lambda dt: qkv(dt, d=96))
sd("d128", lambda dt: qkv(dt, d=128))
sd("d192", lambda dt: qkv(dt, d=192))
sd("d256", lambda dt: qkv(dt, d=256))
sd("d20", lambda dt: qkv(dt, d=20))
sd("d33", lambda dt: qkv(dt, d=33))
sd("dv", lambda dt: qkv(dt, d=64, dv=32))
sd(
    "mask bool",
    lambda dt: qkv(dt),
    extra=lambda dt: {"attn_mask": torch.ones(2, 1, 128, 128, device="cuda", dtype=torch.bool)},
)
sd(
    "mask bool b1",
    lambda dt: qkv(dt),
    extra=lambda dt: {"attn_mask": torch.ones(1, 1, 128, 128, device="cuda", dtype=torch.bool)},
)
sd(
    "mask float",
    lambda dt: qkv(dt),
    extra=lambda dt: {"attn_mask": torch.zeros(2, 4, 128, 128, device="cuda", dtype=dt)},
)
sd("mask 2d", lambda dt: qkv(dt), extra=lambda dt: {"attn_mask": torch.zeros(128, 128, device="cuda", dtype=dt)})
sd(
    "mask pad",
    lambda dt: qkv(dt, s=100),
    extra=lambda dt: {"attn_mask": torch.zeros(2, 1, 100, 100, device="cuda", dtype=dt)},
)
sd(
    "mask pad bool",
    lambda dt: qkv(dt, s=100),
    extra=lambda dt: {"attn_mask": torch.ones(2, 1, 100, 100, device="cuda", dtype=torch.bool)},
)
sd(
    "mask row",
    lambda dt: qkv(dt),
    extra=lambda dt: {"attn_mask": torch.ones(2, 1, 1, 128, device="cuda", dtype=torch.bool)},
)
sd(
    "mask expanded",
    lambda dt: qkv(dt),
    extra=lambda dt: {"attn_mask": torch.zeros(2, 1, 1, 128, device="cuda", dtype=dt).expand(2, 4, 128, 128)},
)
sd("mask grad", lambda dt: qkv(dt), extra=lambda dt: {"attn_mask": T(2, 4, 128, 128, dtype=dt)})
sd(
    "mask dropout",
    lambda dt: qkv(dt),
    extra=lambda dt: {"attn_mask": torch.ones(2, 1, 128, 128, device="cuda", dtype=torch.bool)},
    kw={"dropout_p": 0.1},
)
sd("gqa", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True})
sd("gqa causal", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True, "is_causal": True})
sd(
    "gqa mask",
    lambda dt: qkv(dt, h=8, kv=2),
    kw={"enable_gqa": True},
    extra=lambda dt: {"attn_mask": torch.ones(2, 1, 128, 128, device="cuda", dtype=torch.bool)},
)
sd("scale", lambda dt: qkv(dt), kw={"scale": 0.5})
sd("ctx math", lambda dt: qkv(dt), ctx=[B.MATH])
sd("ctx math causal", lambda dt: qkv(dt), ctx=[B.MATH], kw={"is_causal": True})
sd("ctx math dropout", lambda dt: qkv(dt), ctx=[B.MATH], kw={"dropout_p": 0.1})
sd(
    "ctx math mask",
    lambda dt: qkv(dt),
    ctx=[B.MATH],
    extra=lambda dt: {"attn_mask": torch.ones(2, 1, 128, 128, device="cuda", dtype=torch.bool)},
)
sd("ctx math nograd", lambda dt: qkv(dt), ctx=[B.MATH], grad=False)
sd("ctx eff", lambda dt: qkv(dt), ctx=[B.EFFICIENT_ATTENTION])
sd("ctx eff nograd", lambda dt: qkv(dt), ctx=[B.EFFICIENT_ATTENTION], grad=False)
sd("ctx flash", lambda dt: qkv(dt), ctx=[B.FLASH_ATTENTION], dtypes=(f16, bf16))
sd("ctx cudnn", lambda dt: qkv(dt), ctx=[B.CUDNN_ATTENTION], dtypes=(f16, bf16))
sd("s1 batch1", lambda dt: qkv(dt, b=1, s=1))
sd("3d", lambda dt: [T(8, 128, 64, dtype=dt) for _ in range(3)], layout="x")
sd("f64", lambda dt: qkv(torch.float64), dtypes=(f32,))


def mha(dt: Any) -> Any:
    return T(2, 32, 64, dtype=dt), nn.MultiheadAttention(64, 4, batch_first=True, device="cuda", dtype=dt)


def encoder(dt: Any) -> Any:
    return T(2, 32, 64, dtype=dt), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="cuda", dtype=dt)


def decoder(dt: Any) -> Any:
    return T(2, 32, 64, dtype=dt), nn.TransformerDecoderLayer(64, 4, 128, batch_first=True, device="cuda", dtype=dt)


case("mha noweights", mha, lambda x, m: m(x, x, x, need_weights=False)[0])
case("mha weights", mha, lambda x, m: m(x, x, x)[0])
case("encoder layer", encoder, lambda x, m: m(x))
case("encoder layer eval", encoder, lambda x, m: m.eval()(x))
case("decoder layer", decoder, lambda x, m: m(x, x))
