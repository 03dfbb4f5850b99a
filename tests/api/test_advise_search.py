"""The search, on a subject whose peaks are written down: what is run, in which order, and what is recommended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from scripted_traces import HOST, Script

from memlab.api.advise.search import MAX_COMBINED, Search, ratio
from memlab.api.advise.subject import TimeUp
from memlab.api.run import Run
from memlab.errors import DoesNotApply, MemlabError
from memlab.saving_techniques import techniques
from memlab.trace import Category

MiB = 1 << 20
CHECKPOINT, IN_PLACE, OFFLOAD, FUSED, SEGMENTS = "checkpoint", "in_place", "offload", "fused", "sqrt_segments"


def run_of(
    peak_mib: float, seconds: float = 1.0, category: Category = Category.ACTIVATION, result: object = 1.0
) -> Run:
    script = Script(HOST)
    script.alloc(round(peak_mib * MiB), category=category)
    run = Run("a try", script.trace(duration=10**9))
    run.note("trial", {"on": "cpu", "step_s": [seconds], "techniques": [], "habits": [], "notes": []})
    run.result(result)
    return run


@dataclass
class Written:
    """A subject that does not run: `peaks` has the run or the error of each set of techniques."""

    peaks: dict[frozenset[str], object]
    name: str = "written"
    on: str = "cpu"
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def why_not(self, technique: object) -> str:
        return ""

    def attempt(self, names: Sequence[str], tell: Callable[[str], None], left_s: float) -> Run:
        self.asked.append(tuple(names))
        found = self.peaks[frozenset(names)]
        if isinstance(found, BaseException):
            raise found
        return found if isinstance(found, Run) else run_of(float(found))  # type: ignore[arg-type]


def searched(
    peaks: dict[object, object], target_mib: float | None = None, names: Sequence[str] = (), others: Sequence[str] = ()
) -> tuple[Search, Written]:
    subject = Written({frozenset(k if isinstance(k, tuple) else (k,) if k else ()): one for k, one in peaks.items()})
    target = None if target_mib is None else round(target_mib * MiB)
    search = Search(subject, "allocated", lambda text: None, time.monotonic() + 60, target)
    search.begin(subject.attempt((), lambda text: None, 60))
    search.go(names or [next(iter(key)) for key in subject.peaks if len(key) == 1], others)
    return search, subject


@pytest.mark.parametrize(
    ("peaks", "names"),
    [
        ({(CHECKPOINT, IN_PLACE): 55}, (CHECKPOINT, IN_PLACE)),  # savings do not add up
        ({(CHECKPOINT, IN_PLACE): 60}, (CHECKPOINT,)),  # what adds nothing is left out
        ({IN_PLACE: 100, (CHECKPOINT, IN_PLACE): 40}, (CHECKPOINT, IN_PLACE)),  # alone it saves nothing
    ],
)
def test_every_combination_is_run_and_what_helps_is_recommended(peaks, names):
    search, subject = searched({"": 100, CHECKPOINT: 60, IN_PLACE: 70, **peaks})
    assert (CHECKPOINT, IN_PLACE) in subject.asked
    assert search.recommended.names == names
    peak = min(60, peaks[CHECKPOINT, IN_PLACE]) * MiB
    assert search.recommended.saved_bytes == (100 * MiB - peak, 100 * MiB - peak)
    assert search.best.peak_bytes == peak


def test_a_technique_that_adds_next_to_nothing_is_not_recommended():
    search, subject = searched({"": 100, CHECKPOINT: 60, IN_PLACE: 100, (CHECKPOINT, IN_PLACE): 59.5})
    assert (CHECKPOINT, IN_PLACE) in subject.asked and search.recommended.names == (CHECKPOINT,)


IN_BACKWARD = "step_in_backward"
MOVING = {
    "": run_of(100, category=Category.OPTIMIZER),
    FUSED: run_of(80, category=Category.ACTIVATION),
    (FUSED, OFFLOAD): run_of(60, category=Category.GRADIENT),
    (FUSED, OFFLOAD, IN_BACKWARD): run_of(40, category=Category.OPTIMIZER),
}


def test_what_holds_little_of_the_first_peak_is_tried_once_another_technique_has_moved_it():
    search, subject = searched(MOVING, names=[FUSED], others=[IN_BACKWARD, OFFLOAD, "mmap_loading"])
    assert search.recommended.names == (FUSED, OFFLOAD, IN_BACKWARD)
    assert subject.asked == [(), (FUSED,), (FUSED, OFFLOAD), (FUSED, OFFLOAD, IN_BACKWARD)], "each as it can help"
    held = "acts on what holds little of the peak"
    left_out = search.findings([(one, held) for one in (IN_BACKWARD, OFFLOAD, "mmap_loading")], (), 1.0).left_out
    assert left_out == (("mmap_loading", held),)


def test_what_a_later_technique_makes_needless_is_left_out_of_what_reaches_the_target():
    peaks = MOVING | {(OFFLOAD, IN_BACKWARD): 45, (FUSED, IN_BACKWARD): 70}
    search, subject = searched(peaks, 50, [FUSED], [IN_BACKWARD, OFFLOAD])
    assert search.recommended.names == (OFFLOAD, IN_BACKWARD)
    assert (OFFLOAD,) not in subject.asked and (IN_BACKWARD,) not in subject.asked


def test_what_cannot_be_together_is_not_run_together():
    assert techniques.conflict([CHECKPOINT, SEGMENTS])
    peaks = {"": 100, SEGMENTS: run_of(70, 1.0), CHECKPOINT: run_of(50, 2.0), IN_PLACE: 90}
    search, subject = searched(peaks | {(SEGMENTS, IN_PLACE): 65, (CHECKPOINT, IN_PLACE): 30})
    assert not any({CHECKPOINT, SEGMENTS} <= set(one) for one in subject.asked)
    assert search.recommended.names == (CHECKPOINT, IN_PLACE), "the one that saves most gets a chain of its own"


def test_it_stops_when_the_target_is_reached():
    search, subject = searched({"": 100, CHECKPOINT: 60, IN_PLACE: 70}, target_mib=65)
    assert search.combined == []
    assert search.recommended.names == (CHECKPOINT,)
    assert subject.asked == [(), (CHECKPOINT,), (IN_PLACE,)]


def test_the_cheapest_that_reaches_the_target_is_taken():
    peaks = {"": 100, CHECKPOINT: run_of(30, 1.5), IN_PLACE: run_of(70, 1.0), FUSED: run_of(72, 1.0)}
    search, _ = searched(peaks | {(IN_PLACE, CHECKPOINT): run_of(29, 1.5), (CHECKPOINT, FUSED): run_of(29, 1.5),
                                  (IN_PLACE, FUSED): run_of(45, 1.0)}, target_mib=50)  # fmt: skip
    assert search.recommended.names in {(IN_PLACE, FUSED), (CHECKPOINT,)}
    ratio = search.recommended.ratio
    others = [one for one in (*search.tried, *search.combined) if max(one.peak_bytes) <= 50 * MiB]
    assert ratio == min(one.ratio for one in others if one.ratio is not None)


def test_a_target_that_is_missed_is_told_by_how_much():
    search, _ = searched({"": 100, CHECKPOINT: 60}, target_mib=20)
    found = search.findings((), (), 1.0)
    assert (found.reaches, found.missed_bytes) == (False, 40 * MiB)


def test_nothing_is_recommended_that_was_not_run_well():
    broken, own = ValueError("broken\nsecond line"), MemlabError("what is wrong, what to do")
    search, _ = searched(
        {"": 100, CHECKPOINT: DoesNotApply("checkpoint: no blocks"), IN_PLACE: broken, OFFLOAD: 100, FUSED: own}
    )
    assert search.recommended is None
    reasons = ["does not apply: no blocks", "ValueError: broken", "", "what is wrong, what to do"]
    assert [one.failed for one in search.tried] == reasons


def test_results_that_differ_more_than_is_claimed_are_not_recommended_and_within_it_are_close():
    assert techniques[CHECKPOINT].equality.kind == "exact"
    search, _ = searched(
        {"": run_of(100, result=1.0), CHECKPOINT: run_of(10, result=7.0), IN_PLACE: run_of(80, result=1.0)}
    )
    assert (search.tried[0].results, search.tried[0].is_wrong) == ("different", True)
    assert search.recommended.names == (IN_PLACE,)
    allowed = techniques["autocast_bf16"].equality.relative
    assert allowed > 0.002
    near = run_of(60, result=1.0 + 0.9 * allowed)
    search, _ = searched({"": run_of(100, result=1.0), "autocast_bf16": near})
    assert (search.tried[0].results, search.tried[0].is_wrong) == ("close", False)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), TimeUp("the time limit was reached")], ids=["interrupt", "time"])
def test_what_was_tried_before_the_end_is_kept(stop):
    search, _ = searched({"": 100, CHECKPOINT: 60, IN_PLACE: stop, OFFLOAD: 10})
    assert [one.name for one in search.tried] == [CHECKPOINT]
    assert search.recommended.names == (CHECKPOINT,)
    assert "after 1 of 3 techniques" in search.stopped


def test_an_end_after_every_technique_alone_says_so():
    search, _ = searched({"": 100, CHECKPOINT: 60, IN_PLACE: 70, (CHECKPOINT, IN_PLACE): TimeUp("over")})
    assert search.stopped == "its time limit was reached after all 2 techniques alone and 0 combinations"


def test_no_run_is_begun_when_the_time_is_over():
    subject = Written({frozenset(): 100.0, frozenset({CHECKPOINT}): 60.0})
    search = Search(subject, "allocated", lambda text: None, time.monotonic() - 1)
    search.begin(run_of(100))
    search.go([CHECKPOINT])
    assert (subject.asked, search.stopped) == ([], "its time limit was reached after 0 of 1 technique")


def test_the_number_of_runs_is_bounded():
    class Any(Written):
        def attempt(self, names: Sequence[str], tell: Callable[[str], None], left_s: float) -> Run:
            self.asked.append(tuple(names))
            return run_of(100 - 2 * len(names))

    savings = [one.name for one in techniques.values() if one.kind == "saving"]
    subject = Any({})
    search = Search(subject, "allocated", lambda text: None, time.monotonic() + 600)
    search.begin(run_of(100))
    search.go(savings)
    assert len(subject.asked) <= len(savings) + MAX_COMBINED
    assert not techniques.conflict(search.recommended.names)


@pytest.mark.parametrize(
    ("facts", "times"), [({"step_s": [4.0, 3.0, -1.0, "x"]}, 1.5), ({"step_s": "?"}, 0.5), ("?", 0.5), ({}, 0.5)]
)
def test_the_ratio_is_of_the_quickest_steps_else_of_the_runs_whatever_a_file_says(facts, times):
    before, after = run_of(100, 2.0), run_of(50)  # a run takes one second
    after.note("trial", facts)
    assert ratio(before, after) == times
