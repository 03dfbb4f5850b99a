"""How well sizes fit real training steps of whole models on the CPU; prints the rows of the table in docs/size.md.

python -m pytest -m "slow or not slow" -s tests/api/test_size_workloads.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api.real_forward import left_bytes
from torch import Tensor, nn

import memlab
from memlab.api.size import size
from memlab.units import format_bytes
from memlab.workloads.images import vgg16, vgg19
from memlab.workloads.language import Transformer
from memlab.workloads.vision import ResNet, UNet, Vgg


def gpt2() -> nn.Module:
    return Transformer(layers=12, width=768, heads=12, vocabulary=50257, time=1024, tied=True)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
SMALL = [
    ("VGG-like", Vgg, (2, 3, 64, 64), SGD),
    ("ResNet-like", ResNet, (2, 3, 32, 32), ADAMW),
    ("U-Net", UNet, (1, 3, 128, 128), ADAMW),
    ("transformer", Transformer, (4, 128), ADAMW),
]
LARGE = [
    ("VGG-16", vgg16, (1, 3, 224, 224), SGD),
    ("VGG-19", vgg19, (4, 3, 224, 224), SGD),
    ("GPT-2 small", gpt2, (1, 256), ADAMW),
]
CASES = [pytest.param(*one, id=one[0]) for one in SMALL]
CASES += [pytest.param(*one, id=one[0], marks=pytest.mark.slow) for one in LARGE]


def grown(tensors: Any) -> int:
    return sum({one.data_ptr(): one.nbytes for one in tensors}.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "make", "shape", "kind"), CASES)
def test_real_steps_take_what_was_said(name, make, shape, kind):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape) if len(shape) == 4 else torch.randint(0, 1000, shape)
    optimizer = kind(model.parameters(), lr=1e-6)
    found, left = size(model, x, optimizer=kind), left_bytes(model, x)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert (found.gradient_bytes, found.optimizer_bytes) == (grown(p.grad for p in model.parameters()), grown(states))
    optimizer.zero_grad(set_to_none=True)
    with memlab.track("step", device="cpu", show=False) as run:  # a second one, whose state is there already
        step()
    there = grown((*model.parameters(), *model.buffers(), *states, x))
    peak = run.peak_bytes - run.devices[0].levels[0].start_bytes + there
    sizes = [found.kept_bytes, left, found.before_backward_bytes, found.total_bytes, peak]
    print(f"\n{name:12} {' '.join(f'{format_bytes(one):>14}' for one in sizes)} {peak / found.total_bytes:.2f}")
    assert found.kept_bytes == left
    assert peak >= max(found.before_backward_bytes, found.at_optimizer_bytes)


def test_vgg19_has_the_weights_it_is_known_for_and_activations_alone_grow_with_the_batch():
    with torch.device("meta"):
        model = vgg19()
    one, four = (size(model, (batch, 3, 224, 224), optimizer="sgd") for batch in (1, 4))
    assert one.parameter_count == 143_667_240
    assert format_bytes(one.parameter_bytes) == "548.0 MiB"
    assert (one.gradient_bytes, one.optimizer_bytes) == (one.parameter_bytes, 0)
    assert four.activation_bytes == 4 * one.activation_bytes
    assert four.model_bytes == one.model_bytes
