"""Forecasts: intervals, answers and what speaks for them, from traces whose figures are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted_traces import Script

from memlab.allocator.replay import NOTE
from memlab.analysis.peak import device_peak, peak
from memlab.analysis.summary import summary
from memlab.prediction.cards import Card
from memlab.prediction.forecast import fits_for_certain, forecast, forecast_of
from memlab.prediction.probe import NOTES
from memlab.trace import Trace
from memlab.trace.columns import Blocks, Events, Kind
from memlab.trace.file import dumps, loads
from memlab.trace.trace import PREDICTING, Device, MadeBy
from memlab.units import GiB, MiB

ADDMM = [0, "aten.addmm.default", 0, False, [[64], [8, 64], [64, 64]], "float32"]
"""An operator that takes cuBLAS's workspace, as the dry run notes it."""


def asked(*sizes: int, operators: list | None = None, assumptions: list | None = None) -> Trace:
    """A dry run that asks for blocks and keeps them."""
    count = len(sizes)
    rows, zeros = np.arange(count), np.zeros(count, np.int64)
    events = Events(rows, np.full(count, int(Kind.ALLOC)), rows, *[np.array(sizes)] * 2, zeros, zeros, zeros)
    made_by = MadeBy(PREDICTING, (Device(0, "any"),), {"torch": "2.12.1"}, duration_ns=count)
    notes = {NOTES: {"operators": operators or [], "assumptions": assumptions or []}}
    return Trace(events, Blocks.unknown(count), made_by, notes=notes)


def card(total: int, context: int | tuple[int, int] = 0) -> Card:
    return Card("test card", total, (8, 0), context, total, total, 108)


def test_what_a_program_needs_does_not_depend_on_the_card_that_is_too_small():
    need = asked(*[100 * MiB] * 10)
    large, small = forecast(need, card(8 * GiB)), forecast(need, card(512 * MiB))
    assert large.allocated_bytes == small.allocated_bytes == (1000 * MiB, 1000 * MiB)
    assert large.reserved_bytes == small.reserved_bytes
    assert (large.fits, small.fits) == ("yes", "no")
    assert not large.out_of_memory
    assert "Tried to allocate 100.00 MiB" in small.out_of_memory
    assert int((small.trace.events.kind == Kind.OOM).sum()) == 1
    assert len(small.trace.events) < len(large.trace.events)


def freed_before_the_last(*sizes: int) -> Trace:
    """Blocks that are freed before the last one is asked for."""
    made = asked(*sizes)
    early = len(sizes) - 1
    columns = {name: column.tolist() for name, column in made.events.arrays().items()}
    for name, column in columns.items():
        again = [int(Kind.FREE)] * early if name == "kind" else column[:early]
        columns[name] = list(range(2 * early + 1)) if name == "time_ns" else [*column[:early], *again, *column[early:]]
    return dataclasses.replace(made, events=Events(**{name: np.array(column) for name, column in columns.items()}))


def test_a_card_that_gives_back_its_cache_needs_no_more_than_it_has():
    need = freed_before_the_last(*[100 * MiB] * 10, 1200 * MiB)
    large, tight = forecast(need, card(8 * GiB)), forecast(need, card(1500 * MiB))
    assert large.reserved_bytes[0] > 2100 * MiB
    assert tight.fits == "yes"
    assert tight.device_bytes[1] <= 1500 * MiB
    assert tight.margin_bytes[0] >= 0


def test_no_program_is_so_large_that_its_need_is_not_told():
    found = forecast(asked(*[1 << 50] * 300), card(GiB))
    assert found.fits == "no"
    assert found.allocated_bytes == (300 << 50, 300 << 50)


@pytest.mark.parametrize(
    ("total", "answer"), [(970 * MiB, "no"), (990 * MiB, "close"), (1010 * MiB, "close"), (1030 * MiB, "yes")]
)
def test_near_the_edge_nothing_is_claimed(total, answer):
    assert forecast(asked(*[100 * MiB] * 10), card(total)).fits == answer


def test_an_uncertain_context_makes_it_close():
    need = asked(*[100 * MiB] * 10)
    assert forecast(need, card(1200 * MiB, 100 * MiB)).fits == "yes"
    assert forecast(need, card(1200 * MiB, (100 * MiB, 300 * MiB))).fits == "close"
    found = forecast(need, card(4 * GiB, (100 * MiB, 300 * MiB)))
    assert found.device_bytes == (round(1000 * MiB * 0.98) + 100 * MiB, round(1000 * MiB * 1.02) + 300 * MiB)
    assert found.margin_bytes == (4 * GiB - found.device_bytes[1], 4 * GiB - found.device_bytes[0])


