"""Backward charged to forward lines, and that what it takes for that changes no gradient and keeps nothing."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from probes.line_programs import exact, row
from probes.module_uses import WORKS, gradients, net
from torch import nn

import memlab
from memlab.api.report import LineReport
from memlab.api.run import Run
from memlab.probes.backward import Backward, tensors_in
from memlab.probes.marks import marker
from memlab.probes.tensor_labels import tensor_labels
from memlab.trace import MarkKind


def tracked(function: Callable[..., Any], *args: Any) -> tuple[LineReport, Run]:
    with memlab.track(functions=[function], device="cpu", show=False) as run:
        function(*args)
    return run.lines(), run


def bytes_of(*things: Any) -> int:
    return sum(p.numel() * p.element_size() for thing in things for p in thing.parameters())


def test_gradients_are_charged_to_the_lines_that_called_the_modules():
    first, second, x = nn.Linear(100, 50), nn.Linear(50, 10), torch.ones(7, 100)

    def step() -> None:
        hidden = first(x)
        hidden = hidden.relu()
        loss = second(hidden).sum()
        loss.backward()

    report, run = tracked(step)
    assert exact(report)
    gradient = 7 * 50 * 4  # of what `first` returned: made before backward reaches it, gone after
    assert row(report, "hidden = first(x)").backward_bytes == bytes_of(first) - gradient
    assert row(report, "loss.backward()").held_bytes == 0
    # relu is no module: its backward counts for the one that backward had reached before.
    parts = [row(report, "second(hidden)").backward_bytes, row(report, "hidden = first(x)").backward_bytes]
    unknown = [r.held_bytes + r.backward_bytes for r in report if r.text == "backward"]
    assert sum(parts + unknown) == row(report, "loss.backward()").total_bytes
    kinds, names = run.trace.marks.kind, run.trace.marks.name
    reached = [run.trace.texts["mark"][name] for name in names[kinds == MarkKind.BACKWARD_OF]]
    assert len(reached) == 2


def test_the_innermost_watched_line_counts_and_each_module_once():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 30))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    net = Net()

    def step() -> None:
        for _ in range(3):
            net(torch.ones(5, 30)).sum().backward()

    with memlab.track(functions=[step, Net], device="cpu", show=False) as run:
        step()
    report = run.lines()
    assert exact(report)
    saved = (30 + 20) * 5 * 4  # the inputs of both layers, which backward frees
    assert row(report, "return self.inner(x)").backward_bytes == bytes_of(net) - 3 * saved
    assert row(report, "return self.inner(x)").executions == 3
    assert row(report, "net(torch.ones(5, 30))").backward_bytes == 0
    kinds = run.trace.marks.kind
    assert (kinds == MarkKind.BACKWARD_OF).sum() == 3 * 2, "the output of Net and of both containers is one node"


def test_backward_of_what_was_made_before_the_track_has_no_line():
    layer = nn.Linear(40, 1)
    loss = layer(torch.ones(3, 40)).sum()

    def step() -> None:
        loss.backward()

    report, _ = tracked(step)
    assert exact(report)
    assert (
        report["backward"].held_bytes + report["backward"].backward_bytes == row(report, "loss.backward()").total_bytes
    )
    assert row(report, "loss.backward()").total_bytes >= bytes_of(layer) - 3 * 40 * 4


def test_watched_code_that_runs_within_backward_counts_for_itself():
    kept: list[torch.Tensor] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            kept.append(torch.ones(1000))
            return grad * 2

    def step() -> None:
        x = torch.ones(10, requires_grad=True)
        Doubled.apply(x).sum().backward()

    with memlab.track(functions=[step, Doubled], device="cpu", show=False) as run:
        step()
    report = run.lines()
    assert exact(report)
    assert row(report, "kept.append(torch.ones(1000))").held_bytes == 4000
    assert row(report, "kept.append(torch.ones(1000))").backward_bytes == 0


# --- changes nothing -----------------------------------------------------------------------------------------------------


def same_with_and_without(work: Callable[[], list[torch.Tensor]]) -> None:
    torch.manual_seed(0)
    bare = work()
    with memlab.track(functions=[work], device="cpu", show=False) as run:
        torch.manual_seed(0)
        watched = work()
    assert len(bare) == len(watched) > 0
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert not [gap.text for gap in run.gaps if gap.name == "lines"]


@pytest.mark.parametrize("work", WORKS)
def test_gradients_are_what_they_are(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_with_and_without(work)


@pytest.mark.slow
def test_compiled_modules_compile_once_and_give_the_same():
    model, x = net(), torch.ones(3, 6)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(x).sum().backward()
    bare = [grad.clone() for grad in gradients(model)]
    model.zero_grad()
    with memlab.track(lines=True, device="cpu", show=False):
        for _ in range(2):
            model.zero_grad()
            compiled(x).sum().backward()
    assert len(graphs) == 1
    assert all(torch.equal(one, other) for one, other in zip(bare, gradients(model), strict=True))


@pytest.mark.slow
def test_a_compiled_backward_has_no_breaks_for_us():
    from torch._dynamo import compiled_autograd
    from torch._dynamo.utils import counters

    model, x = net(), torch.ones(3, 6)
    counters["graph_break"].clear()
    with memlab.track(lines=True, device="cpu", show=False):
        loss = model(x).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    assert len(gradients(model)) == 4
    assert not counters["graph_break"]


# --- keeps nothing -------------------------------------------------------------------------------------------------------


def test_hooks_go_with_the_track_and_keep_no_graph():
    model = net()
    with memlab.track(lines=True, device="cpu", show=False):
        kept = model(torch.ones(3, 6))
        lost = model(torch.ones(3, 6))
        gone = weakref.ref(lost)
        del lost
        gc.collect()
        assert gone() is None
    kept.sum().backward()
    assert not marker.log.columns().size
    assert len(gradients(model)) == 4


def test_handles_of_graphs_that_went_are_forgotten():
    backward = Backward(lambda frame, is_owner: -1, iter(range(1 << 30)).__next__)
    backward.start()
    try:
        backward.prune_at = 10
        for _ in range(100):
            output = torch.ones(2, requires_grad=True) * 2
            backward.at_output("m", output)
        assert len(backward.handles) < 4097
        backward.prune()
        assert len(backward.handles) == 1
    finally:
        backward.stop()


def test_what_fails_in_it_is_counted_and_not_the_users():
    def fails(frame: Any, is_owner: bool) -> int:
        raise RuntimeError

    backward = Backward(fails, iter(range(1 << 30)).__next__)
    backward.start()
    try:
        backward.at_output("m", torch.ones(2, requires_grad=True) * 2)
    finally:
        backward.stop()
    assert backward.failures == 1


# --- what modules return -------------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: torch.Tensor
    more: Any = None


class Named(OrderedDict):
    pass


class Sub(torch.Tensor):
    pass


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"user code: {name}")

    def __iter__(self) -> Any:
        raise AssertionError


class HostileList(list):
    __iter__ = __getitem__ = __len__ = Hostile.__iter__


def test_tensors_are_found_in_containers_without_running_their_code():
    one, two = torch.ones(1), nn.Parameter(torch.ones(2))
    assert list(tensors_in(one)) == [one]
    assert list(tensors_in((one, [two, "x"], None))) == [one, two]
    assert list(tensors_in(Output(one, {"a": two}))) == [one, two]
    assert list(tensors_in(Named(a=one, b=3))) == [one]
    assert list(tensors_in(HostileList([one, two]))) == [one, two]
    assert list(tensors_in([[[one]]])) == [], "two levels are enough"
    assert list(tensors_in(Hostile())) == []
    assert list(tensors_in(None)) == []
    assert list(tensors_in(one.as_subclass(Sub))) == [], "a subclass gets no hook"


def test_an_interrupt_at_the_end_of_a_backward_loses_no_later_backward(monkeypatch):
    ended, interrupted = tensor_labels.backward_ended, []

    def interrupt(self=None):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        ended()

    x = torch.ones(100, requires_grad=True)
    with memlab.track(lines=True, show=False) as run:
        monkeypatch.setattr(type(tensor_labels), "backward_ended", interrupt)
        for _ in range(3):
            loss = (x * x).sum()
            with contextlib.suppress(KeyboardInterrupt):
                loss.backward()
    marks, texts = run.trace.marks, run.trace.texts["mark"]
    assert interrupted
    assert sum("(backward)" in texts[name] for name in marks.name[marks.kind == MarkKind.LINE].tolist()) >= 3
