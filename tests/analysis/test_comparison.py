from __future__ import annotations

import dataclasses
import doctest

import numpy as np
import pytest
from scripted_traces import GPU, HOST, Script, busy

from memlab.analysis import comparison, results
from memlab.analysis.comparison import UNTOLD, Difference, Side, differences, known_by, picture
from memlab.errors import MemlabError
from memlab.trace import Bounded, Category
from memlab.trace.trace import Trace
from memlab.units import UNBOUNDED, ByteRange


def side(trace: Trace, name: str = "a", low: int | None = None, high: int | None = None) -> Side:
    from memlab.analysis.peak import peak

    device = trace.made_by.devices[0]
    at = peak(trace, device.index)
    return Side(
        name, trace, device, ByteRange(at.low_bytes if low is None else low, at.high_bytes if high is None else high)
    )


def held(*blocks: tuple[int, dict], device=HOST, notes: dict | None = None, **made_by: object) -> Side:
    """A run that holds these blocks at its peak."""
    script = Script(device)
    for size, known in blocks:
        script.alloc(size, **known)
    return side(script.trace(notes=notes, **made_by))


PARAMETER, ACTIVATION = {"category": Category.PARAMETER}, {"category": Category.ACTIVATION}


def test_the_examples_in_docstrings_are_true():
    for module in (comparison, results):
        assert not doctest.testmod(module).failed


def test_differences_are_of_b_less_a_the_largest_first():
    a = held((100, PARAMETER), (700, ACTIVATION))
    b = held((100, PARAMETER), (300, ACTIVATION), (50, {"category": Category.OPTIMIZER}))
    found = differences(a, b)
    assert list(found.items()) == [
        ("activation", Difference(700, 300)), ("optimizer", Difference(0, 50)), ("parameter", Difference(100, 100))]  # fmt: skip
    assert [one.difference_bytes for one in found.values()] == [-400, 50, 0]
    assert found.total == Difference(800, 450)
    assert a.peak - b.peak == (350, 350)
    assert found.to_pandas()["difference_bytes"].sum() == -350
    assert str(found).splitlines()[0].split() == ["activation", "700", "B", "300", "B", "−400", "B"]


def test_the_modules_of_a_model_that_was_built_again_match():
    a = held((100, {"module": "net.0.fc"}), (50, {"module": "net"}))
    b = held((300, {"module": "net#2.0.fc"}), (50, {"module": "net#2"}))
    found = differences(a, b, "module")
    assert dict(found.items()) == {"net.0.fc": Difference(100, 300), "net": Difference(50, 50)}
    both = held((300, {"module": "net.0"}), (50, {"module": "net#2.0"}))  # a student and its teacher
    assert set(differences(both, both, "module")) == {"net.0", "net#2.0"}
    assert set(differences(a, both, "module")) == {"net.0.fc", "net", "net.0", "net#2.0"}


@pytest.mark.parametrize("by", ["category", "module", "line", "tensor", "phase"])
@pytest.mark.parametrize("seed", range(3))
def test_the_differences_sum_to_that_of_the_peaks_exactly(by, seed):
    """With rounding, with what was there before, with what has no module: busy traces have all of it."""
    random = np.random.default_rng(seed)

    def categorised(trace: Trace) -> Trace:
        return dataclasses.replace(
            trace, blocks=trace.blocks.replace(category=random.integers(0, 8, len(trace.blocks)))
        )

    a, b = side(categorised(busy(900, seed))), side(categorised(busy(1400, seed + 10)))
    found = differences(a, b, by)
    assert sum(one.difference_bytes for one in found.values()) == b.peak.low - a.peak.low
    assert found.total == Difference(a.peak.low, b.peak.low)
    assert by == "phase" or "rounding" in found


@pytest.mark.parametrize(
    ("peak", "untold", "saves"),
    [
        (ByteRange(1000, 1200), 900, (900, 1100)),  # a prediction needs more than its trace reached
        (ByteRange(100, UNBOUNDED), 0, (0, UNBOUNDED)),
    ],
)
def test_what_nobody_saw_is_a_share_of_its_own(peak, untold, saves):
    seen, more = held((100, PARAMETER)), dataclasses.replace(held((100, PARAMETER)), peak=peak)
    found = differences(more, seen)
    assert found.total == Difference(100 + untold, 100)
    assert found.get(UNTOLD) == (Difference(untold, 0) if untold else None)
    assert more.peak - seen.peak == saves
    assert differences(seen, more).total == Difference(100, 100 + untold)
    assert seen.peak - more.peak == tuple(-end for end in reversed(saves))


def test_where_events_were_lost_all_of_the_peak_is_untold():
    lost = held((100, PARAMETER), device=GPU, bounded=(Bounded(0, 0, 5, 3),))
    found = differences(dataclasses.replace(lost, peak=ByteRange(5000, 9000)), held((100, PARAMETER)))
    assert dict(found.items()) == {UNTOLD: Difference(5000, 0), "parameter": Difference(0, 100)}


def test_a_peak_without_an_upper_end_saves_nobody_knows_what():
    open_end = dataclasses.replace(held((100, PARAMETER)), peak=ByteRange(100, UNBOUNDED))
    assert open_end.peak - open_end.peak == (-UNBOUNDED, UNBOUNDED)


def test_it_is_compared_by_what_either_run_knows():
    plain, module = held((1, {})), held((1, {"module": "m"}))
    assert known_by(plain, plain) == ()
    assert known_by(plain, module) == ("module",)
    assert known_by(held((1, PARAMETER)), held((1, {"line": "cell:1"}))) == ("category",)


