"""Sorting, scanning, drawing, indexing."""

from __future__ import annotations

import torch

from kernel_calls import Calls, I, K, N, f32

case = Calls()
CASES = case.cases

# sort & co.

for sh in ((1000,), (100000,), (3000000,), (8, 1000), (64, 5000), (4, 100000), (4096, 64), (512, 2048), (2, 3, 40)):
    case(f"sort {sh}", (sh,), lambda x: x.sort(-1)[0])
    case(f"argsort {sh}", (N(*sh),), lambda x: x.argsort(-1))
    case(f"argsort int {sh}", (K(1000, *sh),), lambda x: x.argsort(-1), (f32,))
    case(f"topk {sh}", (sh,), lambda x: x.topk(10)[0])
    case(f"cumsum {sh}", (sh,), lambda x: x.cumsum(-1))
    case(f"sort desc stable {sh}", (sh,), lambda x: x.sort(-1, descending=True, stable=True)[0], (f32,))
case("sort dim0", ((500, 64),), lambda x: x.sort(0)[0])
case("sort dim0 long", ((5000, 64),), lambda x: x.sort(0)[0])
case("sort middle", ((8, 5000, 4),), lambda x: x.sort(1)[0])
case("sort transposed", ((5000, 64),), lambda x: x.t().sort(-1)[0])
case("sort strided", ((64, 10000),), lambda x: x[:, ::2].sort(-1)[0])
case("sort many rows", ((200, 5000),), lambda x: x.sort(-1)[0])
case("sort many rows int", (K(1000, 130, 5000),), lambda x: x.sort(-1)[0], (f32,))
case("sort long rows", (N(2, 1000000),), lambda x: x.sort(-1)[0])
for sh in ((1024, 20000), (512, 4000), (30, 9000), (30, 10000), (4100, 400)):
    case(f"topk {sh}", (N(*sh),), lambda x: x.topk(5)[0])
case("topk int", (K(1000, 2, 30000),), lambda x: x.topk(5)[0], (f32,))
case("topk huge k", (N(4, 30000),), lambda x: x.topk(5000)[0])
case("topk unsorted", (N(4, 30000),), lambda x: x.topk(5000, sorted=False)[0])
case("topk dim0", (N(30000, 4),), lambda x: x.topk(5, 0)[0])
case("topk middle", (N(8, 64, 1000),), lambda x: x.topk(5, 1)[0])
case("topk big k", ((8, 50000),), lambda x: x.topk(2000)[0])
case("topk 50257", (N(4, 50257),), lambda x: x.topk(50)[0])
case("cumsum dim0", ((500, 64),), lambda x: x.cumsum(0))
case("cumsum int", (K(10, 4096),), lambda x: x.cumsum(0), (f32,))
case("cumsum mask", (lambda dt: torch.ones(8, 512, device="cuda", dtype=torch.int64),), lambda x: x.cumsum(-1), (f32,))
case("cumprod", (N(64, 64),), lambda x: x.cumprod(-1))
case("cummax", (N(64, 64),), lambda x: x.cummax(-1)[0])
case("logcumsumexp", (N(64, 64),), lambda x: x.logcumsumexp(-1))
case("multinomial", (lambda dt: torch.rand(8, 1000, device="cuda").to(dt),), lambda x: torch.multinomial(x, 1))
case("multinomial many", (lambda dt: torch.rand(8, 1000, device="cuda").to(dt),), lambda x: torch.multinomial(x, 10))
case(
    "multinomial replace",
    (lambda dt: torch.rand(8, 1000, device="cuda").to(dt),),
    lambda x: torch.multinomial(x, 10, replacement=True),
)
case("multinomial one", (lambda dt: torch.rand(50257, device="cuda").to(dt),), lambda x: torch.multinomial(x, 1))
case(
    "multinomial vocabulary",
    (lambda dt: torch.rand(4, 50257, device="cuda").to(dt),),
    lambda x: torch.multinomial(x, 5),
)
case("searchsorted", (N(1000, dtype=f32), N(100, dtype=f32)), torch.searchsorted, (f32,))
case("bucketize", (N(1000, dtype=f32), N(100, dtype=f32)), torch.bucketize, (f32,))
case("tril", ((64, 64),), torch.tril)
case("triu mask", lambda dt: (), lambda: torch.triu(torch.full((64, 64), -1e9, device="cuda"), 1), (f32,))
case("flip", ((64, 64),), lambda x: x.flip(0))
case("roll", ((8, 56, 56, 32),), lambda x: torch.roll(x, (3, 3), (1, 2)))
case("repeat", ((64, 64),), lambda x: x.repeat(2, 3))
case("repeat_interleave", ((64, 64),), lambda x: x.repeat_interleave(4, dim=0))
case("expand reshape", ((4, 2, 1, 16, 32),), lambda x: x.expand(4, 2, 4, 16, 32).reshape(4, 8, 16, 32))
case("tile", ((64, 64),), lambda x: x.tile(2, 2))
case("diag", ((64,),), torch.diag)
case("meshgrid", ((64,), (32,)), lambda a, b: torch.stack(torch.meshgrid(a, b, indexing="ij")))

