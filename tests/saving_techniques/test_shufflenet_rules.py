"""Layouts and designs: bytes at equal products, counted by torch's own counter of operations."""

from __future__ import annotations

import pytest
import torch
from job_runs import prepared
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memlab import workloads
from memlab.errors import DoesNotApply, MemlabError
from memlab.saving_techniques import techniques
from memlab.saving_techniques.shufflenet_rules import DESIGNS, Designed, against
from memlab.workloads.nested import tensors_in

RULES = sorted(DESIGNS)


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
    usual, better = Designed(rule), Designed(rule, better=True)
    products, fewer = multiplied(usual, x), multiplied(better, x)
    assert abs(products - fewer) < 0.02 * products
    assert moved_bytes(better, x) < 0.8 * moved_bytes(usual, x)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_for_who_draws(rule: str) -> None:
    job = prepared(lambda: against(rule), rule)
    assert job.model.better and job.model.training
    assert {id(one) for group in job.optimizer.param_groups for one in group["params"]} == set(
        map(id, job.model.parameters())
    )
    for make in (workloads["mlp"].sized("tiny"), lambda: against(RULES[RULES.index(rule) - 1])):
        with pytest.raises(DoesNotApply, match="a rule for designing"):
            prepared(make, rule)
    with pytest.raises(DoesNotApply, match="already"):
        techniques[rule].apply(job)


def test_two_rules_cannot_redraw_one_network() -> None:
    with pytest.raises(MemlabError, match="replaces the whole network"):
        techniques.ordered(RULES[:2])
