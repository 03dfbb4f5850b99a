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


def ones(*shape: int) -> Any:
    return lambda dt: torch.ones(shape, device="cuda", dtype=torch.bool)


def zeros(*shape: int) -> Any:
    return lambda dt: torch.zeros(shape, device="cuda", dtype=dt)


def sd(
    name: str, mk: Any = qkv, dtypes: Any = (f32, f16, bf16), layout: str = "bshd", ctx: Any = None, kw: Any = None,
    grad: bool = True, mask: Any = None,
) -> None:  # fmt: skip
    def setup(dt: torch.dtype) -> Callable[[], None]:
        tensors = [one if grad else one.detach() for one in mk(dt)]
        more = {**(kw or {}), **({"attn_mask": mask(dt)} if mask else {})}

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


sd("plain")
sd("plain bhsd", lambda dt: [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv(dt)], layout="bhsd")
sd("causal", kw={"is_causal": True})
sd("dropout", kw={"dropout_p": 0.1})
sd("nograd", grad=False)
sd("odd s", lambda dt: qkv(dt, s=100))
sd("long s", lambda dt: qkv(dt, s=1000))
sd("cross", lambda dt: qkv(dt, s=100, skv=77))
for d in (32, 80, 96, 128, 160, 192, 224, 256, 20, 33):
    sd(f"d{d}", lambda dt, d=d: qkv(dt, d=d))
for d in (96, 128, 160, 256, 512):
    sd(f"eff d{d}", lambda dt, d=d: qkv(dt, d=d), ctx=B.EFFICIENT_ATTENTION)
    sd(f"eff d{d} odd", lambda dt, d=d: qkv(dt, s=100, d=d, skv=333), ctx=B.EFFICIENT_ATTENTION)
sd("eff d512 heads", lambda dt: qkv(dt, b=8, h=8, s=200, d=512), ctx=B.EFFICIENT_ATTENTION)
sd("eff d512 many heads", lambda dt: qkv(dt, b=32, h=16, d=512), ctx=B.EFFICIENT_ATTENTION)
sd("eff d64 dv256", lambda dt: qkv(dt, d=64, dv=256), ctx=B.EFFICIENT_ATTENTION)
sd("eff d256 dv64", lambda dt: qkv(dt, d=256, dv=64), ctx=B.EFFICIENT_ATTENTION)
sd("eff d32 dv96", lambda dt: qkv(dt, d=32, dv=96), ctx=B.EFFICIENT_ATTENTION)
sd("eff d256 dropout", lambda dt: qkv(dt, d=256), ctx=B.EFFICIENT_ATTENTION, kw={"dropout_p": 0.1})
sd("eff d96 dropout", lambda dt: qkv(dt, d=96), ctx=B.EFFICIENT_ATTENTION, kw={"dropout_p": 0.1})
sd("dv", lambda dt: qkv(dt, d=64, dv=32))
sd("mask bool", mask=ones(2, 1, 128, 128))
sd("mask bool b1", mask=ones(1, 1, 128, 128))
sd("mask float", mask=zeros(2, 4, 128, 128))
sd("mask 2d", mask=zeros(128, 128))
sd("mask pad", lambda dt: qkv(dt, s=100), mask=zeros(2, 1, 100, 100))
sd("mask pad bool", lambda dt: qkv(dt, s=100), mask=ones(2, 1, 100, 100))
sd("mask row", mask=ones(2, 1, 1, 128))
sd("mask expanded", mask=lambda dt: torch.zeros(2, 1, 1, 128, device="cuda", dtype=dt).expand(2, 4, 128, 128))
sd("mask grad", mask=lambda dt: T(2, 4, 128, 128, dtype=dt))
sd("mask dropout", mask=ones(2, 1, 128, 128), kw={"dropout_p": 0.1})
sd("gqa", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True})
sd("gqa equal heads", kw={"enable_gqa": True})
sd("gqa equal heads efficient", kw={"enable_gqa": True}, ctx=B.EFFICIENT_ATTENTION)
sd("gqa equal heads math", kw={"enable_gqa": True}, ctx=B.MATH)
sd("gqa math", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True}, ctx=B.MATH)
sd("gqa efficient refused", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True}, ctx=B.EFFICIENT_ATTENTION)
sd("gqa causal", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True, "is_causal": True})
sd("gqa mask", lambda dt: qkv(dt, h=8, kv=2), kw={"enable_gqa": True}, mask=ones(2, 1, 128, 128))
sd("scale", kw={"scale": 0.5})
sd("ctx math", ctx=[B.MATH])
sd("ctx math causal", ctx=[B.MATH], kw={"is_causal": True})
sd("ctx math dropout", ctx=[B.MATH], kw={"dropout_p": 0.1})
sd("ctx math mask", ctx=[B.MATH], mask=ones(2, 1, 128, 128))
sd("ctx math nograd", ctx=[B.MATH], grad=False)
sd("ctx eff", ctx=[B.EFFICIENT_ATTENTION])
sd("ctx eff nograd", ctx=[B.EFFICIENT_ATTENTION], grad=False)
sd("ctx flash", ctx=[B.FLASH_ATTENTION], dtypes=(f16, bf16))
sd("ctx cudnn", ctx=[B.CUDNN_ATTENTION], dtypes=(f16, bf16))
sd("s1 batch1", lambda dt: qkv(dt, b=1, s=1))
sd("3d", lambda dt: [T(8, 128, 64, dtype=dt) for _ in range(3)], layout="x")
sd("f64", lambda dt: qkv(torch.float64), dtypes=(f32,))


def layer(kind: Any, *sizes: int) -> Any:
    return (2, 32, 64), lambda dt: kind(64, 4, *sizes, batch_first=True, device="cuda", dtype=dt)


mha, encoder = layer(nn.MultiheadAttention), layer(nn.TransformerEncoderLayer, 128)
decoder = layer(nn.TransformerDecoderLayer, 128)
case("mha noweights", mha, lambda x, m: m(x, x, x, need_weights=False)[0])
case("mha weights", mha, lambda x, m: m(x, x, x)[0])
case("encoder layer", encoder, lambda x, m: m(x))
case("encoder layer eval", encoder, lambda x, m: m.eval()(x))
case("decoder layer", decoder, lambda x, m: m(x, x))
