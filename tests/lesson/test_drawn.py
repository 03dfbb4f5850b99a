from __future__ import annotations

import json
import re
import xml.etree.ElementTree as tree

import pytest

from memlab.lesson import Lesson, kept
from memlab.lesson.drawn import Drawn
from memlab.lesson.kept import Kept
from memlab.views.bundle import PLOTLY, SVG

GUESSES = (
    Kept("02 by hand", "Peak?", 4.0),
    Kept("01 one step", "Share?", 0.5),
    Kept("01 one step", "When?", None),
    Kept("01 one step", "Half?", None, "skipped"),
    Kept("02 by hand", "Rows?", 1000.0),
)


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_GUESSES", str(tmp_path / "guesses.json"))
    return Lesson("01 one step", needs="1 MiB")


def test_every_guess_has_its_place():
    found = {(one.row, round(one.place, 3), one.kind) for one in Drawn(GUESSES).points}
    near, far, edge, wrong, skipped = (0, -0.5, "near"), (1, 1.0, "off"), (1, 2.0, "off"), "wrong", "skipped"
    assert {near, far, edge} < found
    beside = {kind: place for _, place, kind in found if kind in (wrong, skipped)}
    assert 2.2 < beside[wrong] < beside[skipped]


def test_the_sentence_counts_them():
    said = Drawn(GUESSES).sentence
    assert "Of 5 questions you answered 4 and skipped 1." in said
    assert "1 were within a factor of 2, 1 too low, 2 too high, 1 the wrong word. The middle one was 4.00 times" in said


def test_the_text_has_one_line_a_lesson():
    assert str(Drawn(GUESSES)).splitlines()[1:] == ["  01 one step  0.50  x  -", "  02 by hand   4.00  1000.00"]


def test_three_forms_of_one_picture():
    bundle = Drawn(GUESSES)._repr_mimebundle_()
    assert set(bundle) == {PLOTLY, SVG, "text/plain"}
    picture = tree.fromstring(bundle[SVG])
    drawn = [one for one in picture.iter() if any(child.tag.endswith("title") for child in one) and one is not picture]
    assert len(drawn) == len(GUESSES)
    width, height = (float(number) for number in picture.attrib["viewBox"].split()[2:])
    for one in picture.iter():
        if one.tag.endswith("circle"):
            assert 0 < float(one.attrib["cx"]) < width and 0 < float(one.attrib["cy"]) < height
    assert sum(len(trace["x"]) for trace in bundle[PLOTLY]["data"]) == len(GUESSES)
    assert len(json.dumps(bundle)) < 35_000


def test_two_hundred_guesses_stay_small():
    many = [Kept(f"{number // 10:02} lesson", f"question {number} " * 8, 0.5 + number / 100) for number in range(200)]
    assert len(json.dumps(Drawn(many)._repr_mimebundle_())) < 150_000


def test_hostile_texts_stay_texts():
    hostile = "<script>alert(1)</script>\x1b[2J\n"
    bundle = Drawn([Kept(hostile, hostile, 2.0)])._repr_mimebundle_()
    tree.fromstring(bundle[SVG])
    assert "<script" not in json.dumps(bundle[PLOTLY]) and not re.search(r"[\x00-\x09\x1b]", bundle["text/plain"])


def test_no_guesses_yet():
    assert Drawn(()).sentence.startswith("No guesses are kept yet")
    assert set(Drawn(())._repr_mimebundle_()) == {"text/plain"}


def test_a_lesson_keeps_and_draws(lesson, capsys):
    lesson.guess("Peak?", between=("1 MiB", "1 GiB")).commit("10 MiB").compare("20 MiB")
    lesson.guess("Share?").compare(30)
    lesson.guess("When?", choices=["forward", "backward"]).commit(1).compare("backward")
    states = [(one.question, one.ratio, one.state) for one in kept.read()]
    assert states == [("Peak?", 0.5, "committed"), ("Share?", None, "skipped"), ("When?", None, "committed")]
    assert [one.kind for one in lesson.guesses_so_far().points] == ["near", "skipped", "wrong"]


def test_a_skip_forgets_no_answer(lesson):
    lesson.guess("Peak?", between=("1 MiB", "1 GiB")).commit("10 MiB").compare("20 MiB")
    lesson.guess("Peak?", between=("1 MiB", "1 GiB")).compare("20 MiB")
    assert kept.read() == (Kept("01 one step", "Peak?", 0.5),)


def test_a_file_of_an_earlier_version_is_read(lesson):
    kept.place().write_text(
        '[{"lesson": "a", "question": "b", "ratio": 2.0}, {"lesson": "a", "question": "c", "state": 3}]'
    )
    assert kept.read() == (Kept("a", "b", 2.0), Kept("a", "c", None))


def test_as_a_table():
    assert Drawn(GUESSES).to_pandas().shape == (5, 4)
