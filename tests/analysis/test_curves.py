from __future__ import annotations

import numpy as np
from handmade import HOST, Script, busy

from memlab.analysis.curves import curves
from memlab.trace import Bounded, MarkKind, Phase


def named(script: Script, *names: str, **made_by: object) -> dict[str, list[tuple[float, int]]]:
    found = curves(script.trace(**made_by), script.devices[0])
    assert [curve.name for curve in found.curves] == list(names)
    return {c.name: list(zip(c.time_s.tolist(), c.bytes.tolist(), strict=True)) for c in found.curves}


def test_an_accelerator_has_allocated_reserved_and_what_was_read_of_the_device():
    script = Script()
    script.segment(2048, at=1_000_000_000)
    script.alloc(512, at=2_000_000_000)
    script.sample(0, 0, 0, 100)
    script.sample(1, 0, 0)  # not read at this tick
    script.sample(3_000_000_000, 512, 2048, 900)
    found = named(script, "allocated", "reserved", "used", duration=3_000_000_000)
    assert found == {
        "allocated": [(0, 0), (2, 512), (3, 512)],
        "reserved": [(0, 0), (1, 2048), (3, 2048)],
        "used": [(0, 100), (3, 900)],
    }


def test_the_host_has_allocated_and_what_is_resident():
    script = Script(HOST)
    script.sample(0, 5, -1, 9, 77, 1000)
    assert named(script, "allocated", "rss", duration=10)["rss"] == [(0, 77)]


def test_an_empty_run_still_draws():
    found = curves(Script().trace(), Script().devices[0])
    assert [c.bytes.tolist() for c in found.curves] == [[0, 0], [0, 0]]
    assert (found.top_bytes, found.peak.low_bytes, found.duration_s) == (0, 0, 0)


def test_many_events_become_few_points_with_the_peak_among_them():
    trace = busy(20_000)
    found = curves(trace, trace.made_by.devices[0])
    points = {curve.name: curve for curve in found.curves}
    assert len(points["allocated"].time_s) <= 1001
    assert len(points["used"].time_s) <= 150
    at = points["allocated"].time_s.tolist().index(found.peak.time_ns / 1e9)
    assert points["allocated"].bytes[at] == found.peak.low_bytes == found.top_bytes or found.top_bytes > 0


def test_thinned_samples_are_real_ones_and_keep_the_highest():
    trace = busy(200)
    found = curves(trace, trace.made_by.devices[0])
    used = next(curve for curve in found.curves if curve.name == "used")
    mine = trace.samples.device == 0
    real = set(zip((trace.samples.time_ns[mine] / 1e9).tolist(), trace.samples.used_bytes[mine].tolist(), strict=True))
    assert set(zip(used.time_s.tolist(), used.bytes.tolist(), strict=True)) <= real
    assert used.bytes.max() == trace.samples.used_bytes[mine].max()


def test_each_stretch_shows_the_phase_that_filled_most_of_it():
    script = Script()
    script.alloc(1, at=0)
    script.mark(MarkKind.PHASE_BEGIN, "backward", 250)
    script.mark(MarkKind.PHASE_END, "backward", 500)
    script.mark(MarkKind.PHASE_BEGIN, "optimizer", 740)
    script.mark(MarkKind.PHASE_END, "optimizer", 1000)
    phases = curves(script.trace(duration=1000), script.devices[0], bins=4).phases
    assert phases.tolist() == [Phase.OTHER, Phase.BACKWARD, Phase.OTHER, Phase.OPTIMIZER]


def test_without_marks_there_are_no_phases():
    assert len(curves(Script().trace(), Script().devices[0]).phases) == 0


def test_stretches_without_events_are_named():
    lost = Bounded(0, 1_000_000_000, 2_000_000_000, 5)
    let_go = Bounded(0, 0, 500_000_000, 5, 10, 10)
    elsewhere = Bounded(1, 0, 1, 5)
    trace = Script().trace(duration=3_000_000_000, bounded=(lost, let_go, elsewhere))
    assert curves(trace, Script().devices[0]).lost == ((1.0, 2.0), (0.0, 0.5))


def test_a_plateau_needs_no_points_in_between():
    script = Script()
    for at in range(1, 50):
        script.free(script.alloc(0, at=2 * at), at=2 * at + 1)
    found = curves(script.trace(), script.devices[0])
    assert np.all(found.curves[0].bytes == 0)
    assert len(found.curves[0].bytes) == 2
