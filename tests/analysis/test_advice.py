from __future__ import annotations

import pytest

from memlab.analysis.advice import LEAST_BYTES, PLURAL, Findings, Tried, cheapest, interval_text, pointer, ranked, saved
from memlab.trace import Category
from memlab.units import UNBOUNDED

MiB = 1 << 20
BEFORE = (100 * MiB, 100 * MiB)


def tried(*names: str, saves: int = 0, **more: object) -> Tried:
    after = 100 * MiB - saves * MiB
    return Tried(names, (after, after), (saves * MiB, saves * MiB), **more)  # type: ignore[arg-type]


def names(found: list[Tried]) -> list[str]:
    return [one.name for one in found]


def test_a_saving_of_predictions_takes_like_ends_from_each_other_and_below_zero_has_a_sign_that_is_read():
    assert saved((100, 120), (60, 70)) == (40, 50)
    assert saved((100, 120), (60, 100)) == (20, 40)
    assert saved((100, 100), (130, 130)) == (-30, -30)
    assert saved((100, UNBOUNDED), (60, 70)) == (30, UNBOUNDED)  # 100 - 70; like ends would be 40
    assert (interval_text((-MiB, MiB)), interval_text((0, 0))) == ("−1.00 MiB to 1.00 MiB", "0 B")


def test_bytes_for_extra_time_decide_where_time_was_measured():
    cheap, dear = tried("cheap", saves=20, ratio=1.0), tried("dear", saves=50, ratio=1.4)
    assert names(ranked([dear, cheap], BEFORE)) == ["cheap", "dear"]
    much = tried("much", saves=90, ratio=1.1)
    assert names(ranked([dear, cheap, much], BEFORE)) == ["much", "cheap", "dear"]


def test_faster_is_not_worth_more_than_free():
    """A step that happens to be timed shorter must not outrank one that saves more."""
    lucky, better = tried("lucky", saves=20, ratio=0.5), tried("better", saves=21, ratio=1.0)
    assert names(ranked([lucky, better], BEFORE)) == ["better", "lucky"]


def test_without_times_what_declares_no_price_comes_first_and_what_changes_training_last():
    free, costly = tried("free", saves=10, costs=False), tried("costly", saves=60)
    other = tried("other", saves=90, costs=False, changes=True)
    assert names(ranked([other, costly, free], BEFORE)) == ["free", "costly", "other"]


def test_what_does_not_help_is_not_ranked():
    useless = [tried("failed", failed="does not apply"), tried("wrong", saves=50, is_wrong=True)]
    assert ranked([*useless, tried("nothing"), tried("crumbs", saves=1), tried("worse", saves=-5)], BEFORE) == []


def test_an_interval_counts_by_what_is_certain():
    perhaps = Tried(("perhaps",), (10 * MiB, 99 * MiB), (0, 90 * MiB))
    assert ranked([perhaps], BEFORE) == []
    assert cheapest([perhaps], 50 * MiB) is None


def test_the_cheapest_that_reaches_the_target():
    slow, two = tried("slow", saves=60, ratio=2.0), tried("a", "b", saves=55, ratio=1.02)
    short = tried("short", saves=20, ratio=1.0)
    assert cheapest([slow, two, short], 50 * MiB) is two
    one = tried("one", saves=52, ratio=1.03)
    assert cheapest([two, one], 50 * MiB) is one, "of the same price the fewer"
    assert cheapest([short], 50 * MiB) is None
    assert cheapest([tried("wrong", saves=60, is_wrong=True)], 50 * MiB) is None


@pytest.mark.parametrize(
    ("target", "reaches", "missed"), [(50 * MiB, False, 20 * MiB), (70 * MiB, True, 0), (None, None, 0)]
)
def test_by_how_much_a_target_is_missed(target, reaches, missed):
    best = tried("best", saves=30, ratio=1.0)
    found = Findings("work", "cpu", "allocated", BEFORE, target, tried=(best,), recommended=best)
    assert (found.reaches, found.missed_bytes) == (reaches, missed)


def test_a_row_for_each_that_was_tried_and_no_figures_where_there_are_none():
    best, failed = tried("best", saves=30, ratio=1.5, results="equal"), tried("bad", failed="does not apply: no ReLU")
    frame = Findings("work", "cpu", "allocated", BEFORE, tried=(failed, best), recommended=best).to_pandas()
    assert frame.techniques.tolist() == ["best", "bad"]
    assert frame.saved_low_bytes.isna().tolist() == [False, True]
    assert frame.saved_low_bytes[0] == 30 * MiB
    assert frame.recommended.tolist() == [True, False]
    assert frame.failed[1] == "does not apply: no ReLU"


LARGE = {"activation": 74 * MiB, "parameter": 26 * MiB}


def test_the_line_names_the_share_and_how_many_are_tried():
    call = "memlab.advise(memlab.runs['a'])"
    line = pointer(LARGE, {"activation": 7}, call)
    assert line == f"Activations hold 74 % of the peak: {call} finds out which of 7 techniques, if any, would lower it."
    assert "which of 1 technique, if any, would" in pointer(LARGE, {"activation": 1}, "f()")
    assert "of what was allocated" in pointer(LARGE, {"activation": 1}, "f()", "what was allocated")


@pytest.mark.parametrize(
    ("shares", "known"),
    [
        ({}, {"activation": 7}),
        ({"activation": LEAST_BYTES - 1}, {"activation": 7}),
        ({"activation": 40 * MiB, "parameter": 30 * MiB, "gradient": 30 * MiB}, {"activation": 7}),
        ({"other": 100 * MiB}, {"other": 7, "activation": 7}),
        (LARGE, {"parameter": 7}),
        (LARGE, {"activation": 0}),
    ],
    ids=["nothing", "small", "spread", "unknown", "no technique", "none left"],
)
def test_nothing_is_said_where_nothing_large_applies(shares, known):
    assert pointer(shares, known, "f()") == ""


def test_it_knows_the_categories_that_techniques_attack():
    assert set(PLURAL) < {category.name.lower() for category in Category}
