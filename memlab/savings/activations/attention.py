"""Attention without its S x S matrix: scaled_dot_product_attention against softmax written out.

Which kernel PyTorch takes depends on device, dtype and arguments; the plain one ("math") makes the matrix all the same.
Attention that the user's model writes out itself cannot be found from outside: its forward has to be changed by hand.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memlab.errors import DoesNotApply
from memlab.savings.technique import Shown, Technique, close
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


class _Instead(TorchFunctionMode):
    """The habit: each fused call becomes the one written out.

    Not where a checkpoint runs a forward again: PyTorch lets no mode into backward. Hence `attend`, where there is one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (written_out if func is FUSED else func)(*args, **(kwargs or {}))


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is FUSED
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    with _Counting() as counting:
        yield
    if not counting.calls:
        raise DoesNotApply(
            "the model calls no scaled_dot_product_attention: attention that is written out has to be changed in its code."
        )


def _apply(job: Job) -> None:
    job.around.append(_refusing)
    job.notes.append(
        "Attention: PyTorch chooses the kernel by device, dtype and mask; the math kernel makes the matrix too."
    )


def _habit(job: Job) -> None:
    for one in job.model.modules():
        if callable(getattr(one, "attend", None)):  # the one place where our own workloads mix positions
            one.attend = functools.partial(_attended, one.attend)  # type: ignore[assignment]
    job.around.append(_Instead)


def _attended(attend: Any, *args: Any, **kwargs: Any) -> Any:
    with _Instead():
        return attend(*args, **kwargs)


TECHNIQUES = (
    Technique(
        name="attention",
        idea="Let scaled_dot_product_attention compute the softmax in tiles instead of making the S x S matrix of scores.",
        attacks=("activation", "temporary"),
        kind="saving",
        stage="model",
        equality=close(1e-4, "sums are taken in another order"),
        price="none: it is faster as well. The scores cannot be looked at.",
        not_when="Sequences are short against the width. The fused kernels need their own dtypes (flash: half precision on a"
        " card), head sizes and masks; otherwise PyTorch falls back to the matrix. `need_weights=True` of"
        " nn.MultiheadAttention asks for the matrix.",
        code="""\
import torch.nn.functional as F

# instead of: (q @ k.transpose(-2, -1) / d**0.5).masked_fill(mask, -inf).softmax(-1) @ v
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
""",
        references=(
            "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, Dao et al. 2022,"
            " https://arxiv.org/abs/2205.14135",
            "Self-attention Does Not Need O(n^2) Memory, Rabe and Staats 2021, https://arxiv.org/abs/2112.05682",
            "scaled_dot_product_attention, PyTorch documentation,"
            " https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        ),
        shown=Shown("gpt", share=0.35),
        apply=_apply,
        habit=_habit,
    ),
)
