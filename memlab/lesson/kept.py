"""The learner's guesses over all lessons, in one small file beside the notebooks.

The file is JSON, written whole or not at all, and only where a guess was compared. What it holds is read as numbers and texts.
A question that was skipped is kept as such, and never in the place of an answer: running all cells again forgets nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memlab.errors import MemlabError
from memlab.trace.whole import whole

FILE = ".memlab-guesses.json"
MAX_BYTES, MAX_TEXT = 1 << 20, 300
State = Literal["committed", "skipped"]


@dataclass(frozen=True, slots=True)
class Kept:
    """One question of a lesson: `ratio` is guess over measurement, None where it was skipped or a wrong word."""

    lesson: str
    question: str
    ratio: float | None
    state: State = "committed"


def place() -> Path:
    """Where guesses are kept: MEMLAB_GUESSES, else a file in the folder that the notebook runs in."""
    return Path(os.environ.get("MEMLAB_GUESSES") or FILE)


def read() -> tuple[Kept, ...]:
    """The guesses so far, in the order in which they were first made; none where there is no file."""
    path = place()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise MemlabError(f"{path} is larger than a file of guesses can be: remove it to begin anew.")
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise MemlabError(f"cannot read guesses from {path}: {error}. Remove the file to begin anew.") from None
    if not isinstance(rows, list):
        raise MemlabError(f"{path} is no file of guesses: remove it to begin anew.")
    return tuple(found for row in rows if (found := _row(row)) is not None)


def _row(row: Any) -> Kept | None:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("lesson", "question")):
        return None
    ratio = row.get("ratio")
    usable = isinstance(ratio, int | float) and not isinstance(ratio, bool) and math.isfinite(ratio) and ratio > 0
    state: State = "skipped" if row.get("state") == "skipped" else "committed"
    known = float(ratio) if usable and ratio and state == "committed" else None
    return Kept(row["lesson"][:MAX_TEXT], row["question"][:MAX_TEXT], known, state)


def keep(found: Kept) -> None:
    """Add a guess; one of the same question is replaced. A folder that cannot be written to is no reason to fail."""
    known = {(one.lesson, one.question): one for one in _readable()}
    before = known.get((found.lesson, found.question))
    if found.state == "skipped" and before is not None:
        return
    known[found.lesson, found.question] = found
    _write(known.values())


def _readable() -> tuple[Kept, ...]:
    try:
        return read()
    except MemlabError:
        return ()


def _write(rows: Iterable[Kept]) -> None:
    try:
        with whole(place()) as file:
            file.write(json.dumps([asdict(one) for one in rows], indent=1).encode())
    except OSError:
        return
