"""The ledger as a table: a row for each cell and device on which something happened, in text and in HTML alike.

What comes from outside (code, names) is kept to one line, cannot steer a terminal, and is escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from memlab.analysis.growth import Accounts, Entry, Growth, Left, Level
from memlab.analysis.peak import Peak
from memlab.units import format_bytes, one_line
from memlab.views import theme
from memlab.views.table import peak_text

ROWS_SHOWN = 30
_NAMES_SHOWN = 3
_NOTHING = "No cell yet: after %load_ext memlab each cell gets an entry."
_FREED_SINCE = (
    "Freed since: there when its cell had ended, let go of by a later one; it counts as left, and not as still there."
)
_LEAST_UNNAMED = 1 << 20
_HEAD = ("cell", "", "device", "before", "peak", "after", "left", "still there", "what is left, by name")
_TEXT_COLUMNS = (0, 1, 2, 8)
_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
_CELL = "padding:1px 10px 1px 0;white-space:nowrap;vertical-align:top"


@dataclass(frozen=True, slots=True)
class LedgerTable:
    """The ledger in words: rows of cells of a table, what grows, and remarks."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    growths: tuple[str, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        lines = [self.title]
        if self.rows:
            lines += ["", *_aligned((_HEAD, *self.rows))]
        lines += ["", *self.growths] if self.growths else []
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(lines)

    def html(self) -> str:
        """A small table that takes its colours from the page; everything in it is escaped."""
        parts = [f"<div style='{_BOX}'><div><b>{escape(self.title)}</b></div>"]
        if self.rows:
            head = "".join(f"<th style='{_CELL};{_side(i)}'>{escape(cell)}</th>" for i, cell in enumerate(_HEAD))
            body = "".join(map(_html_row, self.rows))
            parts.append(f"<table style='margin:2px 0;border-collapse:collapse'><thead><tr>{head}</tr></thead>")
            parts.append(f"<tbody>{body}</tbody></table>")
        parts += [f"<div style='color:{theme.WARNING}'>{escape(line)}</div>" for line in self.growths]
        parts += [f"<div>{escape(line)}</div>" for line in self.notes]
        return "".join(parts) + "</div>"


def ledger_table(accounts: Accounts) -> LedgerTable:
    """Put the ledger into words: the latest cells that did something; the rest is counted."""
    busy = [(entry, level) for entry in accounts.entries for level in entry.levels if _is_busy(entry, level)]
    shown = busy[-ROWS_SHOWN:]
    numbers = {entry.index: entry.number for entry in accounts.entries}
    rows = tuple(_row(entry, level, numbers) for entry, level in shown)
    quiet = len(accounts.entries) - len({entry.index for entry, _ in busy})
    notes = (
        [f"{len(busy) - len(shown)} earlier rows are not shown; .to_pandas() has all."]
        if len(busy) > len(shown)
        else []
    )
    notes += [f"{quiet} cell(s) left nothing and took nothing that was seen."] if quiet else []
    notes += [f"Cell {_number(entry.number)}: {one_line(note, 200)}." for entry, _ in shown for note in entry.notes]
    notes += [f"{one_line(note, 200)}." for note in accounts.notes]
    notes += [] if accounts.entries else [_NOTHING]
    notes += [_FREED_SINCE] if any("(freed since" in row[-1] for row in rows) else []
    count = f"{len(accounts.entries)} cell{'s' if len(accounts.entries) != 1 else ''}"
    state = "" if accounts.is_on else " · off (%memledger on)"
    growths = tuple(map(_growth, accounts.growths))
    return LedgerTable(f"memlab ledger · {count}{state}", rows, growths, tuple(dict.fromkeys(notes)))


def _is_busy(entry: Entry, level: Level) -> bool:
    """Whether a cell did anything on a device: it left or freed something, or its peak rose above both ends."""
    rose = level.peak is not None and level.peak.low_bytes > max(level.before_bytes, level.after_bytes)
    return bool(level.left_bytes) or rose or any(one.device == level.device for one in entry.left)


