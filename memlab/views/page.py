"""A report as one value: a title and parts below it, as text and as HTML with the same content.

External text (names, paths, messages) is kept to one line, and escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape

from memlab.units import one_line
from memlab.views.table import BOX, Table, safe

_LIMIT = 500  # characters of a line
# In the HTML of nbconvert <pre> has the font of the text.
_CODE_FONT = "font-family:var(--jp-code-font-family,monospace)"
STYLE = """:root { color-scheme: light dark }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
body { background: Canvas; color: CanvasText }
section { margin: 1.5rem 0; overflow-x: auto }
svg { max-width: 100%; height: auto }"""


@dataclass(frozen=True, slots=True)
class PageLines:
    """Sentences, one per line, with an optional heading."""

    lines: tuple[str, ...]
    heading: str = ""
    colour: str = ""

    def text(self) -> str:
        """The heading, and one line per sentence."""
        heading = [self.heading] if self.heading else []
        return "\n".join(one_line(line, _LIMIT) for line in [*heading, *self.lines])

    def html(self) -> str:
        """The same; the heading is bold."""
        colour = f" style='color:{self.colour}'" if self.colour else ""
        return _heading(self.heading) + "".join(f"<div{colour}>{safe(line)}</div>" for line in self.lines)


@dataclass(frozen=True, slots=True)
class Beside:
    """Tables side by side in HTML if they fit, and below each other in text."""

    tables: tuple[Table, ...]
    heading: str = ""

    def text(self) -> str:
        """The tables with a blank line between them."""
        tables = "\n\n".join(table.text() for table in self.tables)
        return f"{one_line(self.heading)}\n{tables}" if self.heading else tables

    def html(self) -> str:
        """The tables in a row that wraps."""
        tables = "".join(f"<div>{table.html()}</div>" for table in self.tables)
        return f"{_heading(self.heading)}<div style='display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 32px'>{tables}</div>"


@dataclass(frozen=True, slots=True)
class Folded:
    """A collapsed part, which a notebook expands on a click."""

    heading: str
    part: PageLines | Table | Beside | Markup
    is_open: bool = False

    def text(self) -> str:
        """The heading, and the part below it; sentences become a list."""
        below = self.part.text()
        if isinstance(self.part, PageLines):
            below = "\n".join(f"- {one_line(line, _LIMIT)}" for line in self.part.lines)
        return f"{one_line(self.heading)}:\n{below}"

    def html(self) -> str:
        """A `<details>` element."""
        below = self.part.html()
        if isinstance(self.part, PageLines):
            listed = "".join(f"<li>{safe(line)}</li>" for line in self.part.lines)
            below = f"<ul style='margin:0'>{listed}</ul>"
        is_open = " open" if self.is_open else ""
        return f"<details{is_open}><summary>{safe(self.heading)}</summary>{below}</details>"


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML written by memlab, and a text alternative."""

    content: str
    words: str = ""

    def text(self) -> str:
        """The text, which may be empty."""
        return self.words

    def html(self) -> str:
        """The content."""
        return self.content


Part = str | PageLines | Table | Beside | Folded | Markup


@dataclass(frozen=True, slots=True)
class Page:
    """A title and the parts below it; a string is a sentence."""

    title: str
    parts: tuple[Part, ...] = ()
    colour: str = ""

    def remarked(self, remark: str) -> Page:
        """The same with a remark on its figures below the title; "" for none."""
        return replace(self, parts=(remark, *self.parts)) if remark else self

    def text(self) -> str:
        """Plain text, with a blank line between parts."""
        texts = [part.text() for part in self._filled()]
        return "\n\n".join(filter(None, (one_line(self.title, _LIMIT), *texts)))

    def html(self) -> str:
        """HTML for a notebook, which takes the colours of its text from the page."""
        colour = f" style='color:{self.colour}'" if self.colour else ""
        parts = "".join(f"<div style='margin-top:6px'>{part.html()}</div>" for part in self._filled())
        return f"<div style='{BOX}'><div{colour}><b>{safe(self.title)}</b></div>{parts}</div>"

    def _filled(self) -> list[PageLines | Table | Beside | Folded | Markup]:
        """The parts that are not empty; consecutive sentences are merged."""
        parts: list[PageLines | Table | Beside | Folded | Markup] = []
        for part in self.parts:
            before = parts[-1] if parts else None
            if not isinstance(part, str):
                parts.append(part)
            elif isinstance(before, PageLines) and not before.heading and not before.colour:
                parts[-1] = PageLines((*before.lines, part))
            else:
                parts.append(PageLines((part,)))
        return [part for part in parts if not isinstance(part, PageLines) or part.lines or part.heading]


def code_block(code: str) -> Markup:
    """Python code to copy; indented in text."""
    words = "\n" + "\n".join(f"    {line}".rstrip() for line in code.splitlines())
    style = f"margin:4px 0;white-space:pre-wrap;{_CODE_FONT}"
    return Markup(f"<pre style='{style}'>{escape(code)}</pre>", words)


def _heading(text: str) -> str:
    return f"<div><b>{safe(text)}</b></div>" if text else ""


def document(title: str, sections: Iterable[str]) -> str:
    """A page of its own, light and dark, that needs neither network nor scripts; sections are HTML written by memlab."""
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f"<!doctype html>\n<html lang='en'><head>{head}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
