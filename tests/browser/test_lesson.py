"""What lessons show in a real JupyterLab: a guess, a value that is selected, the guesses drawn, and what is saved of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import lab as harness

pytestmark = pytest.mark.browser
FIGURE = ".js-plotly-plot"
ASK = """
from memlab.lesson import Lesson
lesson = Lesson("01 a lesson", needs="1 MiB")
peak = lesson.guess("Peak?", between=("1 MiB", "1 GiB"))
when = lesson.guess("When?", choices=["forward", "backward"])
"""
COMPARE = "print(peak.compare('128 MiB'))\nprint(when.compare('backward'))"
SWEEP = "lesson.sweep('batch', {8: 2**20, 16: 2**21, 32: 2**22})"
DRAW = "lesson.guesses_so_far()"
LONG = "When a step that retained is over and its loss has a name: how much of the peak is left, in percent?"
ASK_LONG = f"lesson.guess({LONG!r})\nlesson.guess({LONG!r}, choices=['less', 'more']);"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    with harness.opened(tmp_path_factory, "lesson.ipynb", [ASK, COMPARE, SWEEP, DRAW, ASK_LONG]) as made:
        made.run_cell(0)
        made.cell(0).get_by_role("button", name="Commit").first.wait_for(timeout=60_000)
        yield made


def words(outputs: list[dict[str, Any]]) -> str:
    parts = [one["data"]["text/plain"] if "data" in one else one["text"] for one in outputs]
    return "\n".join("".join(part) for part in parts)


def test_nothing_is_chosen_for_the_learner_and_no_other_text_is_shown(lab):
    commits = lab.cell(0).get_by_role("button", name="Commit")
    assert [commits.nth(i).is_disabled() for i in range(commits.count())] == [True, True]
    assert lab.cell(0).get_by_role("radio", checked=True).count() == 0
    assert lab.cell(0).get_by_label("or type").input_value() == ""
    assert not lab.cell(0).get_by_text("Not guessed yet").first.is_visible()
    assert "Not guessed yet" in words(lab.outputs(0)), "what is saved needs no kernel"


def test_a_guess_is_typed_committed_and_locked(lab):
    box = lab.cell(0).get_by_label("or type")
    box.fill("nonsense")
    lab.cell(0).get_by_role("button", name="Commit").first.click()
    lab.cell(0).get_by_role("alert").first.wait_for(timeout=10_000)
    box.fill("64 MiB")
    lab.cell(0).get_by_role("button", name="Commit").first.click()
    lab.cell(0).get_by_text("You said 64.00 MiB; locked").wait_for(timeout=10_000)
    lab.cell(0).get_by_role("button", name="Skip").first.click()
    lab.cell(0).get_by_text("When? You skipped the guess").wait_for(timeout=10_000)
    assert lab.cell(0).get_by_role("button", name="Commit").count() == 0


def test_the_outcome_stands_where_it_is_compared_and_not_below_the_question(lab):
    lab.run_cell(1)
    assert "You said 64.00 MiB, it was 128.0 MiB (2 times too low)" in lab.text(1)
    assert "You said 64.00 MiB; locked" in lab.text(0) and "128.0 MiB" not in lab.text(0)


def test_a_value_is_selected_by_keyboard_and_the_picture_follows(lab):
    lab.run_cell(2)
    lab.cell(2).locator(FIGURE).first.wait_for(timeout=30_000)
    slider = lab.cell(2).get_by_role("slider").first
    slider.focus()
    slider.press("ArrowRight")
    lab.cell(2).locator(FIGURE).get_by_text("batch 16: peak 2.00 MiB; 2.00 times that of 8.").wait_for(timeout=10_000)
    lab.picture("sweep", 2)


def test_the_guesses_are_drawn(lab):
    lab.run_cell(3)
    lab.cell(3).locator(FIGURE).first.wait_for(timeout=30_000)
    assert "Of 2 questions you answered 1 and skipped 1." in words(lab.outputs(3))


@pytest.mark.parametrize("width", [1300, 800])
def test_a_long_question_leaves_room_for_its_slider_which_follows_what_is_typed(lab, width):
    lab.page.set_viewport_size({"width": width, "height": 1000})
    lab.run_cell(4)
    cell = lab.cell(4)
    cell.get_by_role("button", name="Commit").first.wait_for(timeout=60_000)
    inside, slider, box = cell.locator(".jp-OutputArea").first, cell.locator(".noUi-base"), cell.get_by_label("or type")
    box.scroll_into_view_if_needed()
    lab.picture(f"guess-{width}", 4)
    right = inside.bounding_box()["x"] + inside.bounding_box()["width"]
    questions = inside.locator(".widget-html").filter(has_text=LONG)
    for one in (slider, box, questions.nth(0), questions.nth(1)):
        at = one.bounding_box()
        assert at["width"] >= 90 and at["x"] + at["width"] <= right
    handle = cell.get_by_role("slider").first
    assert float(handle.get_attribute("aria-valuenow")) == 50
    box.fill("90")
    lab.page.wait_for_function("one => Number(one.getAttribute('aria-valuenow')) == 90", arg=handle.element_handle())
    assert box.input_value() == "90"
    lab.page.set_viewport_size({"width": 1300, "height": 1000})


def test_what_is_saved_needs_no_kernel(lab):
    assert "You said 64.00 MiB; locked" in words(lab.outputs(0))
    assert "You said 64.00 MiB, it was 128.0 MiB" in words(lab.outputs(1))
    assert "batch 16: peak 2.00 MiB" in words(lab.outputs(2))
    pictures = [one["data"] for cell in (2, 3) for one in lab.outputs(cell) if "image/svg+xml" in one.get("data", {})]
    assert len(pictures) == 2 and all("application/vnd.plotly.v1+json" in one for one in pictures)


def test_nothing_was_asked_of_the_world_and_nothing_failed(lab):
    assert lab.foreign == []
    assert lab.page_errors == []
