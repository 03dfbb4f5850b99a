"""Capturing a graph: what CUDA refuses meanwhile is refused, PyTorch raises its own error, and the process goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from memlab.units import MiB

pytestmark = pytest.mark.simulated


def capture(work: Callable[[], object], mode: str = "global") -> None:
    """Capture some work and replay it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        work()
    graph.replay()


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    """A tensor; PyTorch stays on the stream of a capture that failed, so that is set back."""
    before = torch.cuda.current_stream()
    yield torch.ones(100, device="cuda")
    torch.cuda.set_stream(before)


def test_what_needs_no_waiting_is_captured(x):
    capture(lambda: (x + 1).sum())
    capture(lambda: torch.empty(30 * MiB, device="cuda"))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: torch.nonzero(x),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().query(),
    ],
    ids=["item", "nonzero", "synchronize", "stream", "query"],
)
def test_waiting_spoils_the_capture(x, work):
    with pytest.raises(RuntimeError, match="operation failed due to a previous error during capture"):
        capture(lambda: work(x))
    capture(lambda: x + 1)
    assert (x + 1).sum().item() == 0
    torch.cuda.synchronize()


def test_the_call_itself_fails_and_so_does_what_follows(x):
    texts: list[str] = []

    def work() -> None:
        for call in (lambda: x.sum().item(), lambda: x + 1):
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error).partition("\n")[0])

    with pytest.raises(RuntimeError):
        capture(work)
    assert texts == [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ]


def test_an_event_of_a_capture_cannot_be_waited_for(x):
    event = torch.cuda.Event()

    def work() -> None:
        event.record()
        event.synchronize()

    with pytest.raises(RuntimeError):
        capture(work)
    torch.cuda.current_stream().wait_event(event)  # it belongs to no capture any more
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize(("mode", "is_spoilt"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_another_thread_may_allocate_unless_the_mode_is_global(x, mode, is_spoilt):
    errors: list[str] = []

    def allocate() -> None:
        try:
            torch.empty(50 * MiB, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            errors.append(str(error).partition("\n")[0])

    def work() -> None:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()

    torch.cuda.empty_cache()
    if is_spoilt:
        with pytest.raises(RuntimeError):
            capture(work, mode)
    else:
        capture(work, mode)
    assert errors == ["CUDA error: operation not permitted when stream is capturing"] * is_spoilt


def test_a_whole_step_is_captured():
    model = nn.Linear(10, 10, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    batch = torch.randn(4, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    capture(step)
    torch.cuda.make_graphed_callables(model, (batch,))(batch).sum().backward()
