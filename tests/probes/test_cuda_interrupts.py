"""Ctrl-C at any moment of starting or ending a track: the error propagates, and nothing stays active."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes.probed import above_start, gap_names, probed, take

from memlab import torch_internals
from memlab.analysis.peak import peak
from memlab.probes.cuda import CudaProbe, recorder
from memlab.probes.marks import marker

pytestmark = pytest.mark.simulated
SWITCH, ENGINE = torch.cuda.memory._record_memory_history, torch_internals.engine_entry()


def program() -> None:
    """Two nested tracks with something in each."""
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            probe = CudaProbe()
            probe.start()
            stack.callback(probe.stop)
            torch.nn.Linear(100, 100, device="cuda")(torch.ones(5, 100, device="cuda")).sum().backward()


@pytest.fixture
def queue() -> list[Any]:
    """What waits for CUDA to come up: a seed that an earlier test set waits there too."""
    return list(torch.cuda._queued_calls)


def check_nothing_left(queue: list[Any]) -> None:
    assert (recorder.users, marker.users, marker.quiet) == (0, 0, None)
    assert torch.cuda.memory._record_memory_history is SWITCH
    assert torch_internals.engine_entry() is ENGINE
    assert torch.cuda._queued_calls == queue
    assert not torch._C._cuda_isHistoryEnabled()
    assert not torch.nn.modules.module._global_forward_hooks


def check_still_works() -> None:
    trace = probed(lambda: take(30))
    assert above_start(trace, peak(trace, 0).low_bytes) == 30
    assert not trace.gaps


class Interrupts:
    """Stands for a function and raises at its n-th call, before or after the work."""

    def __init__(self, function: Callable[..., Any], at: int, after: bool) -> None:
        self.function, self.at, self.after, self.calls = function, at, after, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise KeyboardInterrupt
        result = self.function(*args)
        if self.calls == self.at:
            raise KeyboardInterrupt
        return result


# (function, which of its calls): all calls that two nested tracks make, found by running until none is interrupted.
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "name", ["snapshot", "record_history", "cuda_stats", "history_is_on", "replace_history_switch"]
)
def test_an_interrupt_at_every_call_of(queue, name, after, monkeypatch):
    torch.cuda.init()
    take = getattr(torch_internals, name)
    interrupted = 0
    for at in range(1, 200):
        one = Interrupts(take, at, after)
        with monkeypatch.context() as patch:
            patch.setattr(torch_internals, name, one)
            try:
                program()
            except KeyboardInterrupt:
                interrupted += 1
        if one.calls < at:
            break
        if name != "replace_history_switch" or at == 1:  # at the last one nobody could put the switch back
            check_nothing_left(queue)
        torch.cuda.memory._record_memory_history = SWITCH
    assert interrupted >= 1
    check_still_works()


def test_errors_of_ours_inside_of_the_users_code_are_none(queue, monkeypatch):
    """A snapshot that PyTorch refuses becomes a gap, not an error in the first line that uses CUDA."""

    def refuse() -> None:
        raise RuntimeError("not supported by this allocator. Ask elsewhere")

    with monkeypatch.context() as patch:
        patch.setattr(torch_internals, "snapshot", refuse)
        trace = probed(lambda: take(12))
    assert gap_names(trace) == ["no history", "bounded"]
    check_nothing_left(queue)
