"""Every two techniques of activations and precision that do not exclude each other, at once: the weaker claim holds."""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from jobbing import Tried, tried
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.workloads.job import Parts


def names_in(room: str) -> Iterator[str]:
    package = importlib.import_module(f"memlab.savings.{room}")
    for one in pkgutil.iter_modules(package.__path__):
        yield from (found.name for found in importlib.import_module(f"{package.__name__}.{one.name}").TECHNIQUES)


HERE = [*names_in("activations"), *names_in("precision")]
ON_CPU = [name for name in HERE if name not in ("offload", "pure_fp16")]
PAIRS = [pair for pair in itertools.combinations(ON_CPU, 2) if not techniques.conflict(pair)]


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
    """Something for everyone: equal blocks in a chain, attention, norms with statistics, a concatenation, a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(60, 16)
        middle = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU()
        self.conv, self.wide = nn.Sequential(*middle), nn.Conv1d(32, 16, 1)
        self.blocks = nn.Sequential(*(Block() for _ in range(5)))
        self.head = nn.Linear(16, 60, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token(tokens).transpose(1, 2)
        convolved = self.conv(embedded)
        both = torch.cat([convolved, embedded], 1)
        x = self.wide(both).transpose(1, 2)
        return self.head(self.blocks(x))


def lost(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def everything() -> Parts:
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, (torch.randint(0, 60, (4, 24)), torch.randint(0, 60, (4, 24))), lost


@functools.cache
def run_of(*names: str) -> Tried:
    return tried(everything, *names)


@pytest.mark.parametrize("name", ON_CPU)
def test_each_alone(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_at_once(pair: tuple[str, str]) -> None:
    check(*pair)


def check(*names: str) -> None:
    plain, changed = run_of(), run_of(*names)
    claims = [techniques[name].equality for name in names]
    if all(one.kind == "exact" for one in claims):
        assert plain.same(changed)
    elif all(one.kind != "changes" for one in claims):
        assert plain.off(changed) <= max(one.relative for one in claims)
    else:
        assert changed.off(changed) == 0, "no numbers came of it"


def test_what_takes_hold_of_the_same_tensors_is_excluded() -> None:
    forgetting = {"checkpoint", "checkpoint_sequential", "sqrt_segments", "selective_checkpoint", "densenet"}
    for pair in itertools.combinations([*forgetting, "recomputed_norm"], 2):
        assert techniques.conflict(pair), pair
    assert techniques.conflict(["autocast_fp16", "autocast_bf16"])
    assert not techniques.conflict(["checkpoint", "autocast_bf16", "attention", "chunked_loss", "in_place", "offload"])


def test_many_at_once() -> None:
    changed = run_of("checkpoint", "attention", "in_place", "rebinding", "chunked_loss")
    assert run_of().off(changed) < 1e-4 and run_of().share(changed) > 0.25


def test_none_is_refused_twice() -> None:
    with pytest.raises(DoesNotApply) as caught:
        tried(lambda: (nn.Linear(2, 2), None, (torch.ones(1, 2),), None), "in_place")
    assert str(caught.value).count("in_place") == 1
