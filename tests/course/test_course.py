"""Every lesson is executed, with its solutions, in a kernel of its own; its claims assert themselves."""

from __future__ import annotations

import nbformat
import pytest

from notebooks.build.execute import differences, executed, headlines
from notebooks.build.source import Lesson, lessons

pytestmark = pytest.mark.timeout(900)  # a busy machine takes three times as long
LESSON_NAMES = [one.name for one in lessons()]
LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)


def with_solutions(lesson: Lesson) -> list[str]:
    """The cells that solve each exercise and have it checked."""
    ends = "assert lesson.verdicts[-1].passed, str(lesson.verdicts[-1])"
    return [part for one in lesson.exercises() for part in (one.solution, f"{one.check}\n{ends}")]


def in_order(lesson: Lesson, times: int) -> list[str]:
    """The code cells, each so many times before the next."""
    return [cell.source for cell in lesson.fresh().cells if cell.cell_type == "code" for _ in range(times)]


@pytest.mark.course
@LESSONS
def test_its_solutions_pass_and_its_figures_are_those_kept(lesson: Lesson, request: pytest.FixtureRequest) -> None:
    """Every third lesson, before a release each, runs again in the same kernel: its claims and accounts hold once more."""
    fresh = lesson.fresh()
    is_twice = request.config.getoption("--release") or LESSON_NAMES.index(lesson.name) % 3 == 2
    more = [*with_solutions(lesson), *(in_order(lesson, 1) if is_twice else [])]
    done = executed(fresh, more, lesson.answers)
    done.cells = done.cells[: len(fresh.cells)]
    kept = headlines(nbformat.read(lesson.notebook, as_version=4))
    assert differences(kept, headlines(done)) == []


@pytest.mark.course
@pytest.mark.sample(6)
@LESSONS
def test_a_cell_that_is_run_twice_refutes_nothing(lesson: Lesson) -> None:
    """No cell fails, and the figures are those kept, but for what the first of two runs leaves (gradients, a loss)."""
    cells = [nbformat.v4.new_code_cell(source) for source in in_order(lesson, 2)]
    done = headlines(executed(nbformat.v4.new_notebook(cells=cells)))
    kept = headlines(nbformat.read(lesson.notebook, as_version=4))
    assert done.keys() == kept.keys()
    assert {name: (kept[name], figure) for name, figure in done.items() if not is_near(figure, kept[name])} == {}


def is_near(figure: int | float | str, kept: int | float | str) -> bool:
    """Within a twentieth; texts are equal."""
    return figure == kept if isinstance(kept, str) else figure == pytest.approx(kept, rel=0.05)


@pytest.mark.simulated
@LESSONS
def test_it_runs_on_cuda(lesson: Lesson) -> None:
    done = executed(lesson.fresh(), with_solutions(lesson), lesson.answers)
    assert headlines(done)["device"] == "cuda"
