"""What a learner, or a class, has guessed, held and solved over all lessons."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.lesson.guess_plot import NEAR
from memlab.lesson.progress_file import FinishedLesson, Stored, StoredExercise, StoredGuess, load
from memlab.units import number_of
from memlab.views.page import Page, document
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

_GUESSES, _EXERCISES = Column("guesses"), Column("exercises solved")
_NEAR = Column(f"within a factor of {NEAR:g}", "count")
HARDEST = 5
"""Questions that a class is shown: those it was furthest off."""


@dataclass(frozen=True, slots=True)
class LessonProgress:
    """One learner in one lesson; `claims` is None until its last cell was run."""

    lesson: str
    asked: int
    answered: int
    near: int
    tried: int
    solved: int
    claims: int | None

    @property
    def is_finished(self) -> bool:
        """Whether its last cell was run."""
        return self.claims is not None

    @classmethod
    def of(cls, lesson: str, rows: Iterable[Stored]) -> LessonProgress:
        """From the rows of this lesson."""
        rows = list(rows)
        guesses = [one for one in rows if isinstance(one, StoredGuess)]
        exercises = [one for one in rows if isinstance(one, StoredExercise)]
        near = sum(one.ratio is not None and 1 / NEAR <= one.ratio <= NEAR for one in guesses)
        return cls(
            lesson, len(guesses), sum(one.state == "committed" for one in guesses), near,
            len(exercises), sum(one.is_solved for one in exercises),
            next((one.claims for one in rows if isinstance(one, FinishedLesson)), None),
        )  # fmt: skip


class CourseProgress(Shown):
    """One learner: `lessons` has what is stored of each lesson, in their order."""

    def __init__(self, rows: Iterable[Stored]) -> None:
        by_lesson: dict[str, list[Stored]] = defaultdict(list)
        self.guesses = []
        for row in rows:
            by_lesson[row.lesson].append(row)
            self.guesses += [row] if isinstance(row, StoredGuess) else []
        self.lessons = tuple(LessonProgress.of(name, by_lesson[name]) for name in sorted(by_lesson))

    @property
    def page(self) -> Page:
        """A sentence, and one row per lesson."""
        if not self.lessons:
            return Page("Nothing is stored yet: a lesson stores guesses, exercises, and that its last cell was run.")
        finished, solved = _sum("is_finished", self.lessons), _sum("solved", self.lessons)
        done = f"{number_of(finished, 'lesson')} finished, {number_of(solved, 'exercise')} solved"
        answered, near = _sum("answered", self.lessons), _sum("near", self.lessons)
        title = f"{done}; {near} of {answered} guesses within a factor of {NEAR:g}" if answered else done
        columns = (Column("lesson"), _GUESSES, _NEAR, Column("claims that held", "count"), _EXERCISES)
        rows = tuple(
            (one.lesson, _guesses([one]), one.near if one.answered else None, one.claims, _exercises([one]))
            for one in self.lessons
        )
        return Page(title, (Table("", columns, rows, ("Claims are counted when a lesson's last cell is run.",)),))

    def to_pandas(self) -> Any:
        """One row per lesson."""
        import pandas

        return pandas.DataFrame(self.lessons)


class ClassProgress(Shown):
    """Several learners: how far each is, and what the class guessed wrong. `learners` maps names to their progress."""

    def __init__(self, learners: Mapping[str, CourseProgress]) -> None:
        self.learners = dict(learners)

    @property
    def page(self) -> Page:
        """One row per lesson, one per learner, and the questions that were furthest off."""
        return Page(f"{number_of(len(self.learners), 'learner')}", (self._lessons(), self._each(), self._questions()))

    def _lessons(self) -> Table:
        found: dict[str, list[LessonProgress]] = defaultdict(list)
        for learner in self.learners.values():
            for one in learner.lessons:
                found[one.lesson].append(one)
        columns = (Column("lesson"), Column("begun", "count"), Column("finished", "count"), _GUESSES, _EXERCISES)
        rows = tuple(
            (name, len(ones), _sum("is_finished", ones), _guesses(ones), _exercises(ones))
            for name, ones in sorted(found.items())
        )
        return Table("Lessons", columns, rows)

    def _each(self) -> Table:
        columns = (Column("learner"), Column("lessons finished", "count"), _GUESSES, _NEAR, _EXERCISES)
        rows = tuple(
            (name, _sum("is_finished", ones), _guesses(ones), _sum("near", ones), _exercises(ones))
            for name, ones in ((name, learner.lessons) for name, learner in self.learners.items())
        )
        return Table("Learners", columns, rows)

    def _questions(self) -> Table:
        """Where the class was furthest off, by the median distance of those who answered with a number."""
        ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        for learner in self.learners.values():
            for one in learner.guesses:
                if one.ratio is not None:
                    ratios[one.lesson, one.question].append(one.ratio)
        off = {key: statistics.median(max(ratio, 1 / ratio) for ratio in found) for key, found in ratios.items()}
        columns = (
            Column("lesson"), Column("question", wraps=True), Column("off by, median", "times"), Column("too low", "count"),
            Column("too high", "count"),
        )  # fmt: skip
        rows = tuple(
            (*key, off[key], sum(ratio < 1 for ratio in ratios[key]), sum(ratio > 1 for ratio in ratios[key]))
            for key in sorted(off, key=lambda key: (-off[key], key))[:HARDEST]
        )
        return Table("Questions that were furthest off", columns, rows)

    def to_pandas(self) -> Any:
        """One row per learner and lesson."""
        import pandas

        frames = [
            learner.to_pandas().assign(learner=name) for name, learner in self.learners.items() if learner.lessons
        ]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()


def progress_of(files: Iterable[Path]) -> CourseProgress | ClassProgress:
    """The progress in one file, or that of a class in several; learners are named after files, or folders where those are alike.

    Raises MemlabError if a file is missing or cannot be read.
    """
    files = list(files)
    for file in files:
        if not file.is_file():
            raise MemlabError(f"there is no file {str(file)[:200]!r}: a lesson writes it once a guess was compared.")
    if len(files) == 1:
        return CourseProgress(load(files[0]))
    stems = [file.stem for file in files]
    names = [file.stem if stems.count(file.stem) == 1 else f"{file.parent.name}/{file.stem}" for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return ClassProgress({name: CourseProgress(load(file)) for name, file in zip(names, files, strict=True)})


def as_html(found: CourseProgress | ClassProgress) -> str:
    """A page that is readable without network and scripts."""
    return document("Progress in the memlab course", [found.html])


def _sum(of: str, ones: Iterable[LessonProgress]) -> int:
    return sum(getattr(one, of) for one in ones)


def _of(some: str, whole: str, ones: Sequence[LessonProgress]) -> str:
    return f"{_sum(some, ones)} of {most}" if (most := _sum(whole, ones)) else ""


_guesses = functools.partial(_of, "answered", "asked")
_exercises = functools.partial(_of, "solved", "tried")
