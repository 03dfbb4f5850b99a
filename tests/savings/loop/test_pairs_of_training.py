"""Every two techniques of the loop, the parameters and the optimizers that do not exclude each other, at once."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.workloads.job import Job, Parts, seeded


def names_in(room: str) -> list[str]:
    package = importlib.import_module(f"memlab.savings.{room}")
    files = [
        importlib.import_module(f"{package.__name__}.{one.name}") for one in pkgutil.iter_modules(package.__path__)
    ]
    return [one.name for file in files for one in file.TECHNIQUES if one.apply is not None]


NAMES = [name for room in ("loop", "parameters", "optimizers") for name in names_in(room)]
PAIRS = [pair for pair in itertools.combinations(NAMES, 2) if not techniques.conflict(pair)]


class Words(nn.Module):
    """Something for everyone: a table, linear layers, a layer that nobody uses, an output of the table's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(24, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16))
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.token(tokens)))


def lost(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def training() -> Parts:
    model = Words()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, (torch.randint(0, 24, (6, 8)), torch.randint(0, 24, (6, 8))), lost


def inference() -> Parts:
    return Words(), None, (torch.randint(0, 24, (6, 8)),), None


def outcome(make: Callable[[], Parts], names: tuple[str, ...], habits: tuple[str, ...]) -> dict[str, Any]:
    job = Job("cpu", steps=3)
    try:
        with seeded():
            techniques.prepare(job, make, names, habits)
            job.run()
        return job.outcome()
    finally:
        vars(job).clear()


def numbers(found: dict[str, Any], key: str) -> np.ndarray:
    value = found[key]
    return np.asarray(value.detach() if isinstance(value, Tensor) else value, "f8").reshape(-1)


def check(plain: dict[str, Any], changed: dict[str, Any], pair: tuple[str, str]) -> None:
    claims = [techniques[name].equality for name in pair]
    kinds = {one.kind for one in claims}
    for key in ("output",) if "output" in plain else ("losses", "weights"):
        a, b = numbers(plain, key), numbers(changed, key)
        assert np.isfinite(b).all() and b.size
        if "changes" in kinds:
            continue
        if kinds == {"exact"}:
            assert np.array_equal(a, b) and plain.get("digest") == changed.get("digest")
        else:
            assert np.abs(a - b).max() <= max(one.relative for one in claims) * np.abs(a).max()


@pytest.mark.parametrize("make", [training, inference], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_it_goes_with_every_other(name: str, make: Callable[[], Parts]) -> None:
    for pair in (pair for pair in PAIRS if pair[0] == name):
        try:
            changed = outcome(make, pair, ())
        except DoesNotApply:
            alone = []
            for one in pair:
                try:
                    outcome(make, (one,), ())
                except DoesNotApply:
                    alone.append(one)
            assert alone, f"{pair[0]} and {pair[1]} apply alone, and not together"
            continue
        check(outcome(make, (), pair), changed, pair)


def test_there_are_pairs_to_try() -> None:
    assert len(NAMES) > 20 and len(PAIRS) > 200
