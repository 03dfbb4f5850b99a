"""An advice in words: plain text that stands alone, and HTML for a notebook. Both say the same.

Names and reasons come from outside: each is kept to one line, and escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memlab.analysis.advice import Findings, Interval, Tried, interval_text
from memlab.units import format_bytes, format_seconds, one_line
from memlab.views import theme

_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
_CELL = "padding:1px 10px 1px 0;white-space:nowrap;vertical-align:top"
_TABLE = "margin:4px 0;border-collapse:collapse;color:inherit;font-size:inherit"
_HEAD = ("", "peak", "saved", "share", "time", "results", "price")
_NUMBERS = (1, 2, 3, 4)
_PRICE = 72


@dataclass(frozen=True, slots=True)
class Line:
    """One run of the table; `share` is what is left of the peak before, -1.0 where nothing is known."""

    cells: tuple[str, ...]
    share: float
    is_recommended: bool = False


@dataclass(frozen=True, slots=True)
class AdvicePage:
    """The parts of an advice; `text` and `html` write them down."""

    title: str
    sentences: tuple[str, ...]
    lines: tuple[Line, ...]
    failed: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    code: str

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        out = [self.title, "", *self.sentences]
        out += ["", *_aligned([_HEAD, *(line.cells for line in self.lines)])] if self.lines else []
        for heading, items in (("Could not be tried:", self.failed), ("Not tried:", self.left_out)):
            out += ["", heading, *(f"- {item}" for item in items)] if items else []
        out += ["", *self.notes] if self.notes else []
        out += ["", "To paste:", "", *(f"    {line}".rstrip() for line in self.code.splitlines())] if self.code else []
        return "\n".join(out)

    def html(self) -> str:
        """A small table with a bar for what is left of the peak; it takes its colours from the page."""
        first, *rest = self.sentences
        parts = [f"<div style='{_BOX}'><div><b>{escape(self.title)}</b></div><div><b>{escape(first)}</b></div>"]
        parts += [f"<div>{escape(one)}</div>" for one in rest]
        if self.lines:
            head = "".join(f"<th scope='col' style='{_style(i)}'>{escape(cell)}</th>" for i, cell in enumerate(_HEAD))
            parts.append(f"<table style='{_TABLE}'><thead><tr>{head}</tr></thead>")
            parts.append(f"<tbody>{''.join(map(_row, self.lines))}</tbody></table>")
        parts += _folded("Could not be tried", self.failed)
        parts += _folded("Not tried", self.left_out)
        parts += [f"<div style='color:{theme.TEXT}'>{escape(note)}</div>" for note in self.notes]
        if self.code:
            pre = f"<pre style='margin:4px 0;white-space:pre-wrap'>{escape(self.code)}</pre>"
            parts.append(f"<details open><summary>To paste</summary>{pre}</details>")
        return "".join(parts) + "</div>"


def page(found: Findings, code: str = "") -> AdvicePage:
    """Put findings into words."""
    where = f"predicted for {found.on}" if found.is_predicted else f"measured on {found.on}"
    best = found.recommended
    shown = [one for one in (*found.ranking(), *found.combined) if not one.failed]
    return AdvicePage(
        one_line(f"memlab · advice on {found.name} · {where} · {format_seconds(found.duration_s)}"),
        tuple(map(one_line, _sentences(found))),
        (_before(found), *(_line(found, one, one == best) for one in shown)) if shown else (),
        tuple(_grouped([(one.name, one.failed) for one in (*found.tried, *found.combined) if one.failed])),
        tuple(_grouped(found.left_out)),
        tuple(map(one_line, _notes(found))),
        code,
    )


def _sentences(found: Findings) -> Iterator[str]:
    best, of = found.recommended, _of(found)
    before = interval_text(found.before_bytes)
    if found.reaches and best is None:
        yield f"The peak of {of} is {before}: the target of {format_bytes(found.target_bytes or 0)} is reached as it is."
        return
    if best is None and not found.tried:
        yield f"Nothing was tried: the peak of {of} is {before}."
    elif best is None:
        yield f"Nothing that was tried saves memory here: the peak of {of} stays {before}."
    else:
        time = f", a step takes {best.ratio:.2f} times as long" if best.ratio is not None else ""
        yield (
            f"{best.name}: peak of {of} {interval_text(best.peak_bytes)} instead of {before} "
            f"(−{interval_text(best.saved_bytes)}, −{_share(best.saved_bytes, found)} %){time}, results {best.results}."
        )
    if found.target_bytes is not None:
        target = format_bytes(found.target_bytes)
        yield (
            f"The target of {target} is reached."
            if found.reaches
            else (
                f"The target of {target} is missed by {format_bytes(found.missed_bytes)}: a smaller batch, or a larger card."
            )
        )
    if found.shares:
        largest = sorted(found.shares.items(), key=lambda item: -item[1])[:3]
        total = max(sum(found.shares.values()), 1)
        held = ", ".join(f"{name} {format_bytes(count)} ({100 * count / total:.0f} %)" for name, count in largest)
        yield f"Held at the peak before: {held}."


def _of(found: Findings) -> str:
    return "the device" if found.of == "device" else found.of


def _share(saved: Interval, found: Findings) -> str:
    return f"{round(100 * sum(saved) / max(sum(found.before_bytes), 1))}"


def _before(found: Findings) -> Line:
    return Line(("as it is", interval_text(found.before_bytes), "", "", "", "", ""), 1.0)


def _line(found: Findings, one: Tried, is_recommended: bool) -> Line:
    time = f"{one.ratio:.2f}×" if one.ratio is not None else "not measured"
    results = f"{one.results}, more than allowed" if one.is_wrong else one.results
    price = one.prices[0] if len(one.prices) == 1 else ""
    cells = (
        one.name,
        interval_text(one.peak_bytes),
        interval_text(one.saved_bytes),
        f"{_share(one.saved_bytes, found)} %",
        time,
        results,
    )
    left = max(one.peak_bytes) / max(max(found.before_bytes), 1)
    return Line((*(one_line(cell, 120) for cell in cells), one_line(price, _PRICE)), left, is_recommended)


def _grouped(left_out: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Names of the same reason in one line."""
    groups: dict[str, list[str]] = {}
    for name, why in left_out:
        groups.setdefault(why, []).append(name)
    for why, names in groups.items():
        yield one_line(f"{', '.join(names)}: {why}")


