"""The build answers the guesses of a lesson as a student would: committed after the cell, below the question, and nowhere else."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.build import __main__ as build
from notebooks.build.cells import SourceError
from notebooks.build.execute import executed
from notebooks.build.source import lessons

ASK = """
from memlab.lesson import Lesson
lesson = Lesson("01 a lesson", needs="1 MiB")
before = set(globals())
peak = lesson.guess("Peak?", between=("1 MiB", "1 GiB"))
when = lesson.guess("When?", choices=["forward", "backward"])
"""
COMPARE = "print(peak.compare('128 MiB'))\nprint(when.compare('backward'))\nprint(set(globals()) - before)"


def notebook() -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source, id=id) for id, source in (("ask", ASK), ("compare", COMPARE))]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.slow
def test_answers_stand_below_their_questions_and_the_outcome_where_it_is_compared() -> None:
    asked, compared = executed(notebook(), answers={"ask": ["8 MiB", "backward"]}).cells
    shown = [one.data["text/plain"] for one in asked.outputs if one.output_type == "display_data"]
    assert [text for text in shown if text] == [
        "Peak? You said 8.00 MiB; locked.",
        'When? You said "backward"; locked.',
    ]
    first, second, names = "".join(one.text for one in compared.outputs).splitlines()
    assert first == "Peak? You said 8.00 MiB, it was 128.0 MiB (16 times too low)."
    assert second == 'When? You said "backward": right.'
    assert "'peak'" in names and "answer" not in names, "the notebook finds names that no cell of it made"
    assert (asked.execution_count, compared.execution_count) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["8 MiB", "sideways"], "the cell ask: choose one of 'forward', 'backward', or its number, got 'sideways'."),
        (["8 MiB"], "the cell ask: it asked for 2 guesses and answers 1"),
    ],
)
def test_an_answer_that_cannot_be_committed_is_one_line(answers: list[object], said: str) -> None:
    with pytest.raises(SourceError) as caught:
        executed(notebook(), answers={"ask": answers})
    assert str(caught.value) == said


def test_the_build_names_the_file_of_such_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> NotebookNode:
        raise SourceError("the cell guess: no such answer")

    monkeypatch.setattr(build, "executed", refuse)
    monkeypatch.setattr("sys.argv", ["build", "check", "01"])
    assert build.main() == 1
    assert capsys.readouterr().err == "01_one_step.py: the cell guess: no such answer\n"


def test_students_are_right_now_and_then() -> None:
    """About a third of the answers: all right would teach as little as all wrong."""
    said = [
        line
        for lesson in lessons()
        for cell in nbformat.read(lesson.notebook, as_version=4).cells[-3:]
        for one in cell.get("outputs", ())
        for line in one.get("data", {}).get("text/plain", "").splitlines()
        if "You said" in line
    ]
    right = sum(line.endswith("(right).") or '": right' in line for line in said)
    assert 0.25 < right / len(said) < 0.45, f"{right} of {len(said)}"
