"""The head of a lesson, made by rule from its source: objectives, prerequisites, difficulty and minutes.

Minutes: words of prose at 120 a minute, one minute for each code cell and each guess, five for each exercise and one for each line
of its solution, and one for running the cells, which is about what they take on two idle cores; rounded up to five.
Difficulty: by the lines of the longest solution, one point up to 5, two up to 8, three above.
Prerequisites: the earlier lessons that its prose refers to. Objectives: what its claims name, and the tips that it answers first.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

TIPS = Path(__file__).with_name("tips.toml")
SOLUTION = re.compile(r"<details>(?:(?!</details>).)*?[Ss]olution.*?```python\n(.*?)```.*?</details>", re.DOTALL)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
_CLAIM = re.compile(r"lesson\.saves(?:_nothing)?\(\s*\"([^\"]+)\",")
WORDS_A_MINUTE = 120
RUN_MINUTES = 1
EASY, MODERATE = 5, 8


def minutes(text: str) -> int:
    """How long a learner needs, by the rule above."""
    unfolded = _FOLDED.sub("", text)
    cells, words = len(_CODE.findall(unfolded)), len(_CODE.sub("", unfolded).split())
    puzzles = sum(5 + solution.count("\n") for solution in SOLUTION.findall(text))
    total = words / WORDS_A_MINUTE + cells + text.count("lesson.guess(") + puzzles + RUN_MINUTES
    return 5 * math.ceil(total / 5)


def head(name: str, text: str) -> str:
    """The lines below the title."""
    number = name[:2]
    measured = ", ".join(f"*{claim.strip(',')}*" for claim in dict.fromkeys(_CLAIM.findall(text)))
    tips = tomllib.loads(TIPS.read_text(encoding="utf-8"))
    judged = ", ".join(tip for tip, row in tips.items() if row["lessons"][0] == number)
    objectives = ["account for the peak term by term"]
    objectives += [f"measure {measured}"] if measured else []
    objectives += [f"judge the tips {judged}"] if judged else []
    referred = re.findall(r"\blessons? (\d\d)\b(?:(?:,| and) (\d\d)\b)?", _CODE.sub("", text))
    earlier = sorted({one for pair in referred for one in pair if one and one < number})
    before = ", ".join(earlier) if earlier else "none"
    longest = max((solution.count("\n") for solution in SOLUTION.findall(text)), default=0)
    points = 1 + (longest > EASY) + (longest > MODERATE)
    return (
        f"**Objectives**: {'; '.join(objectives)}. **Prerequisites**: {before}. "
        f"**Difficulty**: {points} of 3. **Time**: about {minutes(text)} minutes."
    )
