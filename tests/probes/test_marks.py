"""Marks: the phase and module of what every kind of step allocates, on the CPU and on the simulated GPU; nothing stays."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from probes.probed import DEVICES, MiB, probed, take
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import torch_internals
from memlab.probes import marks
from memlab.probes.bounded_log import BoundedLog
from memlab.probes.marks import Marker
from memlab.trace import Events, Kind, MarkKind, Phase, Trace

PACKAGE = str(Path(memlab.__file__).parent)


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    if request.param == "cuda":  # what is allocated once per process (workspaces of cuBLAS) must not fall into a phase
        nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda")).sum().backward()
    return request.param


def blocks(trace: Trace) -> Iterator[tuple[int, int]]:
    """(MiB, block) of what was allocated in whole MiB, in order."""
    events = trace.events.rows(slice(trace.first_row, None))
    for row in np.flatnonzero((events.kind == Kind.ALLOC) & (events.requested_bytes >= MiB)):
        yield int(events.requested_bytes[row]) // MiB, int(events.block[row])


def phases(body: Callable[[], object], device: str) -> list[tuple[int, str]]:
    trace = probed(body, device=device)
    return [(size, Phase(int(trace.blocks.phase[block])).name.lower()) for size, block in blocks(trace)]


class Scratch(torch.autograd.Function):
    """Allocates 3 MiB in its forward and 5 MiB in its backward."""

    @staticmethod
    def forward(ctx, x):
        take(3, x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        take(5, grad.device)
        return grad


class Layer(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scratch.apply(x * self.weight) ** 2  # saved, so that a checkpoint recomputes all of it


class ScratchSGD(torch.optim.SGD):
    """Allocates 7 MiB in its step, and 8 MiB before it ends or raises."""

    raises = False

    def step(self, closure=None):
        device = self.param_groups[0]["params"][0].device
        take(7, device)
        super().step(closure)
        take(8, device)
        if self.raises:
            raise ZeroDivisionError


def x(device: str) -> torch.Tensor:
    return torch.ones(4, device=device, requires_grad=True)


def test_plain_steps(device):
    model = Layer(device)
    optimizer = ScratchSGD(model.parameters(), lr=0.1)

    def body():
        for _ in range(2):
            take(2, device)
            loss = model(x(device)).sum()
            take(11, device)  # the loss
            loss.backward()
            take(13, device)
            optimizer.step()
        take(17, device)

    one = [
        (2, "other"),
        (3, "forward"),
        (11, "forward"),
        (5, "backward"),
        (13, "other"),
        (7, "optimizer"),
        (8, "optimizer"),
    ]
    assert phases(body, device) == [*one, *one, (17, "other")]


def test_grad_and_double_backward_also_inside_a_forward(device):
    def differentiated(x: torch.Tensor) -> torch.Tensor:
        y = Scratch.apply(x**3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        take(2, device)
        return grad.sum()

    class Forces(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return differentiated(x)

    plain = phases(lambda: differentiated(x(device)).backward(), device)
    assert plain[:3] == [(3, "other"), (5, "backward"), (2, "other")]
    inside = phases(lambda: Forces()(x(device)).backward(), device)
    assert inside[:3] == [(3, "forward"), (5, "backward"), (2, "forward")]
    assert {phase for _, phase in plain[3:] + inside[3:]} <= {"backward"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_in_backward(reentrant, device):
    model = Layer(device)
    trace = probed(lambda: checkpoint(model, x(device), use_reentrant=reentrant).sum().backward(), device=device)
    found = [(size, Phase(trace.blocks.phase[block]), trace.text("module", trace.blocks.module[block]))
             for size, block in blocks(trace)]  # fmt: skip
    assert found[:2] == [(3, Phase.FORWARD, "Layer"), (3, Phase.BACKWARD, "Layer")]
    assert [one[:2] for one in found[2:]] == [(5, Phase.BACKWARD)]


def test_two_optimizers_and_a_closure(device):
    model = Layer(device)
    one, two = ScratchSGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters(), max_iter=1)

    def body():
        model(x(device)).sum().backward()
        one.step()

        def closure():
            take(17, device)
            loss = model(x(device)).sum()
            take(19, device)
            loss.backward()
            take(21, device)
            return loss

        two.step(closure)
        take(23, device)

    found = phases(body, device)
    assert found[:4] == [(3, "forward"), (5, "backward"), (7, "optimizer"), (8, "optimizer")]
    assert found[4:9] == [(17, "optimizer"), (3, "forward"), (19, "forward"), (5, "backward"), (21, "optimizer")]
    assert found[-1] == (23, "other")


def test_a_gradient_scaler_steps_the_optimizer():
    model = Layer("cpu")
    optimizer, scaler = ScratchSGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1.0)

    def body():
        scaler.scale(model(x("cpu")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        take(2, "cpu")

    assert phases(body, "cpu")[2:] == [(7, "optimizer"), (8, "optimizer"), (2, "other")]


def test_what_raises_ends_its_module_at_once_and_its_step_with_the_next_forward(device):
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(device)

        def forward(self, error: type[BaseException]) -> None:
            self.inner(x(device))
            take(2, device)
            raise error

    model, broken = Layer(device), nn.Sequential(Raises())
    optimizer = ScratchSGD(model.parameters(), lr=0.1)
    optimizer.raises = True

    def body():
        with pytest.raises(ZeroDivisionError):
            broken(ZeroDivisionError)
        take(13, device)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        model(x(device)).sum().backward()
        take(17, device)
        with pytest.raises(KeyboardInterrupt):
            broken(KeyboardInterrupt)

    failed = [(3, "forward"), (2, "forward")]
    step = [(7, "optimizer"), (8, "optimizer"), (3, "forward"), (5, "backward")]
    assert phases(body, device) == [*failed, (13, "other"), *step, (17, "other"), *failed]


def test_modules_are_named_by_their_path_from_the_outermost(device):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(device), nn.Sequential(Layer(device))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty(2 * MiB, dtype=torch.uint8, device=device)  # on a line of this file
            return self.layers[1](self.layers[0](x))

    net = Net()
    trace = probed(lambda: net(x(device)), device=device)
    found = list(blocks(trace))
    names = [trace.text("module", trace.blocks.module[block]) for _, block in found]
    assert names == ["Net", "Net.layers.0", "Net.layers.1.0"]
    if device == "cuda":
        line, stack = (trace.text(of, getattr(trace.blocks, of)[found[0][1]]) for of in ("line", "stack"))
        assert line.startswith(__file__) and __file__ in stack.split("\n")[0]


def test_a_module_whose_own_call_runs_no_hooks_is_named_as_not_seen(device):
    class Own(nn.Module):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Seen(nn.Module):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    for inner, expected in ((Own(), ["Sequential.0: a __call__ of its own runs no hooks"]), (Seen(), [])):
        net = nn.Sequential(inner)
        trace = probed(lambda net=net: net(x(device)), device=device)
        told = [gap.text for gap in trace.gaps if gap.name == "modules"]
        assert [text.partition(";")[0].replace("#2", "") for text in told] == expected


@pytest.mark.simulated
@pytest.mark.parametrize("in_module", [False, True])
def test_two_thousand_allocations_fall_between_their_marks(in_module):
    def wait() -> None:
        """History has a clock of its own, which drifts from that of the marks by some hundred nanoseconds."""
        begin = time.perf_counter_ns()
        while time.perf_counter_ns() < begin + 20_000:
            pass

    class Takes(nn.Module):
        def forward(self) -> torch.Tensor:
            wait()
            made = torch.empty(1000, device="cuda")
            wait()
            return made

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
    slack = 20_000 if not in_module else 0
    assert made.sum() == 2000
    assert int(((happened >= begin - slack) & (happened <= end + slack)).sum()) == 2000
    if in_module:
        assert set(trace.blocks.phase[events.block[made]].tolist()) == {Phase.FORWARD}
        rows = [trace.marks.row[trace.marks.kind == kind] for kind in (MarkKind.MODULE_BEGIN, MarkKind.MODULE_END)]
        at = trace.first_row + np.flatnonzero(made)
        assert bool(np.all((rows[0] <= at) & (at < rows[1])))


# --- the marker ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def marker() -> Iterator[Marker]:
    one = Marker()
    one.acquire()
    yield one
    one.release()


def test_marks_of_other_threads_are_theirs(marker):
    model, begin = Layer("cpu"), time.time_ns()
    thread = threading.Thread(target=lambda: model(x("cpu")).sum().backward())
    thread.start()
    thread.join()
    ours, theirs = (marker.columns(begin, time.time_ns(), owner) for owner in (threading.get_ident(), thread.ident))
    assert (len(ours.time_ns), ours.left_out) == (0, 5)  # module, backward, and the line that called it
    assert (len(theirs.time_ns), theirs.left_out) == (5, 0)
    assert not len(marker.columns(time.time_ns(), time.time_ns(), thread.ident).time_ns), "they were set before"


def test_the_last_user_takes_everything_off():
    hooks = (torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks)
    engine, before = torch_internals.engine_entry(), [len(table) for table in hooks]
    one = Marker()
    one.acquire()
    one.acquire()
    one.release()
    assert torch_internals.engine_entry() is not engine
    one.release()
    assert torch_internals.engine_entry() is engine
    assert [len(table) for table in hooks] == before


def test_an_entry_that_somebody_wrapped_meanwhile_stays_theirs():
    engine, one = torch_internals.engine_entry(), Marker()
    one.acquire()
    ours = torch_internals.engine_entry()

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch_internals.replace_engine_entry(theirs)
    try:
        one.release()
        assert torch_internals.engine_entry() is theirs
        torch.ones(2, requires_grad=True).sum().backward()
        assert not one.log.columns().size
    finally:
        torch_internals.replace_engine_entry(engine)


def test_marks_keep_no_module_alive(marker):
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_module_that_is_gone_leaves_its_number_to_nobody(marker):
    for name in ("first", "second", "third"):
        module = nn.Identity()
        marker.know(module, name)
        assert marker.path_of(module) == name  # also where it has the address of the one before
        del module
    gc.collect()
    assert not marker.module_codes and not marker.modules


def test_a_module_costs_few_calls_of_python(device):
    """Each is a microsecond or two of a step, with a hundred modules and more."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    few, many = (nn.Sequential(*(nn.Identity() for _ in range(count))).to(device) for count in (1, 11))
    x, counts = torch.ones(1, device=device), []
    with memlab.track("calls", show=False):
        for model in (few, many):
            for _ in range(2):
                model(x + 1)
            calls = 0
            y = x + 1
            sys.setprofile(count)
            model(y)
            sys.setprofile(None)
            counts.append(calls)
    # Two hooks; on the CPU each asks the tracker for the time.
    assert (counts[1] - counts[0]) / 10 <= {"cpu": 4, "cuda": 2}[device]


