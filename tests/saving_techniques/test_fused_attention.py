"""Attention written out against PyTorch's own, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from job_runs import one_layer, prepared, tried
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques.fused_attention import written_out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": lambda: torch.ones(6, 8, dtype=torch.bool).tril(1)},
        {"attn_mask": lambda: torch.linspace(-2, 2, 48).reshape(6, 8)},
        {"enable_gqa": True},
    ],
    ids=lambda one: "-".join(one) or "plain",
)
def test_written_out_is_the_same(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    heads = 2 if "enable_gqa" in settings else 4
    query, key, value = torch.randn(2, 4, 6, 5), torch.randn(2, heads, 8, 5), torch.randn(2, heads, 8, 5)
    expected = functional.scaled_dot_product_attention(query, key, value, **settings)
    torch.testing.assert_close(written_out(query, key, value, **settings), expected, atol=1e-5, rtol=0)


def test_dropout_is_asked_for() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 1, 64, 4)
    some, none = written_out(q, q, torch.ones_like(q), dropout_p=0.5), written_out(q, q, torch.ones_like(q))
    torch.testing.assert_close(none, torch.ones_like(none))
    assert not torch.allclose(some, none)


def test_the_matrix_grows_with_the_square() -> None:
    peaks = {}
    for time in (64, 256):
        make = workloads["gpt"].sized("tiny", time=time, batch=1)
        habit, fused = tried(make, habits=["attention"], steps=1), tried(make, "attention", steps=1)
        assert habit.off(fused) < 1e-4
        peaks[time] = habit.peak_bytes - fused.peak_bytes
    assert peaks[256] > 8 * max(peaks[64], 1)


def test_the_habit_holds_where_a_checkpoint_runs_the_forward_again() -> None:
    make = workloads["gpt"].sized("tiny", time=64, batch=1)
    assert tried(make, habits=["attention"]).same(tried(make, "checkpoint", habits=["attention"]))


def test_what_calls_none_is_told() -> None:
    job = prepared(one_layer, "attention")
    with pytest.raises(DoesNotApply, match="calls no scaled_dot_product_attention"):
        job.run()
