"""Products of matrices, arithmetic, reductions, joining."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_calls import Calls, I, S, T, bf16, f32

case = Calls()
CASES = case.cases

# matmuls

case("linear 2d", lambda dt: (T(64, 128, dtype=dt), T(256, 128, dtype=dt), T(256, dtype=dt)), F.linear)
case("linear 3d", lambda dt: (T(*S, dtype=dt), T(512, 256, dtype=dt), T(512, dtype=dt)), F.linear)
case("linear 3d nobias", lambda dt: (T(*S, dtype=dt), T(512, 256, dtype=dt)), F.linear)
case("linear 4d", lambda dt: (T(2, *S, dtype=dt), T(512, 256, dtype=dt), T(512, dtype=dt)), F.linear)
case("linear 1d", lambda dt: (T(256, dtype=dt), T(512, 256, dtype=dt), T(512, dtype=dt)), F.linear)
case(
    "linear noncontig",
    lambda dt: (T(64, 8, 256, dtype=dt), T(512, 256, dtype=dt), T(512, dtype=dt)),
    lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
)
case(
    "linear noncontig last",
    lambda dt: (T(8, 256, 64, dtype=dt), T(512, 256, dtype=dt), T(512, dtype=dt)),
    lambda x, w, b: F.linear(x.transpose(1, 2), w, b),
)
case("linear 1out", lambda dt: (T(64, 256, dtype=dt), T(1, 256, dtype=dt), T(1, dtype=dt)), F.linear)
case("linear oddout", lambda dt: (T(64, 33, dtype=dt), T(7, 33, dtype=dt), T(7, dtype=dt)), F.linear)
case(
    "linear relu",
    lambda dt: (T(64, 256, dtype=dt), T(128, 256, dtype=dt), T(128, dtype=dt)),
    lambda x, w, b: F.relu(F.linear(x, w, b)),
)
case(
    "bilinear",
    lambda dt: (T(64, 20, dtype=dt), T(64, 30, dtype=dt), T(40, 20, 30, dtype=dt), T(40, dtype=dt)),
    F.bilinear,
)
case("mm", lambda dt: (T(64, 128, dtype=dt), T(128, 256, dtype=dt)), torch.mm)
case("mm t", lambda dt: (T(128, 64, dtype=dt), T(256, 128, dtype=dt)), lambda a, b: a.t() @ b.t())
case("bmm", lambda dt: (T(8, 64, 128, dtype=dt), T(8, 128, 256, dtype=dt)), torch.bmm)
case("bmm t", lambda dt: (T(8, 64, 128, dtype=dt), T(8, 256, 128, dtype=dt)), lambda a, b: a @ b.transpose(1, 2))
case("baddbmm", lambda dt: (T(8, 64, 256, dtype=dt), T(8, 64, 128, dtype=dt), T(8, 128, 256, dtype=dt)), torch.baddbmm)
case(
    "baddbmm broadcast",
    lambda dt: (T(1, 1, 256, dtype=dt), T(8, 64, 128, dtype=dt), T(8, 128, 256, dtype=dt)),
    torch.baddbmm,
)
case(
    "addmm beta0",
    lambda dt: (T(64, 256, dtype=dt), T(64, 128, dtype=dt), T(128, 256, dtype=dt)),
    lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2),
)
case("addbmm", lambda dt: (T(64, 256, dtype=dt), T(8, 64, 128, dtype=dt), T(8, 128, 256, dtype=dt)), torch.addbmm)
case("addr", lambda dt: (T(64, 32, dtype=dt), T(64, dtype=dt), T(32, dtype=dt)), torch.addr)
case("mv", lambda dt: (T(64, 128, dtype=dt), T(128, dtype=dt)), torch.mv)
case("dot", lambda dt: (T(128, dtype=dt), T(128, dtype=dt)), torch.dot)
case("outer", lambda dt: (T(128, dtype=dt), T(64, dtype=dt)), torch.outer)
case("matmul 3d2d", lambda dt: (T(*S, dtype=dt), T(256, 64, dtype=dt)), torch.matmul)
case("matmul 2d3d", lambda dt: (T(32, 64, dtype=dt), T(8, 64, 256, dtype=dt)), torch.matmul)
case("matmul 4d4d", lambda dt: (T(4, 8, 64, 32, dtype=dt), T(4, 8, 32, 64, dtype=dt)), torch.matmul)
case("matmul 4d broadcast", lambda dt: (T(4, 8, 64, 32, dtype=dt), T(1, 8, 32, 64, dtype=dt)), torch.matmul)
case("matmul 4d gqa", lambda dt: (T(4, 8, 64, 32, dtype=dt), T(4, 1, 32, 64, dtype=dt)), torch.matmul)
case("matmul 3d1d", lambda dt: (T(*S, dtype=dt), T(256, dtype=dt)), torch.matmul)
case(
    "matmul attn",
    lambda dt: (T(4, 64, 8, 32, dtype=dt), T(4, 64, 8, 32, dtype=dt)),
    lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1),
)
case(
    "einsum bij",
    lambda dt: (T(8, 64, 128, dtype=dt), T(8, 32, 128, dtype=dt)),
    lambda a, b: torch.einsum("bik,bjk->bij", a, b),
)
case(
    "einsum bhqd",
    lambda dt: (T(4, 64, 8, 32, dtype=dt), T(4, 64, 8, 32, dtype=dt)),
    lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b),
)
case(
    "tensordot",
    lambda dt: (T(4, 64, 32, dtype=dt), T(32, 64, 8, dtype=dt)),
    lambda a, b: torch.tensordot(a, b, ([1, 2], [1, 0])),
)
case("kron", lambda dt: (T(8, 8, dtype=dt), T(4, 4, dtype=dt)), torch.kron)
case(
    "multi_dot",
    lambda dt: (T(8, 80, dtype=dt), T(80, 40, dtype=dt), T(40, 4, dtype=dt)),
    lambda *x: torch.linalg.multi_dot(x),
)

# elementwise / broadcasting

case("add", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: a + b)
case("add broadcast", lambda dt: (T(*S, dtype=dt), T(256, dtype=dt)), lambda a, b: a + b)
case("add broadcast mid", lambda dt: (T(*S, dtype=dt), T(64, 1, dtype=dt)), lambda a, b: a + b)
case("mul", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: a * b)
case("mul broadcast", lambda dt: (T(*S, dtype=dt), T(8, 1, 256, dtype=dt)), lambda a, b: a * b)
case("mul scalar", lambda dt: (T(*S, dtype=dt),), lambda a: a * 2)
case("mul 0-dim", lambda dt: (T(*S, dtype=dt), T((), dtype=dt)), lambda a, b: a * b)
case("mul mixed", lambda dt: (T(*S, dtype=dt), T(*S)), lambda a, b: a * b)
case("div", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: a / b)
case("pow", lambda dt: (T(*S, dtype=dt),), lambda a: a.pow(2))
case("pow3", lambda dt: (T(*S, dtype=dt),), lambda a: a.pow(3))
for n in [
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "abs",
    "neg",
    "reciprocal",
    "erf",
    "square",
    "log1p",
    "expm1",
    "sign",
    "floor",
    "clone",
]:
    case(n, lambda dt: (T(*S, dtype=dt),), getattr(torch, n))
case("clamp", lambda dt: (T(*S, dtype=dt),), lambda a: a.clamp(-1, 1))
case("clamp tensor", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: torch.clamp(a, min=b))
case("maximum", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), torch.maximum)
case("where", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: torch.where(a > 0, a, b))
case("where scalar", lambda dt: (T(*S, dtype=dt),), lambda a: torch.where(a > 0, a, 0.0))
case("masked_fill", lambda dt: (T(*S, dtype=dt),), lambda a: a.masked_fill(a > 0, 0.0))
case(
    "masked_fill broadcast",
    lambda dt: (T(*S, dtype=dt), torch.ones(64, 256, device="cuda", dtype=torch.bool)),
    lambda a, m: a.masked_fill(m, 0.0),
)
case("addcmul", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt), T(*S, dtype=dt)), torch.addcmul)
case("addcdiv", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt), T(*S, dtype=dt)), torch.addcdiv)
case("lerp", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: torch.lerp(a, b, 0.5))
case("atan2", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), torch.atan2)

# reductions

for n in ["sum", "mean", "std", "var", "logsumexp", "amax", "amin", "prod", "norm", "nansum"]:
    if n not in ("logsumexp",):
        case(f"{n} all", lambda dt: (T(*S, dtype=dt),), lambda x, n=n: getattr(torch, n)(x))
        case(f"{n} all big", lambda dt: (T(64, 256, 512, dtype=dt),), lambda x, n=n: getattr(torch, n)(x), (f32, bf16))
    if n not in ("norm",):
        case(f"{n} last", lambda dt: (T(*S, dtype=dt),), lambda x, n=n: getattr(torch, n)(x, dim=-1))
        case(
            f"{n} first",
            lambda dt: (T(64, 256, 512, dtype=dt),),
            lambda x, n=n: getattr(torch, n)(x, dim=0),
            (f32, bf16),
        )
case("sum01", lambda dt: (T(64, 256, 512, dtype=dt),), lambda x: x.sum((0, 1)))
case("sum small wide", lambda dt: (T(100000, 8, dtype=dt),), lambda x: x.sum(0))
case("sum rows long", lambda dt: (T(8, 1000000, dtype=dt),), lambda x: x.sum(1))
case("sum 2 rows", lambda dt: (T(2, 8000000, dtype=dt),), lambda x: x.sum(1))
case("max dim", lambda dt: (T(*S, dtype=dt),), lambda x: x.max(-1)[0])
case("max dim0 big", lambda dt: (T(4096, 512, dtype=dt),), lambda x: x.max(0)[0])
case("argmax", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: x.argmax(-1))
case("argmax all", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: x.argmax())
case("median", lambda dt: (T(*S, dtype=dt),), lambda x: x.median(-1)[0])
case("kthvalue", lambda dt: (T(*S, dtype=dt),), lambda x: x.kthvalue(3, -1)[0])
case("mode", lambda dt: (T(*S, dtype=dt),), lambda x: x.mode(-1)[0])
case("vector_norm", lambda dt: (T(64, 256, 512, dtype=dt),), lambda x: torch.linalg.vector_norm(x))
case("var_mean", lambda dt: (T(*S, dtype=dt),), lambda x: torch.var_mean(x, dim=-1))
case("any all", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: ((x > 0).any(), (x > 0).all()))
case("any big", lambda dt: (T(64, 256, 512, dtype=dt, grad=False),), lambda x: (x > 0).any())
case("isnan any", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: x.isnan().any())
case("isfinite all", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: x.isfinite().all())
case("count_nonzero", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: x.count_nonzero())
case("histc", lambda dt: (T(*S, dtype=dt, grad=False),), lambda x: x.histc(100, -1, 1), (f32,))
case("bincount", lambda dt: (I(100, 10000),), lambda x: x.bincount(minlength=100), (f32,))

# joining

case("cat", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: torch.cat([a, b], 1))
case("cat last", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: torch.cat([a, b], -1))
case("cat many", lambda dt: [T(16, 32, dtype=dt) for _ in range(200)], lambda *x: torch.cat(x))
case("cat mixed", lambda dt: (T(*S, dtype=dt), T(*S)), lambda a, b: torch.cat([a, b], 1))
case("stack", lambda dt: (T(*S, dtype=dt), T(*S, dtype=dt)), lambda a, b: torch.stack([a, b]))
case("split", lambda dt: (T(*S, dtype=dt),), lambda a: a.split(128, -1))
case("chunk", lambda dt: (T(*S, dtype=dt),), lambda a: a.chunk(2, 1))
case("unbind", lambda dt: (T(4, 64, 64, dtype=dt),), lambda a: a.unbind(0))
case("transpose contiguous", lambda dt: (T(*S, dtype=dt),), lambda a: a.transpose(1, 2).contiguous())
case("permute reshape", lambda dt: (T(*S, dtype=dt),), lambda a: a.permute(2, 0, 1).reshape(256, -1))
case("to f32", lambda dt: (T(*S, dtype=dt),), lambda a: a.float())
case("to f64", lambda dt: (T(*S, dtype=dt),), lambda a: a.double())
case("to bf16 back", lambda dt: (T(*S, dtype=dt),), lambda a: a.bfloat16().float())
case(
    "rotary",
    lambda dt: (T(4, 8, 64, 32, dtype=dt), T(64, 32, dtype=dt, grad=False), T(64, 32, dtype=dt, grad=False)),
    lambda x, c, s: x * c + torch.cat((-x[..., 16:], x[..., :16]), -1) * s,
)
case("fft", lambda dt: (T(8, 64, 256),), lambda x: torch.fft.rfft(x).abs(), (f32,))
case(
    "stft",
    lambda dt: (T(4, 8000),),
    lambda x: torch.stft(x, 400, 160, window=torch.hann_window(400, device="cuda"), return_complex=True).abs(),
    (f32,),
)
case(
    "complex",
    lambda dt: (T(8, 64, 32),),
    lambda x: torch.view_as_real(torch.view_as_complex(x.view(8, 64, 16, 2)) * 2j),
    (f32,),
)
