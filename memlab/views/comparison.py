"""A comparison of two runs: a page whose first line says what the second costs or saves, and a figure of both.

The figure has both timelines on one axis, each from 0, and next to them, on the same scale, who held each peak. If seconds
would hide the shorter run, the axis is the share of each run, and says so; buttons switch. Where not both have seconds that
mean anything (predicted, or on a simulated GPU), events in their order take their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from memlab.analysis.breakdown import ELSEWHERE
from memlab.analysis.comparison import Difference, Differences, Picture, Side
from memlab.analysis.curves import Curve
from memlab.analysis.modules import ranged
from memlab.analysis.results import ResultCheck
from memlab.units import UNBOUNDED, ByteRange, format_bytes, one_line, signed
from memlab.views import theme
from memlab.views.curves import sparkline
from memlab.views.page import Beside, Markup, Page, PageLines
from memlab.views.scene import EVENTS, Axis, Bars, Item, Label, Line, Panel, Rule, Scene
from memlab.views.table import Cell, Column, Table

SIDES = (theme.SERIES["reserved"], theme.SERIES["allocated"])
"""The colours of both runs."""
_ABOVE = 1.15  # space above the higher peak, for its label
_SHOWN = 7  # rows of a table, before the rest is summarized
_FEW = 3  # layers that are alike, before they become one row
_NAME, _CODE = 44, 48


def peak_words(a: Side, b: Side) -> str:
    """Both peaks and their difference."""
    if a.peak - b.peak == (0, 0):
        return f"peak {b.peak}, as before"
    return f"peak {b.peak} instead of {a.peak} ({saved_words(a, b)})"


def saved_words(a: Side, b: Side) -> str:
    """The difference of the peaks, in bytes and as a share of the first."""
    low, high = a.peak - b.peak
    if low == high == 0:
        return "0 B"
    if max(abs(low), abs(high)) >= UNBOUNDED:
        return "by an unknown amount"
    ends: dict[str, str] = {}  # their texts may be equal
    for change in (-low, -high):
        share = 100 * abs(change) / a.peak.low if a.peak.low else 0
        digits = f"{share:.0f}" if share >= 0.95 else f"{share:.1f}" if share >= 0.05 else "<0.1" if share else "0"
        percent = f"{'−' if change < 0 else '+'}{digits} %" if a.peak.low else "from nothing"
        ends.setdefault(signed(change), f"{signed(change)}, {percent}")
    return " to ".join(ends.values())


def times(ratio: float) -> str:
    """A ratio as text.

    >>> times(1.306), times(0.5), times(0.0033), times(12.3), times(1234.5)
    ('1.31 times', '0.50 times', '0.0033 times', '12.3 times', '1,234 times')
    """
    return f"{_number(ratio)} times"


def between(low: float, high: float) -> str:
    """A range of ratios as text.

    >>> between(1.262, 1.4), between(0.5, 0.501)
    ('1.26 to 1.40', '0.50')
    """
    first, last = _number(low), _number(high)
    return first if first == last else f"{first} to {last}"


def _number(ratio: float) -> str:
    if ratio < 0.095:
        return f"{ratio:.2g}"
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


def level_row(of: str, a: ByteRange | str, b: ByteRange | str, words: str = "") -> tuple[Cell, ...]:
    """One row of figures of both runs; `words` describe their difference; by default it is in bytes if both are exact."""
    difference: Cell = words or None
    if not words and isinstance(a, ByteRange) and isinstance(b, ByteRange) and a.is_exact and b.is_exact:
        difference = b.low - a.low
    return of, a, b, difference


def comparison_page(
    sentence: str, names: tuple[str, str], levels: Iterator[tuple[Cell, ...]], tables: Iterator[Differences], results: ResultCheck,
    notes: tuple[str, ...] = (),
) -> Page:  # fmt: skip
    """The sentence, both names, the figures, and the differences by category, line and module."""
    both = [f"{side}: {one_line(name, 120)}" for side, name in zip("ab", names, strict=True)]
    marks = ""
    for text, colour in zip(both, SIDES, strict=True):
        marks += f"<span style='color:{colour}'>■</span> {escape(text)} &nbsp; "
    why = one_line(results.why, 300)
    because = "" if not why or why in results.short or results.verdict == "equal" else f": {why}"
    last = (f"Results {one_line(results.short, 160)}{because}", *results.notes, *notes)
    parts = (
        Markup(f"<div>{marks}</div>", "\n".join(both)),
        Table("", _columns(""), tuple(levels)),
        Beside(tuple(_differences(table) for table in tables if len(table))),
        PageLines(tuple(f"{line}." for line in last)),
    )
    return Page(sentence, parts)


def _columns(head: str) -> tuple[Column, ...]:
    sides = (Column(side, "bytes") for side in "ab")
    return (Column(head, limit=_NAME + _CODE + 2, wraps=True), *sides, Column("difference", "change"))


def _differences(table: Differences) -> Table:
    """The rows to show: of modules and lines those that differ."""
    rows = list(table.items())
    if table.by != "category":
        rows = [row for row in rows if row[1].difference_bytes] or rows
    groups = _layers(rows) if table.by == "module" else [([name], one) for name, one in rows]
    shown = groups if len(groups) <= _SHOWN + 1 and len(rows) >= len(table) - 1 else groups[:_SHOWN]
    named: list[tuple[str, Difference]] = []
    for names, one in shown:
        code, name = one_line(table.texts.get(names[0], ""), _CODE), one_line(names[0], _NAME)
        name = "outside any module" if table.by == "module" and name == ELSEWHERE else name
        if len(names) > 1:
            name = f"{one_line(ranged(names), _NAME)} ({len(names):,} layers)"
        named.append((f"{name}  {code}" if code else name, one))
    seen = {name for names, _ in shown for name in names}
    rest = [one for name, one in table.items() if name not in seen]
    if rest:
        more = Difference(sum(one.a_bytes for one in rest), sum(one.b_bytes for one in rest))
        named.append((f"{len(rest)} more", more))
    named.append(("peak allocated", table.total))
    cells = tuple((name, one.a_bytes or None, one.b_bytes or None, one.difference_bytes) for name, one in named)
    colours = tuple(theme.CATEGORIES.get(names[0], "") if table.by == "category" else "" for names, _ in shown)
    return Table("", _columns(f"peak by {table.by}"), cells, colours=colours)


def _layers(rows: Sequence[tuple[str, Difference]]) -> list[tuple[list[str], Difference]]:
    """Merge layers that differ in their number alone; the largest difference first."""
    alike: dict[tuple[str, Difference], list[str]] = {}
    for name, one in rows:
        alike.setdefault((re.sub(r"\d+", "#", name), one), []).append(name)
    merged = []
    for (_, one), names in alike.items():
        if len(names) < _FEW:
            merged += [([name], one) for name in names]
            continue
        names.sort(key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
        merged.append((names, Difference(one.a_bytes * len(names), one.b_bytes * len(names))))
    return sorted(merged, key=lambda group: -abs(group[1].difference_bytes))


def comparison_scene(picture: Picture, words: str, heading: str = "") -> Scene:
    """The figure of both runs; `words` is its text alternative."""
    limits = _limits(picture)
    height = Axis.of_bytes(max([picture.top_bytes, *limits]) * _ABOVE)
    lines, shares, held = [], [], []
    labels: list[Item] = []
    for at, drawn in enumerate(picture.sides):
        name = f"{'ab'[at]}: {one_line(drawn.name, 32)}"
        lines.append(Line(name, drawn.time_s, drawn.bytes, SIDES[at], 1.4, 0.1, axis=at))
        whole_s = max(drawn.duration_s, 1e-9)
        ticks = tuple((whole_s * percent / 100, f"{percent} %") for percent in (0, 25, 50, 75, 100))
        below = f"share of each run{f' ({picture.why})' if picture.why else ''}"
        shares.append(Axis(0.0, whole_s, ticks, below))
        held.append(dict(drawn.shares))
        # The label above a bar, and the range of the peak.
        low, high = drawn.peak
        words, unit = str(drawn.peak).rsplit(" ", 1)
        text = words.replace(" to ", "\nto ") + f"\n{unit}"  # no wider than a bar in a narrow window
        if low < high < UNBOUNDED:
            x, y = np.array([at - 0.07, at + 0.07, at, at, at - 0.07, at + 0.07]), np.repeat([low, high], 3)
            labels.append(Line("between these", x, y, theme.TEXT, 2, shape="joined", named=False))
        labels.append(Label(at, drawn.top_bytes if high < UNBOUNDED else low, text, SIDES[at]))
    unit = "seconds" if picture.has_times else EVENTS
    common = Axis.of_seconds(picture.duration_s, 4, "seconds since the start of each")
    common = common if picture.has_times else Axis.of_events(round(picture.duration_s))
    views = {unit: (common, common), "share": tuple(shares)}
    rules = (Rule(limit, theme.CAPACITY, text, at_left=True) for limit, text in limits.items())
    left = Panel(height, views, (*lines, *rules), "share" if picture.by_share else unit, 0.0, 0.7)
    names = dict.fromkeys(name for name in [*theme.CATEGORIES, *held[0], *held[1]] if any(name in one for one in held))
    bars = Bars({name: [one.get(name, 0) for one in held] for name in names}, (1.0, 1.0))
    right = Panel(height, {"": (Axis(-0.5, 1.5, ((0, "a"), (1, "b"))),)}, (bars, *labels), begin=0.75)
    title = " against ".join(drawn.name for drawn in reversed(picture.sides))
    heading = " · ".join(filter(None, (heading, picture.remark)))
    return Scene(title, described(picture, words), (left, right), heading, height=290, top=30, bottom=44)


def _limits(picture: Picture) -> dict[int, str]:
    """Capacity of a device that ran out of memory -> which runs did so there."""
    limits = dict[int, str]()
    for side, one in zip("ab", picture.sides, strict=True):
        if limit := one.full_bytes:
            others = f"{limits[limit]}, " if limit in limits else f"capacity {format_bytes(limit)}: "
            limits[limit] = f"{others}{side} {'ends' if one.is_cut else 'ran'} out of memory"
    return limits


def described(picture: Picture, words: str) -> str:
    """The text alternative of the figure."""
    lines = [one_line(words, 500), *_limits(picture).values(), *filter(None, (picture.remark,))]
    for side, drawn in zip("ab", picture.sides, strict=True):
        curve = sparkline(Curve("allocated", drawn.time_s, drawn.bytes, True), drawn.duration_s, 50)
        lines.append(f"{side} {curve} {one_line(drawn.name, 80)}")
    return "\n".join(lines)