# indexing

case("index_select", ((1000, 64), K(1000, 128)), lambda x, i: x.index_select(0, i))
case("index 1", ((1000, 64), K(1000, 128)), lambda x, i: x[i])
case("index 1 big", ((1000, 64), K(1000, 20000)), lambda x, i: x[i])
case("index 2", ((100, 100, 8), K(100, 128), K(100, 128)), lambda x, i, j: x[i, j])
case("index arange", ((64, 1000), K(1000, 64)), lambda x, i: x[torch.arange(64, device="cuda"), i])
case("index broadcast", ((64, 30, 16), K(64, 8, 1), K(30, 8, 5)), lambda x, i, j: x[i, j])
case("index last", ((8, 100, 64),), lambda x: x[:, -1])
case("index slice step", ((8, 100, 64),), lambda x: x[:, ::2])
case("index table", ((169, 4), K(169, 49 * 49)), lambda t, i: t[i].view(49, 49, 4).permute(2, 0, 1).contiguous())
case("gather", ((64, 1000), K(1000, 64, 10)), lambda x, i: x.gather(1, i))
case("scatter", ((64, 1000), K(1000, 64, 10), (64, 10)), lambda x, i, s: x.scatter(1, i, s))
case("scatter_add", ((64, 1000), K(1000, 64, 10), (64, 10)), lambda x, i, s: x.scatter_add(1, i, s))
case("scatter_reduce", ((64, 1000), K(1000, 64, 10), (64, 10)), lambda x, i, s: x.scatter_reduce(1, i, s, "amax"))
case("scatter_reduce mean", ((64, 1000), K(1000, 64, 10), (64, 10)), lambda x, i, s: x.scatter_reduce(1, i, s, "mean"))
case("index_add", ((1000, 64), K(1000, 128), (128, 64)), lambda x, i, s: x.index_add(0, i, s))
case("index_copy", ((1000, 64), K(1000, 128), (128, 64)), lambda x, i, s: x.index_copy(0, i, s))
case("index_fill", ((1000, 64), K(1000, 128)), lambda x, i: x.index_fill(0, i, 0.0))
case("index_put", ((1000, 64), K(1000, 128), (128, 64)), lambda x, i, s: x.index_put((i,), s))
case("index_put acc", ((1000, 64), K(1000, 128), (128, 64)), lambda x, i, s: x.index_put((i,), s, accumulate=True))
case("index_put acc transposed", ((64, 1000), K(1000, 128)), lambda x, i: x.t()[i].t())
case("index_put acc one", ((1000, 64), K(1000, 128), (64,)), lambda x, i, s: x.index_put((i,), s, accumulate=True))
case(
    "index_put acc 2",
    ((100, 90, 8), K(90, 128), (100, 128, 8)),
    lambda x, i, s: x.index_put((None, i), s, accumulate=True),
)
case("index_put_ acc", (N(1000, 64), K(1000, 128), N(128, 64)), lambda x, i, s: x.index_put_((i,), s, True), grad=False)
case("index_put 2", ((100, 100, 8), K(100, 128), K(100, 128), (128, 8)), lambda x, i, j, s: x.index_put((i, j), s))
case("setitem", ((64, 100), (64, 50)), lambda x, y: _set(x, y))


def _set(x, y):
    z = x * 1
    z[:, :50] = y
    return z


case("take_along_dim", ((64, 1000), K(1000, 64, 10)), lambda x, i: x.take_along_dim(i, 1))
case("take", ((64, 1000), K(1000, 64)), lambda x, i: x.take(i))
case(
    "masked_scatter",
    ((64, 100), lambda dt: torch.ones(64, 100, device="cuda", dtype=torch.bool), (64, 100)),
    lambda x, m, s: x.masked_scatter(m, s),
)
case(
    "masked_scatter nograd", (N(64, 1000), lambda dt: torch.ones(64, 1, device="cuda", dtype=torch.bool), N(64, 1000)),
    lambda x, m, s: x.masked_scatter(m, s), grad=False,
)  # fmt: skip
case(
    "scatter_reduce mean alone",
    (N(64, 1000), K(1000, 64, 10), N(64, 10)),
    lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False),
)


# What is written where: a number stays on the host, a mask and a number are one kernel.


def put(name, key, value):
    def call(x):
        x[key(x)] = value
        return x * 1

    case(f"put {name}", (N(64, 64),), call, grad=False)


put("mask number", lambda x: x > 0, 1.5)
put("mask host", lambda x: x > 0, torch.tensor(1.5))
put("row mask number", lambda x: (slice(None), x[0] > 0), 2)
put("row number", lambda x: 3, 0.0)
put("place number", lambda x: (3, 5), 0.0)
put("index number", lambda x: I(64, 8), 0.0)
case("pow of a number", ((64, 64),), lambda x: 2.5**x)
case("pow of one", (N(64, 64),), lambda x: 1**x, grad=False)
case("as_tensor", ((64, 64),), lambda x: torch.as_tensor(x, device=x.device) * 2)
