"""Layers: activations, dropout, norms, convolutions, pools, images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernel_calls import Calls, S, T, bf16, f32

case = Calls()
CASES = case.cases

# activations

for n in [
    "relu",
    "relu6",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "gelu",
    "silu",
    "mish",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "softsign",
    "tanhshrink",
    "softshrink",
    "hardshrink",
    "logsigmoid",
    "sigmoid",
    "tanh",
]:
    case(n, lambda dt: T(*S, dtype=dt), getattr(F, n))
case("gelu tanh", lambda dt: T(*S, dtype=dt), lambda x: F.gelu(x, approximate="tanh"))
case("glu", lambda dt: T(*S, dtype=dt), F.glu)
case("prelu", lambda dt: (T(8, 64, 256, dtype=dt), T(64, dtype=dt)), F.prelu)
case("rrelu", lambda dt: T(*S, dtype=dt), lambda x: F.rrelu(x, training=True))
case("relu_inplace", lambda dt: T(*S, dtype=dt), lambda x: F.relu_(x * 2))
case("threshold", lambda dt: T(*S, dtype=dt), lambda x: F.threshold(x, 0.1, 20))
for n in ("softmax", "log_softmax", "softmin"):
    case(n, lambda dt: T(*S, dtype=dt), lambda x, n=n: getattr(F, n)(x, dim=-1))
    case(n + " dim1", lambda dt: T(*S, dtype=dt), lambda x, n=n: getattr(F, n)(x, dim=1))
    case(n + " f32out", lambda dt: T(*S, dtype=dt), lambda x, n=n: getattr(F, n)(x, dim=-1, dtype=f32))
case("gumbel_softmax", lambda dt: T(*S, dtype=dt), F.gumbel_softmax)

# dropout

case("dropout", lambda dt: T(*S, dtype=dt), lambda x: F.dropout(x, 0.1))
case("dropout eval", lambda dt: T(*S, dtype=dt), lambda x: F.dropout(x, 0.1, training=False))
case("dropout p0", lambda dt: T(*S, dtype=dt), lambda x: F.dropout(x, 0.0))
case("dropout p1", lambda dt: T(*S, dtype=dt), lambda x: F.dropout(x, 1.0))
case("dropout inplace", lambda dt: T(*S, dtype=dt), lambda x: F.dropout(x * 2, 0.1, inplace=True))
case("dropout nograd", lambda dt: T(*S, dtype=dt, grad=False), lambda x: F.dropout(x, 0.1))
case("dropout1d", lambda dt: T(*S, dtype=dt), lambda x: F.dropout1d(x, 0.1))
case("dropout2d", lambda dt: T(8, 16, 32, 32, dtype=dt), lambda x: F.dropout2d(x, 0.1))
case("dropout3d", lambda dt: T(2, 16, 8, 16, 16, dtype=dt), lambda x: F.dropout3d(x, 0.1))
case("alpha_dropout", lambda dt: T(*S, dtype=dt), lambda x: F.alpha_dropout(x, 0.1, training=True))
case("feature_alpha_dropout", lambda dt: T(*S, dtype=dt), lambda x: F.feature_alpha_dropout(x, 0.1, training=True))
case("nn.Dropout", lambda dt: (T(*S, dtype=dt), nn.Dropout(0.1)), lambda x, m: m(x))
case("torch.dropout", lambda dt: T(*S, dtype=dt), lambda x: torch.dropout(x, 0.1, True))

# norms

case(
    "layer_norm",
    lambda dt: (T(*S, dtype=dt), T(256, dtype=dt), T(256, dtype=dt)),
    lambda x, w, b: F.layer_norm(x, (256,), w, b),
)
case(
    "layer_norm big",
    lambda dt: (T(32, 512, 768, dtype=dt), T(768, dtype=dt), T(768, dtype=dt)),
    lambda x, w, b: F.layer_norm(x, (768,), w, b),
)
case("layer_norm nobias", lambda dt: (T(*S, dtype=dt), T(256, dtype=dt)), lambda x, w: F.layer_norm(x, (256,), w))
case("layer_norm bare", lambda dt: (T(*S, dtype=dt),), lambda x: F.layer_norm(x, (256,)))
case("layer_norm mixed", lambda dt: (T(*S, dtype=dt), T(256), T(256)), lambda x, w, b: F.layer_norm(x, (256,), w, b))
case(
    "layer_norm small",
    lambda dt: (T(4, 10, dtype=dt), T(10, dtype=dt), T(10, dtype=dt)),
    lambda x, w, b: F.layer_norm(x, (10,), w, b),
)
case(
    "layer_norm noncontig",
    lambda dt: (T(8, 256, 64, dtype=dt), T(256, dtype=dt), T(256, dtype=dt)),
    lambda x, w, b: F.layer_norm(x.transpose(1, 2), (256,), w, b),
)
case(
    "layer_norm 10M rows",
    lambda dt: (T(200000, 8, dtype=dt), T(8, dtype=dt), T(8, dtype=dt)),
    lambda x, w, b: F.layer_norm(x, (8,), w, b),
)
case("rms_norm", lambda dt: (T(*S, dtype=dt), T(256, dtype=dt)), lambda x, w: F.rms_norm(x, (256,), w))
case("rms_norm big", lambda dt: (T(32, 512, 768, dtype=dt), T(768, dtype=dt)), lambda x, w: F.rms_norm(x, (768,), w))
case("rms_norm bare", lambda dt: (T(*S, dtype=dt),), lambda x: F.rms_norm(x, (256,)))
case(
    "rms_norm nograd",
    lambda dt: (T(*S, dtype=dt, grad=False), T(256, dtype=dt, grad=False)),
    lambda x, w: F.rms_norm(x, (256,), w),
)
case("rms_norm mixed", lambda dt: (T(*S, dtype=dt), T(256)), lambda x, w: F.rms_norm(x, (256,), w))
case(
    "rms_norm noncontig",
    lambda dt: (T(8, 256, 64, dtype=dt), T(256, dtype=dt)),
    lambda x, w: F.rms_norm(x.transpose(1, 2), (256,), w),
)
case(
    "batch_norm",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), nn.BatchNorm2d(16, device="cuda", dtype=f32)),
    lambda x, m: m(x),
)
case(
    "batch_norm allhalf",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), nn.BatchNorm2d(16, device="cuda", dtype=dt)),
    lambda x, m: m(x),
)
case(
    "batch_norm cl",
    lambda dt: (
        T(8, 16, 32, 32, dtype=dt, grad=False).to(memory_format=torch.channels_last).requires_grad_(),
        nn.BatchNorm2d(16, device="cuda", dtype=f32),
    ),
    lambda x, m: m(x),
)
case(
    "batch_norm eval",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), nn.BatchNorm2d(16, device="cuda", dtype=f32).eval()),
    lambda x, m: m(x),
)
case(
    "batch_norm eval nograd",
    lambda dt: (
        T(8, 16, 32, 32, dtype=dt, grad=False),
        nn.BatchNorm2d(16, device="cuda", dtype=f32).eval().requires_grad_(False),
    ),
    lambda x, m: m(x),
)
case("batch_norm1d", lambda dt: (T(128, 64, dtype=dt), nn.BatchNorm1d(64, device="cuda", dtype=f32)), lambda x, m: m(x))
case(
    "batch_norm1d 3d",
    lambda dt: (T(128, 64, 20, dtype=dt), nn.BatchNorm1d(64, device="cuda", dtype=f32)),
    lambda x, m: m(x),
)
case(
    "batch_norm3d",
    lambda dt: (T(4, 8, 8, 16, 16, dtype=dt), nn.BatchNorm3d(8, device="cuda", dtype=f32)),
    lambda x, m: m(x),
)
case(
    "batch_norm nostats",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), nn.BatchNorm2d(16, device="cuda", dtype=f32, track_running_stats=False)),
    lambda x, m: m(x),
)
case(
    "batch_norm noaffine",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), nn.BatchNorm2d(16, device="cuda", dtype=f32, affine=False)),
    lambda x, m: m(x),
)
case(
    "group_norm",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), T(16, dtype=dt), T(16, dtype=dt)),
    lambda x, w, b: F.group_norm(x, 4, w, b),
)
case("group_norm bare", lambda dt: (T(8, 16, 32, 32, dtype=dt),), lambda x: F.group_norm(x, 4))
case(
    "group_norm cl",
    lambda dt: (
        T(8, 16, 32, 32, dtype=dt, grad=False).to(memory_format=torch.channels_last).requires_grad_(),
        T(16, dtype=dt),
        T(16, dtype=dt),
    ),
    lambda x, w, b: F.group_norm(x, 4, w, b),
)
case(
    "group_norm mixed", lambda dt: (T(8, 16, 32, 32, dtype=dt), T(16), T(16)), lambda x, w, b: F.group_norm(x, 4, w, b)
)
case(
    "group_norm 1x1",
    lambda dt: (T(8, 16, dtype=dt), T(16, dtype=dt), T(16, dtype=dt)),
    lambda x, w, b: F.group_norm(x, 4, w, b),
)
case(
    "instance_norm",
    lambda dt: (T(8, 16, 32, 32, dtype=dt), T(16, dtype=dt), T(16, dtype=dt)),
    lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
)
case("instance_norm bare", lambda dt: (T(8, 16, 32, 32, dtype=dt),), lambda x: F.instance_norm(x))
case(
    "instance_norm stats",
    lambda dt: (
        T(8, 16, 32, 32, dtype=dt),
        nn.InstanceNorm2d(16, affine=True, track_running_stats=True, device="cuda", dtype=dt),
    ),
    lambda x, m: m(x),
)
case("local_response_norm", lambda dt: (T(8, 16, 32, 32, dtype=dt),), lambda x: F.local_response_norm(x, 2))
case("normalize", lambda dt: (T(*S, dtype=dt),), lambda x: F.normalize(x, dim=-1))

# convolutions


def conv(name, shape, make, cl=False, dtypes=(f32, bf16)):
    def inputs(dt):
        m = make().to("cuda", dt)
        x = T(*shape, dtype=dt, grad=False)
        if cl:
            fmt = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            m, x = m.to(memory_format=fmt), x.to(memory_format=fmt)
        return x.requires_grad_(), m

    case(name, inputs, lambda x, m: m(x), dtypes)


conv("conv1d", (8, 16, 128), lambda: nn.Conv1d(16, 32, 3, padding=1))
conv("conv2d", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1))
conv("conv2d nobias", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1, bias=False))
conv("conv2d stride", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, 2, 1))
conv("conv2d 1x1", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 1))
conv("conv2d cl", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1), cl=True)
conv("conv2d depthwise", (8, 16, 32, 32), lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16))
conv("conv2d depthwise cl", (8, 16, 32, 32), lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), cl=True)
conv("conv2d depthwise 7x7", (8, 32, 32, 32), lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32))
conv("conv2d depthwise c96", (8, 96, 28, 28), lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96))
conv("conv2d depthwise s2", (8, 32, 32, 32), lambda: nn.Conv2d(32, 32, 3, 2, padding=1, groups=32, bias=False))
conv("conv2d grouped", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1, groups=4))
conv("conv2d dilated", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=2, dilation=2))
conv("conv2d reflect", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"))
conv("conv2d same", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 4, padding="same"))
conv("conv3d", (2, 8, 8, 16, 16), lambda: nn.Conv3d(8, 16, 3, padding=1))
conv("conv3d cl", (2, 8, 8, 16, 16), lambda: nn.Conv3d(8, 16, 3, padding=1), cl=True)
conv("conv_transpose1d", (8, 16, 128), lambda: nn.ConvTranspose1d(16, 32, 4, 2, 1))
conv("conv_transpose2d", (8, 16, 32, 32), lambda: nn.ConvTranspose2d(16, 32, 4, 2, 1))
conv("conv_transpose3d", (2, 8, 8, 8, 8), lambda: nn.ConvTranspose3d(8, 16, 4, 2, 1))
case(
    "conv2d f64",
    lambda dt: (T(4, 8, 16, 16, dtype=torch.float64), nn.Conv2d(8, 8, 3).to("cuda", torch.float64)),
    lambda x, m: m(x),
    (f32,),
)
case(
    "conv2d noncontig",
    lambda dt: (T(32, 32, 8, 16, dtype=dt), nn.Conv2d(16, 8, 3).to("cuda", dt)),
    lambda x, m: m(x.permute(2, 3, 0, 1)),
)
case(
    "conv2d input nograd",
    lambda dt: (T(8, 3, 64, 64, dtype=dt, grad=False), nn.Conv2d(3, 8, 7, 2, 3).to("cuda", dt)),
    lambda x, m: m(x),
)

# pools

for n, sh in (("1d", (8, 16, 128)), ("2d", (8, 16, 32, 32)), ("3d", (2, 8, 8, 16, 16))):
    case(f"max_pool{n}", lambda dt, sh=sh: T(*sh, dtype=dt), lambda x, n=n: getattr(F, f"max_pool{n}")(x, 2))
    case(f"avg_pool{n}", lambda dt, sh=sh: T(*sh, dtype=dt), lambda x, n=n: getattr(F, f"avg_pool{n}")(x, 2))
    case(
        f"adaptive_avg_pool{n}",
        lambda dt, sh=sh: T(*sh, dtype=dt),
        lambda x, n=n: getattr(F, f"adaptive_avg_pool{n}")(x, 4),
    )
    case(
        f"adaptive_avg_pool{n} 1",
        lambda dt, sh=sh: T(*sh, dtype=dt),
        lambda x, n=n: getattr(F, f"adaptive_avg_pool{n}")(x, 1),
    )
    case(
        f"adaptive_max_pool{n}",
        lambda dt, sh=sh: T(*sh, dtype=dt),
        lambda x, n=n: getattr(F, f"adaptive_max_pool{n}")(x, 4),
    )
    if n != "3d":
        case(f"lp_pool{n}", lambda dt, sh=sh: T(*sh, dtype=dt), lambda x, n=n: getattr(F, f"lp_pool{n}")(x, 2, 2))
case("max_pool1d nograd", lambda dt: T(8, 16, 128, dtype=dt, grad=False), lambda x: F.max_pool1d(x, 2))
case(
    "max_pool2d cl",
    lambda dt: T(8, 16, 32, 32, dtype=dt, grad=False).to(memory_format=torch.channels_last).requires_grad_(),
    lambda x: F.max_pool2d(x, 3, 2, 1),
)
case(
    "adaptive_avg_pool2d cl",
    lambda dt: T(8, 16, 32, 32, dtype=dt, grad=False).to(memory_format=torch.channels_last).requires_grad_(),
    lambda x: F.adaptive_avg_pool2d(x, 4),
)
case(
    "max_unpool2d",
    lambda dt: T(8, 16, 32, 32, dtype=dt),
    lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
)
case(
    "fractional_max_pool2d",
    lambda dt: T(8, 16, 32, 32, dtype=dt),
    lambda x: F.fractional_max_pool2d(x, 3, output_size=(10, 10)),
    (f32,),
)

# shape & image

for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
    case(
        f"interpolate {mode}",
        lambda dt: T(4, 8, 16, 16, dtype=dt),
        lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode),
    )
case(
    "interpolate bilinear antialias",
    lambda dt: T(4, 8, 16, 16, dtype=dt),
    lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", antialias=True),
)
case("interpolate linear", lambda dt: T(4, 8, 16, dtype=dt), lambda x: F.interpolate(x, scale_factor=2, mode="linear"))
case(
    "interpolate trilinear",
    lambda dt: T(2, 4, 8, 8, 8, dtype=dt),
    lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
)
for mode in ("constant", "reflect", "replicate", "circular"):
    case(f"pad {mode}", lambda dt: T(4, 8, 16, 16, dtype=dt), lambda x, mode=mode: F.pad(x, (1, 2, 1, 2), mode=mode))
case("unfold", lambda dt: T(4, 8, 16, 16, dtype=dt), lambda x: F.unfold(x, 3, padding=1))
case("fold", lambda dt: T(4, 72, 256, dtype=dt), lambda x: F.fold(x, 16, 3, padding=1))
case(
    "grid_sample",
    lambda dt: (T(4, 8, 16, 16, dtype=dt), T(4, 10, 10, 2, dtype=dt)),
    lambda x, g: F.grid_sample(x, g, align_corners=False),
)
case(
    "grid_sample cudnn",
    lambda dt: (T(4, 8, 16, 16, dtype=dt), T(4, 10, 10, 2, dtype=dt)),
    lambda x, g: F.grid_sample(x, g, align_corners=True),
)
case(
    "grid_sample 3d",
    lambda dt: (T(2, 4, 8, 8, 8, dtype=dt), T(2, 5, 5, 5, 3, dtype=dt)),
    lambda x, g: F.grid_sample(x, g, align_corners=False),
    (f32,),
)
case("affine_grid", lambda dt: T(4, 2, 3, dtype=dt), lambda x: F.affine_grid(x, (4, 8, 16, 16), align_corners=False))
case("pixel_shuffle", lambda dt: T(4, 16, 16, 16, dtype=dt), lambda x: F.pixel_shuffle(x, 2))
case("pixel_unshuffle", lambda dt: T(4, 16, 16, 16, dtype=dt), lambda x: F.pixel_unshuffle(x, 2))
case("channel_shuffle", lambda dt: T(4, 16, 16, 16, dtype=dt, grad=False), lambda x: F.channel_shuffle(x, 4))
