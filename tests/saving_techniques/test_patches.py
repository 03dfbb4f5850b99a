"""Techniques switched on for code that does not know of them: what the advisor does in its child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from job_runs import loop, measured
from torch import nn
from torch.nn import functional

from memlab.api.workload_run import work_of
from memlab.errors import DoesNotApply
from memlab.saving_techniques import Technique, techniques
from memlab.saving_techniques.patching import on_models, on_optimizers, outermost_calls
from memlab.workloads.job import Parts

PATCHED = [one for one in techniques.values() if one.patch]
BASELINES = {
    "retain_graph": "the loop retains its graph",
    "set_to_none": "the loop fills gradients with zeros",
    "mmap_loading": "the loop loads a file",
    "offload": "needs CUDA",
}
"""Those whose effect needs a loop that the plain one is not: their own tests have it."""


def user_code(technique: Technique) -> tuple[int, list[float]]:
    """A loop as users write it: its peak, and its losses or its output."""

    def made() -> Parts:
        parts = work_of(technique.demo.workload, technique.demo.size).make()
        if technique.name in ("foreach_off", "fused"):  # as on CUDA, where it is the default
            parts[1].param_groups[0]["foreach"] = True
        return parts

    values: list[float] = []
    return measured(lambda: values.extend(loop(made, steps=2))), values


@pytest.mark.parametrize("technique", [one for one in PATCHED if one.name not in BASELINES], ids=lambda one: one.name)
def test_code_that_does_not_know_of_it_saves_too(technique: Technique) -> None:
    peak, plain = user_code(technique)
    with technique.patch():
        lower, values = user_code(technique)
    assert 1 - lower / peak > 0.2
    if technique.equality.kind == "exact":
        np.testing.assert_array_equal(values, plain)
    else:
        np.testing.assert_allclose(values, plain, rtol=0, atol=technique.equality.relative * np.abs(plain).max())


@pytest.mark.parametrize("technique", PATCHED, ids=lambda one: one.name)
def test_where_nothing_can_be_changed_it_says_so(technique: Technique) -> None:
    if technique.name in ("no_grad", "inference_mode"):
        pytest.skip("there is always something to switch off")
    with pytest.raises(DoesNotApply) as caught, technique.patch():
        torch.ones(2).sum()
    assert str(caught.value).strip() and "\n" not in str(caught.value)


@pytest.mark.parametrize("technique", PATCHED, ids=lambda one: one.name)
def test_an_error_of_the_user_passes_through(technique: Technique) -> None:
    with pytest.raises(ZeroDivisionError), technique.patch():
        raise ZeroDivisionError


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "half_inference", "int8_weights"])
def test_what_is_for_inference_refuses_a_backward(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(DoesNotApply, match="calls backward"), techniques[name].patch():
        model(torch.randn(2, 8)).sum().backward()


# --- models and optimizers, each once ---


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


class Checkpointing(nn.Sequential):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [nn.Sequential, Checkpointing])
def test_a_model_is_found_once_and_its_layers_not(kind: Callable[..., nn.Module]) -> None:
    """Also where backward runs its layers again."""
    model, found = kind(layer(), layer()), []
    with on_models(found.append):
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
    assert found == [model]


def test_an_optimizer_is_found_once() -> None:
    model, found = layer(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with on_optimizers(found.append):
        optimizer.step()
        optimizer.step()
    assert found == [optimizer]


def test_the_first_reason_is_told_where_none_could_be_changed() -> None:
    def refuse(model: nn.Module) -> None:
        raise DoesNotApply(f"{type(model).__name__} is refused")

    with pytest.raises(DoesNotApply, match="Sequential is refused"), on_models(refuse):
        layer()(torch.ones(1, 8))
        nn.Tanh()(torch.ones(1))
    with pytest.raises(DoesNotApply, match="no optimizer took a step"), on_optimizers(refuse):
        pass


def test_arguments_may_have_any_name() -> None:
    class Named(nn.Tanh):
        def forward(self, function):
            return super().forward(function)

    with on_models(lambda model: None):
        assert Named()(function=torch.zeros(1)) == 0


def test_two_patches_at_once() -> None:
    blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(6))
    model = nn.Sequential(*blocks)
    with techniques["autocast_bf16"].patch(), techniques["checkpoint"].patch():
        loss = functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 8))
        loss.backward()
    assert loss.dtype == torch.float32 and all(one.grad is not None for one in model.parameters())


def test_autocast_ends_with_an_error() -> None:
    class Failing(nn.Linear):
        def forward(self, x):
            assert torch.is_autocast_enabled("cpu")
            raise ArithmeticError

    with techniques["autocast_bf16"].patch():
        with pytest.raises(ArithmeticError):
            Failing(2, 2)(torch.ones(1, 2))
        assert not torch.is_autocast_enabled("cpu")


def test_hooks_see_what_they_see_in_a_block_of_autocast() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(torch.is_autocast_enabled("cpu")))
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 4))
    with techniques["autocast_bf16"].patch():
        model(torch.ones(1, 4))
    assert seen == [True, torch.bfloat16] * 2


def test_what_a_change_calls_itself_is_not_outermost_and_the_call_is_given_back() -> None:
    outermost, plain = [], nn.Module.__call__
    model = nn.Sequential(nn.Linear(2, 2))

    def around(module: nn.Module, forward: Callable[[], Any]) -> Any:
        outermost.append(module)
        model[0](torch.ones(1, 2))
        return forward()

    with outermost_calls(around):
        model(torch.ones(1, 2))
    assert outermost == [model] and nn.Module.__call__ is plain
    mine = lambda self, *args: plain(self, *args)  # noqa: E731
    with outermost_calls(around):
        nn.Module.__call__ = mine
    assert nn.Module.__call__ is mine
    nn.Module.__call__ = plain
