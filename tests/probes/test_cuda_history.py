"""Whose history it is: the user's is read and left alone, ours ends without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probes.probed import MiB, above_start, gap_names, probed, take

from memlab.analysis.peak import peak
from memlab.analysis.timeline import timeline
from memlab.probes.cuda import recorder
from memlab.trace import Trace

pytestmark = pytest.mark.simulated
record = torch.cuda.memory._record_memory_history


def entries() -> list[dict[str, Any]]:
    return [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] != "snapshot"]


def allocated() -> list[int]:
    """MiB of every allocation in history now."""
    return [e["size"] // MiB for e in entries() if e["action"] == "alloc"]


@pytest.fixture(autouse=True)
def off_before_and_after() -> Iterator[None]:
    torch.cuda.init()
    take(900)  # an earlier, higher peak: PyTorch's counter cannot help with any peak below
    torch.cuda.empty_cache()
    yield
    assert torch.cuda.memory._record_memory_history is record
    record(None)
    torch.cuda.empty_cache()


def peak_mebibytes(trace: Trace) -> float:
    """The peak above the start, if the events know it and each of them was read."""
    found = peak(trace, 0)
    assert found.is_exact
    assert not trace.made_by.bounded
    return above_start(trace, found.low_bytes)


def test_many_tracks_under_the_users_history():
    record(max_entries=10_000)
    for size in range(2, 40):
        # The same over and over: places in the ring look alike, and the right one has to be found.
        torch.cuda.reset_peak_memory_stats()
        trace = probed(lambda size=size: [take(5), take(5), take(size), take(5), take(5)])
        assert not trace.made_by.bounded
        assert int(timeline(trace, 0).bytes.max()) == torch.cuda.max_memory_allocated()
    assert len(allocated()) == 38 * 5


def test_the_user_starts_dumps_and_stops_inside():
    found = []

    def body():
        kept = take(30)
        torch.cuda.memory._record_memory_history(max_entries=5000)
        take(40)
        found.extend(allocated())
        torch.cuda.memory._record_memory_history(None)
        take(50)
        return kept

    trace = probed(body)
    assert found == [40], "the user's recording begins with ours"
    assert peak_mebibytes(trace) == 80
    assert gap_names(trace) == ["users history"]
    assert not torch._C._cuda_isHistoryEnabled()


LEGACY = {"enabled": True, "trace_alloc_max_entries": 5000, "trace_alloc_record_context": True}


@pytest.mark.parametrize(
    ("was_on", "inside", "left"),
    [
        (False, None, None),  # ours ends with the track
        (True, None, [7, 30, 40, 9]),  # the user's goes on with all its entries
        (False, {"max_entries": 5000}, [40, 9]),
        (True, {"clear_history": True}, [40, 9]),
        (True, {"max_entries": 700}, [7, 30, 40, 9]),
        (True, LEGACY, [7, 30, 40, 9]),
        (True, {"enabled": None}, None),
    ],
)
def test_history_is_the_users_wherever_it_was_switched(was_on, inside, left):
    if was_on:
        record(max_entries=10_000)
    take(7)

    def body():
        kept = take(30)
        if inside is not None:
            torch.cuda.memory._record_memory_history(**inside)
        return kept, take(40)

    trace = probed(body)
    take(9)
    assert peak_mebibytes(trace) == 70
    assert gap_names(trace) == (["users history"] if was_on or inside else [])
    assert torch._C._cuda_isHistoryEnabled() == (left is not None)
    assert allocated() == (left or [])
    assert left or entries() == []


@pytest.mark.parametrize("was_on", [False, True])
def test_a_wrong_call_raises_as_ever_and_loses_nothing(was_on):
    if was_on:
        record(max_entries=10_000)

    def body():
        kept = take(30)
        with pytest.raises(RuntimeError, match="expected state"):
            torch.cuda.memory._record_memory_history("nonsense")
        return kept, take(40)

    assert peak_mebibytes(probed(body)) == 70
    assert torch._C._cuda_isHistoryEnabled() == was_on


def test_somebody_who_wraps_the_switch_keeps_it():
    ours = []

    def body():
        ours.append(torch.cuda.memory._record_memory_history)
        torch.cuda.memory._record_memory_history = lambda *args, **kwargs: ours[0](*args, **kwargs)
        take(30)

    trace = probed(body)
    theirs = torch.cuda.memory._record_memory_history
    try:
        assert theirs is not record
        assert theirs is not ours[0]
        theirs(max_entries=100)  # no track is open: ours only passes the call on
        assert torch._C._cuda_isHistoryEnabled()
        theirs(None)
        assert not torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history = record
    assert peak_mebibytes(trace) == 30


def check_range(trace: Trace, truth_mebibytes: int, gap: str) -> None:
    """No exact figure is claimed, the truth (above the start) lies in the range, and it is said why."""
    found = peak(trace, 0)
    truth = timeline(trace, 0).start_bytes + truth_mebibytes * MiB
    assert found.low_bytes <= truth <= found.high_bytes
    assert not found.is_exact
    assert gap in gap_names(trace)
    assert trace.made_by.bounded


def test_a_short_ring_of_the_users_loses_events():
    record(max_entries=50)
    trace = probed(lambda: [take(60), [take(1) for _ in range(100)]])
    check_range(trace, 160, "bounded")
    assert peak(trace, 0).high_bytes == torch.cuda.max_memory_allocated()
    assert sum(lost.lost_events for lost in trace.made_by.bounded) == 202


def test_history_that_is_stopped_past_our_switch_is_lost_and_said():
    trace = probed(lambda: [take(60), record(None), take(20)])  # `record` is what somebody imported before the track
    check_range(trace, 80, "bounded")
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.parametrize(
    "arguments",
    [{"enabled": "state"}, {"skip_actions": ["alloc"]}, {"skip_actions": ["free_requested"]}],
)
def test_history_that_leaves_out_kinds_of_events(arguments):
    record(max_entries=10_000, **{"enabled": "all", **arguments})
    trace = probed(lambda: [take(60), [take(1) for _ in range(10)]])
    check_range(trace, 70, "bounded")


@pytest.mark.parametrize("skipped", ["free_completed", "segment_alloc"])
def test_history_without_completed_frees_or_segments(skipped):
    record(max_entries=10_000, skip_actions=[skipped])

    def body():
        for size in (30, 10, 50, 20):
            take(size)

    trace = probed(body)
    found, truth = peak(trace, 0), timeline(trace, 0).start_bytes + 50 * MiB
    assert found.low_bytes <= truth <= found.high_bytes
    reserved = peak(trace, 0, "reserved")
    assert reserved.low_bytes <= torch.cuda.memory_reserved() <= reserved.high_bytes


@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings:FutureWarning")
def test_settings_that_change_inside():
    def body():
        torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:1")
        kept = take(5)
        torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:4")
        return kept, take(33)  # becomes 40

    trace = probed(body)
    torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:[1:0,>:0]")
    check_range(trace, 45, "rules")


def test_a_pool_that_does_not_split():
    held = []

    def body():
        pool = torch.cuda.MemPool(no_split=True)
        with torch.cuda.use_mem_pool(pool):
            held.append((take(3), pool))  # has all the 20 MiB of its segment

    trace = probed(body)
    check_range(trace, 20, "rules")
    line = timeline(trace, 0)
    assert line.end_bytes - line.start_bytes == 20 * MiB
    held.clear()


def test_nobody_is_left_in_the_recorder():
    probed(lambda: take(3))
    assert not recorder.users
    assert not recorder.devices
    assert not recorder.is_open
