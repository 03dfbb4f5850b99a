from __future__ import annotations

import numpy as np
from scripted_traces import GPU, HOST, Script, busy

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
    found = curves(Script().trace(), GPU)
    assert [c.bytes.tolist() for c in found.curves] == [[0, 0], [0, 0]]
    assert (found.top_bytes, found.peak.low_bytes, found.duration_s, len(found.phases)) == (0, 0, 0, 0)


def test_many_events_become_few_points_with_the_peak_among_them():
    trace = busy(20_000)
    found = curves(trace, trace.made_by.devices[0], bins=160)
    points = {curve.name: curve for curve in found.curves}
    assert len(points["allocated"].time_s) == 161
    assert len(points["used"].time_s) <= 80
    assert points["allocated"].top_bytes == found.peak.low_bytes
    gaps = np.diff(points["allocated"].time_s)
    assert np.allclose(gaps, gaps[0])
    at = int(points["allocated"].bytes.argmax())
    assert 0 <= found.peak.time_ns / 1e9 - points["allocated"].time_s[at] < gaps[0]


def sizes_in_turn(*sizes: int, there: int = 0) -> Script:
    """Blocks of these sizes, one after the other, a second for each; the level is what was `there` in between."""
    script = Script(HOST)
    if there:
        script.preexisting(there)
    for second, size in enumerate(sizes):
        script.free(script.alloc(size, at=second * 1_000_000_000), at=second * 1_000_000_000 + 500_000_000)
    return script


def test_few_steps_are_all_there_at_their_own_times():
    found = curves(sizes_in_turn(5, 7).trace(duration=2_000_000_000), HOST, bins=5)
    assert found.curves[0].time_s.tolist() == [0, 0, 0.5, 1, 1.5, 2]
    assert found.curves[0].bytes.tolist() == [0, 5, 0, 7, 0, 0]
    assert found.lowest is None


def test_of_too_many_steps_each_stretch_shows_the_highest_and_the_lowest():
    script = sizes_in_turn(5, 7, 6, 3, there=1)
    found = curves(script.trace(duration=4_000_000_000), HOST, bins=4)
    assert found.start_bytes == 1
    assert found.curves[0].bytes.tolist() == [6, 8, 7, 4, 1]
    assert found.lowest is not None
    assert found.lowest.bytes.tolist() == [1, 1, 1, 1, 1]
    assert found.lowest.time_s.tolist() == found.curves[0].time_s.tolist() == [0, 1, 2, 3, 4]


def test_where_nothing_dips_the_lowest_is_not_shown():
    script = Script(HOST)
    for second in range(300):
        script.alloc(5, at=second)
    assert curves(script.trace(), HOST).lowest is None


def test_a_stretch_without_events_goes_on_as_the_one_before():
    script = Script(HOST)
    script.free(script.alloc(9, at=0), at=1)
    script.alloc(4, at=2)
    script.alloc(1, at=99)
    assert curves(script.trace(duration=100), HOST, bins=4).curves[0].bytes.tolist() == [9, 4, 4, 5, 5]


def test_the_layers_are_those_of_the_moments_that_are_shown():
    script = sizes_in_turn(*range(1, 500))
    for block in script.blocks:
        block["category"] = block["sizes"][0] % 2 + 1
    found = curves(script.trace(), HOST)
    assert found.areas is not None
    assert set(found.areas.layers) == {"parameter", "buffer"}
    assert found.areas.total_bytes.tolist() == found.curves[0].bytes.tolist()
    assert (found.areas.time_ns / 1e9).tolist() == found.curves[0].time_s.tolist()
    assert found.top_bytes == found.peak.low_bytes == 499
    assert curves(sizes_in_turn(1, 2).trace(), HOST).areas is None


def test_layers_that_move_too_much_to_be_seen_get_fewer_and_wider_steps():
    script, random = Script(HOST), np.random.default_rng(0)
    alive: list[int] = []
    for _ in range(4000):
        if len(alive) > 20:
            script.free(alive.pop(int(random.integers(len(alive)))))
        alive.append(script.alloc(int(random.integers(1, 9000)), category=int(random.integers(8))))
    trace = script.trace()
    found = curves(trace, HOST)
    assert found.areas is not None
    assert 40 <= len(found.areas.time_ns) - 1 < 100
    assert found.areas.total_bytes.tolist() == found.curves[0].bytes.tolist()
    assert found.top_bytes == found.peak.low_bytes


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


def test_stretches_without_events_are_named():
    lost = Bounded(0, 1_000_000_000, 2_000_000_000, 5)
    let_go = Bounded(0, 0, 500_000_000, 5, 10, 10)
    elsewhere = Bounded(1, 0, 1, 5)
    trace = Script().trace(duration=3_000_000_000, bounded=(lost, let_go, elsewhere))
    assert curves(trace, GPU).lost == ((1.0, 2.0), (0.0, 0.5))


def test_a_plateau_needs_no_points_in_between():
    script = Script()
    for at in range(1, 50):
        script.free(script.alloc(0, at=2 * at), at=2 * at + 1)
    found = curves(script.trace(), script.devices[0])
    assert np.all(found.curves[0].bytes == 0)
    assert len(found.curves[0].bytes) == 2
