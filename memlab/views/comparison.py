"""Two runs as one plotly figure: both timelines on one axis, each from 0, and beside them, on the same scale, who held each peak.

Where seconds would hide the shorter run, or mean nothing, the axis is the share of each run, and says so; buttons switch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from memlab.analysis.comparison import UNTOLD, Drawn, Picture
from memlab.analysis.curves import Curve
from memlab.analysis.peak import UNKNOWN_BYTES
from memlab.units import one_line
from memlab.views import theme
from memlab.views.bundle import PLOTLY, SVG
from memlab.views.comparison_svg import comparison_svg
from memlab.views.comparison_table import SIDES, interval_text
from memlab.views.figure import Unit, escaped
from memlab.views.svg import byte_ticks, short_bytes, sparkline

HEIGHT = 290
_ROOM = 1.12  # above the higher peak, for its label
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_LINE_OF_TITLE = 105


def comparison_bundle(picture: Picture, title: str, words: str) -> dict[str, Any]:
    """MIME type -> content of the picture; `words` is the sentence of its text twins."""
    figure = json.loads(comparison_figure(picture, title).to_json())
    return {
        PLOTLY: {**figure, "config": {"displaylogo": False}},
        SVG: comparison_svg(picture, words),
        "text/plain": described(picture, words),
    }


def described(picture: Picture, words: str) -> str:
    """The picture in words: its twin for whoever cannot see it."""
    lines = [one_line(words, 500)]
    for side, drawn in zip("ab", picture.sides, strict=True):
        curve = sparkline(Curve("allocated", drawn.time_s, drawn.bytes, True), drawn.duration_s, 50)
        lines.append(f"{side} {curve} {one_line(drawn.name, 80)}")
    return "\n".join(lines)


def comparison_figure(picture: Picture, title: str = "") -> Any:
    """A `plotly.graph_objects.Figure` of both runs."""
    import plotly.graph_objects as go

    unit = Unit(picture.top_bytes)
    lines = textwrap.wrap(title, _LINE_OF_TITLE)
    figure = go.Figure(layout=_layout(picture, unit, lines))
    figure.layout.template = go.layout.Template()  # plotly's own would add 7 kB to every saved notebook
    for index, drawn in enumerate(picture.sides):
        figure.add_trace(go.Scatter(**_stair(drawn, index, unit)))
    for bar in _bars(picture, unit):
        figure.add_trace(go.Bar(**bar))
    for error in _intervals(picture, unit):
        figure.add_trace(go.Scatter(**error))
    for note in _labels(picture, unit):
        figure.add_annotation(**note)
    return figure


def _stair(drawn: Drawn, index: int, unit: Unit) -> dict[str, Any]:
    colour = SIDES[index]
    name = escaped(one_line(drawn.name, 32))
    return {
        "x": drawn.time_s.astype("f4"),
        "y": unit.of(drawn.bytes),
        "name": f"{'ab'[index]}: {name}",
        "mode": "lines",
        "line": {"width": 1.4, "color": colour, "shape": "hv"},
        "fill": "tozeroy",
        "fillcolor": theme.shade(colour, 0.1),
        "hovertemplate": f"%{{x:.4~g}} s: {unit.hover}<extra>{'ab'[index]}</extra>",
        "xaxis": ("x", "x3")[index],
    }


def _bars(picture: Picture, unit: Unit) -> Iterator[dict[str, Any]]:
    """One trace for each name that holds anything at either peak, from the lowest up."""
    held = [dict(drawn.shares) for drawn in picture.sides]
    for name in stacked_names(picture):
        colour = colour_of(name)
        yield {
            "x": ["a", "b"],
            "y": unit.of([shares.get(name, 0) for shares in held]),
            "name": name,
            "marker": {"color": colour, "line": {"width": 0}},
            "width": 0.66,
            "legend": "legend2",
            "hovertemplate": f"{unit.hover}<extra>{name}</extra>",
            "xaxis": "x2",
        }


def stacked_names(picture: Picture) -> list[str]:
    """What the bars are made of, from the lowest up."""
    first, second = ([name for name, _ in drawn.shares] for drawn in picture.sides)
    known = [*theme.CATEGORIES, *first, *second]
    return sorted({*first, *second}, key=known.index)


def colour_of(name: str) -> str:
    """The colour of a part of a bar."""
    return theme.CATEGORIES["other"] if name == UNTOLD else theme.colour_of(name)


def _intervals(picture: Picture, unit: Unit) -> Iterator[dict[str, Any]]:
    """From the lower to the upper end of a peak that is no exact figure."""
    for side, drawn in zip("ab", picture.sides, strict=True):
        if drawn.low_bytes < drawn.high_bytes < UNKNOWN_BYTES:
            yield {
                "x": [side, side],
                "y": unit.of([drawn.low_bytes, drawn.high_bytes]),
                "mode": "lines+markers",
                "line": {"width": 2, "color": theme.TEXT},
                "marker": {"symbol": "line-ew-open", "size": 12, "color": theme.TEXT},
                "showlegend": False,
                "hovertemplate": f"{unit.hover}<extra>between these</extra>",
                "xaxis": "x2",
            }


def _labels(picture: Picture, unit: Unit) -> Iterator[dict[str, Any]]:
    for index, drawn in enumerate(picture.sides):
        yield {
            "x": "ab"[index],
            "y": float(unit.of(drawn.top_bytes if drawn.high_bytes < UNKNOWN_BYTES else drawn.low_bytes)),
            "xref": "x2",
            "text": interval_text(drawn.low_bytes, drawn.high_bytes).replace(" to ", "<br>to "),
            "showarrow": False,
            "yanchor": "bottom",
            "font": {"size": 11, "color": SIDES[index]},
        }


def _layout(picture: Picture, unit: Unit, title: list[str]) -> dict[str, Any]:
    top = picture.top_bytes * _ROOM
    axis = {"gridcolor": theme.GRID, "zeroline": False, "linecolor": theme.GRID, "ticks": ""}
    modes = _seconds(picture), _shares(picture)
    opened = modes[picture.by_share]
    first = {name.removeprefix("xaxis."): value for name, value in opened.items() if name.startswith("xaxis.")}
    above = 17 * len(title)
    return {
        "title": {
            "text": "<br>".join(map(escaped, title)),
            "font": {"size": 13},
            "x": 0.01,
            "y": 0.99,
            "yanchor": "top",
        },
        "height": HEIGHT + above,
        "margin": {"l": 70, "r": 14, "t": 40 + above, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": theme.TEXT, "size": 12},
        "barmode": "stack",
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "legend2": {"traceorder": "reversed", "x": 1.01, "y": 1, "yanchor": "top", "font": {"size": 11}},
        "xaxis": {**axis, **first, "domain": [0, 0.7], "hoverformat": ".4~g"},
        "xaxis2": {"domain": [0.75, 1], "linecolor": theme.GRID, "type": "category", "fixedrange": True},
        "xaxis3": {
            "overlaying": "x",
            "range": opened["xaxis3.range"],
            "domain": [0, 0.7],
            "visible": False,
        },
        "yaxis": {
            **axis,
            "range": [0, top / unit.bytes],
            "tickvals": [tick / unit.bytes for tick in byte_ticks(top)],
            "ticktext": [short_bytes(tick) for tick in byte_ticks(top)],
        },
        "annotations": [_below(opened["annotations[0].text"])],
        "updatemenus": [_switch(modes, picture.by_share)],
    }


def _seconds(picture: Picture) -> dict[str, Any]:
    """What the layout has with an axis of seconds; both runs begin at 0 and have one scale."""
    whole = [0, picture.duration_s]
    return {
        "xaxis.range": whole,
        "xaxis3.range": whole,
        "xaxis.tickmode": "auto",
        "xaxis.ticksuffix": " s",
        "annotations[0].text": "seconds since the start of each",
        "xaxis.tickvals": None,
        "xaxis.ticktext": None,
    }


def _shares(picture: Picture) -> dict[str, Any]:
    """The same with an axis from the beginning of each run to its end."""
    why = f" ({picture.why})" if picture.why else ""
    return {
        "xaxis.range": [0, max(picture.a.duration_s, 1e-9)],
        "xaxis3.range": [0, max(picture.b.duration_s, 1e-9)],
        "xaxis.tickmode": "array",
        "xaxis.ticksuffix": "",
        "annotations[0].text": f"share of each run{why}",
        "xaxis.tickvals": [share * max(picture.a.duration_s, 1e-9) for share in _SHARES],
        "xaxis.ticktext": [f"{share:.0%}" for share in _SHARES],
    }


def _below(text: str) -> dict[str, Any]:
    """What the axis counts: the first annotation, which the buttons change; an axis title would run into them."""
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": -0.09, "xanchor": "left", "yanchor": "top"}
    return {"text": text, "showarrow": False, **place}


def _switch(modes: tuple[dict[str, Any], dict[str, Any]], active: bool) -> dict[str, Any]:
    """Two small buttons at the end of the axis of time."""
    buttons = [
        {"label": label, "method": "relayout", "args": [mode]}
        for label, mode in zip(("seconds", "share"), modes, strict=True)
    ]
    return {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "active": int(active),
        "x": 0.7,
        "xanchor": "right",
        "y": -0.06,
        "yanchor": "top",
        "pad": {"t": 4, "r": 0},
        "bgcolor": "rgba(0,0,0,0)",
        "bordercolor": theme.GRID,
        "font": {"size": 10, "color": theme.TEXT},
    }
