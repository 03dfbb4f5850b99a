"""Asking for a size changes nothing: model, random numbers, modes, hooks, other people's lists and caches."""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from api.real_forward import Function, linear, unchanged
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import memlab
from memlab.api.size import size
from memlab.errors import MemlabError
from memlab.prediction.child import Child
from memlab.torch_internals.fakes import FakeTensor


def rows() -> Tensor:
    return torch.arange(32.0).view(4, 8)


@pytest.fixture(autouse=True)
def no_fakes_are_here():
    yield
    gc.collect()
    assert not any(type(thing) is FakeTensor for thing in gc.get_objects())


def test_a_forward_that_changes_everything_changes_nothing_here():
    table: dict[str, Tensor] = {}
    seen: list[Any] = []
    holder = SimpleNamespace(tensor=None)

    @functools.cache
    def mask(width: int) -> Tensor:
        return torch.ones(width)

    def forward(model: Function, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        torch.manual_seed(3)
        model.calls += 1
        model.last = model.net(x + torch.randn(8)) * mask(8)
        model.history.append(model.last)
        model.table["x"] = table["x"] = holder.tensor = x
        model.counter.add_(1)
        model.running = model.running * 0.9
        model.late = linear()
        return model.last

    def once(module: nn.Module, inputs: Any) -> None:
        handle.remove()

    model = Function(forward, net=nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True)))
    model.calls, model.history, model.table = 0, [], {"k": [1]}
    model.register_buffer("counter", torch.zeros(()))
    model.register_buffer("running", torch.ones(8))
    model.net(rows()).sum().backward()
    handle = model.net.register_forward_pre_hook(once)
    model.net.register_forward_hook(lambda module, inputs, output: seen.append(output))
    states = random.getstate(), np.random.get_state()[1].tolist()
    with unchanged(model):
        found = size(model, rows(), optimizer="adamw")
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    assert (model.calls, model.history, model.table, hasattr(model, "last")) == (0, [], {"k": [1]}, False)
    assert (table, seen, holder.tensor, mask.cache_info().currsize) == ({}, [], None, 0)
    assert found.other_bytes > 0  # what the history and the new buffer hold
    assert all(p.grad is not None for p in model.parameters())
    assert type(model(rows())) is type(seen[0]) is Tensor
    assert len(model.net._forward_pre_hooks) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, MemoryError])
def test_the_model_is_whole_after_an_error(error):
    def forward(model: Function, x: Tensor) -> Tensor:
        model.b = model.a(x)
        raise error("stop")

    model = nn.Sequential(linear(), Function(forward, a=linear()))
    with unchanged(model), pytest.raises(MemlabError, match=error.__name__):
        size(model, rows(), optimizer="adam")
    with unchanged(model), pytest.raises(MemlabError, match="one step of"):
        size(nn.Sequential(model[0]), rows(), optimizer=torch.optim.LBFGS)


def test_nothing_of_the_model_is_kept_alive():
    model, x = nn.Sequential(linear(), nn.ReLU()), rows()
    found = size(model, x, optimizer="adam")
    assert weakref.getweakrefcount(model[0].weight) == 0  # else it could not be swapped
    torch.utils.swap_tensors(model[0].bias, nn.Parameter(torch.zeros(8)))
    seen = [weakref.ref(thing) for thing in (model, model[0].weight, x)]
    del model, x
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]
    assert found.parameter_count == 72


def test_another_optimizer_stays_as_it_is_and_no_hook_of_any_is_called():
    model, calls = linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *args: calls.append(1))
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(2))
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    try:
        with unchanged(model):
            found = size(model, rows(), optimizer=optimizer)
    finally:
        handle.remove()
    assert found.optimizer_bytes == sum(p.nbytes for p in model.parameters())
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert (dict(optimizer.state), calls) == ({}, [])


def test_in_a_tracked_block_no_memory_is_seen():
    model, x = nn.Sequential(linear(1000, 1000), nn.ReLU(), linear(1000, 1000)), torch.randn(50, 1000)
    with memlab.track("asking", device="cpu", show=False) as run:
        size(model, x, optimizer="adam")
    level = run.devices[0].levels[0]
    assert run.peak_bytes - level.start_bytes < 1000  # random number states
    assert level.left_bytes == 0


def test_asked_in_another_thread():
    model, found = linear(), []
    thread = threading.Thread(target=lambda: found.append(size(model, rows()).total_bytes))
    thread.start()
    thread.join()
    assert found == [size(model, rows()).total_bytes]


class Hostile(nn.Module):
    """Nobody asks it what it is, whether it is true, how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()

    def asked(self, *_: object) -> Any:
        raise RuntimeError("asked")

    __eq__ = __bool__ = __len__ = __repr__ = asked  # type: ignore[assignment]
    __hash__ = object.__hash__

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Proxy:
    """Raises at whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked")

    __class__ = property(lambda self: self.asked)  # type: ignore[assignment]


def test_hostile_modules_and_objects():
    model = nn.Sequential(Hostile(), Hostile())
    model.__dict__["proxy"] = Proxy()
    model.__dict__["loop"] = [model, [Proxy()]]
    model.__dict__["loop"].append(model.__dict__["loop"])
    assert size(model, rows()).parameter_count == 144
    model = Function(lambda m, x, other: m.a(x), a=linear())
    assert size(model, rows(), Proxy()).parameter_count == 72


def test_huge_and_deep_attributes_and_modules_shared_in_many_ways_take_no_long_time():
    model: nn.Module = linear()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    model.__dict__["deep"], model.__dict__["huge"] = deep, list(range(1_000_000))
    for _ in range(40):
        model = nn.ModuleList([model, model])
    assert size(Function(lambda m, x: x, a=model), rows()).parameter_count == 72
    while deep:  # or its end would be a long recursion
        deep = deep.pop()


@pytest.mark.parametrize("place", ["meta", "cpu"])
def test_where_no_process_can_be_forked_sizes_are_the_same(monkeypatch, place):
    """The new process has the defaults of PyTorch, and gets a model on meta by its shapes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(place):
            model, x = Function(lambda m, x: m.a(x) * torch.ones(8), a=linear()), torch.ones(4, 8)
        forked = size(model, x, optimizer="adam")
        monkeypatch.setattr(Child, "forks", False)
        assert size(model, x, optimizer="adam") == forked
    finally:
        torch.set_default_dtype(before)
    assert forked.parameter_bytes == 72 * 8
    assert any(one.nbytes == 8 * 8 for one in forked.kept)
