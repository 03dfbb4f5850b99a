"""Marks on the CPU: what every kind of step leaves, that nothing stays behind, that compiled code stays compiled."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memlab import seams
from memlab.probes import marks
from memlab.probes.marks import Marker
from memlab.trace import Events, Phase


@pytest.fixture
def marker() -> Iterator[Marker]:
    one = Marker()
    one.acquire()
    yield one
    one.release()


class Clock:
    """Notes moments of a program under a name, and asks afterwards in which phase and module they were."""

    def __init__(self, marker: Marker) -> None:
        self.marker, self.begin_ns = marker, time.time_ns()
        self.moments: list[tuple[str, int]] = []

    def note(self, name: str) -> None:
        time.sleep(2e-6)  # a mark may be set within the same tick of the clock
        self.moments.append((name, time.time_ns()))
        time.sleep(2e-6)

    def noting(self, name: str) -> Callable[..., None]:
        return lambda *_: self.note(name)

    def columns(self) -> marks.MarkColumns:
        return self.marker.columns(self.begin_ns, time.time_ns(), threading.get_ident())

    def phases(self) -> list[tuple[str, str]]:
        phase, _ = self.columns().steps()
        found = phase.at(np.array([moment for _, moment in self.moments]))
        return [(name, Phase(int(code)).name.lower()) for (name, _), code in zip(self.moments, found, strict=True)]

    def modules(self) -> list[tuple[str, str]]:
        columns = self.columns()
        _, module = columns.steps()
        found = module.at(np.array([moment for _, moment in self.moments])).tolist()
        return [(name, columns.texts[i] if i >= 0 else "") for (name, _), i in zip(self.moments, found, strict=True)]


@pytest.fixture
def clock(marker: Marker) -> Clock:
    return Clock(marker)


class Noted(torch.nn.Module):
    """Notes its forward, and its backward through a hook on its output."""

    def __init__(self, clock: Clock, name: str = "forward") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.clock, self.name = clock, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.note(self.name)
        y = x @ self.weight
        if y.requires_grad:
            y.register_hook(self.clock.noting("gradient"))
        return y


class NotedSGD(torch.optim.SGD):
    clock: Clock

    def step(self, closure=None):
        self.clock.note("step begins")
        result = super().step(closure)
        self.clock.note("step ends")
        return result


def sgd(model: torch.nn.Module, clock: Clock) -> NotedSGD:
    optimizer = NotedSGD(model.parameters(), lr=0.1)
    optimizer.clock = clock
    return optimizer


def x() -> torch.Tensor:
    return torch.ones(2, 4)


def test_a_plain_step(clock):
    model = Noted(clock)
    optimizer = sgd(model, clock)
    for _ in range(2):
        clock.note("before")
        loss = model(x()).sum()
        clock.note("loss")
        loss.backward()
        clock.note("between")
        optimizer.step()
    clock.note("after")
    one = [("before", "other"), ("forward", "forward"), ("loss", "forward"), ("gradient", "backward")]
    one += [("between", "other"), ("step begins", "optimizer"), ("step ends", "optimizer")]
    assert clock.phases() == [*one, *one, ("after", "other")]


def test_grad_and_double_backward(clock):
    x = torch.ones(3, requires_grad=True)
    y = (x**3).sum()
    x.register_hook(clock.noting("gradient"))
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    clock.note("between")
    grad.sum().backward()
    assert clock.phases() == [("gradient", "backward"), ("between", "other"), ("gradient", "backward")]


def test_grad_inside_a_forward(clock):
    class Forces(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            energy = (x**2).sum()
            x.register_hook(clock.noting("inner gradient"))
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            clock.note("rest of forward")
            return force

    Forces()(torch.ones(3)).sum().backward()
    expected = [("inner gradient", "backward"), ("rest of forward", "forward"), ("inner gradient", "backward")]
    assert clock.phases() == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_in_backward(reentrant, clock):
    model = Noted(clock)
    checkpoint(model, x().clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    names = [name for name, _ in clock.phases()]
    assert names.count("forward") == 2
    assert [phase for name, phase in clock.phases() if name == "forward"] == ["forward", "backward"]
    assert {phase for name, phase in clock.phases() if name == "gradient"} == {"backward"}
    assert [module for name, module in clock.modules() if name == "forward"] == ["Noted", "Noted"]


def test_two_optimizers_and_a_closure(clock):
    model = Noted(clock)
    first, second = sgd(model, clock), torch.optim.LBFGS(model.parameters(), max_iter=2)
    model(x()).sum().backward()
    first.step()

    def closure():
        clock.note("closure")
        second.zero_grad()
        loss = model(x()).pow(2).sum()
        clock.note("loss in closure")
        loss.backward()
        clock.note("end of closure")
        return loss

    second.step(closure)
    clock.note("after")
    found = clock.phases()[4:]
    assert ("step ends", "optimizer") in clock.phases()
    assert found[:5] == [
        ("closure", "optimizer"), ("forward", "forward"), ("loss in closure", "forward"),
        ("gradient", "backward"), ("end of closure", "optimizer"),
    ]  # fmt: skip
    assert found[-1] == ("after", "other")


def test_a_gradient_scaler_steps_the_optimizer(clock):
    model = Noted(clock)
    optimizer, scaler = sgd(model, clock), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(x()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    clock.note("after")
    expected = [("step begins", "optimizer"), ("step ends", "optimizer"), ("after", "other")]
    assert clock.phases()[-3:] == expected


def test_a_step_that_raises_ends_with_the_next_forward(clock):
    class Bad(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    model = Noted(clock)
    with pytest.raises(ZeroDivisionError):
        Bad(model.parameters(), lr=0.1).step()
    model(x()).sum().backward()
    clock.note("after")
    expected = [("forward", "forward"), ("gradient", "backward"), ("after", "other")]
    assert clock.phases() == expected


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises(error, clock):
    class Raises(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Noted(clock, "inner")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            clock.note("here")
            raise error

    outer = torch.nn.Sequential(Raises())
    with pytest.raises(error):
        outer(x())
    assert clock.phases() == [("inner", "forward"), ("here", "forward")]
    if error is ValueError:  # after an interrupt no hook of PyTorch's runs, and the cell is over
        clock.note("after")
        assert clock.phases()[-1] == ("after", "other")


def test_modules_are_named_by_their_path_from_the_outermost(clock):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Noted(clock, "a"), Noted(clock, "b")])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            clock.note("net")
            return x

    Net()(x())
    assert clock.modules() == [("a", "Net.layers.0"), ("b", "Net.layers.1"), ("net", "Net")]


def test_marks_of_other_threads_are_theirs(marker, clock):
    model = Noted(clock)
    thread = threading.Thread(target=lambda: model(x()).sum().backward())
    thread.start()
    thread.join()
    assert not len(clock.columns().time_ns)
    theirs = marker.columns(clock.begin_ns, time.time_ns(), thread.ident)
    assert len(theirs.time_ns) == 4


def test_the_last_user_takes_everything_off():
    hooks = (torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks)
    engine, before = seams.engine_entry(), [len(table) for table in hooks]
    one = Marker()
    one.acquire()
    one.acquire()
    one.release()
    assert seams.engine_entry() is not engine
    one.release()
    assert seams.engine_entry() is engine
    assert [len(table) for table in hooks] == before


def test_an_entry_that_somebody_wrapped_meanwhile_stays_theirs(clock):
    engine = seams.engine_entry()
    one = Marker()
    one.acquire()
    ours = seams.engine_entry()

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    seams.replace_engine_entry(theirs)
    try:
        one.release()
        assert seams.engine_entry() is theirs
        torch.ones(2, requires_grad=True).sum().backward()
        assert not len(one.columns(0, time.time_ns(), threading.get_ident()).time_ns) if one.users else True
    finally:
        seams.replace_engine_entry(engine)


def test_marks_keep_no_module_alive(marker):
    model = torch.nn.Linear(3, 3)
    model(torch.ones(1, 3))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_old_marks_go(marker, monkeypatch):
    monkeypatch.setattr(marks, "MAX_MARKS", 100)
    model, begin = torch.nn.Linear(3, 3), time.time_ns()
    for _ in range(500):
        model(torch.ones(1, 3))
        marker.collect()
    assert marker.count == 1000
    assert 0 < len(marker.columns(begin, time.time_ns(), threading.get_ident()).time_ns) <= 100


def test_since_skips_what_was_there_before(marker):
    model, begin = torch.nn.Linear(3, 3), time.time_ns()
    model(torch.ones(1, 3))
    marker.collect()
    first = marker.count
    model(torch.ones(1, 3))
    assert len(marker.columns(begin, time.time_ns(), threading.get_ident(), first).time_ns) == 2


def test_the_table_says_between_which_events_a_mark_fell():
    columns = marks.MarkColumns(np.array([2_500, 5_000]), np.array([0, 1], "u1"), np.array([0, 0], "<i4"), ("x",))
    times = [0, 0, 1_000, 2_000, 3_000, 9_000]  # two rows of before; the cell's begin in row 2
    nothing = np.zeros(6, np.int64)
    events = Events(times, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    assert columns.table(events, 2, 0).row.tolist() == [4, 5]
