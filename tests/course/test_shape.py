"""Every lesson has the shape that the design gives it; nothing is executed here."""

from __future__ import annotations

import re
import statistics
from itertools import pairwise

import nbformat
import pytest

from notebooks.build.cells import cells_of
from notebooks.build.execute import headlines, outputs
from notebooks.build.head import head, minutes
from notebooks.build.pictures import MAX_BYTES, RUNS
from notebooks.build.source import FOLDER, Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)

CAPSTONE = 17, 11
"""Cells, and their median lines, of the lesson in which a whole GPT is written out and edited."""


def code_of(lesson: Lesson) -> list[str]:
    return [cell.source for cell in lesson.fresh().cells if cell.cell_type == "code"]


def prose_of(lesson: Lesson) -> str:
    return "\n".join(cell.source for cell in lesson.fresh().cells if cell.cell_type == "markdown")


@LESSONS
def test_it_asks_one_question_and_its_head_is_made_from_the_sources(lesson: Lesson) -> None:
    title, head = prose_of(lesson).split("\n\n")[:2]
    assert title.startswith("# ") and title.endswith("?")
    for part in (
        "**Objectives**: ",
        "**Prerequisites**: ",
        "**Difficulty**: ",
        f"**Time**: about {lesson.minutes} minutes",
    ):
        assert part in head
    assert not re.search(r"\bminutes\b", lesson.prose.split("##", 1)[0]), "minutes are not typed: the build counts them"


def test_minutes_and_difficulty_follow_their_rule() -> None:
    words, solution = "word " * 239, "\n".join("line" for _ in range(6))
    prose = f"{words}\n<!-- cell: s -->\n<details>Solution\n\n<!-- cell: solution -->\n</details>\n\n<!-- prose -->\n"
    code = f'# %% s tags=["solution"]\n{solution}\n'
    cells = cells_of(f"# %% guess\nlesson.guess()\n{code}", "x.py")
    assert minutes(prose, cells) == 20  # 2 of words, 1 of code, 1 of a guess, 5 + 6 of an exercise, 1 of running
    assert minutes(prose, [*cells, *cells[:1] * 4]) == 25
    made = head("99_x", f"See lessons 01 and 04, and lesson 12.\n{prose}", cells)
    assert "**Prerequisites**: 01, 04, 12." in made and "**Difficulty**: 2 of 3." in made


@LESSONS
def test_cells_are_few_and_short(lesson: Lesson) -> None:
    cells = code_of(lesson)
    lines = [len([line for line in cell.splitlines() if line.strip()]) for cell in cells]
    most, median = CAPSTONE if lesson.name == "20_capstone" else (15, 8)
    assert 10 <= len(cells) <= most, f"{len(cells)} code cells"
    assert statistics.median(lines) <= median and lines[0] <= 9 and max(lines) <= 18, lines


@LESSONS
def test_no_line_of_code_has_to_be_scrolled(lesson: Lesson) -> None:
    solutions = [part for one in lesson.exercises() for part in (one.solution, one.check)]
    lines = [line for cell in [*code_of(lesson), *solutions] for line in cell.splitlines()]
    assert not [line for line in lines if len(line) > 100]


@LESSONS
def test_it_has_every_part(lesson: Lesson) -> None:
    code, prose = "\n".join(code_of(lesson)), prose_of(lesson)
    assert code.count("lesson.guess(") >= 2 and ".compare(" in code
    assert re.search(r"lesson\.(saves|saves_nothing|holds)\(", code)
    assert "lesson.account(" in code
    assert re.search(r"\.same_as\(.*\)\.peak_below\(", code, re.DOTALL)
    assert code.rstrip().endswith("lesson.end()")
    for heading in ("price, and when not", "Exercise", "In three sentences"):
        assert heading.lower() in prose.lower(), heading
    assert "<summary>Solution" in prose and lesson.exercises()
    assert re.search(r"\]\((https?://|\d\d_\w+\.ipynb)", prose)


@LESSONS
def test_the_words_are_not_too_many(lesson: Lesson) -> None:
    assert 350 <= len(re.sub(r"```.*?```", "", prose_of(lesson), flags=re.DOTALL).split()) <= 1300


@LESSONS
def test_the_notebook_is_that_of_the_sources(lesson: Lesson) -> None:
    kept, fresh = nbformat.read(lesson.notebook, as_version=4), lesson.fresh()
    nbformat.validate(kept)
    parts = [[(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in one.cells] for one in (kept, fresh)]
    assert parts[0] == parts[1], "python -m notebooks.build prose, or make where code has changed"


@LESSONS
def test_the_notebook_is_kept_executed_static_and_small(lesson: Lesson) -> None:
    assert lesson.notebook.stat().st_size < MAX_BYTES
    notebook = nbformat.read(lesson.notebook, as_version=4)
    kinds = {kind for output in outputs(notebook) for kind in output.get("data", {})}
    assert not kinds & set(RUNS) and "image/png" in kinds
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert headlines(notebook)
    text = lesson.notebook.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work)/", text), "it names a path of the machine it was made on"
    assert "memlab could not report" not in text


@LESSONS
def test_where_it_leads(lesson: Lesson) -> None:
    for other in re.findall(r"\]\((\d\d_\w+\.ipynb)\)", prose_of(lesson)):
        assert (FOLDER / other).exists(), other


@LESSONS
def test_what_was_printed_is_not_in_pieces(lesson: Lesson) -> None:
    kept = nbformat.read(lesson.notebook, as_version=4)
    for cell in (one for one in kept.cells if one.cell_type == "code"):
        streams = [output.get("name") for output in cell.outputs]
        assert not any(name and name == after for name, after in pairwise(streams))
