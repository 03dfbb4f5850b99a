"""Products of matrices, arithmetic, reductions, joining."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_calls import Calls, K, N, S, T, W, f32

case = Calls()
CASES = case.cases

# matmuls

case("linear 2d", ((64, 128), (256, 128), (256,)), F.linear)
case("linear 3d", (S, (512, 256), (512,)), F.linear)
case("linear 3d nobias", (S, (512, 256)), F.linear)
case("linear 4d", ((2, *S), (512, 256), (512,)), F.linear)
case("linear 1d", ((256,), (512, 256), (512,)), F.linear)
case("linear noncontig", ((64, 8, 256), (512, 256), (512,)), lambda x, w, b: F.linear(x.transpose(0, 1), w, b))
case("linear noncontig last", ((8, 256, 64), (512, 256), (512,)), lambda x, w, b: F.linear(x.transpose(1, 2), w, b))
case("linear 1out", ((64, 256), (1, 256), (1,)), F.linear)
case("linear oddout", ((64, 33), (7, 33), (7,)), F.linear)
case("linear relu", ((64, 256), (128, 256), (128,)), lambda x, w, b: F.relu(F.linear(x, w, b)))
case("bilinear", ((64, 20), (64, 30), (40, 20, 30), (40,)), F.bilinear)
case("bilinear 3d", ((4, 8, 20), (4, 8, 30), (10, 20, 30)), F.bilinear)
case("bilinear one", ((64, 20), (64, 30), (1, 20, 30), (1,)), F.bilinear)
case("mm", ((64, 128), (128, 256)), torch.mm)
case("mm t", ((128, 64), (256, 128)), lambda a, b: a.t() @ b.t())
case("bmm", ((8, 64, 128), (8, 128, 256)), torch.bmm)
case("bmm t", ((8, 64, 128), (8, 256, 128)), lambda a, b: a @ b.transpose(1, 2))
case("baddbmm", ((8, 64, 256), (8, 64, 128), (8, 128, 256)), torch.baddbmm)
case("baddbmm broadcast", ((1, 1, 256), (8, 64, 128), (8, 128, 256)), torch.baddbmm)
case("addmm beta0", ((64, 256), (64, 128), (128, 256)), lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2))
case("addbmm", ((64, 256), (8, 64, 128), (8, 128, 256)), torch.addbmm)
case("addr", ((64, 32), (64,), (32,)), torch.addr)
case("mv", ((64, 128), (128,)), torch.mv)
case("dot", ((128,), (128,)), torch.dot)
case("outer", ((128,), (64,)), torch.outer)
case("matmul 3d2d", (S, (256, 64)), torch.matmul)
case("matmul 2d3d", ((32, 64), (8, 64, 256)), torch.matmul)
case("matmul 4d4d", ((4, 8, 64, 32), (4, 8, 32, 64)), torch.matmul)
case("matmul 4d broadcast", ((4, 8, 64, 32), (1, 8, 32, 64)), torch.matmul)
case("matmul 4d gqa", ((4, 8, 64, 32), (4, 1, 32, 64)), torch.matmul)
case("matmul 3d1d", (S, (256,)), torch.matmul)
case("matmul attn", ((4, 64, 8, 32), (4, 64, 8, 32)), lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1))
case("einsum bij", ((8, 64, 128), (8, 32, 128)), lambda a, b: torch.einsum("bik,bjk->bij", a, b))
case("einsum bhqd", ((4, 64, 8, 32), (4, 64, 8, 32)), lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b))
case("tensordot", ((4, 64, 32), (32, 64, 8)), lambda a, b: torch.tensordot(a, b, ([1, 2], [1, 0])))
case("kron", ((8, 8), (4, 4)), torch.kron)
case("multi_dot", ((8, 80), (80, 40), (40, 4)), lambda *x: torch.linalg.multi_dot(x))

# elementwise / broadcasting

case("add", (S, S), lambda a, b: a + b)
case("add broadcast", (S, (256,)), lambda a, b: a + b)
case("add broadcast mid", (S, (64, 1)), lambda a, b: a + b)
case("mul", (S, S), lambda a, b: a * b)
case("mul broadcast", (S, (8, 1, 256)), lambda a, b: a * b)
case("mul scalar", (S,), lambda a: a * 2)
case("mul 0-dim", (S, ()), lambda a, b: a * b)
case("mul mixed", (S, W(*S)), lambda a, b: a * b)
case("div", (S, S), lambda a, b: a / b)
case("pow", (S,), lambda a: a.pow(2))
case("pow3", (S,), lambda a: a.pow(3))
for n in (
    "exp", "log", "sqrt", "rsqrt", "sin", "cos", "abs", "neg", "reciprocal", "erf", "square", "log1p", "expm1",
    "sign", "floor", "clone",
):  # fmt: skip
    case(n, (S,), getattr(torch, n))
case("clamp", (S,), lambda a: a.clamp(-1, 1))
case("clamp tensor", (S, S), lambda a, b: torch.clamp(a, min=b))
case("maximum", (S, S), torch.maximum)
case("where", (S, S), lambda a, b: torch.where(a > 0, a, b))
case("where scalar", (S,), lambda a: torch.where(a > 0, a, 0.0))
case("masked_fill", (S,), lambda a: a.masked_fill(a > 0, 0.0))
case(
    "masked_fill broadcast",
    (S, lambda dt: torch.ones(64, 256, device="cuda", dtype=torch.bool)),
    lambda a, m: a.masked_fill(m, 0.0),
)
case("addcmul", (S, S, S), torch.addcmul)
case("addcdiv", (S, S, S), torch.addcdiv)
case("lerp", (S, S), lambda a, b: torch.lerp(a, b, 0.5))
case("atan2", (S, S), torch.atan2)

# reductions

for n in ["sum", "mean", "std", "var", "logsumexp", "amax", "amin", "prod", "norm", "nansum"]:
    if n not in ("logsumexp",):
        case(f"{n} all", (S,), lambda x, n=n: getattr(torch, n)(x))
        case(f"{n} all big", ((64, 256, 512),), lambda x, n=n: getattr(torch, n)(x))
    if n not in ("norm",):
        case(f"{n} last", (S,), lambda x, n=n: getattr(torch, n)(x, dim=-1))
        case(f"{n} first", ((64, 256, 512),), lambda x, n=n: getattr(torch, n)(x, dim=0))
case("sum01", ((64, 256, 512),), lambda x: x.sum((0, 1)))
case("sum small wide", ((100000, 8),), lambda x: x.sum(0))
case("sum rows long", ((8, 1000000),), lambda x: x.sum(1))
case("sum 2 rows", ((2, 8000000),), lambda x: x.sum(1))
case("max dim", (S,), lambda x: x.max(-1)[0])
case("max dim0 big", ((4096, 512),), lambda x: x.max(0)[0])
case("argmax", (N(*S),), lambda x: x.argmax(-1))
case("argmax all", (N(*S),), lambda x: x.argmax())
case("median", (S,), lambda x: x.median(-1)[0])
case("kthvalue", (S,), lambda x: x.kthvalue(3, -1)[0])
case("mode", (S,), lambda x: x.mode(-1)[0])
case("vector_norm", ((64, 256, 512),), lambda x: torch.linalg.vector_norm(x))
case("var_mean", (S,), lambda x: torch.var_mean(x, dim=-1))
case("aminmax", (N(64, 256, 512),), lambda x: torch.aminmax(x))
case("aminmax dim", (N(64, 256, 512),), lambda x: torch.aminmax(x, dim=0))
case("std_mean", (S,), lambda x: torch.std_mean(x, dim=-1))
case("any all", (N(*S),), lambda x: ((x > 0).any(), (x > 0).all()))
case("any big", (N(64, 256, 512),), lambda x: (x > 0).any())
case("isnan any", (N(*S),), lambda x: x.isnan().any())
case("isfinite all", (N(*S),), lambda x: x.isfinite().all())
case("count_nonzero dim", (N(*S),), lambda x: x.count_nonzero(-1))
case("count_nonzero", (N(*S),), lambda x: x.count_nonzero())
case("histc", (N(*S),), lambda x: x.histc(100, -1, 1), (f32,))
case("bincount", (K(100, 10000),), lambda x: x.bincount(minlength=100), (f32,))

# joining

case("cat", (S, S), lambda a, b: torch.cat([a, b], 1))
case("cat last", (S, S), lambda a, b: torch.cat([a, b], -1))
case("cat many", lambda dt: [T(16, 32, dtype=dt) for _ in range(200)], lambda *x: torch.cat(x))
case("cat mixed", (S, W(*S)), lambda a, b: torch.cat([a, b], 1))
case("stack", (S, S), lambda a, b: torch.stack([a, b]))
case("split", (S,), lambda a: a.split(128, -1))
case("chunk", (S,), lambda a: a.chunk(2, 1))
case("unbind", ((4, 64, 64),), lambda a: a.unbind(0))
case("transpose contiguous", (S,), lambda a: a.transpose(1, 2).contiguous())
case("permute reshape", (S,), lambda a: a.permute(2, 0, 1).reshape(256, -1))
case("to f32", (S,), lambda a: a.float())
case("to f64", (S,), lambda a: a.double())
case("to bf16 back", (S,), lambda a: a.bfloat16().float())
case(
    "rotary",
    ((4, 8, 64, 32), N(64, 32), N(64, 32)),
    lambda x, c, s: x * c + torch.cat((-x[..., 16:], x[..., :16]), -1) * s,
)
case("fft", (W(8, 64, 256),), lambda x: torch.fft.rfft(x).abs(), (f32,))
case("angle", (W(8, 64, 256),), lambda x: torch.fft.rfft(x).angle(), (f32,))
case(
    "stft",
    (W(4, 8000),),
    lambda x: torch.stft(x, 400, 160, window=torch.hann_window(400, device="cuda"), return_complex=True).abs(),
    (f32,),
)
case("complex", (W(8, 64, 32),), lambda x: torch.view_as_real(torch.view_as_complex(x.view(8, 64, 16, 2)) * 2j), (f32,))
