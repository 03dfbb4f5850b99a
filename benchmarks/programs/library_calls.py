"""Single calls of cuDNN and cuSPARSE, whose workspaces no rule of PyTorch decides: forward and backward of one layer.

Importing this module adds them to `PROGRAMS`. The tensors are those of well-known models; what a call takes beyond them is what
the library chose.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.programs.registry import PROGRAMS


def one_call(layer: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.float32, last: bool = False) -> None:
    """Two forward and backward passes of a layer in training; `last`: with channels last."""
    how: Any = {"dtype": dtype} | ({"memory_format": torch.channels_last} if last else {})
    layer = layer.cuda().to(**how)
    first, *rest = inputs
    first = first.cuda().to(**how).requires_grad_()
    for _ in range(2):
        out = layer(first, *rest)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stem_7x7": (lambda: nn.Conv2d(3, 64, 7, 2, 3, bias=False), (32, 3, 224, 224)),
    "resnet_3x3_56": (lambda: nn.Conv2d(64, 64, 3, 1, 1, bias=False), (32, 64, 56, 56)),
    "resnet_3x3_14": (lambda: nn.Conv2d(256, 256, 3, 1, 1, bias=False), (32, 256, 14, 14)),
    "resnet_3x3_stride": (lambda: nn.Conv2d(128, 256, 3, 2, 1, bias=False), (32, 128, 28, 28)),
    "resnet_1x1": (lambda: nn.Conv2d(256, 1024, 1, bias=False), (32, 256, 14, 14)),
    "vgg_3x3_112": (lambda: nn.Conv2d(128, 128, 3, 1, 1), (16, 128, 112, 112)),
    "patches_16x16": (lambda: nn.Conv2d(3, 768, 16, 16), (32, 3, 224, 224)),
    "depthwise_7x7": (lambda: nn.Conv2d(192, 192, 7, 1, 3, groups=192), (16, 192, 28, 28)),
    "grouped_3x3": (lambda: nn.Conv2d(256, 256, 3, 1, 1, groups=32), (16, 256, 28, 28)),
    "dilated_3x3": (lambda: nn.Conv2d(256, 256, 3, 1, 12, 12), (4, 256, 64, 64)),
    "unet_3x3_256": (lambda: nn.Conv2d(32, 32, 3, 1, 1), (4, 32, 256, 256)),
    "large_5x5": (lambda: nn.Conv2d(64, 64, 5, 1, 2), (8, 64, 128, 128)),
    "one_picture": (lambda: nn.Conv2d(512, 512, 3, 1, 1), (1, 512, 32, 32)),
    "transposed_4x4": (lambda: nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False), (32, 256, 16, 16)),
    "one_dimension": (lambda: nn.Conv1d(80, 512, 3, 1, 1), (16, 80, 3000)),
    "wave_to_vector": (lambda: nn.Conv1d(1, 512, 10, 5), (4, 1, 160_000)),
    "video_3x3x3": (lambda: nn.Conv3d(64, 64, 3, 1, 1), (2, 64, 8, 56, 56)),
}
"""Layer and the shape of its input."""
KINDS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def convolution(name: str, dtype: torch.dtype, last: bool, benchmark: bool, tf32: bool = True) -> None:
    make, shape = CONVOLUTIONS[name]
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32
    one_call(make(), torch.randn(shape), dtype=dtype, last=last)


def recurrent(cell: type[nn.Module], dtype: torch.dtype, sizes: tuple[int, int, int], **how: Any) -> None:
    steps, batch, width = sizes
    one_call(cell(width, width, **how), torch.randn(steps, batch, width), dtype=dtype)


def sparse_product(layout: str, dtype: torch.dtype, rows: int, each: int, width: int) -> None:
    """A graph's adjacency times features, and a vector of gradients back: `each` neighbors of every node."""
    at = torch.stack([torch.arange(rows).repeat_interleave(each), torch.randint(rows, (rows * each,))])
    matrix = torch.sparse_coo_tensor(at, torch.ones(rows * each, dtype=dtype), (rows, rows)).coalesce()
    matrix = matrix.to_sparse_csr().cuda() if layout == "csr" else matrix.cuda()
    features = torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True)
    for _ in range(2):
        (matrix @ features).backward(torch.ones(rows, width, device="cuda", dtype=dtype))


