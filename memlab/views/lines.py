"""The memory of each line: a listing as text and as HTML, and the classic plain form."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from memlab.analysis.lines import BACKWARD, LineRow, LineTable
from memlab.units import format_bytes, number_of, plain, signed
from memlab.views import theme

SECTION_HTML, SECTION_TEXT = 15_000, 5_000
"""The maximum length of a listing below the report of a cell, in characters."""
LEGEND = "held: allocated minus freed in the line; peak: highest rise above its start; freed: of older memory"
_FOLD_FROM = 4  # this many consecutive lines without memory are folded if a listing is too long
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class ListedLine:
    """One line of a listing: its number, its text, and its figures, if it was executed."""

    number: int
    code: str
    row: LineRow | None

    @property
    def peak_bytes(self) -> int:
        """Its peak; -1 if it had none."""
        return -1 if self.row is None or self.row.is_quiet else self.row.peak_bytes


Section = tuple[str, list[ListedLine | int]]
"""The name of a source, and its lines; a number means that many omitted lines."""
_COLUMNS: dict[str, tuple[str, Callable[[int], str]]] = {
    "held": ("held_bytes", signed),
    "in backward": ("backward_bytes", signed),
    "with calls": ("total_bytes", signed),
    "peak": ("peak_bytes", format_bytes),
    "freed": ("freed_bytes", format_bytes),
    "×": ("executions", "×{}".format),
}
"""Head -> the figure of a row and its format; blank for 0."""


def listing_text(table: LineTable, name: str = "", limit: int = 0) -> str:
    """The listing as plain text of at most about `limit` characters (0: of any length)."""
    columns = _columns(table)

    def render(found: list[Section]) -> str:
        lines = [_title(table, name)]
        for source, entries in found:
            grid = [_cells(entry, columns) for entry in entries]
            grid.insert(0, ["", *columns, _plain(source)])
            widths = [max(map(len, texts)) for texts in zip(*grid, strict=True)]
            widths[0] = max(widths[0], 4)
            lines.append("")
            for *cells, code in grid:
                padded = [text.rjust(width) for text, width in zip(cells, widths, strict=False)]
                lines.append("  ".join([*padded[: 1 if cells[0] == "⋮" else None], code]).rstrip())
        return "\n".join([*lines, "", *_closing(table), LEGEND])

    return _shortened(table, limit, render)


def listing_html(table: LineTable, name: str = "", limit: int = 0) -> str:
    """The listing as an HTML table; everything in it is escaped."""
    columns = _columns(table)
    largest = max((row.peak_bytes for row in table.rows), default=0)
    at_peak = 1 + columns.index("peak")
    heads = "".join(f"<th>{_GAP}{head}</th>" for head in columns)
    notes = "".join(f"<div>{escape(line)}</div>" for line in _closing(table))

    def render(found: list[Section]) -> str:
        body = ""
        for source, entries in found:
            body += f"<tr align=right><th></th>{heads}<th {_LEFT}>{escape(_plain(source))}</th></tr>"
            for entry in entries:
                *texts, code = _cells(entry, columns)
                if isinstance(entry, int):
                    body += f"<tr><td align=right>{texts[0]}</td><td colspan={len(columns) + 1}>{code}</td></tr>"
                    continue
                cells = [f"<td>{_GAP}{escape(text).replace(' ', _NO_BREAK)}</td>" for text in texts]
                if entry.row is not None and entry.row.peak_bytes:
                    end = max(round(100 * entry.row.peak_bytes / largest), 1)
                    bar = f"linear-gradient(90deg,{_BAR} {end}%,transparent {end}%)"
                    cells[at_peak] = cells[at_peak].replace("<td>", f"<td style='background:{bar}'>", 1)
                body += f"<tr align=right>{''.join(cells)}<td {_LEFT}>{escape(code)}</td></tr>"
        return (
            f"<details open><summary>{escape(_title(table, name))}</summary>"
            f"<table style='{_TABLE}' title='{escape(LEGEND)}'>{body}</table>{notes}</details>"
        )

    return _shortened(table, limit, render)


_TABLE = "border-collapse:collapse;margin:2px 0;color:inherit;font-family:monospace;font-size:12px;white-space:pre"
# JupyterLab styles every cell of a table, so these are set again where they matter.
_LEFT = "style='text-align:left;white-space:pre;padding:1px 0 1px 16px'"
_NO_BREAK = "\N{NO-BREAK SPACE}"
_GAP = 2 * _NO_BREAK  # marimo resets the padding of cells
_BAR = theme.shade(theme.SERIES["allocated"], 0.35)


def _columns(table: LineTable) -> list[str]:
    """The columns that this table needs."""
    needed = {
        "in backward": any(row.backward_bytes for row in table.rows),
        "with calls": any(row.total_bytes != row.held_bytes for row in table.rows),
        "freed": any(row.freed_bytes for row in table.rows),
    }
    return [head for head in _COLUMNS if needed.get(head, True)]


def _cells(entry: ListedLine | int, columns: list[str]) -> list[str]:
    """The number of a line, its figures, and its code."""
    if isinstance(entry, int):
        return ["⋮", *("" for _ in columns), number_of(entry, "more line")]
    figures = [""] * len(columns)
    if entry.row is not None:
        for place, (name, form) in enumerate(_COLUMNS[head] for head in columns):
            value = getattr(entry.row, name)
            figures[place] = form(value) if value else ""
    return [str(entry.number), *figures, entry.code[:_WIDTH]]


def _shortened(table: LineTable, limit: int, render: Callable[[list[Section]], str]) -> str:
    """The listing, omitting the smallest lines until it is short enough."""
    rows: dict[str, dict[int, LineRow]] = {}
    for row in table.rows:
        if row.text != BACKWARD:
            rows.setdefault(row.source, {})[row.line] = row
    found: list[tuple[str, list[ListedLine]]] = []
    for source, by_line in rows.items():  # include executed lines whose text is unknown
        texts = table.sources.get(source, {})
        numbers = sorted({*texts, *by_line})
        found.append((source, [ListedLine(n, _plain(texts.get(n, "")), by_line.get(n)) for n in numbers]))
    text = render([(source, [*lines]) for source, lines in found])
    peaks = (line.peak_bytes for _, lines in found for line in lines)
    ranks = sorted((peak for peak in peaks if peak >= 0), reverse=True)
    for count in (len(ranks), 150, 100, 60, 40, 25, 12, 6, 3):
        if limit <= 0 or len(text) <= limit:
            break
        if count <= len(ranks):
            least = ranks[count - 1] if ranks else 0
            text = render([(source, _folded(lines, least)) for source, lines in found])
    return text


def _folded(lines: list[ListedLine], least: int) -> list[ListedLine | int]:
    """The lines with at least this peak, and the number omitted between them."""
    kept: list[ListedLine | int] = []
    for is_kept, alike in itertools.groupby(lines, lambda line: line.peak_bytes >= max(least, 0)):
        group = list(alike)
        kept += group if is_kept or (least <= 0 and len(group) < _FOLD_FROM) else [len(group)]
    return kept


def _closing(table: LineTable) -> list[str]:
    """What belongs to no line, and the total."""
    parts = [f"Over the run: {signed(table.change_bytes)}"]
    for row in table.rows:
        if row.text == BACKWARD:
            parts.append(f"backward, of unknown lines: {signed(row.held_bytes + row.backward_bytes)}")
            break
    if table.outside_bytes:
        parts.append(f"outside these lines: {signed(table.outside_bytes)}")
    return [", ".join(parts) + ".", *(_plain(f"Lines: {gap}.") for gap in table.gaps)]


def _title(table: LineTable, name: str) -> str:
    return " · ".join(filter(None, (f"Lines{' of ' + _plain(name) if name else ''}", table.device, table.remark)))


def _plain(text: str) -> str:
    """Text without line breaks and terminal escapes; it may come from a file."""
    return plain(text.replace("\t", "    "))


def plain_text(table: LineTable) -> str:
    """Line by line the total on the device after it, then the tensors allocated (+) and freed (-), by kind.

    Sizes of tensors are in millions of bytes, as this form has always had them; the total is in MiB.
    """
    parts = []
    for row in table.rows:
        if row.came or row.went:
            often = f"   ×{row.executions}" if row.executions > 1 else ""
            total = f"{row.level_bytes / (1 << 20):.1f} MiB"
            parts.append(f"At {_plain(row.source)}: line {row.line}   Total: {total}{often}")
        for sign, groups in (("+", row.came), ("-", row.went)):
            for group in groups:
                shape, dtype = _plain(group.shape) or "(?)", _plain(group.dtype) or "?"
                size = f"{group.bytes / 1e6:#.5g} MB"
                parts.append(f"{sign} | {group.count} * Size:{shape} | Memory: {size} | {dtype}")
    parts = parts or ["No tensor was allocated or freed in a watched line."]
    return "\n".join([*parts, *filter(None, (table.remark,))])
