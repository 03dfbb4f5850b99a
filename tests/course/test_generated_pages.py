"""What stands around the lessons: the map, the table of tips, the pages; all are made, and current."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import nbformat
import pytest

import memlab
from notebooks.build import pages, tips
from notebooks.build.overview import README, entry, overview
from notebooks.build.source import FOLDER, MOVED, Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)
KEPT = [one for one in lessons() if one.notebook.exists()]
AGAIN = "is not that of the lessons: python -m notebooks.build"


# --- the map -------------------------------------------------------------------------------------------------------------


@LESSONS
def test_the_map_knows_each_lesson(lesson: Lesson) -> None:
    found = entry(lesson)
    assert found.question.endswith("?") and 10 <= found.minutes <= 60 and found.needs
    assert 3 < len(found.attacks) < 160, f"{lesson.name}: what it attacks is too long for a table: {found.attacks}"


def test_the_map_is_current() -> None:
    assert README.read_text(encoding="utf-8") == overview(lessons()), f"notebooks/README.md {AGAIN} map"


# --- for a class ---------------------------------------------------------------------------------------------------------


@LESSONS
def test_a_handout_has_neither_outputs_nor_solutions(lesson: Lesson) -> None:
    made = lesson.handout()
    text = nbformat.writes(made)
    assert "<summary>Solution" not in text
    assert text.count("<summary>Hint") == lesson.prose.count("<summary>Hint")
    assert not any(cell.outputs for cell in made.cells if cell.cell_type == "code")
    for exercise in lesson.exercises():
        assert not any(exercise.solution.strip() in cell.source for cell in made.cells)


# --- the tips ------------------------------------------------------------------------------------------------------------


def test_every_tip_has_its_row_in_order() -> None:
    assert [one.name for one in tips.rows()] == tips.IDS
    assert {one.verdict for one in tips.rows()} <= set(tips.VERDICTS)
    assert all(one.tip and one.today and one.lessons for one in tips.rows())


@pytest.mark.parametrize("tip", tips.rows(), ids=lambda one: one.name)
def test_what_a_tip_names_is_there(tip: tips.Tip) -> None:
    for number in tip.lessons:
        assert lessons((number,)), f"there is no lesson {number}"
    assert tip.technique in ("", "-") or tip.technique in tip.techniques
    for figure in tip.figures:
        assert tips.found_in(tip, figure), f"lessons {', '.join(tip.lessons)} have no figure {figure!r}"


def test_no_technique_answers_a_tip_that_is_none() -> None:
    named = {tip for one in memlab.techniques.values() for tip in one.tips}
    assert named <= set(tips.IDS)


def test_wrong_advice_is_named_and_corrected() -> None:
    wrong = {one.name for one in tips.rows() if one.verdict in ("wrong", "outdated")}
    assert wrong >= {"A4", "A5", "A6", "C4", "C8", "E5", "E7"}
    page = tips.TABLE.read_text(encoding="utf-8")
    assert all(word in page for word in ("Apex", "torch.amp", "volatile", "doubles", "ReLU"))


def test_the_table_of_tips_is_current() -> None:
    assert tips.TABLE.read_text(encoding="utf-8") == tips.table(), f"docs/tips.md {AGAIN} tips"


# --- the pages -----------------------------------------------------------------------------------------------------------


class Reader(html.parser.HTMLParser):
    """What a page asks for, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.asks: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "src" or (tag == "link" and name == "href"):
                self.asks.append(value or "")
            elif name == "href":
                self.links.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pages.write(KEPT, folder)
    return folder


def test_there_is_an_index_and_a_page_a_lesson(site: Path) -> None:
    names = {"index", *(one.name for one in KEPT), *MOVED}
    assert {one.stem for one in site.iterdir()} == names


def test_an_earlier_address_of_a_lesson_opens_it(site: Path) -> None:
    for old, new in MOVED.items():
        text = (site / f"{old}.html").read_text(encoding="utf-8")
        assert f'content="0; url={new}.html"' in text and (site / f"{new}.html").exists()
        assert not lessons((old,)), "a lesson stands at that address"


def test_pages_need_no_network_and_run_nothing(site: Path) -> None:
    for page in site.iterdir():
        text = page.read_text(encoding="utf-8")
        reader = Reader()
        reader.feed(text)
        assert all(one.startswith("data:image/png;base64,") for one in reader.asks), page.name
        assert not reader.tags & {"script", "link", "iframe", "object"}, page.name
        assert not re.search(r"@import|url\(", text), page.name
        here = [one for one in reader.links if not one.startswith(("https://", "http://", "#"))]
        known = {f"{one.name}.html" for one in lessons()} | {"index.html"}
        assert set(here) <= known, f"{page.name}: {set(here) - known}"


def test_pages_follow_the_colours_of_the_reader(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "color-scheme: light dark" in text and text.count("prefers-color-scheme: dark") >= 2


def test_lessons_have_neither_formulas_in_dollars_nor_files_beside_them() -> None:
    """Pages have no MathJax, and neither has the text twin of a notebook."""
    for lesson in lessons():
        prose = "\n".join(cell.source for cell in lesson.fresh().cells if cell.cell_type == "markdown")
        assert not re.search(r"\$[^$\n]+\$", prose), lesson.name
        assert not re.search(r"!\[.*?\]\((?!https?:|attachment:)", prose), lesson.name
    assert not (FOLDER / "00_first_look.ipynb").exists()


def test_the_lesson_plans_take_no_longer_than_they_say():
    text = (FOLDER.parent / "docs" / "teaching.md").read_text(encoding="utf-8")
    minutes = {lesson.name[:2]: lesson.minutes for lesson in lessons()}
    for plan, most in {"90 minutes": 90, "half a day, 4 hours": 240, "two days of 5 hours": 600}.items():
        (row,) = re.findall(rf"^\| {plan} \|(.*?)Homework", text, re.MULTILINE)
        assert 0.8 * most < sum(minutes[number] for number in re.findall(r"\d\d", row)) <= most, plan
