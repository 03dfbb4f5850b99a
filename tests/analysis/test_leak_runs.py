"""Leaks of real loops, on the CPU and on the simulated GPU: what is flagged, where, and what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memlab
from memlab.analysis.leak import Leak, leaks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.simulated)]),
]
WIDTH, BATCH = 64, 32
ROWS = BATCH * WIDTH * 4  # bytes of one batch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def found_in(work: Callable[[], Any]) -> tuple[Leak, ...]:
    """The leaks of a run of `work`, whose result stays alive until the run has ended."""
    with memlab.track(show=False) as run:
        result = work()
    del result
    return leaks(run.trace, run.devices[0].device.index)


def train(
    device: str, keep: Callable[[list[Any], int, Any, Any, Any], object] = lambda *_: None, steps: int = 20,
    optimizer: Any = torch.optim.Adam, sizes: Callable[[int], int] = lambda i: BATCH, retain: bool = False,
) -> tuple[Leak, ...]:  # fmt: skip
    """Train; `keep` may put something of each step into a list."""

    def work() -> Any:
        model = net().to(device)
        stepper, kept = optimizer(model.parameters(), lr=1e-3), list[Any]()
        for i in range(steps):
            x = torch.randn(sizes(i), WIDTH, device=device)
            y = torch.zeros(sizes(i), dtype=torch.long, device=device)
            stepper.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward(retain_graph=retain)
            stepper.step()
            keep(kept, i, loss, x, model)
        return kept, model, stepper

    return found_in(work)


# --- flagged ---


def test_losses_that_keep_their_graphs(device):
    leak = train(device, lambda kept, i, loss, x, model: kept.append(loss), retain=True)[0]
    assert (leak.kind, leak.of, leak.iterations) == ("kept", "optimizer step", 20)
    assert leak.since <= 2
    activations = 2 * BATCH * 128 * 4 + ROWS  # both ReLUs and the input, at least
    assert activations <= leak.bytes_per_iteration <= 1.2 * activations
    if device == "cuda":
        lines = {place.line.rpartition("/")[2].partition(":")[0] for place in leak.places}
        assert lines == {"test_leak_runs.py"}
        source = Path(__file__).read_text(encoding="utf-8").splitlines()
        assert "model(x)" in source[int(leak.places[0].line.rpartition(":")[2]) - 1]
    else:
        assert [place.module for place in leak.places[:2]] == ["Sequential.1", "Sequential.3"]


@pytest.mark.parametrize("since", [1, 10])
def test_the_bytes_are_those_of_the_list(device, since):
    (leak,) = train(device, lambda kept, i, loss, x, model: kept.append(x) if i >= since - 1 else None)
    assert leak.bytes_per_iteration == ROWS
    assert leak.since == since or since == 1
    # Of the first step it may not be known yet that this is the model's input.
    assert leak.total_bytes / ROWS in ((19, 20) if since == 1 else (11,))


def test_graphs_of_a_forward_that_no_backward_uses_with_changing_lengths(device):
    sizes = random.Random(0).choices(range(16, 65), k=20).__getitem__
    found = train(device, lambda kept, i, loss, x, model: kept.append(model(x)), sizes=sizes)
    assert found[0].kind == "kept"
    assert found[0].bytes_per_iteration > 128 * 4 * 16


def test_five_steps_are_enough(device):
    assert train(device, lambda kept, i, loss, x, model: kept.append(model(x)), steps=5)


def test_outputs_gathered_with_their_graphs(device):
    def work() -> list[Any]:
        model = net().to(device)
        return [model(torch.randn(BATCH, WIDTH, device=device)) for _ in range(30)]

    (leak,) = found_in(work)
    assert (leak.kind, leak.iterations) == ("kept", 30)
    assert leak.of.startswith("call of ")
    assert leak.total_bytes >= 30 * 2 * BATCH * 128 * 4


def test_a_cache_of_keys_that_grows(device):
    def work() -> Any:
        project = nn.Linear(WIDTH, WIDTH).to(device)
        keys, x = torch.zeros(0, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
        with torch.no_grad():
            for _ in range(40):
                keys = torch.cat([keys, project(x)])
        return keys

    (leak,) = found_in(work)
    assert (leak.kind, leak.bytes_per_iteration) == ("growing", 16 * WIDTH * 4)


# --- not flagged ---


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("steps", [4, 7, 30])
def test_training_from_its_first_step(device, optimizer, steps):
    assert train(device, optimizer=optimizer, steps=steps) == ()


@pytest.mark.parametrize(
    "keep",
    [
        lambda kept, i, loss, x, model: kept.append(loss.item()),
        lambda kept, i, loss, x, model: kept.append(loss.detach()),
        lambda kept, i, loss, x, model: kept.__setitem__(slice(None), [*kept, x][-5:]),
        lambda kept, i, loss, x, model: kept.clear() if i % 6 == 5 else kept.append(x),
        lambda kept, i, loss, x, model: kept.append(x) if i < 4 else None,
    ],
    ids=["item", "detached scalars", "window", "emptied", "first four"],
)
def test_what_is_kept_and_does_not_grow(device, keep):
    assert train(device, keep, steps=40) == ()


def test_lengths_that_change(device):
    lengths = random.Random(0).choices(range(1, 257), k=60)
    assert train(device, steps=60, sizes=lengths.__getitem__) == ()


def test_two_models_in_turn(device):
    def work() -> Any:
        one, other = net().to(device), net().to(device)
        steppers = [torch.optim.Adam(model.parameters()) for model in (one, other)]
        for _ in range(15):
            x = torch.randn(BATCH, WIDTH, device=device)
            for model, stepper in zip((one, other), steppers, strict=True):
                stepper.zero_grad()
                model(x).sum().backward()
                stepper.step()
        return one, other, steppers

    assert found_in(work) == ()


def test_outputs_that_are_dropped_and_models_that_are_built(device):
    def work() -> Any:
        models = [nn.Linear(256, 256, device=device) for _ in range(20)]
        for model in models:
            model(torch.randn(BATCH, 256, device=device))
        return models

    assert found_in(work) == ()


def test_nothing_is_left_of_a_search(device):
    """Asking twice gives the same, and the trace is as it was."""
    with memlab.track(show=False) as run:
        kept = [torch.randn(BATCH, WIDTH, device=device).relu() for _ in range(12)]
    index = run.devices[0].device.index
    assert leaks(run.trace, index) == leaks(run.trace, index)
    del kept
