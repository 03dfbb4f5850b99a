"""The report of a run as a table: as plain text that stands alone, and as HTML for a notebook. Both show the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.leak import short_line
from memlab.analysis.peak import FORETOLD, UNKNOWN_BYTES, Peak
from memlab.analysis.summary import DeviceSummary, Level, Summary
from memlab.units import format_bytes, format_seconds, one_line
from memlab.views import theme

_SHARES_SHOWN = 5
_ROWS_SHOWN = {"category": 7, "tensor": 5}  # what is a table of its own; the rest is a sentence each
Rows = tuple[tuple[str, ...], ...]
_HEAD = ("", "peak", "when", "at start", "at end", "left behind")


@dataclass(frozen=True, slots=True)
class Report:
    """The text of a report, cut into its parts; `text` and `html` put them together."""

    title: str
    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]
    unseen: tuple[str, ...]
    pointer: str = ""

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        lines = [self.title]
        for device in self.devices:
            lines += ["", device.title, *_aligned(device.rows), *("  " + line for line in device.lines)]
            lines += [line for table in device.tables for line in ("", *_aligned(table.rows))]
        if self.notes:
            lines += ["", *self.notes]
        if self.unseen:
            lines += ["", "Not seen:", *("- " + line for line in self.unseen)]
        if self.pointer:
            lines += ["", self.pointer]
        return "\n".join(lines)

    def html(self) -> str:
        """A small table that takes its colours from the page; everything in it is escaped."""
        parts = [f"<div style='{_BOX}'><div><b>{escape(self.title)}</b></div>"]
        for device in self.devices:
            parts += [_html_device(device)]
        parts += [f"<div style='color:{theme.WARNING}'>{escape(note)}</div>" for note in self.notes]
        if self.unseen:
            items = "".join(f"<li>{escape(line)}</li>" for line in self.unseen)
            count = f"{len(self.unseen)} thing{'s' if len(self.unseen) > 1 else ''}"
            parts.append(f"<details><summary>Not seen: {count}</summary><ul style='margin:0'>{items}</ul></details>")
        parts += [f"<div>{escape(self.pointer)}</div>"] if self.pointer else []
        return "".join(parts) + "</div>"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device's part: a title, rows of cells (the first is the head), sentences below, and who held the peak."""

    title: str
    rows: Rows
    lines: tuple[str, ...]
    tables: tuple[ShareTable, ...]


@dataclass(frozen=True, slots=True)
class ShareTable:
    """Who held the peak: name, bytes and share, the head first; with a colour for each row below it ("" for none)."""

    rows: Rows
    colours: tuple[str, ...]


_NOTHING = "No device of those that were measured was used."
_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"


def report(summary: Summary, pointer: str = "") -> Report:
    """Put a summary into words; `pointer` is a line that says where to go on."""
    name = f" · {one_line(summary.name)}" if summary.name else ""
    title = f"memlab{name} · {format_seconds(summary.duration_s)} · {one_line(summary.engine)}"
    shown = [device for device in summary.devices if _is_worth_showing(device)] or list(summary.devices[:1])
    devices = tuple(_device(device) for device in shown)
    notes = (*map(one_line, summary.notes), *(() if devices else (_NOTHING,)))
    unseen = tuple(one_line(f"{gap.name}: {gap.text}") for gap in summary.gaps)
    return Report(title, devices, notes, unseen, one_line(pointer))


def _is_worth_showing(device: DeviceSummary) -> bool:
    return any(level.peak.high_bytes > 0 for level in device.levels if level.of in ("allocated", "reserved"))


def _device(one: DeviceSummary) -> DeviceReport:
    device = one.device
    capacity = f", {format_bytes(device.capacity_bytes)}" if device.capacity_bytes > 0 else ""
    rows = (_HEAD, *(_row(level) for level in one.levels))
    tables = tuple(_share_table(share) for share in one.shares if share.by in _ROWS_SHOWN)
    return DeviceReport(f"{device.label} ({one_line(device.name)}{capacity})", rows, tuple(_lines(one)), tables)


def _row(level: Level) -> tuple[str, ...]:
    start, end = (format_bytes(n) if n >= 0 else "" for n in (level.start_bytes, level.end_bytes))
    left = "" if level.left_bytes is None else _signed(level.left_bytes)
    return level.of, peak_text(level.peak), _when(level.peak), start, end, left


def peak_text(peak: Peak) -> str:
    """A peak as text: plain where it is exact, with ≥ or as a range where it is not."""
    low, high = format_bytes(peak.low_bytes), format_bytes(min(peak.high_bytes, UNKNOWN_BYTES - 1))
    if peak.is_exact:
        return low
    return f"≥ {low}" if peak.high_bytes >= UNKNOWN_BYTES or low == high else f"{low} to {high}"


