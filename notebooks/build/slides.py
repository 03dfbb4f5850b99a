"""Slides from the pictures of a lesson, for a projector: its diagram, then what each section has measured, as it is kept.

One page a lesson that needs neither scripts nor a network; it scrolls by slides, and prints one on a sheet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from notebooks.build.overview import entry
from notebooks.build.pages import document, picture, prose
from notebooks.build.source import Lesson

CSS = Path(__file__).with_name("slides.css")
_HEADING = re.compile(r"^##? (.+)$", re.MULTILINE)


def page(lesson: Lesson) -> str:
    """The slides of a lesson, as HTML."""
    kept = nbformat.read(lesson.notebook, as_version=4)
    slides = (
        f"<section><h2>{heading}</h2>{''.join(image for _, image in images)}</section>"
        for heading, images in groupby(_pictures(kept), key=lambda one: one[0])
    )
    return document(entry(lesson).question, "\n".join(slides), CSS)


def _pictures(kept: NotebookNode) -> Iterator[tuple[str, str]]:
    """Each picture with the heading that it stands under."""
    heading = ""
    for cell in kept.cells:
        if cell.cell_type == "markdown":
            heading = [heading, *_HEADING.findall(cell.source)][-1]
            if cell.get("attachments"):
                yield escape(heading), prose(cell)
        else:
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    yield escape(heading), picture(output.data)
