"""Lines of source with what each took: a listing as text and as HTML, and the classic plain form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memlab.analysis.lines import BACKWARD, Group, LineRow, LineTable
from memlab.units import format_bytes
from memlab.views import theme

SECTION_HTML, SECTION_TEXT = 15_000, 5_000
"""How long a listing may be that stands below the report of a cell, in characters."""
_FOLD_FROM = 4  # so many lines in a row without memory are folded where a listing is too long
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a listing: its number, its text, and its figures, if it was executed."""

    number: int
    code: str
    row: LineRow | None


@dataclass(frozen=True, slots=True)
class Fold:
    """So many lines that are left out."""

    count: int


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures: its head, what it says of a row, and whether a bar shows it."""

    head: str
    cell: Callable[[LineRow], str]
    size: Callable[[LineRow], int] | None = None


Entry = Line | Fold
Section = tuple[str, list[Entry]]


# --- what stands in it ------------------------------------------------------------------------------------------------


def sections(table: LineTable) -> list[Section]:
    """(name of the source, its lines in order); executed lines whose text is not known come as well."""
    rows: dict[str, dict[int, LineRow]] = {}
    for row in table.rows:
        if row.text != BACKWARD:
            rows.setdefault(row.source, {})[row.line] = row
    found = []
    for source, by_line in rows.items():
        texts = table.sources.get(source, {})
        numbers = sorted({*texts, *by_line})
        found.append((source, [Line(n, _plain(texts.get(n, "")), by_line.get(n)) for n in numbers]))
    return [(source, list[Entry](lines)) for source, lines in found]


def columns(table: LineTable) -> list[Column]:
    """The columns that this table needs."""
    rows = table.rows
    chosen = [Column("held", lambda row: _signed(row.held_bytes))]
    if any(row.backward_bytes for row in rows):
        chosen.append(Column("in backward", lambda row: _signed(row.backward_bytes)))
    if any(row.total_bytes != row.held_bytes for row in rows):
        chosen.append(Column("with calls", lambda row: _signed(row.total_bytes)))
    chosen.append(Column("peak", lambda row: _size(row.peak_bytes), lambda row: row.peak_bytes))
    if any(row.freed_bytes for row in rows):
        chosen.append(Column("freed", lambda row: _size(row.freed_bytes)))
    return [*chosen, Column("×", lambda row: f"×{row.executions}" if row.executions else "")]


def closing(table: LineTable) -> list[str]:
    """What belongs to no line, and what all of it comes to."""
    backward = next((row for row in table.rows if row.text == BACKWARD), None)
    parts = ["Over the run: " + _change(table.change_bytes)]
    if backward is not None:
        parts.append(f"backward, of no known line: {_change(backward.held_bytes + backward.backward_bytes)}")
    if table.outside_bytes:
        parts.append(f"outside of these lines: {_change(table.outside_bytes)}")
    return [", ".join(parts) + ".", *(_plain(f"Lines: {gap}.") for gap in table.gaps)]


LEGEND = (
    "held: come less gone while the line was on; peak: the most above its start; freed: of what was older than the line"
)


def _title(table: LineTable, name: str) -> str:
    return f"Lines{' of ' + _plain(name) if name else ''} · {table.device}"


def _shortened(found: list[Section], limit: int, render: Callable[[list[Section]], str]) -> str:
    """The rendered listing, with lines left out until it is short enough: those without memory first, then the least."""
    text = render(found)
    ranks = sorted((row.peak_bytes for _, entries in found for row in _rows(entries)), reverse=True)
    for count in (len(ranks), 150, 100, 60, 40, 25, 12, 6, 3):
        if limit <= 0 or len(text) <= limit:
            break
        if count <= len(ranks):
            least = ranks[count - 1] if ranks else 0
            text = render([(source, _folded(entries, least)) for source, entries in found])
    return text


def _rows(entries: Sequence[Entry]) -> Iterator[LineRow]:
    rows = (entry.row for entry in entries if isinstance(entry, Line))
    return (row for row in rows if row is not None and not row.is_quiet)


def _folded(entries: list[Entry], least: int) -> list[Entry]:
    """The entries with at least so high a peak, and folds for the others."""
    kept: list[Entry] = []
    waiting: list[Entry] = []
    for entry in [*entries, None]:
        row = entry.row if isinstance(entry, Line) else None
        if entry is not None and (row is None or row.is_quiet or row.peak_bytes < least):
            waiting.append(entry)
            continue
        kept += waiting if len(waiting) < _FOLD_FROM and least <= 0 else [Fold(len(waiting))] if waiting else []
        kept += [entry] if entry is not None else []
        waiting = []
    return kept


# --- as text ----------------------------------------------------------------------------------------------------------


def listing_text(table: LineTable, name: str = "", limit: int = 0) -> str:
    """The listing as plain text; where it would be longer than `limit` characters, lines are left out."""
    chosen = columns(table)

    def render(found: list[Section]) -> str:
        lines = [_title(table, name)]
        for source, entries in found:
            lines += ["", *_text_section(source, entries, chosen)]
        return "\n".join([*lines, "", *closing(table), LEGEND])

    return _shortened(sections(table), limit, render)


def _text_section(source: str, entries: Sequence[Entry], chosen: Sequence[Column]) -> Iterator[str]:
    grid = [["", *(column.head for column in chosen)]]
    grid += [_cells(entry, chosen) for entry in entries if isinstance(entry, Line)]
    widths = [max(len(row[at]) for row in grid) for at in range(len(grid[0]))]
    width = max(widths[0], 4)
    yield _row_text(["", *grid[0][1:]], [width, *widths[1:]], _plain(source))
    for entry in entries:
        if isinstance(entry, Fold):
            yield f"{'⋮':>{width}}  {_lines(entry.count)}"
        else:
            yield _row_text(_cells(entry, chosen), [width, *widths[1:]], entry.code[:_WIDTH])


def _cells(line: Line, chosen: Sequence[Column]) -> list[str]:
    return [str(line.number), *(column.cell(line.row) if line.row is not None else "" for column in chosen)]


def _row_text(cells: list[str], widths: list[int], code: str) -> str:
    return ("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + "  " + code).rstrip()


def _lines(count: int) -> str:
    return f"{count} more line{'s' if count > 1 else ''}"


# --- as HTML ----------------------------------------------------------------------------------------------------------


def listing_html(table: LineTable, name: str = "", limit: int = 0) -> str:
    """The listing as a table that takes its colours from the page; everything in it is escaped."""
    chosen = columns(table)
    largest = max((row.peak_bytes for row in table.rows), default=0)

    def render(found: list[Section]) -> str:
        body = "".join(_html_section(source, entries, chosen, largest) for source, entries in found)
        notes = "".join(f"<div>{escape(line)}</div>" for line in closing(table))
        return (
            f"<details open><summary>{escape(_title(table, name))}</summary>"
            f"<table cellpadding='3' style='{_TABLE}' title='{escape(LEGEND)}'>{body}</table>{notes}</details>"
        )

    return _shortened(sections(table), limit, render)


_TABLE = "border-collapse:collapse;margin:2px 0;color:inherit;font-family:monospace;font-size:12px;white-space:pre"
# JupyterLab sets these for every cell of a table, so they are set again where they matter.
_LEFT = "style='text-align:left;white-space:pre;padding:1px 0 1px 16px'"
_NO_BREAK = "\N{NO-BREAK SPACE}"


def _html_section(source: str, entries: Sequence[Entry], chosen: Sequence[Column], largest: int) -> str:
    heads = "".join(f"<th>{escape(column.head)}</th>" for column in chosen)
    rows = [f"<tr align=right><th></th>{heads}<th {_LEFT}>{escape(_plain(source))}</th></tr>"]
    for entry in entries:
        if isinstance(entry, Fold):
            rows.append(f"<tr><td align=right>⋮</td><td colspan={len(chosen) + 1}>{_lines(entry.count)}</td></tr>")
        else:
            cells = "".join(_html_cell(column, entry.row, largest) for column in chosen)
            rows.append(
                f"<tr align=right><td>{entry.number}</td>{cells}<td {_LEFT}>{escape(entry.code[:_WIDTH])}</td></tr>"
            )
    return "".join(rows)


def _html_cell(column: Column, row: LineRow | None, largest: int) -> str:
    text = escape(column.cell(row)).replace(" ", _NO_BREAK) if row is not None else ""
    size = column.size(row) if column.size is not None and row is not None else 0
    if not size or not largest:
        return f"<td>{text}</td>"
    end = max(round(100 * size / largest), 1)
    bar = f"linear-gradient(90deg,{theme.shade(theme.SERIES['allocated'], 0.35)} {end}%,transparent {end}%)"
    return f"<td style='background:{bar}'>{text}</td>"


# --- the classic form -------------------------------------------------------------------------------------------------


def plain_text(table: LineTable) -> str:
    """Line by line the total on the device after it, then the tensors that came (+) and went (-), by kind.

    Sizes of tensors are in millions of bytes, as this form has always had them; the total is in MiB.
    """
    parts = [line for row in table.rows if row.came or row.went for line in _classic(row)]
    return "\n".join(parts) if parts else "No tensor came or went in a watched line."


def _classic(row: LineRow) -> Iterator[str]:
    often = f"   ×{row.executions}" if row.executions > 1 else ""
    yield f"At {_plain(row.source)}: line {row.line}   Total: {row.level_bytes / (1 << 20):.1f} MiB{often}"
    yield from (_group("+", group) for group in row.came)
    yield from (_group("-", group) for group in row.went)


def _group(sign: str, group: Group) -> str:
    size = f"{group.bytes / 1e6:#.5g} MB"
    return (
        f"{sign} | {group.count} * Size:{_plain(group.shape) or '(?)'} | Memory: {size} | {_plain(group.dtype) or '?'}"
    )


# --- words ------------------------------------------------------------------------------------------------------------


def _signed(count: int) -> str:
    return "" if not count else ("+" if count > 0 else "−") + format_bytes(abs(count))


def _change(count: int) -> str:
    return _signed(count) or "0 B"


def _size(count: int) -> str:
    return format_bytes(count) if count else ""


def _plain(text: str) -> str:
    """Text that cannot break a line or steer a terminal; it may come from a file."""
    return "".join(c if c.isprintable() else " " for c in text.replace("\t", "    "))
