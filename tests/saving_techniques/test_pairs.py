"""Techniques that do not exclude each other, together: the weakest of their claims holds."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable

import job_runs
import numpy as np
import pytest
import torch
from job_runs import results
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.workloads.job import Job, Parts, seeded

NAMES = [one.name for one in techniques.values() if one.demo.device == "cpu"]
PAIRS = [pair for pair in itertools.combinations(NAMES, 2) if not techniques.conflict(pair)]

NO_RESULT, HALF = "was kept for backward: there is nothing to recompute", "torch.bfloat16|is float32"
NOTHING_LEFT = {
    # The norms are in the frozen part, of which nothing is recorded; adapters freeze all of them.
    **{("training", norm, other): NO_RESULT for norm in ("densenet", "recomputed_norm")
       for other in ("freezing", "feature_extraction", "low_rank")},
    # An inference records no graph under no_grad, or with weights that ask for no gradient, as those in int8 do.
    **{("inference", norm, other): NO_RESULT for norm in ("densenet", "recomputed_norm")
       for other in ("feature_lists", "no_grad", "inference_mode", "int8_weights")},
    ("inference", "recomputed_norm", "conv_bn_fusion"): NO_RESULT,  # the only BatchNorm is folded
    # An adapter adds its bypass to what the last layer gives.
    ("training", "chunked_loss", "low_rank"): "the model does something after its last Linear layer",
    **{("inference", one, "half_inference"): HALF for one in ("autocast_fp16", "autocast_bf16", "pure_bf16")},
}  # fmt: skip
"""Pairs of which one takes away what the other works on, each alone being right -> what the other says of it in a line."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(16, 48), nn.Dropout(0.1)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.1), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(mixed)
        return x + self.feed(x)


class Everything(nn.Module):
    """Equal blocks in a chain, attention, norms with statistics, a concatenation, a vocabulary, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(60, 16)
        middle = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU()
        self.conv, self.wide = nn.Sequential(*middle), nn.Conv1d(32, 16, 1)
        self.blocks = nn.Sequential(*(Block() for _ in range(5)))
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 60, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token(tokens).transpose(1, 2)
        convolved = self.conv(embedded)
        both = torch.cat([convolved, embedded], 1)
        x = self.wide(both).transpose(1, 2)
        return self.head(self.blocks(x))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def training() -> Parts:
    batch = torch.randint(0, 60, (4, 12)), torch.randint(0, 60, (4, 12))
    return job_runs.training(Everything(), *batch, loss=token_loss, lr=0.05, momentum=0.9)


def inference() -> Parts:
    return Everything(), None, (torch.randint(0, 60, (4, 12)),), None


Outcome = tuple[np.ndarray, str, str]


@functools.cache
def outcome(make: Callable[[], Parts], names: tuple[str, ...], habits: tuple[str, ...] = ()) -> Outcome | str:
    """Losses and weights or the output, digests of parameters and buffers; why, where a technique does not apply."""
    job = Job("cpu", steps=2)
    try:
        with seeded():
            techniques.prepare(job, make, names, habits)
            job.run()
        return results(job)
    except DoesNotApply as error:
        return str(error)
    finally:
        vars(job).clear()


def check(make: Callable[[], Parts], *names: str) -> None:
    changed = outcome(make, names)
    why = NOTHING_LEFT.get((make.__name__, *names))
    if isinstance(changed, str):
        alone = any(isinstance(outcome(make, (name,)), str) for name in names)
        assert alone or (why and re.search(why, changed)), f"{names}: each applies alone, and not together: {changed}"
        return
    assert why is None, f"{names} go together now: take them off the list"
    assert np.isfinite(changed[0]).all() and changed[0].size
    plain = outcome(make, (), tuple(name for name in names if name != "attention"))  # whose sums BatchNorm magnifies
    assert not isinstance(plain, str)
    claims = [techniques[name].equality for name in names]
    if all(one.kind == "exact" for one in claims):
        assert np.array_equal(plain[0], changed[0]) and plain[1:] == changed[1:]
    elif all(one.kind != "changes" for one in claims) and "accumulation" not in names:  # with BatchNorm it changes
        difference = np.abs(plain[0] - changed[0]).max() / np.abs(plain[0]).max()
        assert difference <= max(one.relative for one in claims)


@pytest.mark.parametrize("make", [training, inference], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_each_alone(name: str, make: Callable[[], Parts]) -> None:
    check(make, name)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("make", [training, inference], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_each_with_every_other(name: str, make: Callable[[], Parts]) -> None:
    assert len(PAIRS) > 900
    for pair in PAIRS:
        if pair[0] == name:
            check(make, *pair)


def test_many_at_once() -> None:
    check(training, "checkpoint", "attention", "in_place", "rebinding", "chunked_loss")


def test_what_works_on_the_same_tensors_is_excluded() -> None:
    recomputing = {"checkpoint", "checkpoint_sequential", "sqrt_segments", "selective_checkpoint", "densenet"}
    for pair in itertools.combinations([*recomputing, "recomputed_norm"], 2):
        assert techniques.conflict(pair), pair
    assert techniques.conflict(["autocast_fp16", "autocast_bf16"])
    assert not techniques.conflict(["checkpoint", "autocast_bf16", "attention", "chunked_loss", "in_place", "offload"])
