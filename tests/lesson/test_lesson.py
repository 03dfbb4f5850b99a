from __future__ import annotations

import os

import pytest
import torch

from memlab.errors import MemlabError
from memlab.lesson import Lesson
from memlab.lesson.lesson import HEADLINES
from memlab.probes.counters import DeviceReading
from memlab.torch_internals import blas_workspace_sizes
from memlab.units import MiB

NAME = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_workspace_is_that_of_most_cards_unless_somebody_said_otherwise(monkeypatch):
    monkeypatch.setenv(NAME, ":4096:8")
    Lesson("x", needs="1 MiB")
    assert os.environ[NAME] == ":4096:8"
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    Lesson("x", needs="1 MiB")
    assert 8 * MiB < sum(blas_workspace_sizes()) < 9 * MiB


def test_a_device_that_cannot_show_it_says_so(capsys):
    lesson = Lesson("x", needs="1 MiB")
    lesson.not_measurable("cuDNN", "there is none")
    assert capsys.readouterr().out.endswith("cuDNN: not measurable here: there is none.\n")
    assert lesson.end().bundle()[HEADLINES]["cuDNN"] == "not measurable here: there is none"


def test_a_simulated_gpu_has_no_times_and_is_named_where_something_held(capsys):
    lesson = Lesson("x", needs="1 MiB")
    lesson.source = "measured"
    lesson.seconds("a step", "0.25 s")
    assert lesson.holds("two is two", True).source == f"on {lesson.device}"
    lesson.source = "simulated"
    lesson.seconds("a step", "0.25 s")
    assert lesson.holds("two is two", True).source == "on a simulated GPU"
    assert capsys.readouterr().out.splitlines()[1:] == ["a step: 0.25 s", "a step: no times on a simulated GPU"]


def test_too_little_memory_is_said_in_one_line():
    with pytest.raises(MemlabError, match=r"takes about 1,000\.0? ?TiB|of this machine's memory") as error:
        Lesson("x", needs="1000 TiB")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("others, fits", [(0, True), (6 * 1024 * MiB, False), (None, True)])
def test_a_gpu_that_others_have_filled_is_refused_in_one_line(monkeypatch, others, fits):
    reading = DeviceReading(others, 8 * 1024 * MiB, None, others)
    monkeypatch.setattr("memlab.probes.counters.Nvml.read", lambda self, index: reading)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    lesson = Lesson("x", needs="1 MiB")
    lesson.device = "cuda"
    if fits:
        lesson._check_gpu(1024 * MiB)
        return
    with pytest.raises(MemlabError, match=r"up to 2.20 GiB .* leave 2.00 GiB: shut down the kernels") as error:
        lesson._check_gpu(1024 * MiB)
    assert "\n" not in str(error.value)


def test_names_of_before_still_work():
    lesson = Lesson("x", needs="1 MiB")
    assert lesson.knob("rows", {1: 5, 2: 6}).peaks == {1: 5, 2: 6}
    assert Lesson.on_card is Lesson.predict
    assert lesson.account("Peak", 2, [("weights", "P", 1, 1)], found="simulated").found == "simulated"
    assert lesson.guess("Share?").compare(30, found="predicted").found == "predicted"


def test_a_cell_that_is_run_again_neither_asks_nor_claims_twice():
    lesson = Lesson("x", needs="1 MiB")
    for rows in (8, 9):
        lesson.guess("Peak?", between=("1 MiB", "1 GiB"))
        lesson.guess("When?", choices=["now", "never"])
        lesson.holds(f"{rows} rows take {rows / 2} MiB", True)
        lesson.saves("half of it", 10, rows // 2)
    lesson.guesses[1].commit("now").compare("now")
    lines = lesson.end().text.splitlines()
    assert lines[0].startswith("Lesson x: 2 claims held")
    assert lines[1] == "You committed 1 of 2 guesses."
    assert lines[2].startswith("1 guess was skipped. To answer, run the cell that asks again")


def test_all_guesses_of_a_run_of_all_cells_are_skipped_and_one_line_says_so():
    lesson = Lesson("x", needs="1 MiB")
    for question in ("Peak?", "Rest?"):
        lesson.guess(question).compare(30)
    assert sum("2 guesses were skipped" in line for line in lesson.end().text.splitlines()) == 1


def test_hints_name_the_lesson_as_the_learner_does(capsys):
    mine = Lesson("x", needs="1 MiB")
    mine.guess("Share?")
    Lesson("y", needs="1 MiB").guess("Other?")
    said = capsys.readouterr().out
    assert "Share? Not guessed yet: mine.guesses[0].commit(25), or mine.guesses[0].skip()." in said
    assert "Other? Not guessed yet: .commit(25), or .skip()." in said, "no name leads to it"
