"""Asking for a size changes nothing: model, random numbers, modes, hooks, other people's lists and caches."""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from session.real_forward import Function, linear, unchanged
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import memlab
from memlab.errors import MemlabError
from memlab.seams.fakes import FakeTensor
from memlab.session.size import size


def rows() -> Tensor:
    return torch.arange(32.0).view(4, 8)


def standins() -> list[Any]:
    """Tensors without data that are still alive."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is FakeTensor]


@pytest.fixture(autouse=True)
def no_standins_stay():
    before = {id(one) for one in standins()}  # of tests that failed
    yield
    assert [one for one in standins() if id(one) not in before] == []


def test_a_training_model_stays_as_it_is():
    model = nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), linear())
    model(rows()).sum().backward()
    with unchanged(model):
        size(model, rows(), optimizer="adamw")
    assert all(p.grad is not None for p in model.parameters())
    model(rows()).sum().backward()


def test_random_numbers_go_on_as_if_nothing_had_been():
    def forward(model: Function, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        torch.manual_seed(3)
        return model.a(x + torch.randn(8)).bernoulli()

    model = Function(forward, a=linear())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    size(model, rows())
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_attributes_lists_and_buffers_that_a_forward_changes_are_what_they_were():
    def forward(model: Function, x: Tensor) -> Tensor:
        model.calls += 1
        model.last = model.a(x)
        model.history.append(model.last)
        model.table["x"] = x
        model.counter.add_(1)
        model.running = model.running * 0.9
        model.late = linear()
        return model.last

    model = Function(forward, a=linear())
    model.calls, model.history, model.table = 0, [], {"k": [1]}
    model.register_buffer("counter", torch.zeros(()))
    model.register_buffer("running", torch.ones(8))
    with unchanged(model):
        found = size(model, rows())
    assert (model.calls, model.history, model.table) == (0, [], {"k": [1]})
    assert not hasattr(model, "last")
    assert found.other_bytes > 0  # what the history and the new buffer hold


def test_hooks_of_the_user_run_and_stay():
    seen: list[Any] = []
    model = linear()
    handles: list[Any] = []

    def once(module: nn.Module, inputs: Any) -> None:
        handles[0].remove()

    handles.append(model.register_forward_pre_hook(once))
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with unchanged(model):
        size(model, rows())
    assert seen == []
    model(rows())
    assert len(model._forward_pre_hooks) == 0
    assert type(seen[0]) is Tensor


class Held:
    tensor: Any = None


def test_stand_ins_do_not_stay_in_lists_and_caches_outside():
    table: dict[str, Tensor] = {}
    pairs: list[Any] = ["mine"]
    kept: set[Any] = set()

    @functools.lru_cache(maxsize=4)
    def mask(width: int) -> Tensor:
        return torch.ones(width)

    @functools.cache
    def other_mask(width: int) -> Tensor:
        return torch.ones(width)

    def forward(model: Function, x: Tensor) -> Tensor:
        if "mask" not in table:
            table["mask"] = torch.ones(8)
        pairs.append((x, 1))
        kept.add(x)
        return model.a(x) * table["mask"] * mask(8) * other_mask(8)

    model = Function(forward, a=linear())
    assert size(model, rows()).notes == ()
    assert (table, pairs, kept) == ({}, ["mine"], set())
    assert type(model(rows())) is Tensor


def test_an_object_that_keeps_one_is_named():
    holder = Held()

    def forward(model: Function, x: Tensor) -> Tensor:
        holder.tensor = x
        return model.a(x)

    found = size(Function(forward, a=linear()), rows())
    assert any("in: Held" in note for note in found.notes)
    holder.tensor = None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, MemoryError])
def test_the_model_is_whole_after_an_error(error):
    def forward(model: Function, x: Tensor) -> Tensor:
        model.b = model.a(x)
        raise error("stop")

    model = nn.Sequential(linear(), Function(forward, a=linear()))
    expected = MemlabError if issubclass(error, Exception) else error
    with unchanged(model), pytest.raises(expected):
        size(model, rows(), optimizer="adam")
    with unchanged(model), pytest.raises(MemlabError, match="one step of"):
        size(nn.Sequential(model[0]), rows(), optimizer=torch.optim.LBFGS)


def test_nothing_of_the_model_is_kept_alive():
    model, x = nn.Sequential(linear(), nn.ReLU()), rows()
    seen = [weakref.ref(thing) for thing in (model, model[0].weight, x)]
    found = size(model, x, optimizer="adam")
    del model, x
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]
    assert found.parameter_count == 72


def test_parameters_can_be_swapped_afterwards():
    model = linear()
    size(model, rows())
    assert weakref.getweakrefcount(model.weight) == 0
    model.weight.register_hook(lambda grad: grad)
    torch.utils.swap_tensors(model.bias, nn.Parameter(torch.zeros(8)))


def test_another_optimizer_stays_as_it_is():
    model, calls = linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *args: calls.append(1))
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    with unchanged(model):
        found = size(model, rows(), optimizer=optimizer)
    assert found.optimizer_bytes == sum(p.nbytes for p in model.parameters())
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert (dict(optimizer.state), calls) == ({}, [])


def test_hooks_for_every_optimizer_are_not_called():
    calls: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(1))
    try:
        size(linear(), rows(), optimizer="adam")
    finally:
        handle.remove()
    assert calls == []


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

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("asked")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise RuntimeError("asked")

    def __len__(self) -> int:
        raise RuntimeError("asked")

    def __repr__(self) -> str:
        raise RuntimeError("asked")

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Proxy:
    """Raises at whatever it is asked."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("asked")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked")


def test_hostile_modules_and_objects():
    model = nn.Sequential(Hostile(), Hostile())
    model.__dict__["proxy"] = Proxy()
    model.__dict__["loop"] = [model, [Proxy()]]
    model.__dict__["loop"].append(model.__dict__["loop"])
    assert size(model, rows()).parameter_count == 144
    model = Function(lambda m, x, other: m.a(x), a=linear())
    assert size(model, rows(), Proxy()).parameter_count == 72


def test_huge_and_deep_attributes_are_left_alone():
    model = linear()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    model.__dict__["deep"], model.__dict__["huge"] = deep, list(range(1_000_000))
    assert size(model, rows()).parameter_count == 72
    while deep:  # or its end would be a long recursion
        deep = deep.pop()


def test_a_module_shared_in_a_thousand_ways_is_walked_in_good_time():
    model: nn.Module = linear()
    for _ in range(40):
        model = nn.ModuleList([model, model])
    root = Function(lambda m, x: x, a=model)
    assert size(root, rows()).parameter_count == 72
