"""An out-of-memory and a release in words: plain text that stands alone, and HTML for a notebook. Both show the same.

Whatever comes from outside (paths, names, lines, messages) is kept to one line, and escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.leak import short_line
from memlab.analysis.oom.actions import Action
from memlab.analysis.oom.explain import Explanation, Named, amount_text
from memlab.units import format_bytes, one_line
from memlab.views import theme

_SHARES_SHOWN = 5
_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
_CELL = "padding:1px 10px 1px 0;white-space:nowrap;text-align:left;vertical-align:top"
_SIZE = f"{_CELL};text-align:right"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a page: a heading, sentences, and rows of (name, size, remark)."""

    heading: str
    sentences: tuple[str, ...] = ()
    rows: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A title and parts; `text` and `html` write them down."""

    title: str
    parts: tuple[Part, ...]

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        lines = [one_line(self.title)]
        for part in self._filled():
            lines += ["", one_line(part.heading)] if part.heading else []
            lines += [one_line(sentence) for sentence in part.sentences]
            lines += _aligned(part.rows)
        return "\n".join(lines)

    def html(self) -> str:
        """Small tables that take their colours from the page."""
        parts = [f"<div style='{_BOX}'><div style='color:{theme.WARNING}'><b>{_safe(self.title)}</b></div>"]
        for part in self._filled():
            parts += [f"<div style='margin-top:6px'><b>{_safe(part.heading)}</b></div>"] if part.heading else []
            parts += [f"<div>{_safe(sentence)}</div>" for sentence in part.sentences]
            parts += _table(part.rows)
        return "".join(parts) + "</div>"

    def _filled(self) -> list[Part]:
        return [part for part in self.parts if part.sentences or part.rows]


def _safe(text: str) -> str:
    return escape(one_line(text))


def _aligned(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    clean = [tuple(one_line(cell, 160) for cell in row) for row in rows]
    first, second = (max((len(row[column]) for row in clean), default=0) for column in (0, 1))
    for name, size, remark in clean:
        yield f"  {name:<{first}}  {size:>{second}}  {remark}".rstrip()


def _table(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield "<table style='margin:2px 0;border-collapse:collapse'><tbody>"
        for name, size, remark in rows:
            head = f"<th scope='row' style='{_CELL};font-weight:normal'>{_safe(name)}</th>"
            last = f"<td style='{_CELL};white-space:normal'>{_safe(remark)}</td>"
            yield f"<tr>{head}<td style='{_SIZE}'>{_safe(size)}</td>{last}</tr>"
        yield "</tbody></table>"


# --- an out-of-memory -----------------------------------------------------------------------------------------------------


def oom_page(found: Explanation, cell: str = "") -> Page:
    """An explanation as a page; the things to do come right after what happened."""
    name = f"memlab · {one_line(cell, 80)} · " if cell else "memlab · "
    parts = [
        Part("", found.sentences),
        Part("What to do", (), tuple(_action_row(number, action) for number, action in enumerate(found.actions, 1))),
        Part("What the numbers are", (), tuple((t.name, amount_text(t.amount), t.meaning) for t in found.terms)),
        Part(_alive_heading(found), (), tuple(named_rows(found.named, found.more_named))),
        Part("Allocated at the moment memory ran out", tuple(_share_text(share) for share in found.shares)),
        Part("Not seen", tuple(f"- {gap}" for gap in found.gaps)),
    ]
    return Page(name + found.title, tuple(parts))


def _action_row(number: int, action: Action) -> tuple[str, str, str]:
    about = "about " if action.is_estimate and action.gives.low_bytes > 0 else ""
    enough = {True: "enough for this request", False: "not enough alone", None: ""}[action.is_enough]
    return f"{number}.", about + amount_text(action.gives), f"{action.text}{f' [{enough}]' if enough else ''}"


def _alive_heading(found: Explanation) -> str:
    return f"Still alive on {found.label} when the cell had ended: {format_bytes(found.alive_bytes)}, by what keeps it"


def named_rows(named: Iterable[Named], more: int) -> Iterator[tuple[str, str, str]]:
    """Rows of what keeps memory, and how many more there are."""
    for one in named:
        count = f"{one.count} storages, " if one.count > 1 else ""
        yield one.path or "(no name found)", format_bytes(one.nbytes), f"{count}{one.category}"
    if more:
        yield f"and {more} more", "", ""


def _share_text(share: Breakdown) -> str:
    shown = list(share.items())[:_SHARES_SHOWN]
    names = (short_line(name) if share.by == "line" else one_line(name, 48) for name, _ in shown)
    parts = (
        f"{name} {format_bytes(count)} ({share.percent(key)})" for name, (key, count) in zip(names, shown, strict=True)
    )
    rest = share.total_bytes - sum(count for _, count in shown)
    more = f", {len(share) - len(shown)} more {format_bytes(rest)}" if len(share) > len(shown) else ""
    return f"By {share.by}: {', '.join(parts)}{more}."
