"""The learner's guesses of all lessons, in one small JSON file in the folder of the notebooks.

It is written atomically, and only when a guess is compared. A skipped question never replaces an answer:
running all cells again loses nothing.
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
MAX_BYTES, MAX_TEXT = 1 << 20, 300


@dataclass(frozen=True, slots=True)
class StoredGuess:
    """A question; `ratio` is None if it was skipped, or the word was wrong."""

    lesson: str
    question: str
    ratio: float | None
    state: Literal["committed", "skipped"] = "committed"


def path() -> Path:
    """MEMLAB_GUESSES, else a file in the folder that the notebook runs in."""
    return Path(os.environ.get("MEMLAB_GUESSES") or FILE)


def load() -> tuple[StoredGuess, ...]:
    """The guesses so far, oldest first; none without a file."""
    file = path()
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
    return tuple(guess for row in rows if (guess := _guess(row)) is not None)


def _guess(row: Any) -> StoredGuess | None:
    """Read a row of the file; malformed ones are skipped."""
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("lesson", "question")):
        return None
    lesson, question, ratio = row["lesson"][:MAX_TEXT], row["question"][:MAX_TEXT], row.get("ratio")
    if row.get("state") == "skipped":
        return StoredGuess(lesson, question, None, "skipped")
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not math.isfinite(ratio) or ratio <= 0:
        return StoredGuess(lesson, question, None)
    return StoredGuess(lesson, question, float(ratio))


def save(guess: StoredGuess) -> None:
    """Add or replace a guess. A read-only folder is no reason to fail."""
    try:
        known = {(one.lesson, one.question): one for one in load()}
    except MemlabError:
        known = {}
    key = (guess.lesson, guess.question)
    if guess.state == "skipped" and key in known:
        return
    known[key] = guess
    with contextlib.suppress(OSError), atomic_file(path()) as file:
        file.write(json.dumps([asdict(one) for one in known.values()], indent=1).encode())
