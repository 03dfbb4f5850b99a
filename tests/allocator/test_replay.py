"""Traces of requests, simulated for a card: what the allocator would have made of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted_traces import GPU, HOST, Script, busy

from memlab.allocator import CachingAllocator, Workspace, replay, simulate
from memlab.analysis.breakdown import breakdown
from memlab.analysis.oom.moment import last_moment
from memlab.analysis.peak import peak
from memlab.analysis.timeline import timeline
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.trace import Category, Kind, MarkKind, Phase, Trace
from memlab.trace.columns import Recategorised
from memlab.units import GiB, MiB


def rows(trace: Trace, *columns: str) -> list[tuple]:
    return list(zip(*(getattr(trace.events, name).tolist() for name in columns), strict=True))


def kinds(trace: Trace) -> list[str]:
    return [Kind(kind).name for kind in trace.events.kind]


def requests(*sizes: int) -> Script:
    """Blocks that are asked for and freed in order; a negative number frees the block of that position (from -1)."""
    script = Script()
    for size in sizes:
        script.free(-size - 1) if size < 0 else script.alloc(size)
    return script


def device(trace: Trace):
    return trace.made_by.device(0)


def noted(script: Script, **notes) -> Trace:
    """A trace with notes as those of fake CUDA."""
    return dataclasses.replace(script.trace(), notes={replay.REQUESTS: notes | {"assumptions": [["none", 1]]}})


# --- what the allocator adds ---


def test_requests_become_blocks_in_segments():
    simulated = simulate(requests(1, 6 * MiB, -1, -2).trace(), GiB)
    assert kinds(simulated) == ["SEGMENT_ALLOC", "ALLOC", "SEGMENT_ALLOC", "ALLOC", "FREE", "FREE"]
    assert rows(simulated, "block", "requested_bytes", "allocated_bytes") == [
        (-1, 0, 2 * MiB), (0, 1, 512), (-1, 0, 20 * MiB), (1, 6 * MiB, 6 * MiB), (0, 1, 512), (1, 6 * MiB, 6 * MiB),
    ]  # fmt: skip
    assert simulated.events.time_ns.tolist() == [10, 10, 20, 20, 30, 40]
    assert simulated.events.address[0] == simulated.events.address[1] == simulated.events.address[4] > 1 << 40
    empty = simulate(requests(0, -1).trace(), GiB)  # a storage without bytes is no block
    assert rows(empty, "kind", "block", "allocated_bytes") == [(Kind.ALLOC, 0, 0), (Kind.FREE, 0, 0)]


def test_the_levels_are_those_of_the_allocator():
    trace = busy(3000)
    allocator, blocks = CachingAllocator(8 * GiB), {}
    for kind, block, size in rows(trace, "kind", "block", "requested_bytes"):
        if kind in (Kind.PREEXISTING, Kind.ALLOC):
            blocks[block] = allocator.malloc(size)
        elif kind == Kind.FREE:
            allocator.free(blocks.pop(block))
    simulated = simulate(trace, 8 * GiB)
    for of in ("allocated", "reserved"):
        now, most = (getattr(allocator, f"{name}{of}_bytes") for name in ("", "peak_"))
        facts = device(simulated)
        assert (getattr(facts, f"end_{of}_bytes"), getattr(facts, f"end_peak_{of}_bytes")) == (now, most)
        assert (timeline(simulated, 0, of).bytes[-1], peak(simulated, 0, of).low_bytes) == (now, most)


def test_what_was_there_at_the_start_is_no_event_of_the_run():
    script = requests()
    script.preexisting(30 * MiB)
    script.alloc(5 * MiB, at=40)
    simulated = simulate(script.trace(), GiB)
    assert kinds(simulated) == ["SEGMENT_ALLOC", "PREEXISTING", "SEGMENT_ALLOC", "ALLOC"]
    assert simulated.first_row == 2
    facts = device(simulated)
    assert (facts.start_allocated_bytes, facts.start_reserved_bytes) == (30 * MiB, 30 * MiB)
    assert (facts.end_allocated_bytes, facts.end_reserved_bytes, facts.capacity_bytes) == (35 * MiB, 50 * MiB, GiB)


def test_a_settled_trace_can_be_settled_again():
    once = simulate(busy(3000), 64 * GiB)
    again = simulate(once, 64 * GiB)
    assert rows(again, *again.events.DTYPES) == rows(once, *once.events.DTYPES)
    assert rows(simulate(once, 64 * GiB, "expandable_segments:True"), "kind") != rows(once, "kind")


def test_the_cache_is_emptied_where_the_trace_says_so():
    script = requests(30 * MiB, -1)
    script.rows.append((30, Kind.SEGMENT_FREE, -1, 0, 0, 0, 0, 0))
    script.alloc(30 * MiB)
    simulated = simulate(script.trace(), GiB)
    emptied = ["SEGMENT_FREE", "SEGMENT_FREE", "SEGMENT_ALLOC", "ALLOC"]
    assert kinds(simulated) == ["SEGMENT_ALLOC", "ALLOC", "FREE", *emptied]
    assert simulated.events.allocated_bytes[3:5].tolist() == [0, 30 * MiB]
    assert kinds(simulate(simulated, GiB)) == kinds(simulated)


def test_other_devices_pass_through():
    both, host = Script(GPU, HOST), Script(HOST)
    both.alloc(100)
    both.alloc(77, device=-1)
    host.alloc(77)
    assert rows(simulate(both.trace(), GiB), "device", "allocated_bytes") == [(0, 2 * MiB), (0, 512), (-1, 77)]
    assert rows(simulate(host.trace(), GiB), "kind", "allocated_bytes") == [(Kind.ALLOC, 77)]


@pytest.mark.parametrize(("version", "taken"), [("2.12.1+cu130", 3), ("2.14.0", 0)])
def test_the_allocator_is_that_of_the_torch_of_the_trace(version, taken):
    script = requests(*[5 * MiB] * 4, -1, -4, 5 * MiB)
    simulated = simulate(script.trace(versions={"torch": version}), GiB)
    at = [address for kind, address in rows(simulated, "kind", "address") if kind == Kind.ALLOC]
    assert at[4] == at[taken]


# --- other streams ---


def test_a_block_that_waits_for_a_stream_is_free_when_the_row_says_so():
    script = requests(6 * MiB)
    script.free(0, kind=Kind.FREE_PENDING)
    script.alloc(6 * MiB)
    script.free(0)
    script.alloc(6 * MiB)
    simulated = simulate(script.trace(), GiB)
    assert kinds(simulated)[1:] == ["ALLOC", "FREE_PENDING", "ALLOC", "FREE", "ALLOC"]
    at = simulated.events.address.tolist()
    assert (at[3] - at[1], at[5] - at[1]) == (6 * MiB, 0)
    assert rows(simulated, "requested_bytes", "allocated_bytes")[4] == (6 * MiB, 0), "it left *allocated* before"
    assert peak(simulated, 0, "allocated").low_bytes == 12 * MiB


def test_a_synchronization_ends_the_waiting_before_its_row():
    script = requests(60 * MiB)
    script.free(0, kind=Kind.FREE_PENDING)
    script.alloc(50 * MiB)
    script.free(0)
    simulated = simulate(script.trace(), 100 * MiB)
    assert kinds(simulated)[2:] == ["FREE_PENDING", "FREE", "SEGMENT_FREE", "SEGMENT_ALLOC", "ALLOC"]
    assert device(simulated).num_alloc_retries == 1


def test_the_notes_tell_of_uses_by_other_streams():
    """Such a block is free again with the next request, as the allocator has it."""
    script = requests(6 * MiB, -1, 6 * MiB)
    simulated = simulate(noted(script, recorded_streams=[[1, 0, 7]]), GiB)
    assert kinds(simulated) == ["SEGMENT_ALLOC", "ALLOC", "FREE_PENDING", "FREE", "ALLOC"]
    assert simulated.events.address[1] == simulated.events.address[4]
    assert simulate(simulated, GiB).events.kind.tolist() == simulated.events.kind.tolist()
    assert kinds(simulate(noted(script, recorded_streams=[[1, 0, 0]]), GiB))[2:] == ["FREE", "ALLOC"], "its own stream"


def test_the_notes_tell_where_the_cache_was_emptied_and_what_failed():
    script = requests(30 * MiB, -1, 30 * MiB)
    operators = [[2, "aten.mm", 0, False, [[4, 4]], "float32"]]
    trace = noted(script, emptied=[2], out_of_memory=[[2, GiB, 0]], operators=operators)
    simulated = simulate(trace, 100 * MiB)
    assert kinds(simulated) == [
        "SEGMENT_ALLOC", "ALLOC", "FREE", "SEGMENT_FREE", "OOM", "SEGMENT_FREE", "SEGMENT_ALLOC", "ALLOC",
    ]  # fmt: skip
    notes = simulated.notes[replay.REQUESTS]
    assert notes == {"assumptions": [["none", 1]], "operators": [[3, *operators[0][1:]]]}
    assert kinds(simulate(simulated, 100 * MiB)) == kinds(simulated)


# --- where memory runs out ---


def full() -> Script:
    script = requests(60 * MiB, -1, 50 * MiB, 45 * MiB)
    script.mark(MarkKind.PHASE_BEGIN, "backward", 25)
    script.alloc(90 * MiB)
    script.mark(MarkKind.PHASE_END, "backward", 65)
    script.alloc(1 * MiB, at=70)
    script.sample(20, 5)
    script.sample(75, 6)
    return script


def test_the_trace_ends_where_memory_ran_out():
    simulated = simulate(full().trace(), 150 * MiB, context_bytes=10 * MiB)
    assert kinds(simulated)[-2:] == ["ALLOC", "OOM"]
    assert simulated.events.time_ns[-1] == simulated.made_by.duration_ns == 50
    assert simulated.marks.time_ns.tolist() == [25]
    assert simulated.samples.time_ns.tolist() == [20]
    assert simulated.notes[replay.NOTE]["out_of_memory"].startswith("CUDA out of memory. Tried to allocate 90.00 MiB.")
    facts = device(simulated)
    assert (facts.num_ooms, facts.num_alloc_retries) == (1, 1)
    assert facts.end_allocated_bytes == 50 * MiB + 45 * MiB + MiB  # the last with its slack
    moment = last_moment(simulated)
    assert moment is not None
    assert (moment.asked_bytes, moment.phase) == (90 * MiB, Phase.BACKWARD)
    assert moment.allocated_bytes + moment.cached_bytes + moment.free_bytes == 140 * MiB
    roomy = simulate(full().trace(), GiB)
    assert (roomy.marks.time_ns.tolist(), len(roomy.samples)) == ([25, 65], 2)
    assert (device(roomy).num_ooms, roomy.notes[replay.NOTE]["out_of_memory"]) == (0, "")


def test_an_out_of_memory_that_the_program_survived_is_asked_again():
    script = requests(60 * MiB)
    script.rows.append((20, Kind.OOM, -1, 90 * MiB, 40 * MiB, 0, 0, 0))
    script.alloc(30 * MiB)
    simulated = simulate(script.trace(), 100 * MiB)
    assert kinds(simulated) == ["SEGMENT_ALLOC", "ALLOC", "OOM", "SEGMENT_ALLOC", "ALLOC"]
    assert rows(simulated, "requested_bytes", "allocated_bytes")[2] == (90 * MiB, 40 * MiB)
    assert (device(simulated).num_ooms, simulated.notes[replay.NOTE]["out_of_memory"]) == (1, "")
    assert simulate(script.trace(), GiB).notes[replay.NOTE]["fitted_where_it_had_failed"] == 1


def test_a_failure_after_which_nothing_is_asked_for_is_the_end():
    script = requests(60 * MiB, 5)
    script.rows.append((30, Kind.OOM, -1, 90 * MiB, 40 * MiB, 0, 0, 0))
    script.free(0)
    assert kinds(simulate(script.trace(), 100 * MiB))[-1] == "OOM"
    assert "Tried to allocate 90.00 MiB" in simulate(script.trace(), 100 * MiB).notes[replay.NOTE]["out_of_memory"]
    roomy = simulate(script.trace(), GiB)
    assert (kinds(roomy)[-1], roomy.notes[replay.NOTE]["out_of_memory"]) == ("FREE", "")
    told = simulate(noted(requests(60 * MiB, 5, -1), out_of_memory=[[2, 90 * MiB, 0]]), 100 * MiB)
    assert (kinds(told)[-1], bool(told.notes[replay.NOTE]["out_of_memory"])) == ("OOM", True)


# --- extras ---


def test_extras_are_blocks_of_the_trace():
    script = requests(100, 200, -1)
    script.mark(MarkKind.PHASE_BEGIN, "backward", 35)
    script.alloc(300)
    trace = script.trace()
    workspace = Workspace(1, 8 * MiB, category=Category.OTHER, source_text="workspace of a library")
    passing = Workspace(2, 3000, until_row=2, category=Category.TEMPORARY, source_text="scratch of an operator")
    brief = Workspace(0, 5000, until_row=3, stream=4, source_text="scratch of an operator")
    simulated = simulate(trace, GiB, extras=(workspace, passing, brief))
    named = [
        (kind, simulated.text("name", simulated.blocks.name[block]))
        for kind, block in rows(simulated, "kind", "block")
        if block >= 3
    ]
    assert named == [
        (Kind.ALLOC, "scratch of an operator"),
        (Kind.ALLOC, "workspace of a library"),
        (Kind.ALLOC, "scratch of an operator"),
        (Kind.FREE, "scratch of an operator"),
        (Kind.FREE, "scratch of an operator"),
    ]
    assert simulated.blocks.category[-3:].tolist() == [Category.OTHER, Category.TEMPORARY, Category.OTHER]
    assert simulated.marks.row.tolist() == [len(simulated.events) - 2], "before the extra that goes at that row"
    assert device(simulated).end_allocated_bytes == 8 * MiB + 512 + 512


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (Workspace(5, 1), "within the 4 rows"),
        (Workspace(-1, 1), "within the 4 rows"),
        (Workspace(2, 1, until_row=1), "within the 4 rows"),
        (Workspace(2, 0), "must ask for bytes"),
    ],
)
def test_impossible_extras(extra, message):
    with pytest.raises(MemlabError, match=message):
        simulate(requests(1, 2, -1, -2).trace(), GiB, extras=[extra])


def test_an_extra_may_be_what_does_not_fit():
    large = Workspace(1, 90 * MiB, source_text="workspace")
    simulated = simulate(requests(60 * MiB, 5).trace(), 100 * MiB, extras=[large])
    assert kinds(simulated)[-1] == "OOM"
    assert len(simulated.events) == 3


# --- what refers to rows ---


def test_changes_of_category_follow_their_rows():
    trace = requests(1, 2, -1, 3).trace()
    changes = Recategorised(np.array([0, 1]), np.array([1, 3]), np.array([Category.GRADIENT, Category.INPUT]))
    simulated = simulate(dataclasses.replace(trace, recategorised=changes), GiB)
    assert simulated.recategorised.row.tolist() == [2, 4]


@pytest.mark.parametrize("total", [64 * GiB, 300 * MiB])
def test_every_analysis_works_on_it(total):
    simulated = simulate(busy(4000), total)
    for by in ("category", "module", "line", "phase"):
        for of in ("allocated", "reserved"):
            assert breakdown(simulated, 0, by, of).total_bytes == peak(simulated, 0, of).low_bytes
    run = Run("predicted", simulated)
    assert run.peak_allocated_bytes == device(simulated).end_peak_allocated_bytes
    assert str(run.report())
