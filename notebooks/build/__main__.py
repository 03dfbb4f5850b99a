"""The command line of the course's build."""

from __future__ import annotations

import argparse
import sys
import time

import nbformat
from nbformat import NotebookNode

from notebooks.build import diagrams, pages, slides
from notebooks.build.cells import SourceError, Spoken
from notebooks.build.execute import differences, executed, headlines
from notebooks.build.overview import README, overview
from notebooks.build.pictures import MAX_BYTES, chromium, keep_static
from notebooks.build.source import FOLDER, Lesson, lessons
from notebooks.build.tips import TABLE, table

SITE = FOLDER.parent / "artifacts" / "course"
CLASS = FOLDER.parent / "artifacts" / "class"
SLIDES = FOLDER.parent / "artifacts" / "slides"


def main() -> int:
    """Read the arguments, do it."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build")
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("numbers", nargs="*", help="lessons whose names begin so; all without")
    parser.add_argument("--language", default="", help="make, prose, check, handout: from prose in this folder")
    asked = parser.parse_args()
    chosen = lessons(tuple(asked.numbers), asked.language)
    if not chosen:
        parser.error(f"there is no lesson {' '.join((asked.language, *asked.numbers)).strip()}")
    try:
        return WHAT[asked.what](chosen)
    except SourceError as error:
        print(error, file=sys.stderr)
        return 1


def make(chosen: list[Lesson]) -> int:
    """Write the executed notebooks."""
    with chromium() as draw:
        for lesson in chosen:
            begin = time.monotonic()
            notebook = answered(lesson)
            keep_static(notebook, draw)
            text = nbformat.writes(notebook) + "\n"
            if len(text) > MAX_BYTES:
                print(f"{lesson.name}: {len(text):,} bytes are more than {MAX_BYTES:,}", file=sys.stderr)
                return 1
            keep(lesson, text)
            print(f"{lesson.name}: {time.monotonic() - begin:.0f} s, {len(text):,} bytes", flush=True)
    return 0


def answered(lesson: Lesson) -> NotebookNode:
    """The lesson, executed as a student who took part would see it."""
    try:
        return executed(lesson.fresh(), answers=lesson.answers)
    except SourceError as error:
        raise SourceError(f"{lesson.name}.py: {error}") from None


def keep(lesson: Lesson, text: str) -> None:
    """Write the notebook of a lesson."""
    lesson.notebook.parent.mkdir(exist_ok=True)  # of the first lesson in another language
    lesson.notebook.write_text(text, encoding="utf-8")


def update(lesson: Lesson) -> None:
    """Write prose, head, ids and tags around the outputs of the notebook in English: its code has to be that of the source."""
    kept, english, fresh = nbformat.read(lesson.original, as_version=4), Lesson(lesson.name).fresh(), lesson.fresh()
    code = [[cell.source for cell in one.cells if cell.cell_type == "code"] for one in (kept, english)]
    if code[0] != code[1]:
        raise SystemExit(f"{lesson.name}: its code has changed: python -m notebooks.build make {lesson.name[:2]}")
    outputs = iter([cell for cell in kept.cells if cell.cell_type == "code"])
    kept.cells = [next(outputs) if cell.cell_type == "code" else cell for cell in fresh.cells]
    for cell, new in zip(kept.cells, fresh.cells, strict=True):
        cell.id, cell.metadata, cell.source = new.id, new.metadata, new.source
        for output in cell.get("outputs", ()):
            translate(output, lesson.spoken)
    keep(lesson, nbformat.writes(kept) + "\n")


def translate(output: NotebookNode, said: Spoken) -> None:
    """Put the texts of an edition into what a cell has shown, in place."""
    if "text" in output:
        output.text = said.output(output.text)
    for kind, shown in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = said.output(shown)


def prose(chosen: list[Lesson]) -> int:
    """The text of lessons whose code is as it was, without executing them."""
    for lesson in chosen:
        update(lesson)
    return 0


def draw_diagrams(chosen: list[Lesson]) -> int:
    """The PNG of each diagram whose SVG, or whose colours, have changed."""
    changed = [lesson.diagram for lesson in chosen if not diagrams.is_current(lesson.diagram)]
    with chromium(diagrams.SCALE) as draw:
        for svg in changed:
            path = diagrams.write(svg, draw)
            print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)
    return 0


def check(chosen: list[Lesson]) -> int:
    """Execute afresh, and say which figures are others than those that are kept."""
    wrong = 0
    for lesson in chosen:
        kept = headlines(nbformat.read(lesson.notebook, as_version=4))
        for line in differences(kept, headlines(answered(lesson))):
            print(f"{lesson.name}: {line}")
            wrong += 1
    return min(wrong, 1)


def html(chosen: list[Lesson]) -> int:
    """The course as pages, from the notebooks as they are kept."""
    written = pages.write(chosen, SITE)
    print(f"{len(written)} pages, {sum(one.stat().st_size for one in written):,} bytes: open {written[0]}")
    return 0


def write_slides(chosen: list[Lesson]) -> int:
    """The pictures of the lessons as slides, one page a lesson."""
    SLIDES.mkdir(parents=True, exist_ok=True)
    for lesson in chosen:
        (SLIDES / f"{lesson.name}.html").write_text(slides.page(lesson), encoding="utf-8")
    print(f"{len(chosen)} pages in {SLIDES}")
    return 0


def handout(chosen: list[Lesson]) -> int:
    """Notebooks for a class: nothing executed, no solutions."""
    folder = CLASS / chosen[0].language
    folder.mkdir(parents=True, exist_ok=True)
    for lesson in chosen:
        (folder / lesson.notebook.name).write_text(nbformat.writes(lesson.handout()) + "\n", encoding="utf-8")
    print(f"{len(chosen)} notebooks in {folder}")
    return 0


def course_map(chosen: list[Lesson]) -> int:
    """notebooks/README.md, of all lessons."""
    README.write_text(overview(lessons()), encoding="utf-8")
    return 0


def tips(chosen: list[Lesson]) -> int:
    """docs/tips.md, of all lessons."""
    TABLE.write_text(table(), encoding="utf-8")
    return 0


WHAT = {
    "make": make, "prose": prose, "check": check, "diagrams": draw_diagrams, "html": html, "slides": write_slides,
    "handout": handout, "map": course_map, "tips": tips,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
