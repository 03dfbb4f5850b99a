"""The diagram of each lesson's idea: drawn from its source, small, with an alt text, in the notebook and on its pages."""

from __future__ import annotations

import base64
import re
from html import escape

import nbformat
import pytest

from notebooks.build import diagrams, pages, slides
from notebooks.build.source import Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)


@LESSONS
def test_it_was_drawn_from_its_source(lesson: Lesson) -> None:
    assert diagrams.is_current(lesson.diagram), "draw it: python -m notebooks.build diagrams"
    assert lesson.diagram.with_suffix(".png").stat().st_size <= diagrams.MAX_BYTES
    assert len(diagrams.alt(lesson.diagram)) >= 40
    sizes = re.findall(r"font(?:-size)?[:=]\W*(\d+)", diagrams.styled(lesson.diagram))
    assert sizes and min(map(int, sizes)) >= 12


@LESSONS
def test_the_kept_notebook_holds_it(lesson: Lesson) -> None:
    (held,) = [cell for cell in nbformat.read(lesson.notebook, as_version=4).cells if cell.get("attachments")]
    (image,) = held.attachments.values()
    assert base64.b64decode(image["image/png"]) == lesson.diagram.with_suffix(".png").read_bytes()


def test_a_source_that_changed_is_noticed(tmp_path) -> None:
    first = lessons()[0].diagram
    copy = tmp_path / first.name
    copy.write_text(first.read_text())
    copy.with_suffix(".png").write_bytes(first.with_suffix(".png").read_bytes())
    assert diagrams.is_current(copy)
    copy.write_text(first.read_text().replace("activations", "activation"))
    assert not diagrams.is_current(copy)


def test_pages_and_slides_show_it(tmp_path) -> None:
    lesson = lessons()[0]
    written = pages.write([lesson], tmp_path)[1].read_text()
    made = slides.page(lesson)
    alt = escape(diagrams.alt(lesson.diagram), quote=False)
    for page in (written, made):
        assert f'alt="{alt}"' in page and "attachment:" not in page and "<script" not in page
    kept = nbformat.read(lesson.notebook, as_version=4)
    pictures = sum("image/png" in one.get("data", {}) for cell in kept.cells for one in cell.get("outputs", ()))
    assert made.count("<img ") == pictures + 1
