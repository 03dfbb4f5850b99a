"""Training loops, and calls under autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernel_calls import NAMES as DT
from kernel_calls import I, Setup, T, bf16, f16

CASES: dict[str, Setup] = {}


class Block(nn.Module):
    def __init__(s, w=64, h=4):
        super().__init__()
        s.n1, s.n2 = nn.LayerNorm(w), nn.LayerNorm(w)
        s.qkv, s.out = nn.Linear(w, 3 * w), nn.Linear(w, w)
        s.mlp = nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w))
        s.drop = nn.Dropout(0.1)
        s.h = h

    def forward(s, x):
        B, T, C = x.shape
        q, k, v = [t.view(B, T, s.h, C // s.h).transpose(1, 2) for t in s.qkv(s.n1(x)).split(C, 2)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(B, T, C)
        x = x + s.drop(s.out(y))
        return x + s.drop(s.mlp(s.n2(x)))


class GPT(nn.Module):
    def __init__(s, V=300, L=32, w=64, n=2, ckpt=False):
        super().__init__()
        s.tok, s.pos = nn.Embedding(V, w), nn.Embedding(L, w)
        s.blocks = nn.ModuleList(Block(w) for _ in range(n))
        s.n = nn.LayerNorm(w)
        s.head = nn.Linear(w, V, bias=False)
        s.head.weight = s.tok.weight
        s.ckpt = ckpt

    def forward(s, i, t):
        from torch.utils.checkpoint import checkpoint

        x = s.tok(i) + s.pos(torch.arange(i.shape[1], device=i.device))
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False) if s.ckpt else b(x)
        return F.cross_entropy(s.head(s.n(x)).flatten(0, 1), t.flatten())


def train(
    name, model, data, opt=torch.optim.AdamW, dtype=None, scaler=False, clip=False, steps=2, none=True, accumulate=1
):
    def setup():
        m = model().cuda()
        d = data()
        o = opt(list(m.parameters()))
        sc = torch.amp.GradScaler("cuda", enabled=scaler)

        def step():
            for _ in range(accumulate):
                with torch.autocast("cuda", dtype=dtype or f16, enabled=dtype is not None):
                    loss = m(*d)
                sc.scale(loss).backward()
            if clip:
                sc.unscale_(o)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            sc.step(o)
            sc.update()
            o.zero_grad(set_to_none=none)

        def body():
            for _ in range(steps):
                step()

        return body

    CASES[name] = setup


def d():
    return (I(300, 4, 32), I(300, 4, 32))


train("gpt fp32", GPT, d)
train("gpt fp16", GPT, d, dtype=f16)
train("gpt bf16", GPT, d, dtype=bf16)
train("gpt fp16 scaler clip", GPT, d, dtype=f16, scaler=True, clip=True)
train("gpt bf16 ckpt", lambda: GPT(ckpt=True), d, dtype=bf16)
train("gpt bf16 accumulate", GPT, d, dtype=bf16, accumulate=2)
train("gpt zeros", GPT, d, none=False)


class CNN(nn.Module):
    def __init__(s, cl=False):
        super().__init__()
        s.f = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU(),
            nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.GroupNorm(8, 64),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
        )  # fmt: skip
        if cl:
            s.to(memory_format=torch.channels_last)
        s.cl = cl

    def forward(s, x, t):
        if s.cl:
            x = x.to(memory_format=torch.channels_last)
        return F.cross_entropy(s.f(x), t)


def dc():
    return (T(8, 3, 64, 64, grad=False), I(10, 8))


train("cnn fp32", CNN, dc, opt=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
train("cnn fp16", CNN, dc, dtype=f16, scaler=True)
train("cnn bf16", CNN, dc, dtype=bf16)
train("cnn cl fp32", lambda: CNN(True), dc)
train("cnn cl fp16", lambda: CNN(True), dc, dtype=f16, scaler=True)


def amp(name, inputs, fn):
    for dt in (f16, bf16):

        def setup(dt=dt):
            xs = inputs()

            def body():
                with torch.autocast("cuda", dtype=dt):
                    o = fn(*xs)
                if o.requires_grad:
                    o.float().sum().backward()
                for x in xs:
                    if isinstance(x, torch.Tensor):
                        x.grad = None
                    elif isinstance(x, nn.Module):
                        x.zero_grad()

            body()
            return body

        CASES[f"amp {name} {DT[dt]}"] = setup


amp("linear", lambda: (T(8, 64), T(32, 64), T(32)), F.linear)
amp("linear 3d", lambda: (T(4, 8, 64), T(32, 64), T(32)), F.linear)
amp("weight twice", lambda: (T(8, 64), T(64, 64)), lambda x, w: (x @ w) @ w)
amp("nested", lambda: (T(8, 64), T(64, 64)), lambda x, w: _nest(x, w))


def _nest(x, w):
    y = x @ w
    with torch.autocast("cuda", enabled=False):
        y = y.float() @ w
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = y @ w
    return y @ w


amp("nocache", lambda: (T(8, 64), T(64, 64)), lambda x, w: _nocache(x, w))


def _nocache(x, w):
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        return (x @ w) @ w


for name, after in {
    "softmax": lambda x, y: torch.softmax(y, -1),
    "log_softmax": lambda x, y: torch.log_softmax(y, -1),
    "exp": lambda x, y: torch.exp(y),
    "sum": lambda x, y: y.sum(-1),
    "norm": lambda x, y: y.norm(),
    "norm dim": lambda x, y: y.norm(dim=-1),
    "cumsum": lambda x, y: y.cumsum(-1),
    "cat": lambda x, y: torch.cat([y, x], 1),
    "mse": lambda x, y: F.mse_loss(y, x),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(y, x.detach()),
}.items():
    amp(name, lambda: (T(8, 64), T(64, 64)), lambda x, w, after=after: after(x, x @ w))
amp("pow", lambda: (T(8, 64), T(64, 64)), lambda x, w: (x @ w).pow(2).mean(-1))
amp("layer_norm", lambda: (T(8, 64), T(64, 64), T(64), T(64)), lambda x, w, a, b: F.layer_norm(x @ w, (64,), a, b))
amp("rms_norm", lambda: (T(8, 64), T(64, 64), T(64)), lambda x, w, a: F.rms_norm(x @ w, (64,), a))
amp("group_norm", lambda: (T(8, 64), T(64, 64), T(64), T(64)), lambda x, w, a, b: F.group_norm(x @ w, 8, a, b))
amp("addcmul", lambda: (T(8, 64), T(64, 64)), lambda x, w: torch.addcmul(x, x @ w, x @ w))
amp("conv", lambda: (T(4, 8, 16, 16), nn.Conv2d(8, 8, 3, device="cuda")), lambda x, c: c(x))
amp("convT", lambda: (T(4, 8, 16, 16), nn.ConvTranspose2d(8, 8, 3, device="cuda")), lambda x, c: c(x))
amp("einsum", lambda: (T(4, 8, 16), T(4, 8, 16)), lambda a, b: torch.einsum("bik,bjk->bij", a, b))
amp(
    "interpolate",
    lambda: (T(4, 8, 16, 16), nn.Conv2d(8, 8, 3, device="cuda")),
    lambda x, c: F.interpolate(c(x), scale_factor=2),
)
amp("sdpa", lambda: [T(2, 4, 32, 16) for _ in range(3)], F.scaled_dot_product_attention)
amp(
    "mha",
    lambda: (T(2, 32, 64), nn.MultiheadAttention(64, 4, batch_first=True, device="cuda")),
    lambda x, m: m(x, x, x, need_weights=False)[0],
)
amp(
    "encoder",
    lambda: (T(2, 32, 64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="cuda")),
    lambda x, m: m(x),
)
amp("lstm", lambda: (T(2, 32, 64), nn.LSTM(64, 32, batch_first=True, device="cuda")), lambda x, m: m(x)[0])
