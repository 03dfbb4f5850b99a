"""Two runs compared, in words and in small tables: as plain text that stands alone, and as HTML. Both show the same.

Names, lines and sentences come from users and files: each is kept to one line, and escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from memlab.analysis.comparison import Difference, Differences, Side, saved, signed
from memlab.analysis.peak import UNKNOWN_BYTES, Peak
from memlab.analysis.results import ResultCheck
from memlab.units import format_bytes, one_line
from memlab.views import theme
from memlab.views.table import peak_text

SIDES = (theme.SERIES["reserved"], theme.SERIES["allocated"])
"""The colours of both runs."""
_SHOWN = 7  # rows of a table, before the rest is summed up
_NAME, _CODE = 44, 48
_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
_CELL = "padding:1px 10px 1px 0"
Rows = tuple[tuple[str, ...], ...]


# --- the sentence ------------------------------------------------------------------------------------------------------


def peak_words(a: Side, b: Side) -> str:
    """Both peaks, and what lies between them."""
    first, second = _side_text(a), _side_text(b)
    low, high = saved(a, b)
    if low == high == 0:
        return f"peak {second}, as before"
    return f"peak {second} instead of {first} ({_saved_text(a, b)})"


def _side_text(side: Side) -> str:
    return interval_text(side.low_bytes, side.high_bytes)


def interval_text(low: int, high: int) -> str:
    """A peak that lies between two figures.

    >>> interval_text(1024, 1024), interval_text(1024, 4096), interval_text(1024, UNKNOWN_BYTES)
    ('1.00 KiB', '1.00 KiB to 4.00 KiB', '≥ 1.00 KiB')
    """
    return peak_text(Peak(low, high, -1, -1, ""))


def _saved_text(a: Side, b: Side) -> str:
    low, high = saved(a, b)
    if abs(low) >= UNKNOWN_BYTES // 2 or abs(high) >= UNKNOWN_BYTES // 2:
        return "by how much is not known"
    ends = [f"{signed(-end)}, {_percent(-end, a)}" for end in ((low,) if low == high else (low, high))]
    if low != high and signed(-low) == signed(-high):
        ends = ends[:1]
    return " to ".join(ends)


def _percent(count: int, a: Side) -> str:
    if not a.low_bytes:
        return "from nothing"
    share = 100 * abs(count) / a.low_bytes
    digits = f"{share:.0f}" if share >= 0.95 else f"{share:.1f}" if share >= 0.05 else "<0.1" if share else "0"
    return f"{'−' if count < 0 else '+'}{digits} %"


def time_words(of: str, ratio: float) -> str:
    """Who took how many times as long."""
    return f"{'a step takes' if of == 'step' else 'the run took'} {times(ratio)} as long"


def times(ratio: float) -> str:
    """A ratio as text.

    >>> times(1.306), times(0.5), times(0.0033), times(12.3), times(1234.5)
    ('1.31 times', '0.50 times', '0.0033 times', '12.3 times', '1,234 times')
    """
    if ratio < 0.095:
        return f"{ratio:.2g} times"
    return f"{ratio:.2f} times" if ratio < 9.995 else f"{ratio:.1f} times" if ratio < 99.95 else f"{ratio:,.0f} times"


def results_words(results: ResultCheck) -> str:
    """Whether results agree, or how far off they are."""
    return f"results {one_line(results.short, 160)}"


# --- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Level:
    """One row of figures: of what, of the first run and of the second, with the difference in words where it has none."""

    of: str
    a: Peak | str
    b: Peak | str
    words: str = ""

    @classmethod
    def of_sides(cls, of: str, a: Side, b: Side) -> Level:
        """The peaks as the sides have them."""
        first, second = (Peak(side.low_bytes, side.high_bytes, -1, -1, "") for side in (a, b))
        return cls(of, first, second, "0 B" if saved(a, b) == (0, 0) else _saved_text(a, b))

    def cells(self) -> tuple[str, ...]:
        """What stands in its row."""
        first, second = (one if isinstance(one, str) else peak_text(one) for one in (self.a, self.b))
        return self.of, first, second, self.words or self._difference()

    def _difference(self) -> str:
        if isinstance(self.a, str) or isinstance(self.b, str):
            return ""
        return signed(self.b.low_bytes - self.a.low_bytes) if self.a.is_exact and self.b.is_exact else ""


@dataclass(frozen=True, slots=True)
class Said:
    """A comparison cut into its parts; `text` and `html` put them together."""

    sentence: str
    names: tuple[str, str]
    levels: tuple[Level, ...]
    tables: tuple[Differences, ...]
    results: ResultCheck
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        lines = [one_line(self.sentence, 500), ""]
        lines += [f"  {side}  {one_line(name, 120)}" for side, name in zip("ab", self.names, strict=True)]
        for rows, _ in self._tables():
            lines += ["", *_aligned(rows)]
        return "\n".join([*lines, "", *self._sentences()])

    def html(self) -> str:
        """Small tables that take their colours from the page; everything in them is escaped."""
        parts = [f"<div style='{_BOX}'><div><b>{escape(one_line(self.sentence, 500))}</b></div>"]
        for side, name, colour in zip("ab", self.names, SIDES, strict=True):
            parts.append(f"<div><span style='color:{colour}'>■</span> {side}: {escape(one_line(name, 120))}</div>")
        first, *others = self._tables()
        parts.append(_html_table(*first))
        beside = "".join(_html_table(*one) for one in others)
        parts.append(f"<div style='display:flex;flex-wrap:wrap;gap:0 32px'>{beside}</div>")
        parts += [f"<div>{escape(line)}</div>" for line in self._sentences()]
        return "".join(parts) + "</div>"

    def _tables(self) -> Iterator[tuple[Rows, tuple[str, ...]]]:
        """The rows of each table, its head first, with a colour for each row below ("" for none)."""
        yield (("", "a", "b", "difference"), *(level.cells() for level in self.levels)), ("",) * len(self.levels)
        for table in self.tables:
            if len(table):
                yield _differences(table)

    def _sentences(self) -> Iterator[str]:
        found = self.results
        yield f"Results {one_line(found.short, 160)}{_because(found)}."
        for note in (*found.notes, *self.notes):
            yield f"{one_line(note, 300)}."


def _because(results: ResultCheck) -> str:
    """The sentence behind the verdict, where it says more."""
    why = one_line(results.why, 300)
    return "" if not why or why in results.short or results.verdict == "equal" else f": {why}"


def _differences(table: Differences) -> tuple[Rows, tuple[str, ...]]:
    shown = _shown(table)
    rest = [one for name, one in table.items() if name not in dict(shown)]
    rows = [_row(_called(table, name), one) for name, one in shown]
    if rest:
        rows.append(_row(f"{len(rest)} more", Difference(*(sum(getattr(one, end) for one in rest) for end in _ENDS))))
    rows.append(_row("peak allocated", table.total))
    colours = [theme.CATEGORIES.get(name, "") if table.by == "category" else "" for name, _ in shown]
    head = (f"at the peak, by {table.by}", "a", "b", "difference")
    return (head, *rows), (*colours, *[""] * (len(rows) - len(colours)))


def _shown(table: Differences) -> list[tuple[str, Difference]]:
    """The rows that are worth it: of modules and lines, of which there are many, those that differ."""
    rows = list(table.items())
    if table.by != "category":
        rows = [row for row in rows if row[1].difference_bytes] or rows
    return rows if len(rows) <= _SHOWN + 1 and len(rows) >= len(table) - 1 else rows[:_SHOWN]


_ENDS = ("a_bytes", "b_bytes")


def _row(name: str, one: Difference) -> tuple[str, ...]:
    sizes = (format_bytes(count) if count else "" for count in (one.a_bytes, one.b_bytes))
    return name, *sizes, signed(one.difference_bytes)


def _called(table: Differences, name: str) -> str:
    code = one_line(table.texts.get(name, ""), _CODE)
    return f"{one_line(name, _NAME)}  {code}" if code else one_line(name, _NAME)


def _aligned(rows: Rows) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield ("  " + "  ".join(cells)).rstrip()


def _html_table(rows: Rows, colours: tuple[str, ...]) -> str:
    head, *body = rows
    cells = _head(head[0], "col") + "".join(
        f"<th scope='col' style='{_CELL}'>{_side(cell)}{escape(cell)}</th>" for cell in head[1:]
    )
    inner = "".join(
        f"<tr>{_head(row[0], 'row', colour)}"
        + "".join(f"<td style='{_CELL};white-space:nowrap'>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row, colour in zip(body, colours, strict=True)
    )
    return (
        f"<table style='margin:2px 0;border-collapse:collapse;text-align:right'><thead><tr>{cells}</tr></thead>"
        f"<tbody>{inner}</tbody></table>"
    )


def _side(cell: str) -> str:
    """The colour of a run beside its letter."""
    return f"<span style='color:{SIDES['ab'.index(cell)]}'>■</span> " if cell in ("a", "b") else ""


def _head(text: str, scope: str, colour: str = "") -> str:
    mark = f"<span style='color:{colour}'>■</span> " if colour else ""
    return f"<th scope='{scope}' style='{_CELL};text-align:left;white-space:nowrap'>{mark}{escape(text)}</th>"
