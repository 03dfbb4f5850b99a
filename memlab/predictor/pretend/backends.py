"""Which kernel scaled_dot_product_attention takes on a card, as PyTorch chooses (ATen/native/transformers/cuda/sdp_utils.cpp).

Checked against 2.12.1 for compute capability 7.5 to 12.0. Limits: nested tensors are not considered; cuDNN is taken to be the
version that comes with PyTorch's own builds (newer than 9.15).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

FLASH, EFFICIENT, CUDNN, MATH = "flash", "efficient", "cudnn", "math"
HALVES = (torch.float16, torch.bfloat16)
_NUMBERS = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
"""at::SDPBackend."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the choice depends on."""

    query: Any
    key: Any
    value: Any
    mask: Any
    dropout: float
    is_causal: bool
    shares_heads: bool
    needs_grad: bool
    capability: tuple[int, int]


def choose(call: Call) -> str:
    """The first of the allowed backends that can take it."""
    able = {FLASH: can_flash, EFFICIENT: can_efficient, CUDNN: can_cudnn, MATH: lambda call: True}
    enabled = _enabled()
    for backend in _order(call):
        if enabled[backend] and able[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _enabled() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        FLASH: cuda.flash_sdp_enabled(), EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        CUDNN: cuda.cudnn_sdp_enabled() and torch.backends.cudnn.enabled, MATH: cuda.math_sdp_enabled(),
    }  # fmt: skip


def _order(call: Call) -> list[str]:
    """cuDNN comes first on Hopper and Blackwell servers (priority_order), last elsewhere; the user may say otherwise."""
    given = [_NUMBERS[number] for number in torch._C._get_sdp_priority_order() if number in _NUMBERS]
    if given and given != [FLASH, EFFICIENT, MATH, CUDNN]:
        return given
    prefers = call.capability in ((9, 0), (10, 0)) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    return [CUDNN, FLASH, EFFICIENT, MATH] if prefers else [FLASH, EFFICIENT, MATH, CUDNN]


def _is_four_dimensional(call: Call) -> bool:
    return all(one.dim() == 4 for one in (call.query, call.key, call.value))


def _heads_fit(call: Call, supports_groups: bool) -> bool:
    heads = {one.shape[1] for one in (call.query, call.key, call.value)}
    if len({one.shape[0] for one in (call.query, call.key, call.value)}) > 1:
        return False
    if not (call.shares_heads and supports_groups):
        return len(heads) == 1
    return bool(call.key.shape[1] == call.value.shape[1] and call.query.shape[1] % call.key.shape[1] == 0)


def _lies_well(call: Call) -> bool:
    """Nothing empty, last dimensions dense (check_nonzero_sequence_lengths_dense, check_last_dim_stride_equals_1_dense)."""
    tensors = (call.query, call.key, call.value)
    if 0 in (call.query.shape[2], call.key.shape[2], call.query.numel()):
        return False
    return all(one.stride(-1) == 1 or one.shape[-1] == 1 for one in tensors)


def can_flash(call: Call) -> bool:
    """Half precision on compute capability 8.0 and above, no mask, heads of one width up to 256."""
    width = call.query.shape[-1]
    if not _is_four_dimensional(call) or call.mask is not None or call.query.dtype not in HALVES:
        return False
    if call.capability < (8, 0) or {one.shape[-1] for one in (call.key, call.value)} != {width} or width > 256:
        return False
    small = (8, 6) <= call.capability <= (8, 9)
    if small and width > 192 and call.needs_grad and call.dropout > 0:
        return False
    if call.is_causal and call.query.shape[2] != call.key.shape[2]:
        return False
    return _heads_fit(call, supports_groups=True) and _lies_well(call)


def can_efficient(call: Call) -> bool:
    """Widths that matrix units can read (minimum_gemm_alignment), no shared heads."""
    dtype = call.query.dtype
    allowed = (
        (torch.float16, torch.float32, torch.bfloat16) if call.capability >= (8, 0) else (torch.float16, torch.float32)
    )
    if not _is_four_dimensional(call) or dtype not in allowed or call.shares_heads:
        return False
    step = 8 if dtype in HALVES else 4 if call.capability >= (8, 0) else 1
    if any(one.shape[-1] % step or not one.shape[-1] for one in (call.query, call.value)):
        return False
    return _heads_fit(call, supports_groups=False) and _lies_well(call)


def can_cudnn(call: Call) -> bool:
    """Half precision, widths of eights up to 128 (256 on Hopper), no dropout, no gradient of the mask."""
    if not _is_four_dimensional(call) or call.query.dtype not in HALVES or call.capability < (8, 0):
        return False
    widths = (call.query.shape[-1], call.value.shape[-1])
    largest = 256 if call.capability == (9, 0) else 128
    if any(width % 8 or width > largest for width in widths) or call.dropout > 0:
        return False
    if call.mask is not None and call.mask.requires_grad and call.needs_grad:
        return False
    if call.query.shape[2] == 1 or call.key.shape[2] == 1:
        return False
    return _heads_fit(call, supports_groups=True) and _lies_well(call)