def _notes(found: Findings) -> Iterator[str]:
    if found.stopped:
        yield f"The search ended early: {found.stopped}."
    yield from found.notes


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _style(column: int) -> str:
    wrap = ";white-space:normal" if column == len(_HEAD) - 1 else ""
    return f"{_CELL};text-align:{'right' if column in _NUMBERS else 'left'}{wrap}"


def _row(line: Line) -> str:
    weight = "font-weight:bold" if line.is_recommended else "font-weight:normal"
    first = f"<th scope='row' style='{_style(0)};{weight}'>{_bar(line.share)}{escape(line.cells[0])}</th>"
    rest = enumerate(line.cells[1:], 1)
    return "<tr>" + first + "".join(f"<td style='{_style(i)}'>{escape(cell)}</td>" for i, cell in rest) + "</tr>"


def _bar(share: float) -> str:
    """What is left of the peak, as a bar beside the name."""
    width = round(90 * min(max(share, 0.0), 1.5))
    inner = f"background:{theme.SERIES['allocated']};height:9px;width:{width}px"
    outer = "display:inline-block;width:96px;margin-right:8px"
    return f"<span aria-hidden='true' style='{outer}'><span style='display:block;{inner}'></span></span>"


def _folded(heading: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        inside = "".join(f"<li>{escape(item)}</li>" for item in items)
        yield f"<details><summary>{heading}: {len(items)}</summary><ul style='margin:0'>{inside}</ul></details>"
