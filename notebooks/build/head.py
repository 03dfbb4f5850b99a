"""The head of a lesson, made by rule from its sources: objectives, prerequisites, difficulty and minutes.

Minutes: words of prose at 120 a minute, one minute for each code cell and each guess, five for each exercise and one for each line
of its solution, and one for running the cells, which is about what they take on two idle cores; rounded up to five.
Difficulty: by the lines of the longest solution, one point up to 5, two up to 8, three above.
Prerequisites: the earlier lessons that its prose refers to. Objectives: what its claims name, and the tips that it answers first.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from notebooks.build.cells import BREAK, MARKER, SPOKEN, Cell

TIPS = Path(__file__).with_name("tips.toml")
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
_CLAIM = re.compile(r"lesson\.saves(?:_nothing)?\(\s*\"([^\"]+)\",")
_FIELD = re.compile(r"\{\w+\}")
WORDS_A_MINUTE = 120
RUN_MINUTES = 1
EASY, MODERATE = 5, 8


def minutes(prose: str, cells: Sequence[Cell]) -> int:
    """How long a learner needs, by the rule above."""
    words = len(BREAK.sub("", MARKER.sub("", SPOKEN.sub("", _FOLDED.sub("", prose)))).split())
    solutions = _lines_of_solutions(cells)
    guesses = sum(cell.asks for cell in cells)
    puzzles = sum(5 + lines for lines in solutions)
    total = words / WORDS_A_MINUTE + len(cells) - len(solutions) + guesses + puzzles + RUN_MINUTES
    return 5 * math.ceil(total / 5)


def _lines_of_solutions(cells: Sequence[Cell]) -> list[int]:
    return [len(cell.source.splitlines()) for cell in cells if cell.is_tagged("solution")]


ENGLISH = (
    "**Objectives**: {objectives}. **Prerequisites**: {prerequisites}. "
    "**Difficulty**: {difficulty} of 3. **Time**: about {minutes} minutes."
)


def head(name: str, prose: str, cells: Sequence[Cell], template: str = ENGLISH) -> str:
    """The lines below the title. The template of an edition names what it needs; {tips} are those that the lesson answers first."""
    number, code = name[:2], "\n".join(cell.source for cell in cells)
    measured = ", ".join(f"*{claim.strip(',')}*" for claim in dict.fromkeys(_CLAIM.findall(code)))
    tips = tomllib.loads(TIPS.read_text(encoding="utf-8"))
    judged = ", ".join(tip for tip, row in tips.items() if row["lessons"][0] == number)
    objectives = ["account for the peak term by term"]
    objectives += [f"measure {measured}"] if measured else []
    objectives += [f"judge the tips {judged} of `docs/tips.md`"] if judged else []
    referred = re.findall(r"\blessons? (\d\d)\b(?:(?:,| and) (\d\d)\b)?", prose)
    earlier = sorted({one for pair in referred for one in pair if one and one < number})
    longest = max(_lines_of_solutions(cells), default=0)
    values = {
        "{objectives}": "; ".join(objectives),
        "{tips}": judged or "–",
        "{prerequisites}": ", ".join(earlier) or ("none" if template == ENGLISH else "–"),
        "{difficulty}": str(1 + (longest > EASY) + (longest > MODERATE)),
        "{minutes}": str(minutes(prose, cells)),
    }
    return _FIELD.sub(lambda field: values.get(field[0], field[0]), template)
