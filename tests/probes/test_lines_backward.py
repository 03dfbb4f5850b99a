"""Backward charged to forward lines, and that what it takes for that changes no gradient and keeps nothing."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.probes.backward import Backward, tensors_in
from memlab.probes.marks import marker
from memlab.session.lines import LineReport, lines
from memlab.session.run import Run
from memlab.trace import MarkKind


def tracked(function: Callable[..., Any], *args: Any) -> tuple[LineReport, Run]:
    with memlab.track(functions=[function], device="cpu", show=False) as run:
        function(*args)
    return lines(run), run


def row(report: LineReport, text: str) -> Any:
    """The row of the line that contains this text."""
    source = next(iter(report.table.sources.values()))
    (number,) = [number for number, line in source.items() if text in line and "row(" not in line]
    return next(row for row in report if row.line == number)


def exact(report: LineReport) -> bool:
    table = report.table
    return sum(r.held_bytes + r.backward_bytes for r in report) + table.outside_bytes == table.change_bytes


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
    report = lines(run)
    assert exact(report)
    saved = (30 + 20) * 5 * 4  # the inputs of both layers, which backward lets go
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
    report = lines(run)
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


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def double_backward() -> list[torch.Tensor]:
    model, x = net(), torch.ones(3, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    return [x.grad, *gradients(model)]


def twice_through_one_graph() -> list[torch.Tensor]:
    model = net()
    loss = model(torch.ones(3, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def checkpointed(use_reentrant: bool) -> Callable[[], list[torch.Tensor]]:
    def work() -> list[torch.Tensor]:
        model, x = net(), torch.ones(3, 6, requires_grad=True)
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        return [x.grad, *gradients(model)]

    return work


def functional() -> list[torch.Tensor]:
    model, x = net(), torch.ones(3, 6)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, one).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    return [*each.values(), torch.func.hessian(lambda one: model(one).pow(2).sum())(x[0])]


def in_threads() -> list[torch.Tensor]:
    model = net()
    copies = [torch.ones(3, 6, requires_grad=True) for _ in range(3)]
    threads = [threading.Thread(target=lambda x=x: model(x).sum().backward(inputs=[x])) for x in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [x.grad for x in copies]


def changed_in_place() -> list[torch.Tensor]:
    model, x = net(), torch.ones(3, 6)
    hidden = model[0](x)
    hidden.mul_(2)
    part = hidden[:, :4]
    part.add_(1)
    model[2](hidden).sum().backward()
    return gradients(model)


@pytest.mark.parametrize(
    "work",
    [double_backward, twice_through_one_graph, checkpointed(True), checkpointed(False), functional, in_threads,
     changed_in_place],
)  # fmt: skip
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
    called: list[Any] = []
    marker_add, marker.add = marker.add, lambda *args: called.append(args)
    try:
        kept.sum().backward()
    finally:
        marker.add = marker_add
    assert called == []
    assert len(gradients(model)) == 4


def test_handles_of_graphs_that_went_are_forgotten():
    backward = Backward(lambda frame, is_owner: -1, iter(range(1 << 30)).__next__)
    backward.start()
    try:
        backward._prune_at = 10
        for _ in range(100):
            output = torch.ones(2, requires_grad=True) * 2
            backward.at_output("m", output)
        assert len(backward._handles) < 4097
        backward._prune()
        assert len(backward._handles) == 1
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


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"user code: {name}")

    def __iter__(self) -> Any:
        raise AssertionError


class HostileList(list):
    def __iter__(self) -> Any:
        raise AssertionError

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


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


def test_subclasses_get_no_hook():
    class Sub(torch.Tensor):
        pass

    assert list(tensors_in(torch.ones(3).as_subclass(Sub))) == []
