from __future__ import annotations

import math

import pytest

from memlab.errors import MemlabError
from memlab.lesson import kept
from memlab.lesson.guess import Choice, Guess, Share, Size
from memlab.lesson.kept import Kept
from memlab.units import GiB, MiB

SIZE = Size(MiB, 64 * GiB)
WHERE = Choice(("forward", "backward", "optimizer"))


def test_committed_locked_and_compared():
    guess = Guess("Peak of one step?", SIZE)
    assert "Not guessed yet" in str(guess) and 'guess.commit("300 MiB")' in str(guess)
    guess.commit("3 GiB")
    with pytest.raises(MemlabError, match=r"locked: you said 3\.00 GiB"):
        guess.commit("4 GiB")
    with pytest.raises(MemlabError, match="locked"):
        guess.skip()
    outcome = guess.compare(4 * GiB)
    assert outcome.ratio == 0.75
    assert str(outcome) == "Peak of one step? You said 3.00 GiB, it was 4.00 GiB (guess over measurement 0.75)."
    assert str(guess) == str(outcome)


def test_skipped_is_visible():
    guess = Guess("Peak?", SIZE).skip()
    outcome = guess.compare(MiB)
    assert math.isnan(outcome.ratio) and str(outcome) == "Peak? Measured: 1.00 MiB. You skipped the guess."
    assert "MiB" not in str(guess), "the next reader of the notebook may still guess"


def test_an_open_guess_counts_as_skipped_and_stays_so():
    guess = Guess("Peak?", SIZE)
    assert "skipped" in str(guess.compare(MiB))
    with pytest.raises(MemlabError, match="it was skipped"):
        guess.commit(MiB)


def test_too_late_once_something_was_measured():
    measured: list[int] = []
    guess = Guess("Peak?", SIZE, clock=lambda: len(measured))
    measured.append(1)
    assert guess.is_late
    with pytest.raises(MemlabError, match="measured before it was made"):
        guess.commit("1 GiB")
    assert guess.state == "skipped"


def test_a_choice_by_word_or_number():
    assert Guess("Where?", WHERE).commit(2).compare("backward").ratio == 1
    wrong = Guess("Where?", WHERE).commit("forward").compare("backward")
    assert math.isnan(wrong.ratio) and str(wrong) == 'Where? You said "forward": it was "backward".'
    assert "commit(1 to 3): 1 forward, 2 backward, 3 optimizer" in str(Guess("Where?", WHERE))


def test_a_share():
    outcome = Guess("Which share?", Share()).commit("25 %").compare(50)
    assert outcome.ratio == 0.5 and "You said 25 %, it was 50 %" in str(outcome)


@pytest.mark.parametrize("said", ["nonsense", "0", -5, None, True, 1.5])
def test_what_is_no_size(said):
    guess = Guess("Peak?", SIZE)
    with pytest.raises(MemlabError):
        guess.commit(said)
    assert guess.state == "open"


@pytest.mark.parametrize(("answer", "said"), [(Share(), 101), (Share(), "nan"), (WHERE, 0), (WHERE, 4), (WHERE, True)])
def test_what_is_no_answer(answer, said):
    with pytest.raises(MemlabError, match=r"got "):
        Guess("?", answer).commit(said)


def test_who_listens_hears_of_every_change():
    heard: list[str] = []
    Guess("?", SIZE, on_change=lambda guess: heard.append(guess.state)).commit(MiB).compare(MiB)
    assert heard == ["committed", "committed"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_GUESSES", str(tmp_path / "guesses.json"))
    return tmp_path / "guesses.json"


def test_kept_over_lessons_and_replaced(file):
    assert kept.read() == ()
    kept.keep(Kept("01", "Peak?", 0.5))
    kept.keep(Kept("02", "Peak?", None))
    kept.keep(Kept("01", "Peak?", 0.9))
    assert kept.read() == (Kept("01", "Peak?", 0.9), Kept("02", "Peak?", None))


@pytest.mark.parametrize("content", ["{", "{}", "[" * 100_000, "\x00", '[{"lesson": 1}, 3, null]', "x" * (2 << 20)])
def test_a_file_that_is_none(file, content):
    file.write_text(content)
    if content.startswith('[{"'):
        assert kept.read() == ()
        return
    with pytest.raises(MemlabError, match="to begin anew"):
        kept.read()


def test_numbers_that_are_no_ratio(file):
    file.write_text(
        '[{"lesson": "a", "question": "b", "ratio": 1e999}, {"lesson": "a", "question": "c", "ratio": true}]'
    )
    assert [one.ratio for one in kept.read()] == [None, None]


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_GUESSES", str(tmp_path / "nowhere" / "guesses.json"))
    kept.keep(Kept("01", "Peak?", 0.5))
    assert kept.read() == ()


def test_what_was_predicted_is_not_said_to_be_measured():
    assert "Predicted: 1.00 MiB. You skipped" in str(Guess("Peak?", SIZE).compare(MiB, found="predicted"))
