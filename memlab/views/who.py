"""A list of who holds memory, in text and in HTML alike; it knows cells of text, and not what is in them.

Names come from the user's objects: each is kept to one line, cannot steer a terminal, and is escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from memlab.views import theme

MAX_CELL = 200
_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
_CELL = "padding:1px 10px 1px 0;white-space:nowrap;vertical-align:top"

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A title, a table whose first `numbers` columns are numbers, and sentences below."""

    title: str
    head: Row
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    numbers: int = 1

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        lines = [_one_line(self.title)]
        lines += ["", *self._aligned()] if self.rows else []
        lines += ["", *map(_one_line, self.notes)] if self.notes else []
        return "\n".join(lines)

    def html(self) -> str:
        """A small table that takes its colours from the page."""
        parts = [f"<div style='{_BOX}'><div><b>{_safe(self.title)}</b></div>"]
        if self.rows:
            head = "".join(f"<th style='{self._style(i)}'>{_safe(cell)}</th>" for i, cell in enumerate(self.head))
            body = "".join(map(self._html_row, self.rows))
            parts.append(f"<table style='margin:2px 0;border-collapse:collapse'><thead><tr>{head}</tr></thead>")
            parts.append(f"<tbody>{body}</tbody></table>")
        parts += [f"<div>{_safe(note)}</div>" for note in self.notes]
        return "".join(parts) + "</div>"

    def _aligned(self) -> Iterator[str]:
        rows = [tuple(map(_one_line, row)) for row in (self.head, *self.rows)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.head))]
        for row in rows:
            cells = [
                cell.rjust(width) if column < self.numbers else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield ("  " + "  ".join(cells)).rstrip()

    def _html_row(self, row: Row) -> str:
        return (
            "<tr>"
            + "".join(f"<td style='{self._style(i, cell)}'>{_safe(cell)}</td>" for i, cell in enumerate(row))
            + "</tr>"
        )

    def _style(self, column: int, cell: str = "") -> str:
        side = "right" if column < self.numbers else "left"
        colour = f";color:{theme.CATEGORIES[cell]}" if cell in theme.CATEGORIES else ""
        return f"{_CELL};text-align:{side}{colour}"


def _one_line(text: str) -> str:
    """Text that cannot break a line, steer a terminal, or run away."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 2 * MAX_CELL])
    return clean if len(clean) <= MAX_CELL else clean[: MAX_CELL // 2] + "…" + clean[-MAX_CELL // 2 + 1 :]


def _safe(text: str) -> str:
    return escape(_one_line(text))
