"""Marks and torch.compile, on the CPU: what is compiled stays compiled, as often and as whole as without marks."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from processes import python

from memlab.probes.marks import Marker
from memlab.torch_internals import compiler
from memlab.trace import MarkKind


class Backend:
    """Counts what it is asked to compile, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        self.graphs.append(sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes))
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(torch.nn.Module):
    """A module of the user's: Dynamo does not compile frames of PyTorch's own on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 1


def network() -> torch.nn.Module:
    return torch.nn.Sequential(Network(), Network())


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))


def stepping(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
    return lambda: call(torch.ones(2, 4)).sum().backward()


def compiled_module(backend: Backend) -> Callable[[], object]:
    return stepping(torch.compile(network(), backend=backend, fullgraph=True))


def compiled_in_place(backend: Backend) -> Callable[[], object]:
    model = network()
    model.compile(backend=backend, fullgraph=True)
    return stepping(model)


def compiled_part(backend: Backend) -> Callable[[], object]:
    model = network()
    model[0].compile(backend=backend, fullgraph=True)
    return stepping(model)


def compiled_function(backend: Backend) -> Callable[[], object]:
    model = network()
    return stepping(torch.compile(lambda x: model(x).pow(2).sum(), backend=backend, fullgraph=True))


def compiled_optimizer(backend: Backend) -> Callable[[], object]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), capturable=False)
    step = torch.compile(optimizer.step, backend=backend)  # PyTorch itself breaks this graph

    def body() -> None:
        model(torch.ones(2, 4)).sum().backward()
        step()

    return body


def with_a_break(backend: Backend) -> Callable[[], object]:
    model = network()

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(y).sum()

    return stepping(torch.compile(loss, backend=backend))


PROGRAMS = (
    compiled_module, compiled_in_place, compiled_part, compiled_function, compiled_optimizer, with_a_break
)  # fmt: skip


def graphs(program: Callable[[Backend], Callable[[], object]], when_on: tuple[bool, ...]) -> list[int]:
    """The sizes of the graphs that are compiled when the program runs so often, with marks on or off each time."""
    backend, marker = Backend(), Marker()
    body = program(backend)
    for on in when_on:
        if on:
            marker.acquire()
        try:
            body()
        finally:
            if on:
                marker.release()
    return backend.graphs


@pytest.mark.parametrize(
    "when_on",
    [(True,) * 4, pytest.param((True, False, True, False), marks=pytest.mark.slow), (False, True, True, False)],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_graphs_are_compiled_as_without_marks(program, when_on):
    without = graphs(program, (False,) * 4)
    torch._dynamo.reset()
    found = graphs(program, when_on)
    assert without
    if compiler.HIDES_HOOKS:
        assert found == without
    else:  # each graph at most twice, with and without hooks, however many tracks there are
        assert found in (without, without * 2)


def test_the_call_of_a_compiled_module_is_marked():
    marker, begin_ns = Marker(), time.time_ns()
    marker.acquire()
    try:
        body = compiled_module(Backend())
        for _ in range(3):
            body()
        found = marker.columns(begin_ns, time.time_ns(), threading.get_ident())
    finally:
        marker.release()
    begun = [
        found.texts[name] for name, kind in zip(found.name, found.kind, strict=True) if kind == MarkKind.MODULE_BEGIN
    ]
    assert begun == ["OptimizedModule"] * 3


def test_no_warning_about_our_hooks_reaches_the_user():
    filters = list(warnings.filters)
    marker = Marker()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        marker.acquire()
        try:
            compiled_module(Backend())()
            warnings.warn("theirs", stacklevel=1)
        finally:
            marker.release()
    messages = [str(one.message) for one in caught]
    assert "theirs" in messages
    assert not [message for message in messages if "global hooks" in message]
    assert warnings.filters == filters


@pytest.mark.slow
def test_a_compiler_that_is_loaded_while_marks_are_on():
    code = """
import sys, torch
from memlab.probes.marks import Marker
marker, graphs = Marker(), []
marker.acquire()
assert "torch._dynamo" not in sys.modules
def backend(graph, inputs):
    graphs.append(1)
    return graph.forward
fast = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4)), backend=backend, fullgraph=True)
for _ in range(3):
    fast(torch.ones(2, 4)).sum().backward()
    marker.release()
    fast(torch.ones(2, 4)).sum().backward()
    marker.acquire()
marker.release()
from memlab.torch_internals.compiler import HIDES_HOOKS
assert len(graphs) <= (1 if HIDES_HOOKS else 2), graphs
callbacks = sys.modules["torch._dynamo.callback"].callback_handler
assert not callbacks.start_callbacks and not callbacks.end_callbacks
"""
    assert "global hooks" not in python("-c", f"import sys; sys.stderr = sys.stdout\n{code}")
