"""What was guessed, held and solved over all lessons, by one learner and by a class."""

from __future__ import annotations

import json

import pytest
import torch
from html_text import Words

from memlab import MemlabError
from memlab.__main__ import main
from memlab.lesson import Lesson, progress_file
from memlab.lesson.progress import ClassProgress, CourseProgress, progress_of
from memlab.lesson.progress_file import FinishedLesson, StoredExercise, StoredGuess


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_GUESSES", str(tmp_path / "guesses.json"))
    return tmp_path / "guesses.json"


def whole() -> torch.Tensor:
    return torch.full((1 << 18,), 2.0).sum()


def by_hand() -> torch.Tensor:
    return torch.full((1 << 18,), 2.0).sum()


def unwritten() -> None: ...


def test_a_lesson_stores_what_was_held_and_solved(file):
    lesson = Lesson("03 line by line")
    lesson.check(unwritten).same_as(whole).peak_below("1 GiB")
    lesson.check(whole).same_as(whole).peak_below("1 KiB")
    lesson.check(by_hand).same_as(whole).peak_below("1 GiB")
    lesson.check(by_hand).same_as(whole).peak_below("1 KiB")  # a later failure takes nothing back
    assert progress_file.load() == (
        StoredExercise(lesson.name, "whole", False), StoredExercise(lesson.name, "by_hand", True),
    )  # fmt: skip
    lesson.holds("two is two", True)
    assert [one.claims for one in lesson.progress().lessons] == [None]
    lesson.end()
    (mine,) = lesson.progress().lessons
    assert (mine.tried, mine.solved, mine.claims) == (2, 1, 1)
    before = file.stat().st_mtime_ns
    lesson.end()
    assert file.stat().st_mtime_ns == before, "nothing new, nothing written"


ROWS = (
    StoredGuess("01", "Peak?", 2.0), StoredGuess("01", "Which?", None), StoredGuess("02", "Share?", None, "skipped"),
    StoredGuess("02", "Peak?", 8.0), StoredExercise("01", "f", True), StoredExercise("01", "g", False),
    FinishedLesson("01", 4),
)  # fmt: skip


def test_a_learner_reads_it_lesson_by_lesson(file):
    for row in ROWS:
        progress_file.save(row)
    assert set(progress_file.load()) == set(ROWS)
    shown = CourseProgress(progress_file.load())
    assert shown.text.splitlines()[0] == "1 lesson finished, 1 exercise solved; 1 of 3 guesses within a factor of 2"
    table = shown.to_pandas().set_index("lesson")
    assert table.loc["01"].tolist() == [2, 2, 1, 2, 1, 4.0]
    assert table.loc["02", ["asked", "answered", "near", "tried"]].tolist() == [2, 1, 0, 0]
    assert "Nothing is stored yet" in str(CourseProgress(()))


def test_a_class_sees_who_is_where_and_what_was_hard(tmp_path):
    files = []
    for name, rows in {"ann": ROWS, "<b>bo": [StoredGuess("02", "Peak?", 0.1), FinishedLesson("02", 1)]}.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps([{slot: getattr(row, slot) for slot in row.__slots__} for row in rows]))
    found = progress_of(files)
    assert isinstance(found, ClassProgress) and list(found.learners) == ["ann", "<b>bo"]
    text = found.text
    assert text.splitlines()[0] == "2 learners" and "<b>bo" not in found.html and "<b>bo" in Words(found.html)
    rows = [line.split() for line in text.splitlines()]
    assert ["02", "2", "1", "2", "of", "3"] in rows
    assert ["ann", "1", "3", "of", "4", "1", "1", "of", "2"] in rows
    assert ["02", "Peak?", "9.00×", "1", "1"] in rows, "between 8 times too high and 10 times too low"
    assert len(found.to_pandas()) == 3


def test_learners_of_files_that_are_named_alike_are_told_apart(tmp_path):
    for name in ("ann", "bo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "guesses.json").write_text("[]")
    found = progress_of(sorted(tmp_path.glob("*/guesses.json")))
    assert list(found.learners) == ["ann/guesses", "bo/guesses"]


def test_the_command_shows_and_writes_and_refuses_in_one_line(tmp_path, file, capsys, refused):
    for row in ROWS:
        progress_file.save(row)
    page = tmp_path / "class.html"
    assert main(["progress", "--html", str(page)]) == 0
    assert "1 lesson finished" in capsys.readouterr().out and "1 lesson finished" in page.read_text()
    assert main(["progress", "--json", str(file)]) == 0
    assert [row["lesson"] for row in json.loads(capsys.readouterr().out)] == ["01", "02"]
    for wrong in ("nowhere.json", str(tmp_path)):
        assert "there is no file" in refused(2, "progress", wrong)
    file.write_text("{")
    with pytest.raises(MemlabError, match="to begin anew"):
        progress_of([file])
