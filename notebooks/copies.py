"""Copies of the lessons for a learner, in `work/` beside this folder: what `make lab` opens. It needs Python alone.

python notebooks/copies.py [FOLDER]

A lesson is copied without its outputs, once. What the learner has is never written to; where the lesson has changed since
it was copied, one line says so. Links between lessons, and to ../docs, lead to the same places as in this folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

LESSONS = Path(__file__).resolve().parent
WORK = LESSONS.parent / "work"
BESIDE = ("README.md", ".memlab-guesses.json")
"""The list of the lessons, which they link to, and the guesses of a learner who has worked in this folder."""
KEY = "memlab_lesson"
"""In the notebook's metadata, which editors keep: a digest of the lesson that was copied."""


def make_copies(work: Path, lessons: Path = LESSONS) -> list[str]:
    """Copy what is not there yet; the lines to print."""
    work.mkdir(exist_ok=True)
    copied, changed = 0, []
    for lesson in sorted(lessons.glob("[0-9]*.ipynb")):
        notebook, copy = _read(lesson), work / lesson.name
        if not copy.exists():
            _write(notebook, copy)
            copied += 1
        elif _taken_from(copy) not in (None, digest(notebook)):
            changed.append(copy.name)
    for name in BESIDE:
        if (lessons / name).exists() and not (work / name).exists():
            shutil.copyfile(lessons / name, work / name)
    lines = []
    if copied:
        what = "1 lesson" if copied == 1 else f"{copied} lessons"
        lines.append(f"copied {what} to {work.name}/, {'which is' if copied == 1 else 'which are'} yours to change")
    if changed:
        what = "this lesson has" if len(changed) == 1 else "these lessons have"
        names = ", ".join(changed)
        lines.append(f"{what} changed since you got it: {names}. Yours stays; to get the new one too, rename yours")
    return lines


def digest(notebook: dict[str, Any]) -> str:
    """Of what the lesson says and asks, not of its outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(notebook: dict[str, Any], copy: Path) -> None:
    """Without outputs: the answers to the guesses are among them."""
    notebook["metadata"][KEY] = digest(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    # Whole or not at all: a copy that was cut off would never be replaced.
    part = copy.with_name(f".{copy.name}.part")
    part.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(copy)


def _taken_from(copy: Path) -> str | None:
    """The digest of the lesson that a copy was made from; None if it does not say, or is no notebook any more."""
    try:
        return str(_read(copy)["metadata"][KEY])
    except (OSError, ValueError, LookupError, TypeError):
        return None


if __name__ == "__main__":
    for line in make_copies(Path(sys.argv[1]) if len(sys.argv) > 1 else WORK):
        print(f"memlab: {line}", flush=True)
