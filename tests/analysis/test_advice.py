from __future__ import annotations

import pytest

from memlab.analysis.advice import Findings, Tried, cheapest, interval_text, ranked, saved

MiB = 1 << 20
BEFORE = (100 * MiB, 100 * MiB)


def tried(*names: str, saves: int = 0, **more: object) -> Tried:
    after = 100 * MiB - saves * MiB
    return Tried(names, (after, after), (saves * MiB, saves * MiB), **more)  # type: ignore[arg-type]


def names(found: list[Tried]) -> list[str]:
    return [one.name for one in found]


def test_a_saving_of_predictions_takes_like_ends_from_each_other():
    assert saved((100, 120), (60, 70)) == (40, 50)
    assert saved((100, 120), (60, 100)) == (20, 40)
    assert saved((100, 100), (130, 130)) == (-30, -30)


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


@pytest.mark.parametrize(
    "useless",
    [
        tried("failed", failed="does not apply"),
        tried("wrong", saves=50, is_wrong=True),
        tried("nothing"),
        tried("crumbs", saves=1),
        tried("worse", saves=-5),
    ],
    ids=lambda one: one.name,
)
def test_what_does_not_help_is_not_ranked(useless):
    assert ranked([useless], BEFORE) == []


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


def test_by_how_much_a_target_is_missed():
    best = tried("best", saves=30, ratio=1.0)
    found = Findings("work", "cpu", "allocated", BEFORE, 50 * MiB, tried=(best,), recommended=best)
    assert (found.reaches, found.missed_bytes) == (False, 20 * MiB)
    reached = Findings("work", "cpu", "allocated", BEFORE, 70 * MiB, tried=(best,), recommended=best)
    assert (reached.reaches, reached.missed_bytes) == (True, 0)
    assert Findings("work", "cpu", "allocated", BEFORE).reaches is None


def test_a_row_for_each_that_was_tried_and_no_figures_where_there_are_none():
    best, failed = tried("best", saves=30, ratio=1.5, results="equal"), tried("bad", failed="does not apply: no ReLU")
    frame = Findings("work", "cpu", "allocated", BEFORE, tried=(failed, best), recommended=best).to_pandas()
    assert frame.techniques.tolist() == ["best", "bad"]
    assert frame.saved_low_bytes.isna().tolist() == [False, True]
    assert frame.saved_low_bytes[0] == 30 * MiB
    assert frame.recommended.tolist() == [True, False]
    assert frame.failed[1] == "does not apply: no ReLU"


def test_sizes_below_zero_have_a_sign_that_is_read():
    assert interval_text((-MiB, MiB)) == "−1.00 MiB to 1.00 MiB"
    assert interval_text((0, 0)) == "0 B"