def add(name: str, work: Callable[..., None], *arguments: Any, **how: Any) -> None:
    PROGRAMS[name] = lambda: work(*arguments, **how)


for (_name, (_, _shape)), (_kind, _dtype) in itertools.product(CONVOLUTIONS.items(), KINDS.items()):
    add(f"conv_{_name}_{_kind}", convolution, _name, _dtype, False, False)
    if len(_shape) == 4:
        add(f"conv_{_name}_{_kind}_channels_last", convolution, _name, _dtype, True, False)
    if _kind != "bf16":
        add(f"conv_{_name}_{_kind}_benchmark", convolution, _name, _dtype, False, True)
for _cell, (_kind, _dtype), (_label, _sizes) in itertools.product(
    (nn.RNN, nn.LSTM, nn.GRU), KINDS.items(), {"small": (50, 16, 128), "large": (200, 64, 512)}.items()
):
    for _how, _options in {
        "": {},
        "_two_layers": {"num_layers": 2},
        "_dropout": {"num_layers": 2, "dropout": 0.3},
        "_bidirectional": {"bidirectional": True},
    }.items():
        add(f"{_cell.__name__.lower()}_{_label}_{_kind}{_how}", recurrent, _cell, _dtype, _sizes, **_options)
for _layout, (_label, _sizes) in itertools.product(
    ("coo", "csr"), {"small": (2000, 8, 64), "middle": (50_000, 10, 128), "wide": (20_000, 40, 512)}.items()
):
    add(f"sparse_product_{_layout}_{_label}", sparse_product, _layout, torch.float32, *_sizes)


def survey(seed: int) -> None:
    """A convolution of any plausible shape."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = False, True
    pick = random.Random(seed).choice
    while True:
        dimensions, size = pick(
            [(1, 1000), (1, 8000), (2, 7), (2, 14), (2, 28), (2, 56), (2, 112), (2, 224), (3, 16), (3, 32)]
        )
        before, after, kernel = (
            pick([1, 3, 16, 32, 64, 96, 128, 256, 512, 1024]),
            pick([8, 32, 64, 100, 256, 512]),
            pick([1, 2, 3, 3, 4, 5, 7]),
        )
        groups, batch, stride = pick([1, 1, 1, before]), pick([1, 4, 16, 64]), pick([1, 1, 2])
        after = before * pick([1, 2]) if groups > 1 else after
        if (
            max(before, after) * batch * size**dimensions <= 1 << 26
            and before * after // groups * kernel**dimensions <= 1 << 24
        ):
            break
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    layer = pick([*kinds[0:1] * 4, kinds[1]])[dimensions - 1](
        before, after, kernel, stride, kernel // 2, groups=groups, bias=pick([False, True])
    )
    shape = (batch, before) + (size,) * dimensions
    one_call(
        layer, torch.randn(shape), dtype=pick([*KINDS.values()]), last=dimensions == 2 and pick([False, False, True])
    )


def survey_recurrent(seed: int) -> None:
    """A recurrent layer of any plausible shape."""
    pick = random.Random(seed).choice
    width, hidden = pick([32, 100, 128, 300, 512, 1024]), pick([32, 64, 100, 128, 256, 512, 1024])
    layers = pick([1, 1, 2, 3])
    layer = pick([nn.RNN, nn.LSTM, nn.LSTM, nn.GRU])(
        width, hidden, layers, bias=pick([True, True, False]), batch_first=pick([False, True]),
        dropout=pick([0.0, 0.2]) if layers > 1 else 0.0, bidirectional=pick([False, True]),
    )  # fmt: skip
    one_call(
        layer,
        torch.randn(pick([5, 20, 50, 100, 200]), pick([1, 4, 16, 32, 64, 100]), width),
        dtype=pick([*KINDS.values()]),
    )


for _seed in range(240):
    add(f"survey_convolution_{_seed}", survey, _seed)
for _seed in range(160):
    add(f"survey_recurrent_{_seed}", survey_recurrent, _seed)
for _name, (_, _shape) in CONVOLUTIONS.items():
    add(f"conv_{_name}_f32_without_tf32", convolution, _name, torch.float32, False, False, False)
