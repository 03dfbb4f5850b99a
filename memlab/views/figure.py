"""The timeline as a plotly figure: exact curve, few points, nothing fetched, legible on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memlab.analysis.curves import Curve, Curves
from memlab.trace.columns import Array, Phase
from memlab.units import KiB, MiB, format_bytes, plain
from memlab.views import theme
from memlab.views.svg import Frame, short_bytes

HEIGHT = 270
_LEGEND = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}
# As the areas lie: the highest first.
_LEGEND_OF_AREAS = {"traceorder": "reversed", "x": 1.01, "y": 1, "yanchor": "top", "font": {"size": 11}}


def timeline_figure(curves: Curves, title: str = "") -> Any:
    """A `plotly.graph_objects.Figure` of the curves, the capacity, the peak and the phases."""
    import plotly.graph_objects as go

    frame = Frame(curves)
    unit = Unit(frame.top_bytes)
    figure = go.Figure(layout=_layout(curves, frame, unit, title))
    figure.layout.template = go.layout.Template()  # plotly's own would add 7 kB to every saved notebook
    figure.add_traces([go.Scatter(**scatter) for scatter in _scatters(curves, unit)])
    if len(curves.phases):
        figure.add_trace(go.Heatmap(**_phase_strip(curves)))
    if frame.shows_capacity:
        figure.add_hline(
            y=float(unit.of(curves.device.capacity_bytes)), line={"color": theme.CAPACITY, "dash": "dash", "width": 1}
        )
    if curves.peak.time_ns >= 0:
        figure.add_annotation(**_peak(curves, unit))
    for begin_s, end_s in curves.lost:
        figure.add_vrect(x0=begin_s, x1=end_s, fillcolor=theme.TEXT, opacity=0.12, line_width=0)
    return figure


class Unit:
    """What the vertical axis counts in, so that a reader of the hover text need not: MiB, or less for small runs."""

    def __init__(self, top_bytes: float) -> None:
        self.bytes, self.name = next((u for u in ((MiB, "MiB"), (KiB, "KiB")) if top_bytes >= u[0]), (1, "B"))
        self.hover = "%{y:,.4~r} " + self.name

    def of(self, count: Any) -> Any:
        """Bytes in this unit. float32 halves the file; the exact figures stand in the report."""
        return (np.asarray(count) / self.bytes).astype("f4")


def _scatters(curves: Curves, unit: Unit) -> Iterator[dict[str, Any]]:
    """The layers from the lowest to the highest, and over them the lines."""
    allocated = curves.curves[0]
    for name, level in curves.areas.layers.items() if curves.areas else ():
        look = {"stackgroup": "held", "fillcolor": theme.CATEGORIES[name], "legend": "legend2"}
        yield _stair(
            name, allocated.time_s, unit.of(level), unit, {"width": 0, "color": theme.CATEGORIES[name]}, **look
        )
    for curve in curves.curves:
        visible = True if curve in curves.in_scale else "legendonly"
        yield _line(curve, unit, curves.areas is not None) | {"visible": visible}
    if curves.lowest is not None:
        line = {"width": 1, "color": theme.LOWEST if curves.areas else theme.SERIES["allocated"]}
        lowest = curves.lowest
        yield _stair("lowest", lowest.time_s, unit.of(lowest.bytes), unit, line, showlegend=False)


def _line(curve: Curve, unit: Unit, has_areas: bool) -> dict[str, Any]:
    colour = theme.SERIES[curve.name]
    fill = {"fill": "tozeroy", "fillcolor": theme.shade(colour, 0.14)} if curve.name == "allocated" else {}
    # One pixel: an edge of 1.8 takes half as many bytes again in the PNG that JupyterLab saves.
    drawn = _stair(curve.name, curve.time_s, unit.of(curve.bytes), unit, {"width": 1, "color": colour})
    if not curve.is_stair:
        drawn["line"] = {"width": 1.3, "color": colour, "dash": "dash"}
    return drawn | ({} if has_areas else fill)


def _stair(name: str, time_s: Array, level: Array, unit: Unit, line: dict[str, Any], **more: Any) -> dict[str, Any]:
    hover = {"hovertemplate": f"{unit.hover}<extra>{name}</extra>"}
    return {
        **_times(time_s),
        "y": level,
        "name": name,
        "mode": "lines",
        "line": line | {"shape": "hv"},
        **hover,
        **more,
    }


def _times(time_s: Array) -> dict[str, Any]:
    """Evenly spaced times need two numbers."""
    gaps = np.diff(time_s)
    if len(gaps) > 1 and gaps[0] > 0 and np.allclose(gaps, gaps[0], rtol=1e-6, atol=0):
        return {"x0": float(time_s[0]), "dx": float(time_s[-1] - time_s[0]) / len(gaps)}
    return {"x": time_s.astype("f4")}


def _phase_strip(curves: Curves) -> dict[str, Any]:
    """One row of cells on an axis of its own: a byte for each stretch of time."""
    count = len(curves.phases)
    names = [phase.name.lower() for phase in Phase]
    colours = ["rgba(0,0,0,0)", *(theme.PHASE_COLOURS[name] for name in names[1:])]
    scale = [[(i + end) / len(names), colour] for i, colour in enumerate(colours) for end in (0, 1)]
    return {
        "z": curves.phases[None, :],
        "x0": curves.duration_s / count / 2,
        "dx": curves.duration_s / count,
        "yaxis": "y2",
        "zmin": -0.5,
        "zmax": len(names) - 0.5,
        "colorscale": scale,
        "showscale": False,
        "hoverinfo": "skip",
        "name": "phase",
    }


def _peak(curves: Curves, unit: Unit) -> dict[str, Any]:
    peak = curves.peak
    bound = "" if peak.is_exact else "≥ "
    return {
        "x": peak.time_ns / 1e9,
        "y": float(unit.of(peak.low_bytes)),
        "text": f"peak {bound}{format_bytes(peak.low_bytes)}",
        "showarrow": True,
        "arrowhead": 2,
        "ax": -56 if peak.time_ns / 1e9 > curves.duration_s / 2 else 56,
        "ay": -16,
        "font": {"color": theme.SERIES["allocated"]},
        "arrowcolor": theme.SERIES["allocated"],
    }


def _layout(curves: Curves, frame: Frame, unit: Unit, title: str) -> dict[str, Any]:
    ticks = frame.ticks()
    axis = {"gridcolor": theme.GRID, "zeroline": False, "linecolor": theme.GRID, "fixedrange": False, "ticks": ""}
    present = [Phase(code).name.lower() for code in np.unique(curves.phases) if code]
    words = [f"<span style='color:{theme.PHASE_COLOURS[name]}'>■</span> {name}" for name in present]
    return {
        "title": {"text": escaped(title), "font": {"size": 13}, "x": 0.01, "y": 0.98},
        "height": HEIGHT,
        "margin": {"l": 70, "r": 14, "t": 34, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": theme.TEXT, "size": 12},
        "hovermode": "x unified",
        "legend": _LEGEND,
        **({"legend2": _LEGEND_OF_AREAS} if curves.areas else {}),
        "xaxis": {
            **axis,
            "title": {"text": "  ".join(words), "standoff": 12, "font": {"size": 12}},
            "ticksuffix": " s",
            "hoverformat": ".4~g",
            "anchor": "y2",
            "range": [0, curves.duration_s],
        },
        "yaxis": {
            **axis,
            "domain": [0.06, 1],
            "range": [0, frame.top_bytes / unit.bytes],
            "tickvals": [tick / unit.bytes for tick in ticks],
            "ticktext": [short_bytes(tick) for tick in ticks],
        },
        "yaxis2": {"domain": [0, 0.04], "visible": False, "fixedrange": True},
    }


def escaped(text: str) -> str:
    """Plotly reads a few HTML tags in its texts; a user's name must stay text."""
    clean = plain(text)
    return clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
