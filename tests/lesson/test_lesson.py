from __future__ import annotations

import gc
import math
import os
import weakref

import psutil
import pytest
import torch

from memlab.api.oom import explain_oom
from memlab.api.runs import runs
from memlab.api.track import track
from memlab.errors import ClaimRefuted, MemlabError
from memlab.lesson import Lesson
from memlab.lesson.lesson import HEADLINES, check_gpu
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


def product(rows: int):
    return lambda: torch.ones(rows, 32) @ torch.ones(32, 32)


def test_a_price_is_a_ratio_that_is_asserted():
    lesson = Lesson("x", needs="1 MiB")
    paid = lesson.price("half", product(64), product(32), at_most=0.5)
    assert str(paid) == "Claim holds (computed): half: 0.50 times the FLOPs (at most 0.5)"
    assert lesson.headlines == {"half: times the FLOPs": 0.5}
    with pytest.raises(ClaimRefuted, match=r"twice: 2\.00 times the FLOPs"):
        lesson.price("twice", product(32), product(64), at_most=1.5)
    timed = lesson.price("twice", product(32), product(64), at_most=1e6, of="seconds")
    assert str(timed).startswith(f"Claim holds (measured on {lesson.device})") and "in 5 pairs" in str(timed)
    with pytest.raises(ClaimRefuted, match="times the seconds"):
        lesson.price("twice", product(32), product(64), at_most=0.0, of="seconds")
    for wrong, of in ((product(32), "euros"), (lambda: None, "FLOPs")):
        with pytest.raises(MemlabError):
            lesson.price("it", wrong, wrong, 1, of=of)


def test_a_simulated_gpu_has_neither_times_nor_values(capsys, monkeypatch):
    lesson = Lesson("x", needs="1 MiB")
    lesson.accuracy("half precision", 0.004, at_most=0.05)
    with pytest.raises(ClaimRefuted, match=r"off by 6\.0%, at most 5%"):
        lesson.accuracy("half precision", 0.06, at_most=0.05)
    with pytest.raises(ClaimRefuted):
        lesson.accuracy("half precision", math.nan, at_most=0.05)
    lesson.source = "simulated"
    lesson.accuracy("half precision", math.nan, at_most=0.05)
    monkeypatch.setattr("memlab.lesson.lesson.provenance_here", lambda devices: "simulated")
    paid = lesson.price("it", product(1), product(1), at_most=0.1, of="seconds")
    assert paid == "it: not measurable here: a simulated GPU has no times"
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Claim holds (computed): half precision: off by 0.4%, at most 5%",
        "half precision: accuracy: not measurable here: a simulated GPU computes no values.",
    ]


def test_the_source_of_a_figure_is_said_by_what_made_it():
    lesson = Lesson("x", needs="1 MiB")
    with track("of a lesson", show=False) as run:
        kept = torch.ones(1 << 18)
    try:
        held = lesson.account("Peak", run, [("ones", "4 N", kept.nbytes, kept.nbytes)])
        assert held.source == lesson.holds("so", True, run).source == "measured on cpu"
        by_category = lesson.account("Peak", run, {"temporary and other": kept.nbytes})
        small = 1024  # what other tests of this process keep
        assert [term.measured_bytes for term in by_category.terms] == [pytest.approx(kept.nbytes, abs=small)]
        assert "formula" not in str(by_category).splitlines()[2]
        with pytest.raises(ClaimRefuted, match=r"temporary and other \(\+0.5 MiB\)"):
            lesson.account("Peak", run, {"temporary and other": kept.nbytes // 2})
        with pytest.raises(MemlabError, match=r"one of parameter, buffer, .* got 'ones'"):
            lesson.account("Peak", run, {"ones": kept.nbytes})
        with pytest.raises(MemlabError, match="only a run has categories, got int"):
            lesson.account("Peak", kept.nbytes, {"other": kept.nbytes})
        assert lesson.holds("so", True).source == "computed"
        assert (
            lesson.guess("How much?", between=("1 KiB", "1 GiB")).compare(kept.nbytes, run).source == "measured on cpu"
        )
        told = explain_oom(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.12 GiB is free."
        )
        assert lesson.holds("so", True, run, told).source == "measured on cpu and read from the message"
        assert lesson.holds("so", True, psutil.Process()).source == "measured on the host"
        with pytest.raises(MemlabError, match="got str"):
            lesson.holds("so", True, "measured")  # type: ignore[arg-type]
    finally:
        runs.discard(run)


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
    if fits:
        check_gpu("x", 1024 * MiB)
        return
    with pytest.raises(MemlabError, match=r"up to 2.20 GiB .* leave 2.00 GiB: shut down the kernels") as error:
        check_gpu("x", 1024 * MiB)
    assert "\n" not in str(error.value)


def test_names_of_before_still_work():
    lesson = Lesson("x", needs="1 MiB")
    assert lesson.knob("rows", {1: 5, 2: 6}).peaks == {1: 5, 2: 6}
    assert Lesson.on_card is Lesson.predict


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
    assert lines[-2] == "Claim holds (computed): 9 rows take 4.5 MiB", "a cell shows no more than its last claim"
    assert len(lines) == 6


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


def test_what_priced_steps_leave_in_cycles_is_not_in_the_next_peak():
    class Cycle:
        def __init__(self) -> None:
            self.me, self.held = self, torch.ones(1024)
            alive.add(self)

    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    gc.disable()
    try:
        Lesson("x", needs="1 MiB").price("it", Cycle, Cycle, at_most=1e9, of="seconds")
        assert not len(alive)
    finally:
        gc.enable()


def test_a_price_of_next_to_nothing_is_no_zero():
    x = torch.ones(256, 8)
    claim = Lesson("x", needs="1 MiB").price("one row", lambda: x @ x.T, lambda: x[:1] @ x[:1].T, at_most=1)
    assert "1.5e-05 times the FLOPs" in str(claim)
