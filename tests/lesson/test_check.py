from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest
import torch

from memlab.api.runs import runs
from memlab.errors import MemlabError
from memlab.lesson.check import Check, Verdict
from memlab.units import MiB
from memlab.views import theme

ROWS = 1 << 20  # 4 MiB of float32


def wasteful() -> torch.Tensor:
    held = [torch.ones(ROWS) * k for k in range(4)]
    return sum(held).sum()


def frugal() -> torch.Tensor:
    total = torch.zeros(ROWS)
    for k in range(4):
        total += k
    return total.sum()


@pytest.fixture(autouse=True)
def no_runs() -> Iterator[None]:
    before = list(runs)
    gc.collect()  # what other tests left to be collected would be part of the peaks
    yield
    assert list(runs) == before


def test_solved():
    heard: list[Verdict] = []
    verdict = Check(frugal, "cpu", heard.append).same_as(wasteful).peak_below(10 * MiB)
    assert verdict.passed and heard == [verdict]
    assert re.match(
        r"✓ Solved\.\n  ✓ Peak [\d.]+ MiB, limit 10\.00 MiB\.\n  ✓ The same result bit for bit\.", str(verdict)
    )
    assert verdict.run is not None and verdict.took_s > 0
    start = verdict.run.devices[0].levels[0].start_bytes
    assert 4 * MiB <= verdict.run.peak_allocated_bytes - start < 4 * MiB + 1024


def broken() -> None:
    raise ValueError("half of it\nis missing")


@pytest.mark.parametrize(
    ("yours", "said"),
    [
        (wasteful, r"^✗ Not yet\.\n  ✗ Peak .*mine\.verdicts\[-1\]\.run shows the rest\.\n  ✓ The same"),
        (
            lambda: frugal() + 1,
            r"  ✓ Peak.*\n  ✗ The results differ by .* of the largest value; no difference .*They must agree",
        ),
        (lambda: None, r"^○ Not yet\.\n .*returns nothing yet"),
        (lambda: ..., "returns nothing yet"),
        (broken, r"^✗ Not yet\.\n    broken\(\) raised ValueError: half of it$"),
    ],
)
def test_what_is_not_solved_says_why(yours, said):
    verdict = Check(yours, "cpu", name="mine").same_as(wasteful).peak_below("10 MiB")
    assert not verdict.passed and re.search(said, str(verdict), re.DOTALL)


def test_within_a_tolerance():
    nearly = Check(lambda: frugal() * (1 + 1e-5), "cpu")
    refused = nearly.same_as(wasteful).peak_below("10 MiB")
    assert not refused.passed and re.search(
        r"results differ by [^;]* of the largest value; no difference is allowed\. They must", str(refused)
    )
    assert nearly.same_as(wasteful, relative=1e-4).peak_below("10 MiB").passed


def test_an_interrupt_goes_out():
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Check(stopped, "cpu").same_as(wasteful).peak_below("10 MiB")


def test_both_sides_are_asked():
    with pytest.raises(MemlabError, match="say what the result must be"):
        Check(frugal).peak_below("10 MiB")
    with pytest.raises(MemlabError, match="check a function"):
        Check(3)  # type: ignore[arg-type]
    with pytest.raises(MemlabError, match="compare with a function"):
        Check(frugal).same_as(3)  # type: ignore[arg-type]


def test_it_is_seen_at_a_glance_and_not_by_colour_alone():
    """Sign and word besides the colour, which is legible on white and on black; signs are not read aloud, words are."""
    solved = Check(frugal, "cpu").same_as(wasteful).peak_below(10 * MiB).html
    failed = Check(wasteful, "cpu").same_as(wasteful).peak_below(10 * MiB).html
    unwritten = Check(lambda: ..., "cpu").same_as(wasteful).peak_below(10 * MiB).html
    for html, sign, word, colour in (
        (solved, "✓", "Solved.", theme.SERIES["used"]),
        (failed, "✗", "Not yet.", theme.CAPACITY),
        (unwritten, "○", "Not yet.", theme.WARNING),
    ):
        assert "role='status'" in html
        assert f"<span aria-hidden='true'>{sign}</span> {word}" in html
        assert html.count("aria-label='met'") + html.count("aria-label='not met'") == (0 if sign == "○" else 2)
        assert f"color:{colour}" in html
        assert "verdicts" not in html, "no name leads to the lesson here"


def test_what_is_shown_is_escaped():
    def hostile() -> None:
        raise ValueError("<script>")

    assert "<script>" not in Check(hostile, "cpu").same_as(wasteful).peak_below(10 * MiB).html
