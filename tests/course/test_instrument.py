"""Lessons are about PyTorch: of their lines of code, few are calls of the instrument that measures it."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

import pytest

from notebooks.build.cells import Cell
from notebooks.build.source import Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)
MOST = 15
"""The percent of instrument that a lesson may have."""
BOUNDS = {
    "01_one_step": 30, "02_by_hand": 23, "03_line_by_line": 30, "04_allocator": 33, "05_inference": 26,
    "06_in_place": 22, "07_mixed_precision": 24, "08_checkpointing": 26, "09_recomputed_norm": 28,
    "10_accumulation": 27, "11_optimizers": 25, "12_leaks": 25, "13_feeding": 19, "14_small_inference": 22,
    "15_attention": 26, "16_design": 26, "18_out_of_memory": 24, "19_will_it_fit": 30,
    "20_capstone": 20, "21_kv_cache": 22, "23_several_gpus": 21, "24_compile": 26, "25_snapshot": 24,
}  # fmt: skip
"""Lessons with more, and the percent that they have, which may only fall: a measured claim is worth more than a short list."""
NAMES = {"memlab", "lesson", "Lesson", "CachingAllocator", "lab"}
METHODS = {"compare", "breakdown", "result"}
"""What lessons ask of a guess and of a run."""


def share_of_instrument(cells: list[Cell]) -> int:
    """The percent of a lesson's code lines that are instrument, rounded up.

    Code lines are those of the notebook's cells, the setup included, without solutions, blank lines and lines of nothing but
    a comment. Instrument is each magic of memlab, each line that names `memlab`, `lesson` or what was imported from memlab,
    and all lines of a call that begins with such a name, or of a guess's `compare` and a run's `breakdown`: an account whose
    rows are in its call is instrument from its first line to its last. What a `with memlab.track()` measures is not, nor are
    an account's formulas in a dict before it: they are arithmetic of tensor sizes, which a learner does without memlab too.
    """
    lines = instruments = 0
    for cell in cells:
        if not cell.is_tagged("solution"):
            numbers = set(instrument_lines(cell.source))
            code = [number for number, line in enumerate(cell.source.splitlines(), 1) if is_code(line)]
            lines, instruments = lines + len(code), instruments + len(numbers.intersection(code))
    return math.ceil(100 * instruments / lines)


def is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def instrument_lines(source: str) -> Iterator[int]:
    """The numbers of the lines of a cell that are instrument, some twice."""
    lines = source.splitlines()
    magics = {number: line for number, line in enumerate(lines, 1) if line.startswith("%")}
    yield from (number for number, line in magics.items() if "mem" in line)
    code = "\n".join("" if number in magics else line for number, line in enumerate(lines, 1))
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name) if name in NAMES:
                yield node.lineno
            case ast.Import(names=modules) if any(one.name.startswith("memlab") for one in modules):
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if module.startswith("memlab"):
                yield node.lineno
            case ast.Call(func=function) if is_instrument(function):
                yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_instrument(function: ast.expr) -> bool:
    """Whether a call of it begins with a name of the instrument, or is one of its methods."""
    if isinstance(function, ast.Attribute) and function.attr in METHODS:
        return True
    while isinstance(function, ast.Attribute | ast.Call | ast.Subscript):
        function = function.func if isinstance(function, ast.Call) else function.value
    return isinstance(function, ast.Name) and function.id in NAMES


@LESSONS
def test_few_lines_of_a_lesson_are_instrument(lesson: Lesson) -> None:
    share, bound = share_of_instrument(lesson.cells), BOUNDS.get(lesson.name, MOST)
    assert share <= bound, f"{share} % of its code lines are instrument, and {bound} % are allowed"
    assert bound == MOST or share == bound, f"it has come down to {share} %: write so in BOUNDS"


def test_which_lines_are_instrument() -> None:
    cell = """%%memtrack --name step
# memlab in a comment

import torch, memlab
with memlab.track("a") as run:
    model(x)
lesson.account("b", run, [
    ("c", 4 * P),
])
held = run.breakdown()["d"]
lesson.check(yours).same_as(
    whole).peak_below(3)
print(f"{lesson.card}")
x = torch.ones(3)"""
    assert sorted(set(instrument_lines(cell))) == [1, 4, 5, 7, 8, 9, 10, 11, 12, 13]
    solution = Cell("s", "lesson.end()", {"tags": ["solution"]})
    assert share_of_instrument([Cell("a", cell, {}), solution]) == math.ceil(100 * 10 / 12)


if __name__ == "__main__":
    for one in lessons():
        print(f"{share_of_instrument(one.cells):3} %  {one.name}")
