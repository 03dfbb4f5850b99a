"""The guesses of all lessons, and how far off they were: one row per lesson."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from memlab.lesson.guess import distance
from memlab.lesson.progress_file import StoredGuess
from memlab.units import one_line
from memlab.views import theme
from memlab.views.scene import Axis, Mark, Panel, Scene, Shade
from memlab.views.shown import ShownPicture

EDGE = 16.0
"""Ratios beyond this factor are drawn at the edge."""
NEAR = 2.0
"""Within this factor a guess is near."""
ROW, TOP, BOTTOM = 22, 12, 62
WRONG_AT, SKIPPED_AT = 2.9, 3.8
"""Positions of wrong words and skipped questions, right of the log4 axis."""
_TICKS = ((1 / 16, "16x"), (1 / 4, "4x"), (1 / 2, "2x"), (1.0, "right"), (2.0, "2x"), (4.0, "4x"), (16.0, "16x"))
_MARKS = {
    "near": ("dot", theme.SERIES["used"]), "off": ("dot", theme.SERIES["allocated"]),
    "wrong": ("cross", theme.CAPACITY), "skipped": ("ring", theme.TEXT),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GuessPoint:
    """One guess: `place` is log4 of guess divided by measurement, or a position right of the axis."""

    row: int
    place: float
    kind: str
    words: str

    says = property(attrgetter("words"))  # the earlier name


class GuessPlot(ShownPicture):
    """All guesses so far; `points` and `to_pandas()` have the values."""

    def __init__(self, guesses: Iterable[StoredGuess]) -> None:
        self.guesses = tuple(guesses)
        self.lessons = tuple(sorted({one.lesson for one in self.guesses}))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Guess divided by measurement, for all committed guesses that are not words."""
        return tuple(one.ratio for one in self.guesses if one.ratio is not None)

    @property
    def points(self) -> tuple[GuessPoint, ...]:
        """The position of each guess; those of a lesson without a ratio are drawn side by side."""
        points = []
        for one in self.guesses:
            row = self.lessons.index(one.lesson)
            if one.ratio is not None:
                kind = "near" if 1 / NEAR <= one.ratio <= NEAR else "off"
                place = math.log(min(max(one.ratio, 1 / EDGE), EDGE), 4)
                points.append(GuessPoint(row, place, kind, f"{one.question} {distance(one.ratio)}"))
                continue
            alike = [two for two in self.guesses if (two.lesson, two.state, two.ratio) == (one.lesson, one.state, None)]
            shift = min(0.13, 0.7 / len(alike)) * (alike.index(one) - (len(alike) - 1) / 2)
            at, kind, words = SKIPPED_AT, "skipped", "Skipped."
            if one.state != "skipped":
                at, kind, words = WRONG_AT, "wrong", "The wrong word."
            points.append(GuessPoint(row, at + shift, kind, f"{one.question} {words}"))
        return tuple(points)

    @property
    def sentence(self) -> str:
        """How many were answered, and how close."""
        if not self.guesses:
            return "No guesses yet: a guess is stored as soon as it was compared with a measurement."
        asked, ratios, kinds = len(self.guesses), sorted(self.ratios), [one.kind for one in self.points]
        skipped = kinds.count("skipped")
        answered = f"Of {asked} questions you answered {asked - skipped} and skipped {skipped}."
        if skipped == asked:
            return answered
        count = kinds.count("near")
        near = f"{count} {'was' if count == 1 else 'were'} within a factor of {NEAR:g}"
        low, high = sum(ratio < 1 for ratio in ratios), sum(ratio > 1 for ratio in ratios)
        counts = f"{near}, {low} too low, {high} too high, {kinds.count('wrong')} the wrong word."
        middle = ratios[(len(ratios) - 1) // 2 : len(ratios) // 2 + 1]  # ratios have a geometric mean
        median = f" The median: {distance(statistics.geometric_mean(middle))}." if middle else ""
        return f"{answered} {counts}{median}"

    @property
    def text(self) -> str:
        """The sentence, and the ratios of each lesson; `-` is skipped, `x` a wrong word."""
        names = [one_line(lesson, 26) for lesson in self.lessons]
        lines = [self.sentence]
        for name, lesson in zip(names, self.lessons, strict=True):
            signs = []
            for one in self.guesses:
                if one.lesson == lesson:
                    word = "-" if one.state == "skipped" else "x"
                    signs.append(word if one.state == "skipped" or one.ratio is None else f"{one.ratio:.2f}")
            lines.append(f"  {name.ljust(max(map(len, names)))}  {'  '.join(signs)}")
        return "\n".join(lines)

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the figure; text if there is nothing to draw."""
        return super().bundle() if self.guesses else {"text/plain": self.text}

    def to_pandas(self) -> Any:
        """One row per guess."""
        import pandas

        return pandas.DataFrame(self.guesses, columns=["lesson", "question", "state", "ratio"])

    def scene(self) -> Scene:
        """A mark for each guess, in the row of its lesson."""
        ticks = [(math.log(value, 4), text) for value, text in _TICKS]
        ticks += [(WRONG_AT, "wrong word"), (SKIPPED_AT, "skipped")]
        rows = tuple((row, one_line(lesson, 26)) for row, lesson in enumerate(self.lessons))
        x = Axis(
            -2.2, SKIPPED_AT + 0.4, tuple(ticks), "too low   ·   guess   ·   too high", has_grid=True, has_zero=True
        )
        near = Shade(-math.log(NEAR, 4), math.log(NEAR, 4), _MARKS["near"][1], 0.1)
        marks = (Mark(one.place, one.row, *_MARKS[one.kind], one.words) for one in self.points)
        return Scene(
            "How far off the guesses were, lesson by lesson", self.text,
            (Panel(Axis(len(rows) - 0.5, -0.5, rows), {"": (x,)}, (near, *marks)),),
            height=TOP + ROW * len(rows) + BOTTOM, left=190, top=TOP, bottom=BOTTOM,
        )  # fmt: skip