def _row(entry: Entry, level: Level, numbers: Mapping[int, int]) -> tuple[str, ...]:
    mine = [one for one in entry.left if one.device == level.device]
    still = sum(one.nbytes for one in mine if one.died is None)
    again = f" (run {entry.again + 1})" if entry.again else ""
    status = "" if entry.status == "ok" else f" ({one_line(entry.status, 40)})"
    return (
        _number(entry.number),
        one_line(entry.text, 40) + again + status,
        level.device,
        format_bytes(level.before_bytes),
        _peak(level.peak),
        format_bytes(level.after_bytes),
        _signed(level.left_bytes),
        format_bytes(still) if mine else "",
        _names(entry, level, mine, numbers),
    )


def _number(number: int) -> str:
    """A cell's execution count as notebooks write it; nobody tells that of some interrupted cells."""
    return f"[{number or '?'}]"


def _peak(peak: Peak | None) -> str:
    return "" if peak is None else peak_text(peak)


def _signed(count: int) -> str:
    return "0 B" if not count else ("+" if count > 0 else "−") + format_bytes(abs(count))


def _names(entry: Entry, level: Level, mine: list[Left], numbers: Mapping[int, int]) -> str:
    """What a cell left by variable, the largest first, and what has been freed since."""
    groups: dict[str, list[Left]] = {}
    for one in mine:
        if one.is_there_after(entry.index) and (one.path or one.died is None):
            groups.setdefault(one.root, []).append(one)
    ordered = sorted(groups.values(), key=lambda group: -sum(one.nbytes for one in group))
    parts = [_group(group, numbers) for group in ordered[:_NAMES_SHOWN]]
    parts += [f"{len(ordered) - _NAMES_SHOWN} more names"] if len(ordered) > _NAMES_SHOWN else []
    unnamed = entry.unnamed_bytes(level.device)
    if unnamed >= _LEAST_UNNAMED:
        what = "rounding and what Python does not see" if entry.is_whole else "not looked at"
        parts.append(f"{what} {format_bytes(unnamed)}")
    return ", ".join(parts)


def _group(group: list[Left], numbers: Mapping[int, int]) -> str:
    name = group[0].path if len(group) == 1 else group[0].root
    count = f" ({len(group)} tensors)" if len(group) > 1 else ""
    size = format_bytes(sum(one.nbytes for one in group))
    return f"{one_line(name, 60) or 'no name found'}{count} {size}{_freed(group, numbers)}"


def _freed(group: list[Left], numbers: Mapping[int, int]) -> str:
    """What has become of things that a cell left: nothing to say, or in which cell the last of them was freed."""
    if any(one.died is None for one in group):
        return ""
    number = numbers.get(max(one.died for one in group if one.died is not None))
    return f" (freed since, in {_number(number)})" if number else " (freed since)"


def _growth(growth: Growth) -> str:
    each, name = format_bytes(growth.bytes_per_run), one_line(growth.name, 60) or "something without a name"
    return (
        f"Cell {_number(growth.number)} grows when run again: {name} by {each} in each of the last {growth.runs} runs"
        f" ({growth.device}; {one_line(growth.text, 40)}); {format_bytes(growth.still_bytes)} of it is still there."
    )


def _aligned(rows: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        yield "  ".join(cell.ljust(w) if i in _TEXT_COLUMNS else cell.rjust(w) for cell, w, i in cells).rstrip()


def _html_row(row: tuple[str, ...]) -> str:
    cells = enumerate(row[1:], 1)
    head = f"<th scope='row' style='{_CELL};{_side(0)}'>{escape(row[0])}</th>"
    return f"<tr>{head}" + "".join(f"<td style='{_CELL};{_side(i)}'>{escape(c)}</td>" for i, c in cells) + "</tr>"


def _side(column: int) -> str:
    return "text-align:left" if column in _TEXT_COLUMNS else "text-align:right"
