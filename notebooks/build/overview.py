"""The map of the course, made from the sources: question, minutes, what each lesson attacks, what it needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from notebooks.build.cells import MARKER
from notebooks.build.source import FOLDER, Lesson

README = FOLDER / "README.md"
_ATTACKS = re.compile(r"\bAttacks\s+(.+?)(?:[:.;](?=\s|$)|,\s+(?=and\b)|\n\n)", re.DOTALL)
_HEAD = """# The course

Lessons that ask one question each, let you **guess**, measure plain PyTorch on your machine, and explain every large
number. This page is made from their sources by `python -m notebooks.build map`.

- **Start**: `make lab` copies the lessons to `work/`, once, and opens the first in JupyterLab. The copies are yours:
  nothing overwrites them. A laptop without a GPU is enough; on a GPU the same cells show the GPU's numbers. The first
  cell of a lesson clears the names of its kernel (`%reset -f`), so that all cells can be run again.
- **Order**: 01 to 04 name the parts and the instruments; each later one attacks one of them and can be read alone. 20
  uses all.
- **Guesses** are locked once something is measured. They are kept in `.memlab-guesses.json` beside your copies,
  and lesson 20 draws them.
- **Exercises** are checked on both sides: a peak below a limit *and* the same result. Hint and solution are folded.
- **For teachers**: [docs/teaching.md](../docs/teaching.md). Every tip that you have read elsewhere:
  [docs/tips.md](../docs/tips.md).
- **Without Jupyter**: `make course-html` writes the course as pages that need no network.

"""
_FOOT = """*Memory* is what the lesson asks of the host; it looks first whether so much is free. *GPU*: no lesson needs one.
Where a CPU cannot show something, *predicted* lessons show what `memlab.predict` predicts for a GPU, marked as
such."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the map says of one lesson."""

    lesson: Lesson
    question: str
    minutes: int
    attacks: str
    needs: str
    predicts: bool

    def row(self) -> str:
        """As a row of the table."""
        number = self.lesson.name[:2]
        gpu = "not needed; predicted" if self.predicts else "not needed"
        link = f"[{self.question}]({self.lesson.notebook.name})"
        return f"| {number} | {link} | {self.minutes} | {self.attacks} | {self.needs} | {gpu} |"


def entry(lesson: Lesson) -> Entry:
    """Read from the sources; what is missing there is an error that names it."""
    code = "\n".join(cell.source for cell in lesson.cells)
    title = lesson.prose.split("\n", 1)[0]
    return Entry(
        lesson,
        title.removeprefix("# ").strip(),
        lesson.minutes,
        attacked(lesson),
        _one(lesson, r"Lesson\([^)]*needs=\"([^\"]+)\"", code, 'Lesson(..., needs="...")'),
        bool(re.search(r"lesson\.predict\(|memlab\.(predict|max_batch)\(|memlab\.advise\([^)]*card=|--predict", code)),
    )


def attacked(lesson: Lesson) -> str:
    """What the first paragraph says after "Attacks", up to the first stop."""
    text = MARKER.split(lesson.prose, maxsplit=1)[0] + "\n\n"
    found = _ATTACKS.search(text)
    assert found, f'{lesson.name}: its first paragraph does not say "Attacks ..."'
    return " ".join(found[1].replace("|", "/").split())


def _one(lesson: Lesson, pattern: str, text: str, what: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{lesson.name}: its source does not say {what}"
    return found[1]


def overview(chosen: list[Lesson]) -> str:
    """The whole page."""
    entries = [entry(one) for one in chosen]
    hours = sum(one.minutes for one in entries) / 60
    rows = "\n".join(one.row() for one in entries)
    head = "| | question | minutes | attacks | memory | GPU |\n|---|---|--:|---|--:|---|\n"
    return f"{_HEAD}{len(entries)} lessons, about {hours:.0f} hours of reading and trying.\n\n{head}{rows}\n\n{_FOOT}\n"
