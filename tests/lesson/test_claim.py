from __future__ import annotations

import pytest
import torch

from memlab.allocator import CachingAllocator
from memlab.api.runs import runs
from memlab.api.track import track
from memlab.errors import ClaimRefuted, MemlabError
from memlab.lesson import Lesson
from memlab.units import MiB


@pytest.fixture
def lesson() -> Lesson:
    return Lesson("claims", needs=1)


def test_a_saving_that_is_one(lesson):
    claim = lesson.saves("half", 200 * MiB, 100 * MiB)
    assert claim.saved_share == 0.5 and claim.text == claim.sentence  # as it was called before
    sentence = "with half the peak of allocated is 100.0 MiB instead of 200.0 MiB (-50%)."
    assert str(claim) == f"Claim holds: {sentence}", "two numbers do not say where they come from"


@pytest.mark.parametrize("after", [151 * MiB, 200 * MiB, 300 * MiB])
def test_a_saving_that_is_none(after, lesson):
    with pytest.raises(ClaimRefuted, match="At least 25% was claimed"):
        lesson.saves("it", 200 * MiB, after)
    assert issubclass(ClaimRefuted, AssertionError)  # as any assertion in a notebook
    assert not lesson.claims and not lesson.headlines


def test_a_myth(lesson):
    claim = lesson.saves_nothing("emptying", 1000, 995)
    assert claim.saved_share == 0.005 and claim.sentence.endswith("(±0%).")
    for after in (900, 1100):
        with pytest.raises(ClaimRefuted, match="At most 1% was claimed"):
            lesson.saves_nothing("emptying", 1000, after)


def test_two_runs_of_this_machine(lesson):
    with track("large", show=False) as large:
        torch.empty(1 << 20)
    with track("small", show=False) as small:
        torch.empty(1 << 10)
    try:
        assert "measured on cpu" in str(lesson.saves("less", large, small))
        with pytest.raises(MemlabError, match="a claim compares runs, or numbers of bytes, got str"):
            lesson.saves("less", large, "3")  # type: ignore[arg-type]
    finally:
        runs.discard(large)
        runs.discard(small)


@pytest.mark.parametrize(("before", "share"), [(0, 0.25), (100, 0), (100, 1.5)])
def test_what_cannot_be_claimed(before, share, lesson):
    with pytest.raises(MemlabError):
        lesson.saves("it", before, 0, at_least=share)


def test_an_account_shows_what_it_cannot_explain(lesson):
    terms = [("weights", "4 P", 400, 400), ("activations", "4 BH", 580, 596)]
    made = lesson.account("Peak", 1000, terms, CachingAllocator(1 << 30))
    assert made.unexplained_bytes == 20 and made.terms[1].residual_bytes == 16
    assert str(made).splitlines()[2:] == [
        "  what         formula  computed  simulated  residual",
        "  weights      4 P         400 B      400 B       0 B",
        "  activations  4 BH        580 B      596 B     +16 B",
        "  together                 980 B     1000 B     +20 B",
        "The formulas leave 20 B of 1000 B unexplained (2.0%).",
    ]
    assert list(made.to_pandas()["residual_bytes"]) == [0, 16]
    assert "&lt;b&gt;" in lesson.account("<b>", 1, [("<b>", "", 1, 1)])._repr_mimebundle_()["text/html"]
    headings = str(lesson.account("Peak", 1, [("a", "1", 1, 1)])).splitlines()[2].split()
    assert headings[2:4] == ["computed", "counted"]


@pytest.mark.parametrize(
    ("terms", "missing"),
    [
        ([("weights", "P", 60 * MiB, 60 * MiB)], r"together \(\+40.0 MiB\)"),
        (
            [("weights", "P", 60 * MiB, 50 * MiB), ("rest", "R", 40 * MiB, 50 * MiB)],
            r"weights \(-10.0 MiB\), rest \(\+10.0 MiB\)",
        ),
    ],
)
def test_an_account_that_leaves_a_gap_is_refused_and_shows_it(terms, missing, lesson):
    with pytest.raises(ClaimRefuted, match=missing) as refused:
        lesson.account("Peak", 100 * MiB, terms)
    assert "at most 3% of" in str(refused.value)
