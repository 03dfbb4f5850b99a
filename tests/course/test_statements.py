"""Statements of the course and the tips that two readers found wrong: what is said now is measured here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memlab
from notebooks.build import tips

ROWS = 2048


def peak(step: Callable[[], object]) -> int:
    """The peak of a step beyond what was there before it."""
    with memlab.track("statement", device="cpu", show=False) as run:
        result = step()
    memlab.runs.discard(run)
    del result
    return run.peak_allocated_bytes - run.devices[0].levels[0].start_bytes


def stack(*layers: Callable[[], nn.Module], times: int = 6) -> nn.Sequential:
    return nn.Sequential(*[layer() for _ in range(times) for layer in layers])


def test_eval_frees_the_masks_of_dropout_and_not_the_graph():
    model, x = stack(lambda: nn.Linear(256, 256), nn.GELU, nn.Dropout), torch.randn(ROWS, 256)
    training, evaluating = peak(lambda: model.train()(x)), peak(lambda: model.eval()(x))
    with torch.no_grad():
        without_graph = peak(lambda: model(x))
    assert 0.6 * training < evaluating < 0.75 * training
    assert without_graph < 0.4 * evaluating


@pytest.mark.parametrize(("widths", "saves"), [((64, 64, 64), False), ((16, 128, 16), True)])
def test_relu_in_place_saves_in_a_prediction_only_behind_the_widest_layer(widths, saves):
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, widths[0])
    with torch.no_grad():
        plain = peak(lambda: model(x))
        for relu in layers[1::2]:
            relu.inplace = True
        in_place = peak(lambda: model(x))
    assert (in_place < 0.8 * plain) if saves else (in_place == plain)


def test_two_forwards_and_one_backward_keep_what_the_whole_batch_keeps():
    model, x = stack(lambda: nn.Linear(256, 256), nn.GELU), torch.randn(ROWS, 256)

    def train(n: int, is_at_once: bool) -> None:
        losses = (model(part).square().mean() / n for part in x.chunk(n))
        if is_at_once:
            sum(losses).backward()  # type: ignore[union-attr]
        else:
            for loss in losses:
                loss.backward()
        model.zero_grad()

    whole = peak(lambda: train(1, True))
    assert peak(lambda: train(2, True)) > 0.8 * whole
    assert peak(lambda: train(2, False)) < 0.65 * whole


@pytest.mark.skipif(
    not Path("/proc/meminfo").exists() or not Path("/dev/shm").is_dir(), reason="needs a Linux RAM disk"
)
def test_a_file_on_a_ram_disk_is_host_memory():
    def shared_kib() -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))

    file, before = Path("/dev/shm/memlab-statement"), shared_kib()
    try:
        file.write_bytes(b"x" * (32 << 20))
        assert shared_kib() - before > 24 << 10
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["B6", "E2", "E3", "E5", "E6", "E7"])
def test_what_a_cpu_cannot_show_is_no_zero(name):
    """The notebooks are kept from a machine without a GPU."""
    (row,) = (line for line in tips.TABLE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    assert "not measurable here" in row and "±0 %" not in row


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("A3", "partly", "15.2 million"),
        ("C8", "wrong", "after each forward"),
        ("D1", "holds", "dropout's masks"),
        ("E1", "holds", "only returns the cache"),
        ("E7", "wrong", "`cuda:0`"),
        ("F4", "holds", "RAM disk"),
    ],
)
def test_what_the_tips_say_now(name, verdict, words):
    (tip,) = (tip for tip in tips.rows() if tip.name == name)
    assert tip.verdict == verdict and words in f"{tip.tip} {tip.today}"
