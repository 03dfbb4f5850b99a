"""Norms, activations and concatenations recomputed in backward: values to the bit, statistics once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from job_runs import one_layer, prepared, training, tried
from storage_tracking import rise
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques.recomputed_norm import Recomputing, norm_stack
from memlab.workloads.job import Parts

BOTH = ("recomputed_norm", "densenet")


class Mixed(nn.Module):
    """Norms trained and frozen, ReLU as layer, as function, as method, in place and not; a concatenation read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(8, 4, 3)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(8)
        self.frozen, self.drop = nn.BatchNorm2d(4, momentum=None), nn.Dropout(0.2)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def train(self, mode: bool = True) -> Mixed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.relu(self.norm1(self.conv1(x))))
        y = functional.relu(self.norm2(self.conv2(x)), inplace=True)
        y = torch.relu(self.frozen(y)).sigmoid()
        both = torch.cat((y, y * 2), dim=1)
        z = self.conv3(self.norm3(both).relu()) + self.conv3(both)
        return self.head(functional.gelu(self.norm1(z)).mean((2, 3)))


def mixed() -> Parts:
    batch = torch.randn(6, 3, 16, 16), torch.randint(0, 4, (6,))
    return training(Mixed(), *batch, loss=functional.cross_entropy, momentum=0.9)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "make", [mixed, norm_stack, workloads["unet"].sized("tiny", side=32), workloads["gan"].sized("tiny", batch=4)]
)
def test_results_and_buffers_are_bitwise_equal(make: Callable[[], Parts], name: str) -> None:
    assert tried(make).same(tried(make, name))


def graph(model: nn.Module, x: Tensor, mode: Recomputing | None) -> list[Tensor]:
    """Gradients of a double use of one graph."""
    model.zero_grad()
    if mode is None:
        loss = model(x).square().sum()
    else:
        with mode.on():
            loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def test_a_graph_that_is_kept_can_be_used_twice() -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 3, 16, 16)
    model.drop.p = 0.0
    mode = Recomputing(concatenations=True)
    plain, again = graph(model, x, None), graph(model, x, mode)
    assert mode.saved and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_graph_that_nobody_goes_backward_through_is_let_go() -> None:
    model, x = Mixed(), torch.randn(2, 3, 16, 16)

    def forward() -> None:
        with Recomputing(concatenations=True).on():
            model(x).square().sum()

    forward()  # what a first call makes for good
    peak, left = rise(forward)
    assert left == 0 < peak


def test_under_autocast() -> None:
    plain, changed = tried(mixed, "autocast_bf16"), tried(mixed, "autocast_bf16", "densenet")
    assert plain.same(changed)


def test_what_was_changed_after_it_was_read_is_told() -> None:
    a, b = (torch.ones(3, requires_grad=True) * 2 for _ in range(2))
    with Recomputing(concatenations=True).on():
        loss = (torch.cat([a, b]) ** 2).sum()
    a.add_(1)
    with pytest.raises(DoesNotApply, match="changed in place after it was read"):
        loss.backward()


def test_what_was_changed_after_it_was_made_is_kept() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    values = []
    for mode in (None, Recomputing(concatenations=True)):
        x.grad = None
        with mode.on() if mode is not None else torch.enable_grad():
            made = torch.cat([x, x * 2])
            made.mul_(3)
            loss = (made**2).sum()
        loss.backward()
        values.append(x.grad.clone())
    assert torch.equal(*values)


def test_nothing_is_kept_without_gradients() -> None:
    mode = Recomputing()
    model = norm_stack()[0]
    with mode.on(), torch.no_grad():
        model(torch.randn(2, 3, 8, 8))
        assert not mode.saved and not mode.recipes


def test_nothing_is_known_after_an_error() -> None:
    mode = Recomputing()
    with pytest.raises(ZeroDivisionError), mode.on():
        norm_stack()[0](torch.randn(2, 3, 8, 8))
        raise ZeroDivisionError
    assert not mode.recipes
    kept = functional.relu(torch.ones(2, requires_grad=True) * 1)
    assert isinstance(kept.grad_fn._saved_result, Tensor)  # and no hook is left on


def test_what_has_no_norm_is_refused() -> None:
    with pytest.raises(DoesNotApply, match="Linear has no BatchNorm layer"):
        prepared(one_layer, "recomputed_norm")
    job = prepared(one_layer, "densenet")
    with pytest.raises(DoesNotApply, match="no result of a concatenation or BatchNorm was kept"):
        job.run()


def test_densenet_saves_what_norms_alone_do_not() -> None:
    make = workloads["densenet121"].sized("tiny", side=32)
    plain = tried(make)
    shares = [plain.share(tried(make, name)) for name in BOTH]
    assert 0.2 < shares[0] < shares[1] - 0.1
