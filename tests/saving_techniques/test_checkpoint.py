"""Checkpointing of blocks and of segments: what is found, what stays as it is, what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from job_runs import one_layer, prepared, training, tried
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques.checkpoint import blocks, checkpoint_blocks, residual_stack, segments, square_root
from memlab.workloads.job import Parts

FORGETTING = ("checkpoint", "checkpoint_sequential", "sqrt_segments", "selective_checkpoint")


class Block(nn.Module):
    """Something of everything that a repetition could get wrong: a norm with statistics, dropout, a second input, a word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * scale * self.drop(functional.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))
        self.blocks.append(self.blocks[0])  # one is used twice

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale, gain=0.5)
        return x.mean((2, 3))


def with_everything() -> Parts:
    model = Net()
    batch = torch.randn(4, 4, 16, 16), torch.rand(4, 1, 1, 1), torch.randint(0, 4, (4,))
    return training(model, *batch, loss=functional.cross_entropy, momentum=0.9)


def chained() -> Parts:
    """A chain in which many a cut would be in front of a layer in place that is not the same twice."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Conv2d(3, 3, 3, padding=1), nn.LeakyReLU(0.2, inplace=True), nn.BatchNorm2d(3), nn.Dropout(0.2)]
    return training(nn.Sequential(*layers), torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16))


@pytest.mark.parametrize(
    ("name", "make", "share"),
    [
        ("checkpoint", with_everything, 0.1),
        ("selective_checkpoint", with_everything, 0.1),
        ("checkpoint_sequential", chained, 0.25),
        ("sqrt_segments", chained, 0.25),
    ],
)
def test_results_stay_exact_with_their_buffers(name: str, make: Callable[[], Parts], share: float) -> None:
    plain, changed = tried(make, steps=3), tried(make, name, steps=3)
    assert plain.same(changed) and plain.share(changed) > share


def test_plain_checkpoint_counts_each_batch_twice() -> None:
    """What `_frozen_statistics` is for; should PyTorch mend it one day, this fails and it can go."""
    norm = nn.BatchNorm1d(3)
    x = torch.randn(8, 3, requires_grad=True)
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 2


def test_norms_are_themselves_again_after_an_error() -> None:
    model = nn.Sequential(*(Failing() for _ in range(2)))
    checkpoint_blocks(model)
    loss = model(torch.randn(8, 3, requires_grad=True)).sum()
    Failing.fails = True
    try:
        with pytest.raises(ArithmeticError):
            loss.backward()
    finally:
        Failing.fails = False
    for one in model:
        assert one.norm.momentum == 0.1 and one.norm.num_batches_tracked == 1


class Failing(nn.Module):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("in the repetition")
        return self.last(self.norm(x))


def kinds(name: str) -> dict[str, int]:
    return Counter(type(one).__name__ for one in blocks(workloads[name].sized("tiny")()[0]))


def test_which_blocks_are_found() -> None:
    assert kinds("resnet50") == {"Bottleneck": 16}
    assert kinds("densenet121") == {"DenseBlock": 4}
    assert kinds("unet") == {"Twice": 9}
    assert set(kinds("gan")) == {"Sequential"}
    assert kinds("vgg16") == {}
    assert len(blocks(Net())) == 4
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


class Clipping(nn.Module):
    """Changes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2).sin())


def clipping() -> Parts:
    return training(nn.Sequential(nn.Linear(4, 4), Clipping(), Clipping()), torch.randn(3, 4), torch.randn(3, 4))


def test_a_block_that_changes_its_input_is_refused() -> None:
    job = prepared(clipping, "checkpoint")
    with pytest.raises(DoesNotApply, match="changes its input in place"):
        job.run()


@pytest.mark.parametrize("name", FORGETTING)
def test_what_has_nothing_to_forget_is_refused(name: str) -> None:
    with pytest.raises(DoesNotApply, match=r"Linear has no (repeated blocks|nn\.Sequential)"):
        prepared(one_layer, name)


def test_segments_never_begin_in_place() -> None:
    layers = [
        nn.Conv2d(1, 1, 1),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Sequential(nn.ReLU6(inplace=True))),
        nn.Tanh(),
    ]
    model = nn.Sequential(*layers * 3)
    for count in range(1, 13):
        parts = segments(model, count)
        assert [one for part in parts for one in part] == list(model)
        assert all(part and part[0] not in layers[1:3] for part in parts)
    only = nn.Sequential(*(nn.ReLU(inplace=True) for _ in range(4)))
    assert segments(only, 4) == [list(only)]


def test_the_square_root() -> None:
    assert [square_root(count) for count in (4, 9, 36, 100)] == [2, 3, 6, 10]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def test_selected_products_are_not_computed_again() -> None:
    counts = {}
    for names in ((), ("selective_checkpoint",), ("checkpoint",)):
        job = prepared(residual_stack, *names, steps=1)
        with Products() as products:
            job.run()
        counts[names] = products.count
    assert counts[("selective_checkpoint",)] == counts[()] < counts[("checkpoint",)]


def test_selecting_refuses_layers_in_place() -> None:
    def make() -> Parts:
        model, optimizer, batch, loss = with_everything()
        model.blocks[2].drop.inplace = True
        return model, optimizer, batch, loss

    with pytest.raises(DoesNotApply, match=r"Block\.drop works in place"):
        prepared(make, "selective_checkpoint")


def test_the_users_class_is_left_alone() -> None:
    forward = Block.forward
    prepared(with_everything, "checkpoint").run()
    assert Block.forward is forward and "forward" not in vars(copy.deepcopy(Net()).blocks[0])
