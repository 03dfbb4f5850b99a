"""`memlab progress`: what a learner, or a class, has done of the course."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memlab.cli.files import write
from memlab.cli.parser import Parser, given


def main(arguments: Sequence[str]) -> int:
    """`memlab progress [FILE ...]`: the progress in one file, or of a class."""
    parser = Parser(
        "progress", "[OPTIONS] [FILE ...]",
        "Show what was guessed, held and solved in the lessons of the course; of several files, a class.",
        "  memlab progress\n  memlab progress --html class.html collected/*.json",
    )  # fmt: skip
    what = "what lessons wrote (default: that of this folder)"
    parser.add_argument("files", metavar="FILE", nargs="*", type=given, help=what)
    parser.add_argument("--html", metavar="FILE", type=given, help="write a page that needs nothing else")
    parser.add_argument("--json", action="store_true", help="one line of JSON: one row per lesson, and per learner")
    asked = parser.parse_args(arguments)
    from memlab.lesson.progress import as_html, progress_of
    from memlab.lesson.progress_file import path

    with parser.refusing():
        found = progress_of([Path(name) for name in asked.files] or [path()])
        if asked.html is not None:
            write(asked.html, as_html(found))
        print(found.to_pandas().to_json(orient="records") if asked.json else found)
    return 0
