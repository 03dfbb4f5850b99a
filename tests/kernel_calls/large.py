"""Calls at the sizes of real work, where kernels take scratch that they do not take at small ones, and expanded gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_calls import Calls, I, T, bf16, f16, f32

case = Calls()
CASES = case.cases
ROWS, IMAGES, VOLUMES, SERIES = (8192, 1024), (16, 64, 128, 128), (4, 8, 32, 32, 32), (32, 64, 4096)


def summed(name, inputs, call, dtypes=(f32,)):
    """A call whose gradient is one number for all of its result."""
    case(name, inputs, lambda *given: call(*given).sum(), dtypes)


def norm(*shape):
    return [shape, (shape[-1],), (shape[-1],)]


for rows, columns in ((65536, 128), (131072, 256), (262144, 32), (262144, 96), (262144, 192)):
    case(
        f"layer_norm {rows} {columns}", norm(rows, columns), lambda x, w, b: F.layer_norm(x, w.shape, w, b), (f32, f16)
    )

# expanded gradients

for kind in ("max_pool2d", "avg_pool2d"):
    summed(kind, IMAGES, lambda x, kind=kind: getattr(F, kind)(x, 3, 2), (f32, f16))
for kind in ("adaptive_avg_pool2d", "adaptive_max_pool2d"):
    summed(kind, IMAGES, lambda x, kind=kind: getattr(F, kind)(x, 7))
for kind in ("max_pool3d", "avg_pool3d"):
    summed(kind, VOLUMES, lambda x, kind=kind: getattr(F, kind)(x, 2))
for kind in ("max_pool1d", "avg_pool1d"):
    summed(kind, SERIES, lambda x, kind=kind: getattr(F, kind)(x, 3))
for mode in ("reflect", "replicate"):
    summed(f"pad {mode} 1d", SERIES, lambda x, mode=mode: F.pad(x, (1, 1), mode=mode))
    summed(f"pad {mode} 2d", IMAGES, lambda x, mode=mode: F.pad(x, (1, 1, 1, 1), mode=mode))
for mode in ("bilinear", "bicubic"):
    summed(
        f"antialias {mode}", IMAGES, lambda x, mode=mode: F.interpolate(x, scale_factor=0.5, mode=mode, antialias=True)
    )
summed("nearest-exact", IMAGES, lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"))
summed("roll", ROWS, lambda x: x.roll(1, 0))
summed("roll flat", ROWS, lambda x: x.roll(5))
summed("roll windows", IMAGES, lambda x: x.permute(0, 2, 3, 1).roll((3, 3), (1, 2)))
for kind in ("contiguous_format", "channels_last"):
    form = getattr(torch, kind)
    summed(
        f"batch_norm {kind}",
        [IMAGES, (64,), (64,)],
        lambda x, w, b, form=form: F.batch_norm(x.to(memory_format=form), None, None, w, b, True),
    )

# scratch

case("cdist p=1", ((512, 64), (500, 64)), lambda x, y: torch.cdist(x, y, p=1), (f32,))
case("cdist batch", ((4, 256, 64), (4, 300, 64)), lambda x, y: torch.cdist(x, y, p=1), (f32,))
case("pdist", (1024, 64), F.pdist, (f32,))
case("dist", (ROWS, ROWS), torch.dist)
case("median", ROWS, torch.median, (f32, f16), grad=False)
case("nanmedian", ROWS, torch.nanmedian, grad=False)
case("bernoulli", ROWS, torch.bernoulli, (f32, f16, bf16), grad=False)
case("index_reduce", (ROWS, ROWS), lambda x, y: x.index_reduce(0, I(8192, 8192), y, "mean"), grad=False)
case("affine_grid", (64, 2, 3), lambda x: F.affine_grid(x, (64, 3, 256, 256), align_corners=False), (f32, f16))
case("affine_grid 3d", (4, 3, 4), lambda x: F.affine_grid(x, (4, 3, 32, 64, 64), align_corners=False), (f32,))
case("irfft", ROWS, lambda x: torch.fft.irfft(torch.fft.rfft(x)), (f32,))
case("irfft2", IMAGES, lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), (f32,))
for count in (20_000, 1_000_000, 20_000_000):
    CASES[f"randperm {count}"] = lambda count=count: lambda: torch.randperm(count, device="cuda").size()
CASES["randperm int32"] = lambda: lambda: torch.randperm(100_000, device="cuda", dtype=torch.int32).size()
CASES["one_hot"] = lambda: lambda: F.one_hot(T(8192, dtype=torch.long, grad=False), 1000).size()