def test_a_line_has_one_name_as_only_runs_that_followed_lines_alike_are_compared_by_line():
    of_frames, followed = held((1, {"line": "/tmp/train.py:1"})), lined((1, 10), texts={1: "x"})
    assert known_by(of_frames, of_frames) == known_by(followed, followed) == ("line",)
    assert known_by(of_frames, followed) == known_by(followed, of_frames) == ()


def test_by_what_is_unknown_is_refused_in_one_line():
    one = held((1, PARAMETER))
    with pytest.raises(MemlabError, match="cannot compare by 'colour'"):
        differences(one, one, "colour")
    with pytest.raises(MemlabError, match="neither run knows its lines"):
        differences(one, one, "line")


def test_a_trace_in_which_nothing_happened():
    empty = side(Script(HOST).trace())
    assert dict(differences(empty, empty)) == {}
    assert differences(empty, held((5, PARAMETER))).total == Difference(0, 5)
    assert picture(empty, empty).top_bytes == 1


# --- lines ---


def lined(*lines: tuple[int, int], texts: dict[int, str]) -> Side:
    """(number, bytes) of lines of a cell, with the text of the cell."""
    blocks = [(size, {"line": f"cell:{number}"}) for number, size in lines]
    return held(*blocks, notes={"lines": {"cell": {str(n): text for n, text in texts.items()}}})


def test_a_line_that_moved_is_the_same_line():
    a = lined((1, 100), (2, 50), texts={1: "h = block(x)", 2: "loss = h.sum()"})
    b = lined((2, 30), (3, 50), texts={1: "# now checkpointed", 2: "h = checkpoint(block, x)", 3: "loss = h.sum()"})
    found = differences(a, b, "line")
    assert dict(found.items()) == {
        "cell:1 (a)": Difference(100, 0), "cell:2 (b)": Difference(0, 30), "cell:2 → 3": Difference(50, 50)}  # fmt: skip
    assert found.texts["cell:2 → 3"] == "loss = h.sum()"
    assert found.texts["cell:2 (b)"] == "h = checkpoint(block, x)"


def test_lines_that_are_the_same_keep_their_names_and_those_of_one_run_are_against_nothing():
    a, b = (lined((1, size), texts={1: "x"}) for size in (10, 20))
    assert list(differences(a, b, "line")) == ["cell:1"]
    found = differences(a, held((7, {})), "line")
    assert dict(found.items()) == {"cell:1": Difference(10, 0), "elsewhere": Difference(0, 7)}


@pytest.mark.parametrize("notes", [{}, {"lines": 5}, {"lines": {"cell": "x"}}, {"lines": {"cell": {"a": 1, "-3": []}}}])
def test_texts_from_a_file_that_are_none_are_left_out(notes):
    one = held((5, {"line": "cell:1"}), notes=notes)
    assert dict(differences(one, one, "line").items()) == {"cell:1": Difference(5, 5)}


def test_no_line_is_lost_or_counted_twice():
    random = np.random.default_rng(0)
    for _ in range(40):
        texts = [{n + 1: f"t{random.integers(4)}" for n in range(random.integers(1, 9))} for _ in "ab"]
        a, b = (lined(*[(n, int(random.integers(1, 99))) for n in text], texts=text) for text in texts)
        found = differences(a, b, "line")
        assert found.total == Difference(a.peak.low, b.peak.low)
        names = comparison.matched(*({"cell": text} for text in texts))
        assert [len(set(one.values())) for one in (names.of_a, names.of_b)] == [len(text) for text in texts]


# --- what is drawn ---


def timed(duration_ns: int, size: int = 100) -> Side:
    script = Script(HOST)
    script.free(script.alloc(size, at=duration_ns // 4), at=duration_ns // 2)
    return side(script.trace(duration=duration_ns))


def test_where_one_takes_far_longer_the_axis_is_the_share_of_each():
    found = picture(timed(10**9), timed(3 * 10**9))
    assert (found.by_share, found.why, found.duration_s) == (False, "", 3.0)
    far = picture(timed(10**9), timed(9 * 10**9))
    assert (far.by_share, far.why) == (True, "one took 9 times as long")


def test_where_seconds_mean_nothing_both_runs_are_drawn_over_their_events():
    found = picture(timed(10**9), timed(9 * 10**9), has_time=False)
    assert (found.by_share, found.why, found.duration_s) == (False, "", 2.0)
    assert [one.time_s.tolist() for one in found.sides] == [[0, 1, 2, 2]] * 2
    script = Script(HOST)
    for at in range(10):
        script.alloc(100, at=at)
    far = picture(timed(10**9), side(script.trace(duration=10)), has_time=False)
    assert (far.by_share, far.why) == (True, "one has 5 times as many events")


def test_the_drawn_stair_has_the_peak_and_the_bars_sum_to_it():
    trace = busy(5000)
    found = picture(side(trace), side(trace))
    assert len(found.a.time_s) < 300
    assert found.a.bytes.max() == found.a.peak.low == sum(count for _, count in found.a.shares)


def test_the_bars_are_stacked_as_areas_are_and_what_is_not_known_lies_on_top():
    a = held((5, ACTIVATION), (9, PARAMETER), device=GPU)
    found = picture(dataclasses.replace(a, peak=ByteRange(20, a.peak.high)), held((1, {})))
    assert found.a.shares == (("parameter", 9), ("activation", 5), (UNTOLD, 6))
    assert picture(held((3, {})), held((4, {}))).b.shares == (("allocated", 4),)
