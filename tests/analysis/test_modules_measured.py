"""The figures of modules against readings taken around every forward: PyTorch's counters on the simulated GPU, the
tracker's own count on the CPU."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from probes.probed import probed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memlab.analysis.modules import calls, left_by, modules, rise_of
from memlab.probes.cpu import CpuProbe
from memlab.trace import Trace


@dataclass
class Readings:
    """Levels read before and after each forward, and the highest in between; `read` gives (level, peak since the last)."""

    read: Callable[[], tuple[int, int]]
    calls: defaultdict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _open: list[list[int]] = field(default_factory=list)  # level at the begin, highest since

    def look(self) -> int:
        level, peak = self.read()
        for one in self._open:
            one[1] = max(one[1], peak, level)
        return level

    def around(self, name: str, body: Callable[[], Any]) -> Any:
        before = self.look()
        self._open.append([before, before])
        try:
            return body()
        finally:
            after = self.look()
            _, peak = self._open.pop()
            self.calls[name].append((after - before, peak - before))


readings: Readings | None = None


def told(kind: type[nn.Module]) -> type[nn.Module]:
    """The same module, which lets the readings look right before and after all that happens in a call."""

    class Told(kind):  # type: ignore[valid-type, misc]
        def __call__(self, *args: Any) -> Any:
            assert readings is not None
            return readings.around(self.label, lambda: super(Told, self).__call__(*args))

        def forward(self, *args: Any) -> Any:
            try:
                return super().forward(*args)
            finally:
                assert readings is not None
                readings.look()  # before the mark of the end: the CPU's frees are dated by the next look

    Told.__name__ = kind.__name__
    return Told


Linear, Sequential = told(nn.Linear), told(nn.Sequential)


@told
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = Linear(width, 3 * width), Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(700, 1000, device=x.device)  # gone when it returns
        y = self.down(torch.relu(self.up(x)) + scratch[0, 0] * 0)
        return x + y


@told
class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = Sequential(Block(width), Block(width))
        self.shared = Linear(width, width)
        self.head = Linear(width, 1)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        x = self.blocks(self.shared(x))
        if depth:
            return self(x, depth - 1)
        return self.head(self.shared(x)).sum()


@told
class Checkpointed(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()


@told
class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(64, 64), Linear(65, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def built(kind: type[nn.Module], device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model whose modules know their paths, and its data."""
    model = kind().to(device)
    for path, module in model.named_modules():
        module.label = f"{kind.__name__}.{path}" if path else kind.__name__
    return model, torch.ones(500, 64, device=device, requires_grad=True)


def train(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(x).backward()


def fail(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError):
        model(x)


PROGRAMS = {
    "training": (Net, train),
    "two forwards": (Net, lambda model, x: (model(x) + model(x, 0)).backward()),
    "inference": (Net, torch.no_grad()(lambda model, x: model(x))),
    "recomputed": (Checkpointed, lambda model, x: model(x).backward()),
    "failing": (Failing, fail),
}


def made(program: str, device: str) -> Callable[[], None]:
    kind, work = PROGRAMS[program]
    model, x = built(kind, device)
    return lambda: work(model, x)


def figures(trace: Trace, device: int) -> dict[str, list[tuple[int, int]]]:
    """Path -> of each of its calls, in the order of their ends, what is left and the rise."""
    made = calls(trace)
    left, rise = left_by(trace, device, made, made.end), rise_of(trace, device, made)
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for call in sorted(range(len(made)), key=lambda call: (made.end[call], -made.begin[call], -call)):
        found[trace.texts["mark"][made.name[call]]].append((int(left[call]), int(rise[call])))
    return found


def check(trace: Trace, device: int) -> None:
    """In these forwards nothing goes that was there before, so what is left is what the level rose by."""
    assert readings is not None
    found = figures(trace, device)
    assert found == dict(readings.calls)
    tree = modules(trace, device)
    for path, each in readings.calls.items():
        assert tree[path].transient_bytes == max(rise for _, rise in each)
        assert tree[path].calls + tree[path].recomputed == len(each)
    assert any(left for each in readings.calls.values() for left, _ in each)


@contextlib.contextmanager
def reading(read: Callable[[], tuple[int, int]]) -> Iterator[None]:
    global readings
    readings = Readings(read)
    try:
        yield
    finally:
        readings = None


class Highest(TorchDispatchMode):
    """The highest count of the tracker after any operator since somebody asked."""

    def __init__(self, probe: CpuProbe) -> None:
        super().__init__()
        self.probe, self.highest = probe, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.highest = max(self.highest, self.probe.tracker.current_bytes)
        return out

    def read(self) -> tuple[int, int]:
        level, highest = self.probe.tracker.current_bytes, self.highest
        self.highest = level
        return level, highest


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_the_cpu_each_call_is_what_the_storage_tracker_counts_around_it(program):
    body, probe = made(program, "cpu"), CpuProbe()
    highest = Highest(probe)
    with reading(highest.read):
        probe.start()
        try:
            with highest:
                body()
        finally:
            trace = probe.stop()
        check(trace, -1)


def from_counters() -> tuple[int, int]:
    level, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return level, peak


@pytest.fixture
def warm_cublas() -> None:
    """Its workspace comes once, with the first product; before 2.12 cuBLASLt has one, too, which is not known from a tensor."""
    layer, x = nn.Linear(8, 8).cuda(), torch.ones(2, 8, device="cuda", requires_grad=True)
    x.register_hook(layer)  # in the thread of backward, as a checkpoint does it
    layer(x).sum().backward()


@pytest.mark.simulated
@pytest.mark.usefixtures("warm_cublas")
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_the_simulated_gpu_each_call_is_what_the_counters_say(program):
    body = made(program, "cuda")
    with reading(from_counters):
        check(probed(body), 0)


@pytest.mark.simulated
@pytest.mark.usefixtures("warm_cublas")
def test_what_is_kept_is_what_the_counter_says_when_backward_begins():
    levels, (model, x) = [], built(Net, "cuda")

    def body() -> None:
        levels.append(torch.cuda.memory_allocated())
        loss = model(x)
        levels.append(torch.cuda.memory_allocated())
        loss.backward()

    with reading(from_counters):
        trace = probed(body)
    assert modules(trace, 0)["Net"].kept_bytes == levels[1] - levels[0]


def test_on_the_cpu_gradients_that_went_before_a_forward_do_not_hide_its_rise():
    model, probe = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)), CpuProbe()
    x = torch.ones(500, 64, requires_grad=True)
    probe.start()
    try:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
    finally:
        trace = probe.stop()
    made = calls(trace)
    rise, left = rise_of(trace, -1, made), left_by(trace, -1, made, made.end)
    outermost = made.depth == 0
    assert (rise[outermost] >= left[outermost]).all()
