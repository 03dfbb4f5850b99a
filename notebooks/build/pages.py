"""The course as static pages, from the notebooks as they are kept: no script, no network, light and dark as the reader's system is.

nbconvert's own pages ask for MathJax and RequireJS elsewhere, so only its Markdown and its colours are used here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import nbformat
from nbconvert.filters.highlight import Highlight2HTML
from nbconvert.filters.markdown import markdown2html
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from notebooks.build.overview import Entry, entry, overview
from notebooks.build.source import MOVED, Lesson

CSS = Path(__file__).with_name("page.css")
_LINK = re.compile(r'href="(\d\d_\w+)\.ipynb"')
_ANCHOR = re.compile(r'<a class="anchor-link"[^>]*>[^<]*</a>')


def write(chosen: Sequence[Lesson], folder: Path, home: str = "index.html") -> list[Path]:
    """Write one page a lesson, one for each earlier address, and `index.html`; returns them.

    Lessons link to `home`, the page that lists them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = [entry(one) for one in chosen]
    written = [folder / "index.html"]
    written[0].write_text(_index(list(chosen)), encoding="utf-8")
    for index, one in enumerate(entries):
        path = folder / f"{one.lesson.name}.html"
        before = entries[index - 1] if index else None
        after = entries[index + 1] if index + 1 < len(entries) else None
        path.write_text(_lesson(one, before, after, home), encoding="utf-8")
        written.append(path)
    names = {one.lesson.name: one.question for one in entries}
    for old, new in MOVED.items():
        if new in names:
            written.append(folder / f"{old}.html")
            written[-1].write_text(_moved(new, names[new]), encoding="utf-8")
    return written


def _moved(new: str, question: str) -> str:
    """A page at an earlier address, which opens the lesson at its address now."""
    link = f'<a href="{new}.html">{escape(question)}</a>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="0; url={new}.html"><title>{escape(question)}</title></head>'
        f"<body>This lesson has moved: {link}</body></html>\n"
    )


def _index(chosen: list[Lesson]) -> str:
    body = _prose(overview(chosen))
    # What stands beside the notebooks in the repository is not beside the pages.
    body = re.sub(r'<a href="\.\./[^"]*">(.*?)</a>', r"\1", body)
    return document("The course", body)


def _lesson(one: Entry, before: Entry | None, after: Entry | None, home: str) -> str:
    notebook = nbformat.read(one.lesson.notebook, as_version=4)
    around = _nav(before, after, home)
    body = f"{around}<main>{''.join(_cells(notebook))}</main><footer>{around}</footer>"
    return document(one.question, body)


def _nav(before: Entry | None, after: Entry | None, home: str) -> str:
    left = (
        f'<a rel="prev" href="{before.lesson.name}.html">← {escape(before.question)}</a>' if before else "<span></span>"
    )
    right = (
        f'<a rel="next" href="{after.lesson.name}.html">{escape(after.question)} →</a>' if after else "<span></span>"
    )
    return f'<nav>{left}<a href="{home}">all lessons</a>{right}</nav>'


def _cells(notebook: NotebookNode) -> Iterator[str]:
    code = Highlight2HTML(pygments_lexer="ipython3")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield f'<div class="prose">{prose(cell)}</div>'
        elif cell.cell_type == "code":
            yield code(cell.source)
            yield from filter(None, map(_output, cell.outputs))


def prose(cell: NotebookNode) -> str:
    """A Markdown cell as HTML, its attachments inline."""
    text: str = cell.source
    for name, data in cell.get("attachments", {}).items():
        text = text.replace(f"attachment:{name}", f"data:image/png;base64,{data['image/png']}")
    return _prose(text)


def _prose(text: str) -> str:
    made = _ANCHOR.sub("", markdown2html(text))
    return _LINK.sub(r'href="\1.html"', made).replace('href="README.md"', 'href="index.html"')


def _output(output: NotebookNode) -> str:
    """The richest form that needs no script; a picture has its words as its text twin."""
    if output.output_type == "stream":
        return f'<div class="output"><pre>{escape(output.text)}</pre></div>'
    data = output.get("data", {})
    words = data.get("text/plain", "")
    if "image/png" in data:
        return picture(data)
    if "text/html" in data:
        return f'<div class="output">{data["text/html"]}</div>'
    return f'<div class="output"><pre>{escape(words)}</pre></div>' if words.strip() else ""


def picture(data: NotebookNode) -> str:
    """The picture of an output, whose text twin is its alt text."""
    image, words = "".join(data["image/png"].split()), data.get("text/plain", "")
    return f'<div class="output"><img src="data:image/png;base64,{image}" alt="{escape(words)}"></div>'


def document(title: str, body: str, *more: Path) -> str:
    """A whole page; the style sheets in `more` come after that of all pages."""
    style = "".join(one.read_text(encoding="utf-8") for one in (CSS, *more))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}{_colours()}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _colours() -> str:
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    kept = (
        "\n".join(line for line in text.splitlines() if re.match(r"\.highlight \.\w", line)) for text in (light, dark)
    )
    first, second = kept
    return f"{first}@media (prefers-color-scheme: dark) {{{second}}}"
