"""Every lesson is executed, with its solutions, in a kernel of its own; its claims assert themselves."""

from __future__ import annotations

import nbformat
import pytest

pytest.importorskip("jupytext")
from notebooks.build.execute import differences, executed, headlines
from notebooks.build.source import Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)


def with_solutions(lesson: Lesson) -> list[str]:
    """The cells that solve each exercise and have it checked."""
    ends = "assert lesson.verdicts[-1].passed, str(lesson.verdicts[-1])"
    return [part for one in lesson.exercises() for part in (one.solution, f"{one.check}\n{ends}")]


@pytest.mark.course
@LESSONS
def test_it_runs_its_solutions_pass_and_its_figures_are_those_kept(lesson: Lesson) -> None:
    done = executed(lesson.fresh(), with_solutions(lesson))
    kept = headlines(nbformat.read(lesson.notebook, as_version=4))
    assert differences(kept, headlines(done)) == []


@pytest.mark.course
def test_any_cell_of_the_first_lesson_can_be_run_again() -> None:
    """Each cell twice, then all of them once more: what a learner who goes back does."""
    (lesson,) = lessons(("01",))
    notebook = lesson.fresh()
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    again = [source for source in sources for _ in range(2)] + sources
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in again]
    executed(notebook)


@pytest.mark.simulated
@LESSONS
def test_it_runs_on_cuda(lesson: Lesson) -> None:
    done = executed(lesson.fresh(), with_solutions(lesson))
    assert headlines(done)["device"] == "cuda"
