"""A table as one value: columns with units and rows of plain values, as text and as HTML.

Texts come from users and files: each is kept to one line, without terminal escapes, and is escaped in HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from memlab.units import UNBOUNDED, ByteRange, format_bytes, format_seconds, one_line, signed
from memlab.views import theme

Cell = str | int | float | ByteRange | None
"""A value in the unit of its column, None for blank, or text instead."""

BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
# Undo the cells' left padding, to align a table with the text above and below it.
_TABLE = "margin:2px -4px;border-collapse:collapse;text-align:right;font-size:inherit"
_CELL = "padding:0 4px"  # JupyterLab styles table cells, so each needs its own style
_LONGEST_BAR, _BAR_WIDTH = 12, 7  # characters in text, em in HTML
_WRAPPED = 300
"""The limit of text that HTML wraps."""


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column, the unit of its values, the limit of text, and the least width of text that wraps.

    Both are in characters. Units are "bytes", "change" (bytes with a sign), "seconds", "share" (of 1), "times", "count" and "text".
    """

    name: str
    unit: str = "text"
    limit: int = 120
    wraps: bool = False
    least: int = 0
    is_early: bool = False
    """Whether HTML has it next to the first column, so that it is in view also in a narrow window; in text it may be long."""

    @property
    def is_number(self) -> bool:
        """Whether its values are right-aligned."""
        return self.unit in _FORMATS

    @property
    def style(self) -> str:
        """The CSS of its cells."""
        start = "" if self.is_number else ";text-align:left"
        may_wrap = self.wraps or self.unit in ("share", "count")  # a share is no wider than the word above it
        least = ";min-width:12em;overflow-wrap:anywhere" if self.wraps and self.is_early else ""
        return f"{_CELL}{start}{'' if may_wrap else ';white-space:nowrap'}{least}"

    def text(self, value: Cell, limit: int = 0) -> str:
        """A value of this column as text, up to its limit or this one."""
        if value is None:
            return ""
        if isinstance(value, str) or not self.is_number:
            return one_line(str(value), limit or self.limit)
        if not isinstance(value, ByteRange):
            text = _FORMATS[self.unit](value)
        else:
            text = str(value) if self.unit == "bytes" else signed_range(value)
        return text.replace("-", "−")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values below named columns, with a title above and notes below.

    `bar` is the index of the column with bars, -1 for none. `colours` has one per row, "" for none, for its bar and the mark
    before it. `strong` are the indices of emphasized rows. Empty columns are omitted.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    bar: int = -1
    colours: tuple[str, ...] = ()
    strong: frozenset[int] = frozenset()

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        padded = []
        for _, column, values in self._used():
            texts = [one_line(column.name), *map(column.text, values)]
            width = max(map(len, texts))
            padded.append([text.rjust(width) if column.is_number else text.ljust(width) for text in texts])
        padded.append(["", *("█" * round(_LONGEST_BAR * length) for length in self._bars())])
        lines = [("  " + "  ".join(cells)).rstrip() for cells in zip(*padded, strict=True)]
        shown = lines if lines[0] else lines[1:]
        title = [one_line(self.title)] if self.title else []
        return "\n".join([*title, *shown, *map(one_line, self.notes)])

    def html(self) -> str:
        """A small table that inherits the text colours of the page."""
        heads, rows = "", [""] * len(self.rows)
        bars, used = self._bars(), sorted(self._used(), key=lambda one: (one[0] > 0, not one[1].is_early))
        for place, (at, column, values) in enumerate(used):
            wide = f";min-width:{_BAR_WIDTH}em" if at == self.bar else ""
            if column.least:
                longest = max(len(text) for text in (column.name, *(column.text(value, _WRAPPED) for value in values)))
                wide += f";min-width:{min(column.least, longest)}ch"
            heads += f"<th style='{column.style}{wide}'>{safe(column.name)}</th>"
            for number, value in enumerate(values):
                text = safe(column.text(value, max(column.limit, _WRAPPED) if column.wraps else 0))
                colour = self.colours[number] if number < len(self.colours) else ""
                style = column.style
                if number in self.strong:
                    style += ";font-weight:700"
                elif not place:
                    style += ";font-weight:400"
                if not place:  # the row's heading
                    mark = f"<span style='color:{colour}'>■</span> " if colour else ""
                    rows[number] += f"<th style='{style}'>{mark}{text}</th>"
                    continue
                length = round(_BAR_WIDTH * bars[number], 1)
                if at == self.bar and length:
                    style += f";box-shadow:inset {length:g}em 0 {colour or theme.SERIES['allocated']}55"
                rows[number] += f"<td style='{style}'>{text}</td>"
        caption = f"<caption style='text-align:left;{_CELL}'>{safe(self.title)}</caption>" if self.title else ""
        head = f"<thead><tr>{heads}</tr></thead>" if any(column.name for _, column, _ in used) else ""
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        table = f"<table style='{_TABLE}'>{caption}{head}<tbody>{body}</tbody></table>"
        notes = "".join(f"<div>{safe(note)}</div>" for note in self.notes)
        return (table if self.rows or caption else "") + notes

    def _used(self) -> list[tuple[int, Column, list[Cell]]]:
        """The columns that are not empty: index, column, values."""
        found = ((at, column, [row[at] for row in self.rows]) for at, column in enumerate(self.columns))
        return [one for one in found if not self.rows or any(value not in (None, "") for value in one[2])]

    def _bars(self) -> list[float]:
        """The length of each row's bar, as a share of the longest."""
        sizes: list[float] = []
        for row in self.rows:
            value = row[self.bar] if self.bar >= 0 else None
            if isinstance(value, ByteRange):
                value = value.high if value.high < UNBOUNDED else value.low
            size = value
            sizes.append(0 if size is None or isinstance(size, str) else max(size, 0))
        longest = max(sizes, default=0) or 1
        return [size / longest for size in sizes]


def signed_range(change: ByteRange) -> str:
    """A change with two bounds."""
    low, high = signed(change.low), signed(change.high)
    if change.high >= UNBOUNDED:
        return "unknown" if change.low <= -UNBOUNDED else f"≥ {low}"
    if change.low <= -UNBOUNDED:
        return f"≤ {high}"
    return low if low == high else f"{low} to {high}"


def percent(share: float) -> str:
    """A share of 1 as text.

    >>> percent(0.256), percent(0.004), percent(0.0), percent(-0.06), percent(-0.004)
    ('26 %', '<1 %', '0 %', '−6 %', '>−1 %')
    """
    if share and abs(share) < 0.005:
        return "<1 %" if share > 0 else ">−1 %"
    return f"{100 * share:.0f} %".replace("-", "−")


def safe(text: str, limit: int = 500) -> str:
    """One line of text, escaped; what stands in backticks is code.

    >>> safe("`x.item()` < 3")
    '<code>x.item()</code> &lt; 3'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(one_line(text, limit)))


_FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "change": signed,
    "seconds": format_seconds,
    "share": percent,
    "times": "{:.2f}×".format,
    "count": "{:,}".format,
}
