"""The learner's guesses, drawn: guess over measurement on a logarithmic axis around 1, one row a lesson, skipped ones beside it.

One figure in three forms (plotly, SVG, words), of which a saved notebook and a page without scripts show the second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from memlab.lesson.kept import Kept
from memlab.units import one_line
from memlab.views import theme
from memlab.views.bundle import PLOTLY, SVG
from memlab.views.figure import escaped

EDGE = 16.0
"""Further off than this many times is drawn at the edge."""
NEAR = 2.0
"""Within this factor a guess is near."""
WIDTH, ROW = 880, 22
_LEFT, _RIGHT, _TOP, _BOTTOM = 190, 866, 12, 42
_WRONG, _SKIPPED = 2.9, 3.8
"""Where words that were wrong and questions that were skipped stand on the axis of log4: right of its end at 2."""
_FROM, _TO = -2.2, _SKIPPED + 0.4
_TICKS = ((1 / 16, "1/16"), (1 / 4, "1/4"), (1 / 2, "1/2"), (1.0, "right"), (2.0, "2x"), (4.0, "4x"), (16.0, "16x"))
_COLOURS = {
    "near": theme.SERIES["used"],
    "off": theme.SERIES["allocated"],
    "wrong": theme.CAPACITY,
    "skipped": theme.TEXT,
}


@dataclass(frozen=True, slots=True)
class Point:
    """One guess in the picture: `place` is the logarithm to base 4 of guess over measurement, or right of the axis."""

    row: int
    place: float
    kind: str
    says: str


class Drawn:
    """All guesses so far: shown in a notebook as a figure, elsewhere as text; `points` and `to_pandas()` have the values."""

    def __init__(self, guesses: Iterable[Kept]) -> None:
        self.guesses = tuple(guesses)
        self.lessons = tuple(sorted({one.lesson for one in self.guesses}))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Guess over measurement of all that were committed and have a distance."""
        return tuple(one.ratio for one in self.guesses if one.ratio is not None)

    @property
    def points(self) -> tuple[Point, ...]:
        """Where each guess is drawn."""
        return tuple(self._point(one) for one in self.guesses)

    def _point(self, one: Kept) -> Point:
        row = self.lessons.index(one.lesson)
        if one.ratio is None:
            kind, says = ("skipped", "Skipped.") if one.state == "skipped" else ("wrong", "Another word.")
            return Point(row, self._beside(one), kind, f"{one.question} {says}")
        place = math.log(min(max(one.ratio, 1 / EDGE), EDGE), 4)
        kind = "near" if 1 / NEAR <= one.ratio <= NEAR else "off"
        return Point(row, place, kind, f"{one.question} {one.ratio:.2f} times what was measured.")

    def _beside(self, one: Kept) -> float:
        """Several of a lesson that have no distance stand side by side."""
        alike = [
            other for other in self.guesses if (other.lesson, other.state, other.ratio) == (one.lesson, one.state, None)
        ]
        step = min(0.13, 0.7 / len(alike))
        return (_SKIPPED if one.state == "skipped" else _WRONG) + step * (alike.index(one) - (len(alike) - 1) / 2)

    @property
    def sentence(self) -> str:
        """What the picture says."""
        asked, ratios = len(self.guesses), self.ratios
        if not asked:
            return (
                "No guesses are kept yet: they are, lesson by lesson, as soon as one was compared with a measurement."
            )
        skipped = sum(one.state == "skipped" for one in self.guesses)
        wrong = sum(one.state == "committed" and one.ratio is None for one in self.guesses)
        said = f"Of {asked} questions you answered {asked - skipped} and skipped {skipped}."
        if not asked - skipped:
            return said
        near = sum(1 / NEAR <= one <= NEAR for one in ratios)
        low, high = sum(one < 1 for one in ratios), sum(one > 1 for one in ratios)
        said += f" {near} were within a factor of {NEAR:g}, {low} too low, {high} too high, {wrong} the wrong word."
        if ratios:
            said += (
                f" The middle one was {4 ** statistics.median(math.log(one, 4) for one in ratios):.2f} times the truth."
            )
        return said

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if not self.guesses:
            return {"text/plain": str(self)}
        return {PLOTLY: self.figure(), SVG: self.svg(), "text/plain": str(self)}

    def __str__(self) -> str:
        return "\n".join([self.sentence, *self._lines()])

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        """One row a lesson: each ratio, `-` where it was skipped, `x` for a wrong word."""
        names = [_name(lesson) for lesson in self.lessons]
        for name, lesson in zip(names, self.lessons, strict=True):
            mine = [one for one in self.guesses if one.lesson == lesson]
            told = [
                f"{one.ratio:.2f}" if one.ratio is not None else {"skipped": "-"}.get(one.state, "x") for one in mine
            ]
            yield f"  {name.ljust(max(map(len, names)))}  {'  '.join(told)}"

    def to_pandas(self) -> Any:
        """One row per guess."""
        import pandas

        rows = [(one.lesson, one.question, one.state, one.ratio) for one in self.guesses]
        return pandas.DataFrame(rows, columns=["lesson", "question", "state", "ratio"])

    # --- for JupyterLab --------------------------------------------------------------------------------------------------

    def figure(self) -> dict[str, Any]:
        """What plotly draws: data, layout and config."""
        data = [
            _scatter(kind, colour, found)
            for kind, colour in _COLOURS.items()
            if (found := [one for one in self.points if one.kind == kind])
        ]
        return {"data": data, "layout": self._layout(), "config": {"displaylogo": False}}

    def _layout(self) -> dict[str, Any]:
        ticks = [*((math.log(value, 4), text) for value, text in _TICKS), (_WRONG, "wrong word"), (_SKIPPED, "skipped")]
        count = len(self.lessons)
        return {
            "height": _height(count) + 20,
            "margin": {"l": _LEFT, "r": 14, "t": 30, "b": _BOTTOM},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": theme.TEXT, "size": 12},
            "hovermode": "closest",
            "showlegend": False,
            "title": {"text": "guess over measurement", "font": {"size": 13}, "x": 0.01, "y": 0.99, "yanchor": "top"},
            "xaxis": {
                "range": [_FROM, _TO],
                "tickvals": [place for place, _ in ticks],
                "ticktext": [text for _, text in ticks],
                "gridcolor": theme.GRID,
                "zeroline": True,
                "zerolinecolor": theme.TEXT,
            },
            "yaxis": {
                "range": [count - 0.5, -0.5],
                "tickvals": list(range(count)),
                "ticktext": [escaped(_name(lesson)) for lesson in self.lessons],
                "gridcolor": theme.GRID,
                "zeroline": False,
            },
            "shapes": [_band()],
        }

    # --- for everything else ---------------------------------------------------------------------------------------------

    def svg(self) -> str:
        """The same as a small SVG, whose description is the sentence."""
        height = _height(len(self.lessons))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
            f'font-family="system-ui,sans-serif" font-size="12" fill="{theme.TEXT}">',
            f"<title>Guess over measurement, lesson by lesson</title><desc>{escape(one_line(self.sentence, 600))}</desc>",
            *self._grid(height),
            *(_mark(one) for one in self.points),
        ]
        return "".join(parts) + "</svg>"

    def _grid(self, height: int) -> Iterator[str]:
        bottom = height - _BOTTOM
        near = _x(-0.5), _x(0.5)
        yield f'<rect x="{near[0]}" y="{_TOP}" width="{near[1] - near[0]}" height="{bottom - _TOP}" ' + (
            f'fill="{_COLOURS["near"]}" fill-opacity=".1"/>'
        )
        for value, text in _TICKS:
            x, strong = _x(math.log(value, 4)), ".8" if value == 1 else ".25"
            yield f'<path d="M{x} {_TOP}V{bottom}" stroke="{theme.TEXT}" stroke-opacity="{strong}"/>'
            yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
        for place, text in ((_WRONG, "wrong word"), (_SKIPPED, "skipped")):
            yield f'<text x="{_x(place)}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
        middle = (_x(-2) + _x(2)) // 2
        yield f'<text x="{middle}" y="{height - 6}" text-anchor="middle">guess over measurement</text>'
        for row, lesson in enumerate(self.lessons):
            yield f'<text x="{_LEFT - 12}" y="{_y(row) + 4}" text-anchor="end">{escape(_name(lesson))}</text>'
            path = f"M{_LEFT} {_y(row)}H{_RIGHT}"
            yield f'<path d="{path}" stroke="{theme.TEXT}" stroke-opacity=".12"/>'


