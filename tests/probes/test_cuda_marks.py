"""The clock on the pretend device: allocations fall between the marks around them, and so into the right phase."""

from __future__ import annotations

import collections
import time

import numpy as np
import pytest
import torch
from probes.probed import probed
from torch.utils.checkpoint import checkpoint

from memlab.trace import Kind, MarkKind, Phase, Trace

pytestmark = pytest.mark.fakegpu
MiB = 1 << 20


@pytest.fixture(autouse=True)
def warm() -> None:
    """What is allocated once per process (workspaces of cuBLAS) must not fall into a phase."""
    layer = torch.nn.Linear(8, 8).cuda()
    layer(torch.ones(1, 8, device="cuda")).sum().backward()


def phases_by_size(trace: Trace) -> dict[int, list[str]]:
    """Requested MiB -> the phases in which so much was allocated, in order; sizes below are not looked at."""
    events = trace.events.rows(slice(trace.first_row, None))
    found = collections.defaultdict(list)
    for block, size in zip(
        *(column[events.kind == Kind.ALLOC] for column in (events.block, events.requested_bytes)), strict=True
    ):
        if size >= MiB:
            found[int(size) // MiB].append(Phase(int(trace.blocks.phase[block])).name.lower())
    return dict(found)


def take(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device="cuda")


class Scratch(torch.autograd.Function):
    """Allocates 3 MiB in its forward and 5 MiB in its backward."""

    @staticmethod
    def forward(ctx, x):
        take(3)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        take(5)
        return grad


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scratch.apply(x * self.weight) ** 2  # saved, so that a checkpoint recomputes all of it


class ScratchSGD(torch.optim.SGD):
    """Allocates 7 MiB in its step."""

    def step(self, closure=None):
        take(7)
        return super().step(closure)


def x() -> torch.Tensor:
    return torch.ones(4, device="cuda", requires_grad=True)


@pytest.mark.parametrize("in_module", [False, True])
def test_two_thousand_allocations_fall_between_their_marks(in_module):
    class Takes(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.empty(1000, device="cuda")

    module, kept, moments = Takes(), [], []

    def body():
        for _ in range(2000):
            begin = time.time_ns()
            kept.append(module() if in_module else torch.empty(1000, device="cuda"))
            moments.append((begin, time.time_ns()))

    trace = probed(body)
    events = trace.events.rows(slice(trace.first_row, None))
    made = events.kind == Kind.ALLOC
    happened = events.time_ns[made] + round(trace.made_by.started_at_s * 1e9)
    begin, end = np.array(moments).T
    slack = 1000 if not in_module else 0  # a float of seconds, and what lies around is a microsecond away at most
    assert made.sum() == 2000
    assert int(((happened >= begin - slack) & (happened <= end + slack)).sum()) == 2000
    if in_module:
        assert set(trace.blocks.phase[events.block[made]].tolist()) == {Phase.FORWARD}
        rows = {
            kind: trace.marks.row[trace.marks.kind == kind] for kind in (MarkKind.MODULE_BEGIN, MarkKind.MODULE_END)
        }
        at = trace.first_row + np.flatnonzero(made)
        assert bool(np.all((rows[MarkKind.MODULE_BEGIN] <= at) & (at < rows[MarkKind.MODULE_END])))


def test_a_plain_step():
    model = Layer()
    optimizer = ScratchSGD(model.parameters(), lr=0.1)

    def body():
        for _ in range(3):
            take(2)
            loss = model(x()).sum()
            take(11)  # the loss
            loss.backward()
            take(13)
            optimizer.step()

    assert phases_by_size(probed(body)) == {
        2: ["other"] * 3, 3: ["forward"] * 3, 11: ["forward"] * 3, 5: ["backward"] * 3, 13: ["other"] * 3,
        7: ["optimizer"] * 3,
    }  # fmt: skip


def test_grad_and_grad_of_grad():
    model = Layer()

    def body():
        y = x()
        (grad,) = torch.autograd.grad(model(y).pow(2).sum(), y, create_graph=True)
        take(2)
        grad.sum().backward()

    found = phases_by_size(probed(body))
    assert found[3] == ["forward"]
    assert set(found[5]) == {"backward"}
    assert found[2] == ["other"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_in_backward(reentrant):
    model = Layer()
    trace = probed(lambda: checkpoint(model, x(), use_reentrant=reentrant).sum().backward())
    assert phases_by_size(trace) == {3: ["forward", "backward"], 5: ["backward"]}


def test_two_optimizers_and_a_closure():
    model = Layer()
    one, two = ScratchSGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters(), max_iter=1)

    def body():
        model(x()).sum().backward()
        one.step()

        def closure():
            take(17)
            loss = model(x()).sum()
            take(19)
            loss.backward()
            return loss

        two.step(closure)
        take(23)

    found = phases_by_size(probed(body))
    assert found[7] == found[17] == ["optimizer"]
    assert (found[19], found[23]) == (["forward"], ["other"])
    assert set(found[3]) == {"forward"}
    assert set(found[5]) == {"backward"}


def test_a_gradient_scaler():
    model = Layer()
    optimizer, scaler = ScratchSGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")

    def body():
        with torch.autocast("cuda"):
            loss = model(x()).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        take(2)

    assert phases_by_size(probed(body)) == {3: ["forward"], 5: ["backward"], 7: ["optimizer"], 2: ["other"]}


def test_what_raises():
    class Raises(torch.nn.Module):
        def forward(self, error: type[BaseException]) -> None:
            take(2)
            raise error

    class BadStep(torch.optim.SGD):
        def step(self, closure=None):
            take(11)
            raise ZeroDivisionError

    model, broken = Layer(), Raises()

    def body():
        with pytest.raises(ZeroDivisionError):
            broken(ZeroDivisionError)
        take(13)
        with pytest.raises(ZeroDivisionError):
            BadStep(model.parameters(), lr=0.1).step()
        model(x()).sum().backward()
        take(17)
        with pytest.raises(KeyboardInterrupt):
            broken(KeyboardInterrupt)

    assert phases_by_size(probed(body)) == {
        2: ["forward", "forward"], 13: ["other"], 11: ["optimizer"], 3: ["forward"], 5: ["backward"], 17: ["other"]
    }  # fmt: skip


def test_the_module_and_the_line_of_an_allocation():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(Layer())

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            take(2)
            return self.inner(y)

    net = Net()
    trace = probed(lambda: net(x()).sum().backward())
    events = trace.events
    block = {
        int(size) // MiB: int(block)
        for block, size, kind in zip(events.block, events.requested_bytes, events.kind, strict=True)
        if kind == Kind.ALLOC and size >= MiB
    }
    assert trace.text("module", int(trace.blocks.module[block[2]])) == "Net"
    assert trace.text("module", int(trace.blocks.module[block[3]])) == "Net.inner.0"
    stack = trace.text("stack", int(trace.blocks.stack[block[2]]))
    assert __file__ in stack.split("\n")[0]
    assert trace.text("line", int(trace.blocks.line[block[2]])).startswith(__file__)
