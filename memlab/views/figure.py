"""The timeline as a plotly figure: exact curve, few points, nothing fetched, legible on a light and on a dark page."""

from __future__ import annotations

from typing import Any

import numpy as np

from memlab.analysis.curves import Curve, Curves
from memlab.trace.columns import Phase
from memlab.units import format_bytes
from memlab.views import theme
from memlab.views.svg import Frame, short_bytes

HEIGHT = 270


def timeline_figure(curves: Curves, title: str = "") -> Any:
    """A `plotly.graph_objects.Figure` of the curves, the capacity, the peak and the phases."""
    import plotly.graph_objects as go

    frame = Frame(curves)
    figure = go.Figure(layout=_layout(curves, frame, title))
    figure.layout.template = go.layout.Template()  # plotly's own would add 7 kB to every saved notebook
    for curve in curves.curves:
        visible = True if curve in curves.in_scale else "legendonly"
        figure.add_trace(go.Scatter(**_scatter(curve), visible=visible))
    if len(curves.phases):
        figure.add_trace(go.Heatmap(**_phase_strip(curves)))
    if frame.shows_capacity:
        figure.add_hline(y=curves.device.capacity_bytes, line={"color": theme.CAPACITY, "dash": "dash", "width": 1})
    if curves.peak.time_ns >= 0:
        figure.add_annotation(**_peak(curves))
    for begin_s, end_s in curves.lost:
        figure.add_vrect(x0=begin_s, x1=end_s, fillcolor=theme.TEXT, opacity=0.12, line_width=0)
    return figure


def _scatter(curve: Curve) -> dict[str, Any]:
    # float32 halves the file; the exact figures stand in the report.
    colour = theme.SERIES[curve.name]
    look: dict[str, Any] = {"color": colour, "width": 1.8 if curve.name == "allocated" else 1.3}
    look |= {"shape": "hv"} if curve.is_stair else {"dash": "dash"}
    fill = {"fill": "tozeroy", "fillcolor": theme.shade(colour, 0.14)} if curve.name == "allocated" else {}
    return {
        "x": curve.time_s.astype("f4"),
        "y": curve.bytes.astype("f4"),
        "name": curve.name,
        "mode": "lines",
        "line": look,
        "hovertemplate": "%{y:.4s}B<extra>" + curve.name + "</extra>",
        **fill,
    }


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


def _peak(curves: Curves) -> dict[str, Any]:
    peak = curves.peak
    bound = "" if peak.is_exact else "≥ "
    return {
        "x": peak.time_ns / 1e9,
        "y": peak.low_bytes,
        "text": f"peak {bound}{format_bytes(peak.low_bytes)}",
        "showarrow": True,
        "arrowhead": 2,
        "ax": -56 if peak.time_ns / 1e9 > curves.duration_s / 2 else 56,
        "ay": -16,
        "font": {"color": theme.SERIES["allocated"]},
        "arrowcolor": theme.SERIES["allocated"],
    }


def _layout(curves: Curves, frame: Frame, title: str) -> dict[str, Any]:
    ticks = frame.ticks()
    axis = {"gridcolor": theme.GRID, "zeroline": False, "linecolor": theme.GRID, "fixedrange": False, "ticks": ""}
    present = [Phase(code).name.lower() for code in np.unique(curves.phases) if code]
    words = [f"<span style='color:{theme.PHASE_COLOURS[name]}'>■</span> {name}" for name in present]
    return {
        "title": {"text": _escaped(title), "font": {"size": 13}, "x": 0.01, "y": 0.98},
        "height": HEIGHT,
        "margin": {"l": 70, "r": 14, "t": 34, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": theme.TEXT, "size": 12},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        "xaxis": {
            **axis,
            "title": {"text": "  ".join(words), "standoff": 12},
            "ticksuffix": " s",
            "anchor": "y2",
            "range": [0, curves.duration_s],
        },
        "yaxis": {
            **axis,
            "domain": [0.06, 1],
            "range": [0, frame.top_bytes],
            "tickvals": ticks,
            "ticktext": [short_bytes(tick) for tick in ticks],
        },
        "yaxis2": {"domain": [0, 0.04], "visible": False, "fixedrange": True},
    }


def _escaped(text: str) -> str:
    """Plotly reads a few HTML tags in its texts; a user's name must stay text."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
