"""How well sizes fit real training steps of whole models on the CPU; prints the table of docs/size.md.

python -m pytest -m "slow or not slow" -s tests/session/test_size_workloads.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from session.real_forward import left_bytes
from torch import Tensor, nn

import memlab
from memlab.session.size import size
from memlab.units import format_bytes
from memlab.workloads.language import Transformer
from memlab.workloads.vision import ResNet, UNet, Vgg, vgg16, vgg19


def gpt2() -> nn.Module:
    return Transformer(layers=12, width=768, heads=12, vocabulary=50257, time=1024, tied=True)


def pictures(side: int, batch: int = 2) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, side, side)


def tokens(batch: int, time: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 1000, (batch, time))


Workload = tuple[str, Callable[[], nn.Module], Callable[[], Tensor], str]
SMALL: list[Workload] = [
    ("VGG-like", Vgg, pictures(64), "sgd"),
    ("ResNet-like", ResNet, pictures(32), "adamw"),
    ("U-Net", UNet, pictures(128, 1), "adamw"),
    ("transformer", Transformer, tokens(4, 128), "adamw"),
]
LARGE: list[Workload] = [
    ("VGG-16", vgg16, pictures(224, 1), "sgd"),
    ("VGG-19", vgg19, pictures(224, 4), "sgd"),
    ("GPT-2 small", gpt2, tokens(1, 256), "adamw"),
]
HEAD = "\nmodel          kept said   kept measured  off by  before backward  all together   peak measured  peak/said"


def real_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(x).sum().backward()
    optimizer.step()


def real_peak(model: nn.Module, name: str, x: Tensor) -> int:
    """The peak of a second step, of which the model, the optimizer's state and the input are a part."""
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    optimizer = kind(model.parameters(), lr=1e-6)
    real_step(model, optimizer, x)
    optimizer.zero_grad(set_to_none=True)
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    there = sum({t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers(), *states, x)}.values())
    with memlab.track("step", device="cpu", show=False) as run:
        real_step(model, optimizer, x)
    return run.peak_bytes - run.devices[0].levels[0].start_bytes + there


def check(workload: Workload) -> None:
    name, make, inputs, optimizer = workload
    torch.manual_seed(0)
    model, x = make(), inputs()
    found = size(model, x, optimizer=optimizer)
    left = left_bytes(model, x)
    peak = real_peak(model, optimizer, x)
    cells = [found.kept_bytes, left, found.before_backward_bytes, found.total_bytes, peak]
    texts = [format_bytes(cell) for cell in cells]
    off = f"{abs(found.kept_bytes - left) / left:.2%}"
    print(HEAD.splitlines()[1] if name == "VGG-like" else "", end="\n" if name == "VGG-like" else "")
    print(
        f"{name:12} {texts[0]:>11} {texts[1]:>15} {off:>7} {texts[2]:>16} {texts[3]:>13} {texts[4]:>15} {peak / cells[3]:>10.2f}"
    )
    assert found.kept_bytes == left
    assert peak >= max(found.before_backward_bytes, found.at_optimizer_bytes)


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload[0])
def test_small_models(workload):
    check(workload)


@pytest.mark.slow
@pytest.mark.parametrize("workload", LARGE, ids=lambda workload: workload[0])
def test_large_models(workload):
    check(workload)


def sizes_on_meta(make: Callable[[], nn.Module], *inputs: Any, **more: Any) -> Any:
    with torch.device("meta"):
        model = make()
    return size(model, *inputs, **more)


def test_vgg19_has_the_weights_it_is_known_for():
    found = sizes_on_meta(vgg19, (1, 3, 224, 224), optimizer="sgd")
    assert found.parameter_count == 143_667_240
    assert format_bytes(found.parameter_bytes) == "548.0 MiB"
    assert found.gradient_bytes == found.parameter_bytes
    assert found.optimizer_bytes == 0


def test_activations_grow_with_the_batch_and_parameters_do_not():
    one, four = (sizes_on_meta(vgg16, (batch, 3, 224, 224)) for batch in (1, 4))
    assert four.activation_bytes == 4 * one.activation_bytes
    assert four.model_bytes == one.model_bytes
