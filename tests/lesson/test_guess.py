from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as tree
from typing import Any

import pytest

from memlab.allocator import CachingAllocator
from memlab.errors import MemlabError
from memlab.lab.widgets import close_all
from memlab.lesson import Lesson, progress_file
from memlab.lesson.guess import Choice, Guess, GuessWidget, Share, Size
from memlab.lesson.guess_plot import GuessPlot
from memlab.lesson.progress_file import StoredGuess
from memlab.units import GiB, MiB
from memlab.views.shown import PLOTLY, SVG

SIZE = Size(MiB, 64 * GiB)
WHERE = Choice(("forward", "backward", "optimizer"))


def test_committed_locked_and_compared():
    heard: list[str] = []
    guess = Guess("Peak of one step?", SIZE, on_change=lambda guess: heard.append(guess.state))
    assert "Not guessed yet" in str(guess) and 'guess.commit("300 MiB")' in str(guess)
    guess.commit("3 GiB")
    with pytest.raises(MemlabError, match=r"locked: you said 3\.00 GiB"):
        guess.commit("4 GiB")
    with pytest.raises(MemlabError, match="locked"):
        guess.skip()
    outcome = guess.compare(4 * GiB)
    assert outcome.ratio == 0.75
    assert str(outcome) == "Peak of one step? You said 3.00 GiB, it was 4.00 GiB (1.3 times too low)."
    assert str(guess) == "Peak of one step? You said 3.00 GiB; locked.", (
        "the next reader of the notebook may still guess"
    )
    assert heard == ["committed", "committed"]


@pytest.mark.parametrize(
    ("committed", "said"),
    [
        ("7 MiB", "it was 1.00 MiB (7 times too high)."),
        ("1 MiB", "it was 1.00 MiB (right)."),
        ("512 KiB", "(2 times too low)."),
    ],
)
def test_how_far_off_it_was(committed, said):
    assert str(Guess("Peak?", SIZE).commit(committed).compare(MiB)).endswith(said)


def test_skipped_is_visible():
    guess = Guess("Peak?", SIZE).skip()
    outcome = guess.compare(MiB)
    assert math.isnan(outcome.ratio) and str(outcome) == "Peak? Measured: 1.00 MiB. You skipped the guess."
    assert "MiB" not in str(guess), "the next reader of the notebook may still guess"
    guess = Guess("Peak?", SIZE, source=lambda: "predicted")
    assert "Predicted: 1.00 MiB. You skipped" in str(guess.compare(MiB))
    assert "Simulated: 1.00 MiB. You skipped" in str(guess.compare(MiB, CachingAllocator(total_bytes=MiB)))


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
    assert 'guess.commit("forward"), one of "forward", "backward" and "optimizer"' in str(Guess("Where?", WHERE))


def test_a_share():
    outcome = Guess("Which share?", Share()).commit("25 %").compare(50)
    assert outcome.ratio == 0.5 and "You said 25 %, it was 50 %" in str(outcome)
    assert str(Guess("Which share?", Share()).commit(0).compare(50)).endswith("You said 0 %, it was 50 %.")


@pytest.mark.parametrize(
    ("answer", "typed", "to", "beyond", "end"),
    [(SIZE, "1 GiB", GiB, "1 TiB", 64 * GiB), (Share(), "25 %", 25, "0", 0)],
)
def test_slider_and_box_follow_each_other_below_the_question(monkeypatch, answer, typed, to, beyond, end):
    shown: list[Any] = []
    monkeypatch.setattr("memlab.lesson.guess.display", lambda content, **how: shown.append(content))
    GuessWidget(Guess("How <much> is left?", answer))
    question, row, buttons, _ = shown[0].children
    (slider, box), commit = row.children, buttons.children[0]
    assert "How &lt;much&gt; is left?" in question.value and slider.description == "" and commit.disabled
    assert row.layout.flex_flow == "row wrap"
    box.value = typed
    assert (slider.value, box.value, commit.disabled) == (to, typed, False)
    box.value = beyond
    assert (slider.value, box.value) == (end, beyond)
    box.value = "nonsense"
    assert (slider.value, box.value) == (end, "nonsense")
    slider.value = to
    assert answer.read(box.value) == to
    close_all(shown[0])


@pytest.mark.parametrize(
    ("answer", "said"),
    [*((SIZE, said) for said in ("nonsense", "0", -5, None, True, 1.5)), (Share(), 101), (Share(), "nan"), (WHERE, 0),
     (WHERE, 4), (WHERE, True)],
)  # fmt: skip
def test_what_is_no_answer(answer, said):
    guess = Guess("?", answer)
    with pytest.raises(MemlabError):
        guess.commit(said)
    assert guess.state == "open"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_GUESSES", str(tmp_path / "guesses.json"))
    return tmp_path / "guesses.json"


def test_stored_over_lessons_and_replaced(file):
    assert progress_file.load() == ()
    for guess in (StoredGuess("01", "Peak?", 0.5), StoredGuess("02", "Peak?", None), StoredGuess("01", "Peak?", 0.9)):
        progress_file.save(guess)
    assert progress_file.load() == (StoredGuess("01", "Peak?", 0.9), StoredGuess("02", "Peak?", None))
    progress_file.save(StoredGuess("01", "Peak?", None, "skipped"))
    assert progress_file.load()[0].ratio == 0.9


