"""Cells longer than the ring of history: what is exact stays exact, what is not is a range that holds the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from probes.probed import MiB, above_start, gap_names, probed, take

from memlab.analysis.breakdown import breakdown
from memlab.analysis.peak import peak
from memlab.analysis.timeline import timeline
from memlab.probes import history, rows
from memlab.probes.cuda import recorder
from memlab.trace import Trace

pytestmark = pytest.mark.simulated
reset_peak, reset_accumulated = torch.cuda.reset_peak_memory_stats, torch.cuda.reset_accumulated_memory_stats
empty_cache = torch.cuda.empty_cache


def churn(times: int) -> None:
    """Three entries of history each time."""
    for _ in range(times):
        torch.empty(1000, device="cuda")


@pytest.fixture(autouse=True)
def earlier_peak() -> Iterator[int]:
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    take(400)
    torch.cuda.empty_cache()
    yield torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()


def tracked(body: Callable[[], object], entries: int = 1000) -> Trace:
    return probed(body, entries)


def touch(mebibytes: int) -> None:
    take(mebibytes)


def stepping(steps: int, inside: Callable[[int], object]) -> Callable[[], None]:
    """A loop of optimizer steps: after each of them there is a quiet moment."""
    weight = torch.nn.Parameter(torch.ones(10, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def body() -> None:
        for step in range(steps):
            inside(step)
            optimizer.step()

    return body


@pytest.mark.parametrize("entries", [1000, 5000])
def test_a_peak_among_lost_events_is_a_range(entries, earlier_peak):
    kept = take(8)

    def body():
        take(100)
        churn(entries)

    trace = tracked(body, entries)
    found = peak(trace, 0)
    assert above_start(trace, found.low_bytes) <= 100 <= above_start(trace, found.high_bytes)
    assert not found.is_exact
    assert found.high_bytes == earlier_peak
    reserved = peak(trace, 0, "reserved")
    assert reserved.low_bytes <= torch.cuda.memory_reserved() <= reserved.high_bytes
    assert gap_names(trace) == ["bounded"]
    (lost,) = trace.made_by.bounded
    assert lost.lost_events == 2 * (entries + 1)
    assert not lost.is_exact
    assert 0 <= lost.begin_ns < lost.end_ns
    assert timeline(trace, 0).end_bytes == torch.cuda.memory_allocated()
    assert timeline(trace, 0, "reserved").end_bytes == torch.cuda.memory_reserved()
    del kept


def test_lost_allocations_that_are_all_kept():
    kept = []
    trace = tracked(lambda: kept.extend(torch.empty(1000, device="cuda") for _ in range(1200)))
    found = peak(trace, 0)
    assert found.low_bytes == torch.cuda.memory_allocated() < found.high_bytes
    assert sum(lost.lost_events for lost in trace.made_by.bounded) == 1200
    assert timeline(trace, 0).end_bytes == torch.cuda.memory_allocated()
    kept.clear()


def test_quiet_moments_that_can_be_afforded_keep_everything_exact(monkeypatch):
    monkeypatch.setattr(history, "QUIET_ENTRIES", 1)
    monkeypatch.setattr(history, "READ_SHARE", float("inf"))
    trace = tracked(stepping(30, lambda step: (take(50 if step == 9 else 5), churn(150))))
    found = peak(trace, 0)
    assert found.is_exact
    assert 50 <= above_start(trace, found.low_bytes) < 51
    assert found.row >= trace.first_row
    assert not trace.gaps
    assert not trace.made_by.bounded


def test_quiet_moments_that_cannot_be_afforded_keep_the_end_exact(monkeypatch, earlier_peak):
    monkeypatch.setattr(history, "READ_SHARE", 0.0)
    kept = []

    def inside(step: int) -> None:
        take(70 if step == 3 else 5)
        churn(20)
        if step == 29:
            kept.append(take(9))

    body = stepping(30, inside)
    trace = tracked(body)
    found = peak(trace, 0)
    assert above_start(trace, found.low_bytes) <= 71
    assert found.high_bytes == earlier_peak
    lost = trace.made_by.bounded
    assert lost
    assert all(not one.is_exact for one in lost)
    last = max(one.end_ns for one in lost)
    after = trace.events.rows(trace.events.time_ns > last)
    assert len(after) > 100, "the end of the cell was not read event by event"
    assert 9 * MiB in after.requested_bytes.tolist()
    assert timeline(trace, 0).end_bytes == torch.cuda.memory_allocated()


@pytest.mark.parametrize("highest", [1, 17])
def test_who_held_the_peak_is_known_though_there_is_no_time_to_read_each_step(monkeypatch, highest):
    monkeypatch.setattr(history, "READ_SHARE", 0.0)
    reads: list[int] = []
    columns_of = rows.columns_of
    monkeypatch.setattr(rows, "columns_of", lambda *what: reads.append(1) or columns_of(*what))
    reset_peak()
    trace = tracked(body := stepping(40, lambda step: (take(50 if step == highest else 5), churn(150))))
    found = peak(trace, 0)
    assert found.is_exact and 50 <= above_start(trace, found.low_bytes) < 51
    assert sum(breakdown(trace, 0, "category").values()) == found.low_bytes
    assert len(trace.made_by.bounded) > 10 and len(reads) < 6
    if highest == 1:  # the same cell again: the counter does not rise, and nothing that was lost can have been higher
        again = tracked(body)
        assert len(again.made_by.bounded) > 10 and peak(again, 0).bytes == found.bytes
        assert sum(breakdown(again, 0, "category").values()) == found.low_bytes


def test_within_a_step_that_is_longer_than_the_ring_modules_and_backwards_are_quiet_moments(monkeypatch):
    """An evaluation without backward, and batches whose gradients are summed up before the only optimizer step."""
    monkeypatch.setattr(history, "READ_SHARE", float("inf"))

    class Busy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            churn(100)
            return super().forward(x)

    model = torch.nn.Sequential(*(Busy(256, 256) for _ in range(12))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(4096, 256, device="cuda"))

    def accumulate() -> None:
        for _ in range(3):
            model(torch.ones(4096, 256, device="cuda")).sum().backward()
        optimizer.step()

    for body, category, least in ((evaluate, "temporary", 1), (accumulate, "activation", 2)):
        reset_peak()
        trace = tracked(body)
        found = peak(trace, 0)
        assert found.is_exact and found.low_bytes == torch.cuda.max_memory_allocated()
        held = breakdown(trace, 0, "category")
        assert sum(held.values()) == found.low_bytes and held[category] >= least * 4096 * 256 * 4


def test_rows_let_go_leave_their_peaks(monkeypatch):
    monkeypatch.setattr(history, "MAX_ROWS", 1000)
    monkeypatch.setattr(history, "QUIET_ENTRIES", 1)
    monkeypatch.setattr(history, "READ_SHARE", float("inf"))
    kept = [take(11)]
    rows = []

    def inside(step: int) -> None:
        if step == 2:
            kept.append(take(3))
            take(60)
        if step == 20:
            kept.pop(0)
        churn(100)
        rows.append(sum(len(part.events) for part in recorder.devices[0].parts))

    body = stepping(40, inside)
    torch.cuda.reset_peak_memory_stats()
    trace = tracked(body)
    found, reserved = peak(trace, 0), peak(trace, 0, "reserved")
    assert (found.is_exact, found.source) == (True, "events that were dropped later")
    assert found.low_bytes == torch.cuda.max_memory_allocated()
    assert reserved.is_exact
    assert reserved.low_bytes == torch.cuda.max_memory_reserved()
    assert max(rows) <= 1000 + 300
    assert len(trace.events) <= 1000 + 300
    assert gap_names(trace) == ["dropped"]
    assert timeline(trace, 0).end_bytes == torch.cuda.memory_allocated()
    assert timeline(trace, 0, "reserved").end_bytes == torch.cuda.memory_reserved()
    assert all(one.is_exact for one in trace.made_by.bounded)


@pytest.mark.parametrize(
    ("body", "mebibytes", "is_exact", "gaps"),
    [
        # A new maximum among lost events; a ring that is just long enough; a peak that was read before others were lost.
        (lambda: (touch(500), churn(2000)), 500, True, ["bounded"]),
        (lambda: (touch(100), churn(330)), 100, True, []),
        (lambda: (touch(80), recorder.read(), churn(2000)), 80, False, ["bounded"]),
        # The user resets counters: the accumulated ones among lost events; the peak, which is then below that of the cell.
        (lambda: (touch(100), churn(400), reset_accumulated(), churn(400)), 100, False, ["rules"]),
        (lambda: (touch(700), empty_cache(), reset_peak(), touch(500)), 700, True, []),
    ],
)
def test_a_peak_is_exact_or_lies_in_a_range_and_the_end_is_right(body, mebibytes, is_exact, gaps):
    trace = tracked(body)
    found = peak(trace, 0)
    assert above_start(trace, found.low_bytes) <= mebibytes <= above_start(trace, found.high_bytes)
    assert found.is_exact == is_exact
    assert gap_names(trace) == gaps
    assert timeline(trace, 0).end_bytes == torch.cuda.memory_allocated()
    if mebibytes == 500:
        assert found.low_bytes == torch.cuda.max_memory_allocated() and "counter" in found.source
    if mebibytes == 80:
        assert above_start(trace, found.low_bytes) >= 80


def test_a_reset_after_lost_events_still_gives_what_was_seen():
    """Nobody can know a peak that was neither read nor counted; what was read may not be forgotten for the counter."""
    body = lambda: (touch(700), recorder.read(), reset_peak(), empty_cache(), churn(2000), touch(500))  # noqa: E731
    assert peak(tracked(body), 0).low_bytes >= 700 * MiB
