"""Layers: activations, dropout, norms, convolutions, pools, images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernel_calls import Calls, L, N, S, T, W, bf16, f32

case = Calls()
CASES = case.cases


def layer(name, shape, make, cl=False, dtypes=(f32, bf16), dtype=None, grad=True):
    def inputs(dt):
        module, given = make().to("cuda", dtype or dt), L if cl else N
        if cl:
            module.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        return given(*shape)(dt).requires_grad_(grad), module

    case(name, inputs, lambda x, m: m(x), dtypes)


# activations

for n in (
    "relu", "relu6", "elu", "selu", "celu", "leaky_relu", "gelu", "silu", "mish", "hardtanh", "hardswish",
    "hardsigmoid", "softplus", "softsign", "tanhshrink", "softshrink", "hardshrink", "logsigmoid", "sigmoid",
    "tanh",
):  # fmt: skip
    case(n, (S,), getattr(F, n))
case("gelu tanh", (S,), lambda x: F.gelu(x, approximate="tanh"))
case("glu", (S,), F.glu)
case("prelu", ((8, 64, 256), (64,)), F.prelu)
case("rrelu", (S,), lambda x: F.rrelu(x, training=True))
case("relu_inplace", (S,), lambda x: F.relu_(x * 2))
case("threshold", (S,), lambda x: F.threshold(x, 0.1, 20))
for n in ("softmax", "log_softmax", "softmin"):
    case(n, (S,), lambda x, n=n: getattr(F, n)(x, dim=-1))
    case(n + " dim1", (S,), lambda x, n=n: getattr(F, n)(x, dim=1))
    case(n + " f32out", (S,), lambda x, n=n: getattr(F, n)(x, dim=-1, dtype=f32))
for n in ("softmax", "log_softmax"):
    for dim in (1, -1):
        case(f"{n} channels last {dim}", (L(8, 16, 32, 32),), lambda x, n=n, dim=dim: getattr(F, n)(x, dim=dim))
    case(f"{n} channels last 3d", (L(2, 8, 4, 16, 16),), lambda x, n=n: getattr(F, n)(x, dim=1))
    case(f"{n} channels last f32out", (L(8, 16, 32, 32),), lambda x, n=n: getattr(F, n)(x, dim=1, dtype=f32))
    case(f"{n} of every second", (S,), lambda x, n=n: getattr(F, n)(x[..., ::2], dim=-1))
    case(f"{n} slice of gradient", (S,), lambda x, n=n: torch.cat([y := getattr(F, n)(x, dim=-1), y.detach()], 1))
    case(f"{n} expanded gradient", (S,), lambda x, n=n: getattr(F, n)(x, dim=-1).sum())
    case(f"{n} long", ((8, 5000),), lambda x, n=n: getattr(F, n)(x, dim=-1))
    case(f"{n} transposed gradient", (S,), lambda x, n=n: getattr(F, n)(x, dim=-1).transpose(1, 2).contiguous())
case("gumbel_softmax", (S,), F.gumbel_softmax)

# dropout

case("dropout", (S,), lambda x: F.dropout(x, 0.1))
case("dropout eval", (S,), lambda x: F.dropout(x, 0.1, training=False))
case("dropout p0", (S,), lambda x: F.dropout(x, 0.0))
case("dropout p1", (S,), lambda x: F.dropout(x, 1.0))
case("dropout inplace", (S,), lambda x: F.dropout(x * 2, 0.1, inplace=True))
case("dropout nograd", (N(*S),), lambda x: F.dropout(x, 0.1))
case("dropout1d", (S,), lambda x: F.dropout1d(x, 0.1))
case("dropout2d", ((8, 16, 32, 32),), lambda x: F.dropout2d(x, 0.1))
case("dropout3d", ((2, 16, 8, 16, 16),), lambda x: F.dropout3d(x, 0.1))
case("alpha_dropout", (S,), lambda x: F.alpha_dropout(x, 0.1, training=True))
case("feature_alpha_dropout", (S,), lambda x: F.feature_alpha_dropout(x, 0.1, training=True))
case("nn.Dropout", (S, lambda dt: nn.Dropout(0.1)), lambda x, m: m(x))
case("torch.dropout", (S,), lambda x: torch.dropout(x, 0.1, True))

# norms

case("layer_norm", (S, (256,), (256,)), lambda x, w, b: F.layer_norm(x, (256,), w, b))
case("layer_norm big", ((32, 512, 768), (768,), (768,)), lambda x, w, b: F.layer_norm(x, (768,), w, b))
case("layer_norm nobias", (S, (256,)), lambda x, w: F.layer_norm(x, (256,), w))
case("layer_norm bare", (S,), lambda x: F.layer_norm(x, (256,)))
case("layer_norm mixed", (S, W(256), W(256)), lambda x, w, b: F.layer_norm(x, (256,), w, b))
case("layer_norm small", ((4, 10), (10,), (10,)), lambda x, w, b: F.layer_norm(x, (10,), w, b))
case(
    "layer_norm noncontig",
    ((8, 256, 64), (256,), (256,)),
    lambda x, w, b: F.layer_norm(x.transpose(1, 2), (256,), w, b),
)
case("layer_norm 10M rows", ((200000, 8), (8,), (8,)), lambda x, w, b: F.layer_norm(x, (8,), w, b))
case("rms_norm", (S, (256,)), lambda x, w: F.rms_norm(x, (256,), w))
case("rms_norm big", ((32, 512, 768), (768,)), lambda x, w: F.rms_norm(x, (768,), w))
case("rms_norm bare", (S,), lambda x: F.rms_norm(x, (256,)))
case("rms_norm nograd", (N(*S), N(256)), lambda x, w: F.rms_norm(x, (256,), w))
case("rms_norm mixed", (S, W(256)), lambda x, w: F.rms_norm(x, (256,), w))
case("rms_norm noncontig", ((8, 256, 64), (256,)), lambda x, w: F.rms_norm(x.transpose(1, 2), (256,), w))
BATCH = (8, 16, 32, 32)
layer("batch_norm", BATCH, lambda: nn.BatchNorm2d(16), dtype=f32)
layer("batch_norm allhalf", BATCH, lambda: nn.BatchNorm2d(16))
layer("batch_norm cl", BATCH, lambda: nn.BatchNorm2d(16), cl=True, dtype=f32)
layer("batch_norm eval", BATCH, lambda: nn.BatchNorm2d(16).eval(), dtype=f32)
layer("batch_norm eval nograd", BATCH, lambda: nn.BatchNorm2d(16).eval().requires_grad_(False), dtype=f32, grad=False)
layer("batch_norm1d", (128, 64), lambda: nn.BatchNorm1d(64), dtype=f32)
layer("batch_norm1d 3d", (128, 64, 20), lambda: nn.BatchNorm1d(64), dtype=f32)
for n, is_training in (("", True), (" eval", False)):
    case(
        f"batch_norm1d transposed{n}",
        lambda dt, on=is_training: (N(128, 20, 64)(f32).requires_grad_(), nn.BatchNorm1d(64).to("cuda").train(on)),
        lambda x, m: m(x.transpose(1, 2)),
    )
layer("batch_norm3d", (4, 8, 8, 16, 16), lambda: nn.BatchNorm3d(8), dtype=f32)
layer("batch_norm nostats", BATCH, lambda: nn.BatchNorm2d(16, track_running_stats=False), dtype=f32)
layer("batch_norm noaffine", BATCH, lambda: nn.BatchNorm2d(16, affine=False), dtype=f32)
case("group_norm", ((8, 16, 32, 32), (16,), (16,)), lambda x, w, b: F.group_norm(x, 4, w, b))
case("group_norm bare", ((8, 16, 32, 32),), lambda x: F.group_norm(x, 4))
case("group_norm cl", (L(8, 16, 32, 32), (16,), (16,)), lambda x, w, b: F.group_norm(x, 4, w, b))
case("group_norm mixed", ((8, 16, 32, 32), W(16), W(16)), lambda x, w, b: F.group_norm(x, 4, w, b))
case("group_norm 1x1", ((8, 16), (16,), (16,)), lambda x, w, b: F.group_norm(x, 4, w, b))
case("instance_norm", ((8, 16, 32, 32), (16,), (16,)), lambda x, w, b: F.instance_norm(x, weight=w, bias=b))
case("instance_norm bare", ((8, 16, 32, 32),), lambda x: F.instance_norm(x))
layer("instance_norm stats", BATCH, lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True))
case("local_response_norm", ((8, 16, 32, 32),), lambda x: F.local_response_norm(x, 2))
case("normalize", (S,), lambda x: F.normalize(x, dim=-1))

# convolutions

layer("conv1d", (8, 16, 128), lambda: nn.Conv1d(16, 32, 3, padding=1))
layer("conv2d", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1))
layer("conv2d nobias", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1, bias=False))
layer("conv2d stride", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, 2, 1))
layer("conv2d 1x1", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 1))
layer("conv2d cl", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1), cl=True)
layer("conv2d depthwise", (8, 16, 32, 32), lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16))
layer("conv2d depthwise cl", (8, 16, 32, 32), lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), cl=True)
layer("conv2d depthwise 7x7", (8, 32, 32, 32), lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32))
layer("conv2d depthwise c96", (8, 96, 28, 28), lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96))
layer("conv2d depthwise s2", (8, 32, 32, 32), lambda: nn.Conv2d(32, 32, 3, 2, padding=1, groups=32, bias=False))
layer("conv2d grouped", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1, groups=4))
layer("conv2d dilated", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=2, dilation=2))
layer("conv2d reflect", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"))
layer("conv2d same", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 4, padding="same"))
layer("conv3d", (2, 8, 8, 16, 16), lambda: nn.Conv3d(8, 16, 3, padding=1))
layer("conv3d cl", (2, 8, 8, 16, 16), lambda: nn.Conv3d(8, 16, 3, padding=1), cl=True)
layer("conv_transpose1d", (8, 16, 128), lambda: nn.ConvTranspose1d(16, 32, 4, 2, 1))
layer("conv_transpose2d", (8, 16, 32, 32), lambda: nn.ConvTranspose2d(16, 32, 4, 2, 1))
layer("conv_transpose3d", (2, 8, 8, 8, 8), lambda: nn.ConvTranspose3d(8, 16, 4, 2, 1))
case(
    "conv2d f64",
    lambda dt: (T(4, 8, 16, 16, dtype=torch.float64), nn.Conv2d(8, 8, 3).to("cuda", torch.float64)),
    lambda x, m: m(x), (f32,),
)  # fmt: skip
case(
    "conv2d noncontig",
    ((32, 32, 8, 16), lambda dt: nn.Conv2d(16, 8, 3).to("cuda", dt)),
    lambda x, m: m(x.permute(2, 3, 0, 1)),
)
case(
    "conv1d noncontig",
    ((32, 128, 16), lambda dt: nn.Conv1d(16, 8, 3).to("cuda", dt)),
    lambda x, m: m(x.transpose(1, 2)),
)
layer("conv2d input nograd", (8, 3, 64, 64), lambda: nn.Conv2d(3, 8, 7, 2, 3), grad=False)

for name, form, shape, make in (
    ("conv1d", "", (8, 16, 128), lambda: nn.Conv1d(16, 32, 3, padding=1)),
    ("conv2d", "", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1)),
    ("conv2d cl input", "input", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1)),
    ("conv2d cl weight", "weight", (8, 16, 32, 32), lambda: nn.Conv2d(16, 32, 3, padding=1)),
    ("conv2d depthwise", "", (8, 16, 32, 32), lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16)),
    ("conv_transpose2d", "", (8, 16, 32, 32), lambda: nn.ConvTranspose2d(16, 32, 4, 2, 1)),
    ("conv_transpose2d cl input", "input", (8, 16, 32, 32), lambda: nn.ConvTranspose2d(16, 32, 4, 2, 1)),
):

    def inputs(dt, form=form, shape=shape, make=make):
        module, given = make().to("cuda", dt), L if form == "input" else N
        if form == "weight":
            module.to(memory_format=torch.channels_last)
        return given(*shape)(dt).requires_grad_(), module

    # The gradient of the result is a slice, or lies the other way.
    case(f"{name} slice of gradient", inputs, lambda x, m: torch.cat([y := m(x), y.detach()], 1))
    case(
        f"{name} transposed gradient",
        inputs,
        lambda x, m: m(x).movedim(1, -1).clone(memory_format=torch.contiguous_format),
    )

# pools

for n, shape in (("1d", (8, 16, 128)), ("2d", (8, 16, 32, 32)), ("3d", (2, 8, 8, 16, 16))):
    for name, pool, given in (
        (f"max_pool{n}", "max_pool", (2,)), (f"avg_pool{n}", "avg_pool", (2,)),
        (f"adaptive_avg_pool{n}", "adaptive_avg_pool", (4,)), (f"adaptive_avg_pool{n} 1", "adaptive_avg_pool", (1,)),
        (f"adaptive_max_pool{n}", "adaptive_max_pool", (4,)), (f"lp_pool{n}", "lp_pool", (2, 2)),
    ):  # fmt: skip
        if name != "lp_pool3d":
            case(name, (shape,), lambda x, f=pool + n, given=given: getattr(F, f)(x, *given))
case("max_pool1d nograd", (N(8, 16, 128),), lambda x: F.max_pool1d(x, 2))
case("max_pool2d cl", (L(8, 16, 32, 32),), lambda x: F.max_pool2d(x, 3, 2, 1))
case("adaptive_avg_pool2d cl", (L(8, 16, 32, 32),), lambda x: F.adaptive_avg_pool2d(x, 4))
case("max_unpool2d", ((8, 16, 32, 32),), lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2))
case("fractional_max_pool2d", ((8, 16, 32, 32),), lambda x: F.fractional_max_pool2d(x, 3, output_size=(10, 10)), (f32,))

# shape & image

for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
    case(f"interpolate {mode}", ((4, 8, 16, 16),), lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode))
case(
    "interpolate bilinear antialias",
    ((4, 8, 16, 16),),
    lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", antialias=True),
)
case("interpolate linear", ((4, 8, 16),), lambda x: F.interpolate(x, scale_factor=2, mode="linear"))
case("interpolate trilinear", ((2, 4, 8, 8, 8),), lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"))
for mode in ("constant", "reflect", "replicate", "circular"):
    case(f"pad {mode}", ((4, 8, 16, 16),), lambda x, mode=mode: F.pad(x, (1, 2, 1, 2), mode=mode))
case("unfold", ((4, 8, 16, 16),), lambda x: F.unfold(x, 3, padding=1))
case("unfold one", ((8, 16, 16),), lambda x: F.unfold(x, 3, padding=1))
case("unfold stride", ((2, 8, 16, 16),), lambda x: F.unfold(x, (2, 4), stride=(2, 4)))
case("unfold channels last", (L(4, 8, 16, 16),), lambda x: F.unfold(x, 3, padding=1))
case("unfold slice of gradient", ((4, 8, 16, 16),), lambda x: torch.cat([y := F.unfold(x, 3), y.detach()], 1))
case("fold", ((4, 72, 256),), lambda x: F.fold(x, 16, 3, padding=1))
case("fold one", ((72, 256),), lambda x: F.fold(x, 16, 3, padding=1))
case("fold transposed", ((4, 256, 72),), lambda x: F.fold(x.transpose(1, 2), 16, 3, padding=1))
case("grid_sample", ((4, 8, 16, 16), (4, 10, 10, 2)), lambda x, g: F.grid_sample(x, g, align_corners=False))
case("grid_sample cudnn", ((4, 8, 16, 16), (4, 10, 10, 2)), lambda x, g: F.grid_sample(x, g, align_corners=True))
case(
    "grid_sample 3d", ((2, 4, 8, 8, 8), (2, 5, 5, 5, 3)), lambda x, g: F.grid_sample(x, g, align_corners=False), (f32,)
)
case("affine_grid", ((4, 2, 3),), lambda x: F.affine_grid(x, (4, 8, 16, 16), align_corners=False))
case("pixel_shuffle", ((4, 16, 16, 16),), lambda x: F.pixel_shuffle(x, 2))
case("pixel_unshuffle", ((4, 16, 16, 16),), lambda x: F.pixel_unshuffle(x, 2))
case("channel_shuffle", (N(4, 16, 16, 16),), lambda x: F.channel_shuffle(x, 4))
