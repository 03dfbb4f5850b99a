"""The moment at which memory ran out, read from traces written by hand."""

from __future__ import annotations

from handmade import HOST, Script

from memlab.analysis.oom.moment import Moment, last_moment
from memlab.trace import Category, Kind, MarkKind, Phase


def out_of_memory(script: Script, asked: int, free: int, device: int | None = None) -> None:
    script._row(Kind.OOM, -1, asked, free, None, device)


def moment_of(script: Script) -> Moment:
    found = last_moment(script.trace())
    assert found is not None
    return found


def training() -> Script:
    """A parameter from before, two activations of which one is gone, a cache of 300, then 5000 asked."""
    script = Script()
    script.adopt(1000)
    script.segment(4000, at=0)
    script.here_it_starts()
    script.alloc(700, requested=650, category=Category.ACTIVATION, phase=Phase.FORWARD, line="cell:3", module="net.0")
    gone = script.alloc(2000, category=Category.ACTIVATION, phase=Phase.FORWARD, line="cell:4", module="net.1")
    script.alloc(1500, category=Category.INPUT, line="cell:2")
    script.free(gone)
    script.alloc(500, category=Category.TEMPORARY, phase=Phase.OPTIMIZER, line="cell:6")
    script.alloc(100, category=Category.OPTIMIZER, phase=Phase.OPTIMIZER, line="cell:6")
    return script


def test_the_numbers_are_those_of_the_row_and_not_of_what_came_after():
    script = training()
    out_of_memory(script, 5000, 64)
    script.alloc(9000, at=900, category=Category.OTHER)
    script.segment(9000, at=900)
    found = moment_of(script)
    assert (found.device, found.asked_bytes, found.free_bytes) == (0, 5000, 64)
    assert (found.allocated_bytes, found.reserved_bytes, found.cached_bytes) == (3800, 4000, 200)
    assert found.step_bytes == 500
    shares = {by: dict(found.share(by)) for by in ("category", "line", "module")}
    assert shares["category"].pop("other") == 1000  # the one from before, of which nothing is told
    assert shares["category"] == {"input": 1500, "activation": 650, "temporary": 500, "optimizer": 100, "rounding": 50}
    assert shares["line"] == {"cell:2": 1500, "before the cell": 1000, "cell:3": 650, "cell:6": 600, "rounding": 50}
    assert shares["module"] == {"elsewhere": 2100, "before the cell": 1000, "net.0": 650, "rounding": 50}
    assert all(share.total_bytes == 3800 for share in found.shares)


def test_a_trace_without_it_has_none_and_one_from_before_the_cell_does_not_count():
    assert last_moment(training().trace()) is None
    script = Script()
    out_of_memory(script, 10, 1)
    script.here_it_starts()
    script.alloc(10)
    assert last_moment(script.trace()) is None


def test_of_several_the_last_counts_on_its_own_device():
    script = training()
    out_of_memory(script, 5000, 64)
    script.alloc(77, device=-1)
    script.devices = (*script.devices, HOST)
    out_of_memory(script, 6000, 32)
    assert (moment_of(script).asked_bytes, moment_of(script).allocated_bytes) == (6000, 3800)


def test_a_breakdown_in_which_nothing_is_told_is_left_out():
    script = Script()
    script.adopt(1000)
    script.alloc(500)
    out_of_memory(script, 10, 1)
    assert moment_of(script).shares == ()
    assert moment_of(script).share("line") is None


def test_the_phase_comes_from_the_marks_before_it():
    for kind, name, phase, backward in (
        (MarkKind.MODULE_BEGIN, "net", Phase.FORWARD, False),
        (MarkKind.PHASE_BEGIN, "backward", Phase.BACKWARD, True),
        (MarkKind.PHASE_BEGIN, "optimizer", Phase.OPTIMIZER, False),
    ):
        script = training()
        script.mark(kind, name, at=script.now + 5)
        out_of_memory(script, 10, 1)
        script.mark(MarkKind.PHASE_BEGIN, "optimizer", at=script.now + 5)
        found = moment_of(script)
        assert (found.phase, found.has_backward) == (phase, backward)
    assert moment_of_plain().phase == Phase.OTHER


def moment_of_plain() -> Moment:
    script = training()
    out_of_memory(script, 10, 1)
    return moment_of(script)
