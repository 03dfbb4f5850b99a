from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from memlab import workloads
from memlab.probes.tally import Tally
from memlab.workloads.language import Transformer
from memlab.workloads.vision import ResNet, UNet, Vgg

STEPS = [workloads.vgg, workloads.resnet, workloads.unet, workloads.transformer]


@pytest.mark.parametrize("make", STEPS)
def test_steps_repeat_and_leave_no_bytes(make: Callable[[], Callable[[], float]]) -> None:
    step = make()
    assert all(math.isfinite(step()) for _ in range(2))
    tally = Tally()
    tally.start()
    try:
        step()
    finally:
        tally.stop()
    assert tally.current_bytes == tally.base_bytes
    assert tally.peak_bytes > tally.base_bytes


@pytest.mark.parametrize("make", STEPS)
def test_the_same_seed_gives_the_same_numbers(make: Callable[[], Callable[[], float]]) -> None:
    assert make()() == make()()


@pytest.mark.parametrize("make", [workloads.vgg, workloads.resnet, workloads.transformer])
def test_training_lowers_the_loss(make: Callable[[], Callable[[], float]]) -> None:
    step = make()
    losses = [step() for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("model", "parameter_bytes", "buffer_bytes"),
    [
        (Vgg, 10_138_280, 0),
        (ResNet, 2_786_472, 9_080),
        (UNet, 473_160, 0),
        (Transformer, 4_262_912, 0),
        (lambda: Transformer(12, 768, 12, 50257, 1024, tied=True), 4 * 124_439_808, 0),  # GPT-2 small, as published
    ],
)
def test_models_have_the_size_they_are_known_by(
    model: Callable[[], torch.nn.Module], parameter_bytes: int, buffer_bytes: int
) -> None:
    with torch.device("meta"):
        built = model()
    assert sum(p.nbytes for p in built.parameters()) == parameter_bytes
    assert sum(b.nbytes for b in built.buffers()) == buffer_bytes


def test_attention_looks_only_back() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer().eval(), torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 1
    same = (model(tokens) == model(changed)).all(dim=2)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


@pytest.mark.fakegpu
def test_gpt2_steps_on_a_device() -> None:
    step = workloads.gpt2(batch=1, time=64)
    step()
    assert torch.cuda.max_memory_allocated() > 3 * 4 * 124_439_808
