"""Attention without its S x S matrix: scaled_dot_product_attention in place of the softmax written out.

Which kernel PyTorch chooses depends on device, dtype and arguments; the "math" kernel still makes the matrix.
Attention that the user's model writes out itself cannot be found: its forward has to be changed by hand.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memlab.saving_techniques.patching import must_happen
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job

FUSED = functional.scaled_dot_product_attention


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as in the paper's formula: scores, softmax, and their product with the values, each S x S."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        is_choice = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_choice else scores + attn_mask
    weights = functional.dropout(functional.softmax(scores, -1), dropout_p, training=dropout_p > 0)
    return weights @ value


class _Replacing(TorchFunctionMode):
    """Replace each call of the fused function by another.

    This misses recomputation by a checkpoint: modes are not active in backward. Hence `attend`, where it exists.
    """

    def __init__(self, other: Callable[..., Any] = written_out) -> None:
        super().__init__()
        self.other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.other if func is FUSED else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def _must_call_it() -> Iterator[None]:
    otherwise = (
        "the model calls no scaled_dot_product_attention: attention that is written out has to be changed in its code."
    )

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return FUSED(*args, **kwargs)

    with must_happen(otherwise) as calls, _Replacing(noted):
        yield


def _apply(job: Job) -> None:
    job.around.append(_must_call_it)
    job.notes.append(
        "Attention: PyTorch chooses the kernel by device, dtype and mask; the math kernel makes the matrix too."
    )


def _baseline(job: Job) -> None:
    def attend(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with _Replacing():
            return plain(*args, **kwargs)

    for one in job.model.modules():
        if callable(getattr(one, "attend", None)):  # the attention of memlab's own workloads
            one.attend = functools.partial(attend, one.attend)  # type: ignore[assignment]
    job.around.append(_Replacing)


TECHNIQUES = (described("attention", Demo("gpt", share=0.35), _apply, baseline_pattern=_baseline),)
