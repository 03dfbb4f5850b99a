"""Layouts and designs: bytes at equal products, counted by torch's own counter of operations."""

from __future__ import annotations

import pytest
import torch
from jobbing import prepared, tried
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memlab.errors import DoesNotApply, MemlabError
from memlab.savings import techniques
from memlab.savings.design.channels_last import convolutions
from memlab.savings.design.shufflenet import DRAWINGS, Drawn, drawn
from memlab.workloads.job import seeded
from memlab.workloads.nested import tensors_in

RULES = sorted(DRAWINGS)


class Moved(TorchDispatchMode):
    """Bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nbytes += sum(one.nbytes for one in tensors_in([list(args), out]))
        return out


def multiplied(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:  # of backward it forgets that there are groups
        model(x)
    return counter.get_total_flops()


def moved_bytes(model: nn.Module, x: Tensor) -> int:
    with Moved() as moved:
        model(x).sum().backward()
    return moved.nbytes


@pytest.mark.parametrize("rule", RULES)
def test_the_same_products_and_fewer_bytes(rule: str) -> None:
    x = torch.randn(1, 3, 16, 16)
    usual, better = Drawn(rule), Drawn(rule, better=True)
    products, fewer = multiplied(usual, x), multiplied(better, x)
    assert abs(products - fewer) < 0.02 * products
    assert moved_bytes(better, x) < 0.8 * moved_bytes(usual, x)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_for_who_draws(rule: str) -> None:
    job = prepared(lambda: drawn(rule), rule)
    assert job.model.better and job.model.training
    assert {id(one) for group in job.optimizer.param_groups for one in group["params"]} == set(
        map(id, job.model.parameters())
    )
    for make in (convolutions, lambda: drawn(RULES[RULES.index(rule) - 1])):
        with pytest.raises(DoesNotApply, match="who draws a network"):
            prepared(make, rule)
    with pytest.raises(DoesNotApply, match="already"):
        techniques[rule].apply(job)


def test_two_rules_cannot_redraw_one_network() -> None:
    with pytest.raises(MemlabError, match="redraws the whole network"):
        techniques.ordered(RULES[:2])


# --- channels last ----------------------------------------------------------------------------------------------------


def test_channels_last_is_another_order_of_the_same_bytes() -> None:
    job = prepared(convolutions, "channels_last")
    assert job.batch[0].is_contiguous(memory_format=torch.channels_last) and not job.batch[0].is_contiguous()
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in job.model.parameters() if one.dim() == 4)
    plain, last = tried(convolutions), tried(convolutions, "channels_last")
    assert abs(plain.share(last)) < 0.02 and plain.off(last) < 1e-4


def test_a_target_keeps_its_order() -> None:
    def make():
        model = nn.Conv2d(3, 3, 3, padding=1)
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(2, 3, 8, 8),) * 2, nn.functional.mse_loss

    job = prepared(make, "channels_last")
    assert job.batch[-1].is_contiguous() and not job.batch[0].is_contiguous()
    with pytest.raises(DoesNotApply, match="two-dimensional convolution"):
        prepared(lambda: (nn.Linear(2, 2), None, (torch.ones(1, 2),), None), "channels_last")


def test_channels_last_from_outside() -> None:
    with seeded():
        model, _, (x, _), _ = convolutions()
    expected = model(x)
    with techniques["channels_last"].outside():
        got = model(x)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(got, expected, atol=1e-5)