def _when(peak: Peak) -> str:
    return format_seconds(peak.time_ns / 1e9) if peak.time_ns >= 0 else ""


def _signed(count: int) -> str:
    return "0 B" if not count else ("+" if count > 0 else "−") + format_bytes(abs(count))


def _lines(one: DeviceSummary) -> Iterator[str]:
    allocated = one.levels[0].peak
    yield f"Peak allocated {_exactly(allocated)}; known from {allocated.source}."
    if one.at:
        phase = [f"in phase {one.at['phase']}"] if "phase" in one.at else []
        module = [f"in {one_line(one.at['module'], 80)}"] if "module" in one.at else []
        line = [f"at {short_line(one.at['line'])}"] if "line" in one.at else []
        yield f"It was reached {', '.join(phase + module + line)}."
    has_categories = any(share.by == "category" for share in one.shares)
    for share in one.shares:
        if share.by not in _ROWS_SHOWN and not (share.by == "phase" and has_categories):  # which tell as much, and more
            yield f"At the peak, by {share.by}: {_share_text(share)}."
    if one.device.num_ooms:
        yield f"Out of memory was raised {one.device.num_ooms} time(s) by the allocator."
    if one.device.num_alloc_retries:
        yield f"The allocator had to give back its cache and try again {one.device.num_alloc_retries} time(s)."


def _exactly(peak: Peak) -> str:
    if peak.is_exact:
        return f"{peak.low_bytes:,} bytes, {'predicted' if peak.source == FORETOLD else 'exact'}"
    if peak.high_bytes >= UNKNOWN_BYTES:
        return f"at least {peak.low_bytes:,} bytes"
    return f"between {peak.low_bytes:,} and {peak.high_bytes:,} bytes"


def _share_text(share: Breakdown) -> str:
    shown = list(share.items())[:_SHARES_SHOWN]
    text = ", ".join(f"{one_line(name, 48)} {format_bytes(count)} ({share.percent(name)})" for name, count in shown)
    rest = len(share) - len(shown)
    others = share.total_bytes - sum(count for _, count in shown)
    return text + (f", {rest} more {format_bytes(others)}" if rest else "")


def _share_table(share: Breakdown) -> ShareTable:
    """The largest shares as rows, and what is left in one more."""
    limit = _ROWS_SHOWN[share.by]
    large = [name for name in share if share[name] * 200 >= share.total_bytes]  # "0 %" is not worth a row
    shown = (large or list(share))[:limit]
    rows = [(one_line(name, 48), format_bytes(share[name]), share.percent(name)) for name in shown]
    others, rest = len(share) - len(shown), share.total_bytes - sum(share[name] for name in shown)
    if others:
        rows.append((f"{others} more", format_bytes(rest), f"{100 * rest / max(share.total_bytes, 1):.0f} %"))
    title = "at the peak" if share.by == "category" else f"largest {share.by}s"
    colours = [theme.CATEGORIES.get(name, "") if share.by == "category" else "" for name in shown]
    return ShareTable(((title, "allocated", "share"), *rows), (*colours, *[""] * bool(others)))


def _aligned(rows: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _html_device(device: DeviceReport) -> str:
    caption = f"<caption style='text-align:left;padding:0'>{escape(device.title)}</caption>"
    lines = "".join(f"<div>{escape(line)}</div>" for line in device.lines)
    beside = "".join(_html_table(table.rows, colours=table.colours) for table in device.tables)
    shares = f"<div style='display:flex;flex-wrap:wrap;gap:0 32px'>{beside}</div>" if beside else ""
    return _html_table(device.rows, caption) + lines + shares


def _html_table(rows: Rows, caption: str = "", colours: tuple[str, ...] = ()) -> str:
    head, *body = rows
    cells = _html_head(head[0], "col") + "".join(f"<th style='{_CELL}'>{escape(cell)}</th>" for cell in head[1:])
    inner = "".join(_html_row(row, colour) for row, colour in zip(body, colours or [""] * len(body), strict=True))
    table = f"<table style='{_TABLE}'>{caption}<thead><tr>{cells}</tr></thead>"
    return f"{table}<tbody>{inner}</tbody></table>"


_CELL = "padding:1px 10px 1px 0"
_TABLE = "margin:2px 0;border-collapse:collapse;text-align:right"


def _html_row(row: tuple[str, ...], colour: str) -> str:
    cells = "".join(f"<td style='{_CELL}'>{escape(cell)}</td>" for cell in row[1:])
    return f"<tr>{_html_head(row[0], 'row', colour)}{cells}</tr>"


def _html_head(text: str, scope: str, colour: str = "") -> str:
    """The first cell of a row, with the colour that its area has in the figure."""
    mark = f"<span style='color:{colour}'>■</span> " if colour else ""
    return f"<th scope='{scope}' style='{_CELL};text-align:left;white-space:nowrap'>{mark}{escape(text)}</th>"
