"""How much a convolution's workspace takes at most; only cuDNN knows how much it does.

The bound was drawn around layers measured on an H200; one is beyond it (tests/fake_cuda/test_library_workspaces.py).
What cuDNN does there: on tensor cores it copies a call's tensors to the layout that these need, with the channels of each group
filled up to a multiple of eight; it sums the gradient of a weight in parts, about as many as the GPU has multiprocessors; a 1 x 1
convolution in float32 may be a matrix product with 32 MiB of its own; without tensor cores it transforms tiles (Winograd).
Limits: one 3 x 3 layer with three channels out, in float32, took six times its input; with cudnn.benchmark each first call also
tries plans that take whatever is free, which is an assumption and not in the bound.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.fake_cuda.kernel_rules import round_up
from memlab.units import KiB, MiB

WORKSPACE = "cudnn::workspace"
"""The name under which a call is logged, with what its workspace may take beyond what the trace has, and the rows during which."""
BENCHMARK = (
    "cudnn.benchmark tries plans at the first call of each shape: what they take, perhaps all that is free, is left out"
)
_CHANNELS = 8
_PART_BYTES = 272 * KiB
_MOST_PART_BYTES = 512 * KiB
_WIDE_PART_BYTES = 640 * KiB
"""Partial sums of a weight's gradient for each multiprocessor: of usual kernels, and of those in 3-D or of 5 x 5 and more."""
_WIDE, _MOST_PARTS = 5, 17
_AS_MATRICES = 32 * MiB
_TILE = 4
_TRANSFORMED, _TRANSFORMED_OTHER = 2.25, 4.7
"""Bytes of Winograd's tiles for a byte of the tensors, for 3 x 3 kernels and for others."""


def note(cuda: Any, tensor: Any, out: Any, weight: Any, groups: int, of_weight: bool = False) -> None:
    """Log the call that has just allocated its result: `tensor` and `out` are the layer's, or gradients of their shapes."""
    if torch.backends.cudnn.benchmark:
        cuda.assume(BENCHMARK)
    size = most(tensor, out, weight, groups, of_weight, tuple(cuda.gpu.compute_capability), cuda.gpu.multiprocessors)
    cuda.log.note(WORKSPACE, False, ((size, 0),), "uint8")


def most(
    tensor: Any, out: Any, weight: Any, groups: int, of_weight: bool, capability: tuple[int, int], multiprocessors: int
) -> int:
    """The bound in bytes for one call."""
    each, kernel = tensor.element_size(), weight.shape[2:]
    copies = (sum(_filled(one.shape, 1, groups) for one in (tensor, out)) + _filled(weight.shape, 2)) * each
    is_wide = max(kernel) >= _WIDE or len(kernel) > 2
    parts = 0
    if of_weight:
        of_all = _MOST_PARTS * weight.numel() * 4
        parts = multiprocessors * (_WIDE_PART_BYTES if is_wide else _PART_BYTES)
        parts = parts + of_all if is_wide else max(parts, min(of_all, multiprocessors * _MOST_PART_BYTES))
    bound = copies + max(parts, MiB)
    if tensor.dtype is torch.float32:
        if max(kernel) == 1:
            bound = max(bound, _AS_MATRICES + MiB)
        if capability < (8, 0) or not torch.backends.cudnn.allow_tf32:
            tiles = sum(
                math.prod((*shape[:2], *(round_up(size, _TILE) for size in shape[2:])))
                for shape in (tensor.shape, out.shape)
            )
            factor = _TRANSFORMED if max(kernel) == 3 else _TRANSFORMED_OTHER
            bound = max(bound, (int(factor * tiles) + 4 * weight.numel()) * each)
    return bound


def _filled(shape: Any, channels: int, groups: int = 1) -> int:
    """Elements, with so many dimensions of channels filled up in each group: the second of a tensor, the first two of a weight."""
    full = [round_up(-(-size // groups), _CHANNELS) * groups for size in shape[2 - channels : 2]]
    return math.prod((*shape[: 2 - channels], *full, *shape[2:]))