@pytest.mark.parametrize(
    ("version", "conf", "ends"),
    [
        ("2.10.0", "", (80 * MiB, 90 * MiB)),
        ("2.11.0", "", (80 * MiB, 90 * MiB)),
        ("2.11.0", "expandable_segments:True", (80 * MiB, 80 * MiB)),
        ("2.12.1", "", (80 * MiB, 80 * MiB)),
        ("2.14.1", "", (80 * MiB, 80 * MiB)),
    ],
)
def test_before_2_12_reserved_hangs_on_where_segments_are(version, conf, ends):
    """Two segments of four blocks with a hole each; which of them is filled decides whether 10 MiB fit into the second."""
    script = Script()
    script.alloc(40 * MiB)
    blocks = [script.alloc(5 * MiB) for _ in range(8)]
    for hole in (1, 5):
        script.free(blocks[hole])
    script.alloc(5 * MiB)
    script.free(blocks[6])
    script.alloc(10 * MiB)
    need, (low, high) = script.trace(versions={"torch": version}), ends
    found, edge = forecast(need, card(8 * GiB), conf), card(88 * MiB)
    assert found.reserved_bytes == (round(0.98 * low), round(1.02 * high))
    assert any("where the driver puts segments" in text for text in found.assumptions) == (low < high)
    assert forecast(need, edge, conf).fits == ("yes" if low == high else "close")
    assert fits_for_certain(need, edge, conf) == (low == high)


def test_workspaces_come_from_the_operators_and_are_named():
    without, with_ = (forecast(asked(MiB, operators=noted), card(GiB)) for noted in ([], [ADDMM]))
    assert with_.allocated_bytes[0] - without.allocated_bytes[0] == 8_519_680  # of PyTorch's CublasHandlePool.cpp
    (part,) = [part for part in with_.parts if part.name == "workspace of cuBLAS"]
    assert (part.low_bytes, part.high_bytes) == (8_519_680, 8_519_680)
    assert "CublasHandlePool" in part.source_text


def test_assumptions_are_counted_and_become_gaps():
    found = forecast(asked(MiB, assumptions=[["a value was read", 3], ["it is eager", 1]]), card(GiB))
    assert found.assumptions == ("a value was read (3 times)", "it is eager")
    assert [gap.text for gap in found.trace.gaps if gap.name == "assumed"] == list(found.assumptions)


def test_a_forecast_goes_with_its_trace_through_a_file():
    found = forecast(asked(*[100 * MiB] * 10, operators=[ADDMM]), card(8 * GiB, (MiB, 2 * MiB)))
    again = forecast_of(loads(dumps(found.trace)))
    assert again is not None
    assert again.margin_bytes == found.margin_bytes
    assert dataclasses.replace(again, trace=found.trace) == found
    assert forecast_of(asked(MiB)) is None


def test_the_analyses_of_measured_runs_know_the_intervals():
    found = forecast(asked(*[100 * MiB] * 10), card(8 * GiB, (100 * MiB, 300 * MiB)))
    assert peak(found.trace, 0).is_exact
    reserved = peak(found.trace, 0, "reserved")
    assert (reserved.low_bytes, reserved.high_bytes) == (1000 * MiB, found.reserved_bytes[1])
    used = device_peak(found.trace, 0)
    assert used is not None
    assert (used.low_bytes, used.high_bytes) == found.device_bytes
    assert [level.of for level in summary(found.trace).devices[0].levels] == ["allocated", "reserved", "device used"]
    small = forecast(asked(*[100 * MiB] * 10), card(512 * MiB))
    assert (peak(small.trace, 0).low_bytes, peak(small.trace, 0).high_bytes) == (500 * MiB, 1000 * MiB)


def test_expandable_segments_are_the_cards_setting():
    need = asked(*[6 * MiB] * 4)
    assert forecast(need, card(GiB)).trace.made_by.device(0).end_peak_reserved_bytes == 40 * MiB
    found = forecast(need, card(GiB), "expandable_segments:True")
    assert found.trace.made_by.device(0).end_peak_reserved_bytes == 40 * MiB  # 24 MiB in pages of 20
    assert found.trace.notes[NOTE]["out_of_memory"] == ""
    assert int((found.trace.events.kind == Kind.SEGMENT_MAP).sum()) == 2