def _scatter(kind: str, colour: str, found: list[Point]) -> dict[str, Any]:
    symbol = {"skipped": "circle-open", "wrong": "x-thin-open"}.get(kind, "circle")
    return {
        "type": "scatter",
        "x": [one.place for one in found],
        "y": [one.row for one in found],
        "name": kind,
        "mode": "markers",
        "marker": {
            "symbol": symbol,
            "size": 10,
            "color": colour,
            "opacity": 0.85,
            "line": {"width": 1.6, "color": colour},
        },
        "text": [escaped(one.says) for one in found],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _band() -> dict[str, Any]:
    """From half to twice what was measured."""
    across = {"type": "rect", "xref": "x", "yref": "paper", "x0": -0.5, "x1": 0.5, "y0": 0, "y1": 1}
    return {**across, "fillcolor": _COLOURS["near"], "opacity": 0.1, "line": {"width": 0}}


def _mark(one: Point) -> str:
    x, y, colour = _x(one.place), _y(one.row), _COLOURS[one.kind]
    says = f"<title>{escape(one_line(one.says))}</title>"
    if one.kind == "wrong":
        path = f"M{x - 4} {y - 4}l8 8m0 -8l-8 8"
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8">{says}</path>'
    look = f'fill="none" stroke="{colour}" stroke-width="1.6"' if one.kind == "skipped" else f'fill="{colour}"'
    return f'<circle cx="{x}" cy="{y}" r="5" fill-opacity=".85" {look}>{says}</circle>'


def _height(rows: int) -> int:
    return _TOP + ROW * rows + _BOTTOM


def _x(place: float) -> int:
    return round(_LEFT + (place - _FROM) / (_TO - _FROM) * (_RIGHT - _LEFT))


def _y(row: int) -> int:
    return _TOP + ROW * row + ROW // 2


def _name(lesson: str) -> str:
    return one_line(lesson, 26)