def test_of_too_many_rows_the_older_half_goes():
    log = BoundedLog(100, 2)
    for number in range(250):
        log.append((number, -number))
        if number % 10 == 0:
            log.collect()
    first, second = log.columns()
    assert len(first) <= 100
    assert first.tolist() == list(range(250 - len(first), 250)) and (second == -first).all()
    assert log.count() == 250
    assert log.columns(since=240)[0].tolist() == list(range(240, 250)) and log.columns(since=3).shape == (2, len(first))
    log.clear()
    assert log.columns().shape == (2, 0)


def test_the_table_says_between_which_events_a_mark_fell():
    columns = marks.MarkColumns(np.array([2_500, 5_000]), np.array([0, 1], "u1"), np.array([0, 0], "<i4"), ("x",))
    times = [0, 0, 1_000, 2_000, 3_000, 9_000]  # two rows of before; the cell's begin in row 2
    nothing = np.zeros(6, np.int64)
    events = Events(times, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    assert columns.table(events, 2).row.tolist() == [4, 5]


def test_when_marks_are_dropped_those_of_optimizer_steps_stay():
    """By them the ranks of a job are aligned."""
    marker = Marker()
    marker.acquire()
    try:
        log = BoundedLog(1000, 3, marker.thinned)
        step, other = marker.code_of("optimizer"), marker.code_of("elsewhere")
        for number in range(1500):
            log.append((number, step if number % 100 == 0 else other, 0))
            if number % 10 == 0:
                log.collect()
        times, codes, _ = log.columns()
        assert times[codes == step].tolist() == list(range(0, 1500, 100))
        assert len(times) < 1100
        assert log.columns(since=1499)[0].tolist() == [1499]
    finally:
        marker.release()


def test_parts_of_a_module_that_is_never_called_are_named_after_it():
    class Task(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.ReLU())
            self.head = torch.nn.Linear(100, 5)

        def training_step(self, batch):
            def loss():
                return self.head(self.net(batch)).sum()

            return loss()

    task = Task()
    with memlab.track(show=False) as run:
        task.training_step(torch.randn(7, 10)).backward()
    shares = run.breakdown("module")
    assert {"Task.net.0", "Task.head"} <= set(shares)
    assert not {"Sequential.0", "Linear"} & set(shares)
    assert run.breakdown()["input"] == 7 * 10 * 4
