"""A learner's progress over all lessons: guesses, exercises and finished lessons, in one small JSON file next to the notebooks.

It is written atomically, and only when there is something new. A skipped question never replaces an answer, nor a failed
attempt a solution: running all cells again loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memlab.errors import MemlabError
from memlab.trace.file import atomic_file

FILE = ".memlab-guesses.json"
MAX_BYTES, MAX_TEXT, MAX_CLAIMS = 1 << 20, 300, 1000


@dataclass(frozen=True, slots=True)
class StoredGuess:
    """A question; `ratio` is None if it was skipped, or the word was wrong."""

    lesson: str
    question: str
    ratio: float | None
    state: Literal["committed", "skipped"] = "committed"


@dataclass(frozen=True, slots=True)
class StoredExercise:
    """An exercise that was tried, by the name of its function."""

    lesson: str
    exercise: str
    is_solved: bool


@dataclass(frozen=True, slots=True)
class FinishedLesson:
    """A lesson that was run to its last cell, and how many claims held there."""

    lesson: str
    claims: int


Stored = StoredGuess | StoredExercise | FinishedLesson


def path() -> Path:
    """MEMLAB_GUESSES, else a file in the folder that the notebook runs in."""
    return Path(os.environ.get("MEMLAB_GUESSES") or FILE)


def load(file: Path | None = None) -> tuple[Stored, ...]:
    """What is stored, oldest first; nothing without a file. Raises MemlabError if it cannot be read."""
    file = file or path()
    try:
        if file.stat().st_size > MAX_BYTES:
            raise MemlabError(f"{file} is larger than a file of guesses can be: remove it to begin anew.")
        rows = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise MemlabError(f"cannot read guesses from {file}: {error}. Remove the file to begin anew.") from None
    if not isinstance(rows, list):
        raise MemlabError(f"{file} is no file of guesses: remove it to begin anew.")
    return tuple(found for row in rows if (found := _stored(row)) is not None)


def guesses() -> tuple[StoredGuess, ...]:
    """The guesses that are stored, oldest first."""
    return tuple(one for one in load() if isinstance(one, StoredGuess))


def _stored(row: Any) -> Stored | None:
    """Read a row of the file; malformed ones are skipped."""
    match row:
        case {"lesson": str(lesson), "exercise": str(exercise), "is_solved": bool(is_solved)}:
            return StoredExercise(lesson[:MAX_TEXT], exercise[:MAX_TEXT], is_solved)
        case {"lesson": str(lesson), "claims": int(claims)} if 0 <= claims <= MAX_CLAIMS:
            return FinishedLesson(lesson[:MAX_TEXT], claims)
        case {"lesson": str(lesson), "question": str(question)}:
            lesson, question, ratio = lesson[:MAX_TEXT], question[:MAX_TEXT], row.get("ratio")
            if row.get("state") == "skipped":
                return StoredGuess(lesson, question, None, "skipped")
            if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not math.isfinite(ratio) or ratio <= 0:
                return StoredGuess(lesson, question, None)
            return StoredGuess(lesson, question, float(ratio))
    return None


def save(one: Stored) -> None:
    """Add or replace a row. A read-only folder is no reason to fail."""
    try:
        known = {_key(row): row for row in load()}
    except MemlabError:
        known = {}
    before = known.get(_key(one))
    is_less = (isinstance(one, StoredGuess) and one.state == "skipped") or (
        isinstance(one, StoredExercise) and not one.is_solved
    )
    if before == one or (is_less and before is not None):
        return
    known[_key(one)] = one
    with contextlib.suppress(OSError), atomic_file(path()) as file:
        file.write(json.dumps([asdict(row) for row in known.values()], indent=1).encode())


def _key(one: Stored) -> tuple[str, ...]:
    """What there is one row of."""
    match one:
        case StoredGuess():
            return one.lesson, "question", one.question
        case StoredExercise():
            return one.lesson, "exercise", one.exercise
        case FinishedLesson():
            return one.lesson, "finished"