@pytest.mark.parametrize("content", ["{", "{}", "[" * 100_000, "\x00", '[{"lesson": 1}, 3, null]', "x" * (2 << 20)])
def test_a_file_that_is_none(file, content):
    file.write_text(content)
    if content.startswith('[{"'):
        assert progress_file.load() == ()
        return
    with pytest.raises(MemlabError, match="to begin anew"):
        progress_file.load()


def test_a_file_of_an_earlier_version_and_numbers_that_are_no_ratio(file):
    file.write_text(
        '[{"lesson": "a", "question": "b", "ratio": 2.0}, {"lesson": "a", "question": "c", "state": 3},'
        '{"lesson": "a", "question": "d", "ratio": 1e999}, {"lesson": "a", "question": "e", "ratio": true}]'
    )
    assert [(one.question, one.ratio, one.state) for one in progress_file.load()] == [
        (name, 2.0 if name == "b" else None, "committed") for name in "bcde"
    ]


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_GUESSES", str(tmp_path / "nowhere" / "guesses.json"))
    progress_file.save(StoredGuess("01", "Peak?", 0.5))
    assert progress_file.load() == ()


# --- all of them in a picture ---

GUESSES = (
    StoredGuess("02 by hand", "Peak?", 4.0),
    StoredGuess("01 one step", "Share?", 0.5),
    StoredGuess("01 one step", "When?", None),
    StoredGuess("01 one step", "Half?", None, "skipped"),
    StoredGuess("02 by hand", "Rows?", 1000.0),
)


def test_every_guess_has_its_place():
    points = {(one.row, round(one.place, 3), one.kind) for one in GuessPlot(GUESSES).points}
    assert {(0, -0.5, "near"), (1, 1.0, "off"), (1, 2.0, "off")} < points
    others = {kind: place for _, place, kind in points if kind in ("wrong", "skipped")}
    assert 2.2 < others["wrong"] < others["skipped"]


def test_the_words_count_them_and_have_one_line_a_lesson():
    plot = GuessPlot(GUESSES)
    assert plot.sentence == (
        "Of 5 questions you answered 4 and skipped 1. 1 was within a factor of 2, 1 too low, 2 too high, "
        "1 the wrong word. The median: 4 times too high."
    )
    assert str(plot).splitlines()[1:] == ["  01 one step  0.50  x  -", "  02 by hand   4.00  1000.00"]
    assert plot.to_pandas().shape == (5, 4)


def test_three_forms_of_one_picture():
    bundle = GuessPlot(GUESSES)._repr_mimebundle_()
    assert set(bundle) == {PLOTLY, SVG, "text/plain"}
    picture = tree.fromstring(bundle[SVG])
    drawn = [one for one in picture.iter() if any(child.tag.endswith("title") for child in one) and one is not picture]
    assert len(drawn) == len(GUESSES)
    width, height = (float(number) for number in picture.attrib["viewBox"].split()[2:])
    for one in picture.iter():
        if one.tag.endswith("circle"):
            assert 0 < float(one.attrib["cx"]) < width and 0 < float(one.attrib["cy"]) < height
    assert sum(len(trace["x"]) for trace in bundle[PLOTLY]["data"]) == len(GUESSES)
    many = [StoredGuess(f"{at // 10:02} lesson", f"question {at} " * 8, 0.5 + at / 100) for at in range(200)]
    assert len(json.dumps(GuessPlot(many)._repr_mimebundle_())) < 150_000


def test_hostile_texts_stay_texts():
    hostile = "<script>alert(1)</script>\x1b[2J\n"
    bundle = GuessPlot([StoredGuess(hostile, hostile, 2.0)])._repr_mimebundle_()
    tree.fromstring(bundle[SVG])
    assert "<script" not in json.dumps(bundle[PLOTLY]) and not re.search(r"[\x00-\x09\x1b]", bundle["text/plain"])


def test_no_guesses_yet():
    assert GuessPlot(()).sentence.startswith("No guesses yet")
    assert set(GuessPlot(())._repr_mimebundle_()) == {"text/plain"}


def test_a_lesson_stores_and_draws_and_a_skip_forgets_no_answer(file):
    lesson = Lesson("01 one step", needs="1 MiB")
    lesson.guess("Peak?", between=("1 MiB", "1 GiB")).commit("10 MiB").compare("20 MiB")
    lesson.guess("Peak?", between=("1 MiB", "1 GiB")).compare("20 MiB")
    lesson.guess("Share?").compare(30)
    lesson.guess("When?", choices=["forward", "backward"]).commit(1).compare("backward")
    states = [(one.question, one.ratio, one.state) for one in progress_file.load()]
    assert states == [("Peak?", 0.5, "committed"), ("Share?", None, "skipped"), ("When?", None, "committed")]
    assert [one.kind for one in lesson.guesses_so_far().points] == ["near", "skipped", "wrong"]
