"""A scene as a small plotly figure, legible on a light and on a dark page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from memlab.trace.columns import Array
from memlab.units import plain
from memlab.views import theme
from memlab.views.scene import EVENTS, Axis, Bands, Bars, Item, Label, Line, Mark, Panel, Rule, Scene, Shade, Strip

_LEAST_COUNTED_S = 0.01
_CLEAR = "rgba(0,0,0,0)"
_SWITCH_HEIGHT = 20  # pixels
_TOOLBAR_HEIGHT, _BESIDE_TOOLBAR = 22, 45  # pixels; characters of a heading that has room beside it in a narrow window
_AXIS = {"gridcolor": theme.GRID, "zeroline": False, "linecolor": theme.GRID, "ticks": ""}
_LEGEND: dict[str, Any] = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
_LEGEND_OF_LAYERS = {"traceorder": "reversed", "x": 1.01, "y": 1, "yanchor": "top", "font": {"size": 11}}
_SYMBOLS = {"dot": "circle", "ring": "circle-open", "cross": "x-thin-open"}


def figure(scene: Scene) -> Any:
    """A `plotly.graph_objects.Figure` of a scene."""
    import plotly.graph_objects as go

    drawn: dict[str, list[dict[str, Any]]] = {"data": [], "annotations": [], "shapes": [], "updatemenus": []}
    layout = _layout(scene)
    further = itertools.count(len(scene.panels) + 1)
    for number, panel in enumerate(scene.panels, 1):
        # The horizontal axes are x, x2, ... for the panels, then their additional ones.
        numbers = [number, *itertools.islice(further, len(panel.axes) - 1)]
        axes = [f"x{one if one > 1 else ''}" for one in numbers]
        layout |= _axes(scene, panel, axes)
        if len(panel.views) > 1:
            # The axis title, as the first annotation, which the buttons change; a real axis title would overlap them.
            below = {"xref": "paper", "yref": "paper", "x": 0, "y": -0.09, "xanchor": "left", "yanchor": "top"}
            drawn["annotations"].append({"text": escaped(panel.axes[0].title), "showarrow": False, **below})
            drawn["updatemenus"].append(_switch(panel, axes))
        for item in panel.items:
            drawn["data"] += _traces(item, panel, axes)
            for kind, one in _beside(item, panel, axes[0]):
                drawn[kind].append(one)
    data = drawn.pop("data")
    made = go.Figure({"data": data, "layout": layout | {kind: found for kind, found in drawn.items() if found}})
    made.layout.template = {}  # plotly's own would add 7 kB to every saved notebook
    if made.layout.hovermode == "closest":  # else each curve is named, with its height
        made.update_traces({"hovertemplate": "%{y}"}, {"hovertemplate": None, "hoverinfo": None})
    return made


def escaped(text: str) -> str:
    """Plotly interprets a few HTML tags in its texts; names must stay plain text."""
    return plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _traces(item: Item, panel: Panel, axes: list[str]) -> Iterator[dict[str, Any]]:
    """The traces of an item: none for one that is a shape or an annotation."""
    axis = axes[item.axis] if isinstance(item, Line) else axes[0]
    place: dict[str, Any] = {} if axis == "x" else {"xaxis": axis}
    look: dict[str, Any]
    match item:
        case Bands():
            for name, height in item.layers.items():
                colour = theme.category_colour(name)
                yield {
                    **_curve(name, item.x, height, panel.y), **place, "legend": "legend2", "stackgroup": "held",
                    "line": {"width": 0, "color": colour, "shape": "hv"}, "fillcolor": colour,
                }  # fmt: skip
        case Bars():
            for name, heights in item.layers.items():
                look = {"color": theme.category_colour(name), "line": {"width": 0}, "opacity": list(item.opacity)}
                yield {
                    "type": "bar", "x": list(range(len(item.opacity))), "y": _counted(heights, panel.y), "name": name,
                    "marker": look, "width": item.width, "legend": "legend2", **place,
                }  # fmt: skip
        case Line():
            yield _line(item, panel.y) | place
        case Strip():
            # One row of cells on its own axis: a byte per time bin.
            stretch = (panel.axes[0].high - panel.axes[0].low) / len(item.codes)
            codes = len(item.colours)
            steps = enumerate(colour or _CLEAR for colour in item.colours)
            yield {
                "type": "heatmap", "z": item.codes[None, :], "x0": stretch / 2, "dx": stretch, "yaxis": "y2",
                "zmin": -0.5, "zmax": codes - 0.5, "showscale": False, "hoverinfo": "skip", "name": "phase",
                "colorscale": [[(code + end) / codes, colour] for code, colour in steps for end in (0, 1)],
            }  # fmt: skip
        case Mark():
            look = {"width": 1.6, "color": item.colour}
            yield {
                "type": "scatter", "x": [item.x], "y": [float(_counted(item.y, panel.y))],
                "mode": "markers", "text": [escaped(item.text)],
                "marker": {"symbol": _SYMBOLS[item.kind], "size": 10, "color": item.colour, "opacity": 0.85, "line": look},
                "hovertemplate": "%{text}<extra></extra>", "showlegend": False, **place,
            }  # fmt: skip


def _line(item: Line, axis: Axis) -> dict[str, Any]:
    # One pixel: an edge of 1.8 makes the PNG that JupyterLab saves half as large again.
    look: dict[str, Any] = {"width": 1, "color": item.colour, "shape": "hv"}
    if item.shape != "stair":
        look = {"width": 1.3, "color": item.colour, "dash": "dash"}
    if item.shape == "joined":
        look |= {"width": item.width, "dash": "solid"}
    trace = {**_curve(escaped(item.name), item.x, item.y, axis), "line": look}
    trace |= {"fill": "tozeroy", "fillcolor": theme.shade(item.colour, item.fill)} if item.fill else {}
    trace |= {"visible": "legendonly"} if item.hidden else {}
    return trace | ({} if item.named else {"showlegend": False})


def _beside(item: Item, panel: Panel, axis: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The shapes and annotations of an item, each with the list of the figure that it belongs to."""
    look: dict[str, Any]
    match item:
        case Rule():
            level = float(_counted(item.y, panel.y))
            ends = {"xref": "x domain", "x0": 0, "x1": 1, "y0": level, "y1": level}
            yield "shapes", {"type": "line", **ends, "line": {"color": item.colour, "dash": "dash", "width": 1}}
            end = {"x": 0, "xanchor": "left"} if item.at_left else {"x": 1, "xanchor": "right"}
            below = {"xref": "x domain", "y": level, "yanchor": "top", "showarrow": False, **end}
            if item.text:  # on its colour: it may lie over areas, on which red cannot be read
                look = {"font": {"size": 11, "color": theme.ON_CAPACITY}, "bgcolor": item.colour}
                yield "annotations", {"text": escaped(item.text), **look, **below}
        case Shade():
            across = {"yref": "paper", "x0": item.begin, "x1": item.end, "y0": 0, "y1": 1}
            look = {"fillcolor": item.colour, "opacity": item.opacity, "line": {"width": 0}}
            yield "shapes", {"type": "rect", **across, **look}
        case Label():
            text = "<br>".join(map(escaped, item.text.split("\n")))
            place = {"x": item.x, "y": float(_counted(item.y, panel.y)), "text": text}
            place |= {} if axis == "x" else {"xref": axis}
            look = {"showarrow": False, "yanchor": "bottom", "font": {"size": 11, "color": item.colour}}
            if item.points:
                aside = -56 if item.x > (panel.axes[0].low + panel.axes[0].high) / 2 else 56
                look = {"showarrow": True, "arrowhead": 2, "ax": aside, "ay": -16, "arrowcolor": item.colour}
                if item.over:
                    look |= {"ayref": "y", "ay": float(_counted(item.over, panel.y)), "yanchor": "bottom"}
                look["font"] = {"color": item.colour}
            yield "annotations", {**place, **look}


def _curve(name: str, x: Array, y: Any, axis: Axis) -> dict[str, Any]:
    """A curve; evenly spaced times need two numbers."""
    gaps = np.diff(x)
    times: dict[str, Any] = {"x": x.astype("f4")}
    if len(gaps) > 1 and gaps[0] > 0 and np.allclose(gaps, gaps[0], rtol=1e-6, atol=0):
        times = {"x0": float(x[0]), "dx": float(x[-1] - x[0]) / len(gaps)}
    return {"type": "scatter", **times, "y": _counted(y, axis), "name": name, "mode": "lines"}


def _counted(count: Any, axis: Axis) -> Array:
    """Values in the unit of an axis; float32 halves the file."""
    return (np.asarray(count) / axis.divisor).astype("f4")


def _layout(scene: Scene) -> dict[str, Any]:
    items = [item for panel in scene.panels for item in panel.items]
    has_strip, has_bars = (any(isinstance(item, kind) for item in items) for kind in (Strip, Bars))
    y, above = scene.panels[0].y, scene.above
    over = _TOOLBAR_HEIGHT if any(len(line) > _BESIDE_TOOLBAR for line in scene.heading_lines) else 0
    above += over
    below = 10 + (_SWITCH_HEIGHT if any(len(panel.views) > 1 for panel in scene.panels) else 0)
    layout: dict[str, Any] = {
        "height": scene.height + above + below,
        "margin": {"l": scene.left, "r": 14, "t": 34 + above if above else 30, "b": scene.bottom + below},
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"color": theme.TEXT, "size": 12},
        "modebar": {"bgcolor": _CLEAR, "color": theme.TEXT, "activecolor": theme.SERIES["allocated"]},
        "hovermode": "closest" if has_bars or not any(isinstance(item, Line) for item in items) else "x unified",
        "hoverlabel": {"namelength": -1},
        "legend": _LEGEND,
        "yaxis": {
            **_AXIS, "domain": [0.06 if has_strip else 0, 1],
            "range": [y.low / y.divisor, y.high / y.divisor],
            "hoverformat": ",.4~r", "ticksuffix": f" {y.unit}",  # of what a pointer finds; the ticks have texts
            "tickvals": [value / y.divisor for value, _ in y.ticks], "ticktext": [escaped(text) for _, text in y.ticks],
        },
    }  # fmt: skip
    if above:
        text = "<br>".join(map(escaped, scene.heading_lines))
        place = {"x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 8 + over}}
        layout["title"] = {"text": text, "font": {"size": 13}, **place}
    if scene.layers:
        layout["legend2"] = _LEGEND_OF_LAYERS
    if has_bars:
        layout["barmode"] = "stack"
        if scene.layers and not scene.legend:
            layout["showlegend"] = False
    if has_strip:
        layout["yaxis2"] = {"domain": [0, 0.04], "visible": False, "fixedrange": True}
    return layout


def _axes(scene: Scene, panel: Panel, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The horizontal axes of a panel; additional ones overlay the first."""
    is_whole = (panel.begin, panel.end) == (0.0, 1.0)
    for axis, name in zip(panel.axes, names, strict=True):
        made: dict[str, Any] = {} if is_whole else {"domain": [panel.begin, panel.end]}
        if name != names[0]:
            made |= {"overlaying": names[0], "range": [axis.low, axis.high], "visible": False}
        else:
            made |= {**_AXIS, **_scale(axis), "hoverformat": ".4~g", "fixedrange": not _counts(axis)}
            if axis.has_zero:
                made |= {"zeroline": True, "zerolinecolor": theme.TEXT}
            if len(panel.views) == 1:
                words = "  ".join(f"<span style='color:{colour}'>■</span> {key}" for key, colour in scene.keys)
                made["title"] = {"text": words or escaped(axis.title), "standoff": 12, "font": {"size": 12}}
            if any(isinstance(item, Strip) for item in panel.items):
                made["anchor"] = "y2"
        yield f"xaxis{name[1:]}", made


def _counts(axis: Axis) -> bool:
    """Whether plotly chooses the ticks: for an axis of seconds or events, which can be zoomed.

    Not for a few milliseconds: their ticks would be "500μ s".
    """
    return axis.unit == EVENTS or (axis.unit == "s" and axis.high >= _LEAST_COUNTED_S)


def _scale(axis: Axis) -> dict[str, Any]:
    """The range and the ticks of an axis; a button sets all of them."""
    scale: dict[str, Any] = {"range": [axis.low, axis.high], "tickmode": "auto", "ticksuffix": f" {axis.unit}"}
    if _counts(axis):
        one = {"showticksuffix": "last", "tickformat": ","} if axis.unit == EVENTS else {}
        return {**scale, "tickvals": None, "ticktext": None, **one}
    texts = [escaped(text) for _, text in axis.ticks]
    return {**scale, "tickmode": "array", "ticksuffix": "", "tickvals": [at for at, _ in axis.ticks], "ticktext": texts}


def _switch(panel: Panel, names: list[str]) -> dict[str, Any]:
    """Small buttons below the title of the axis, one per unit: next to it they would cover it in a narrow notebook.

    None is marked as active, for which plotly has but one colour, of white pages; the title says which it is.
    """
    buttons = []
    for label, axes in panel.views.items():
        changes = {f"xaxis.{key}": value for key, value in _scale(axes[0]).items()}
        changes |= {f"xaxis{name[1:]}.range": [axis.low, axis.high] for name, axis in zip(names, axes, strict=True)}
        changes["annotations[0].text"] = escaped(axes[0].title)
        buttons.append({"label": label, "method": "relayout", "args": [changes]})
    return {
        "type": "buttons", "direction": "right", "buttons": buttons,
        "active": list(panel.views).index(panel.opened), "showactive": False,
        "x": panel.end, "xanchor": "right", "y": -0.06, "yanchor": "top", "pad": {"t": 4 + _SWITCH_HEIGHT, "r": 0},
        "bgcolor": _CLEAR, "bordercolor": theme.GRID, "font": {"size": 10, "color": theme.TEXT},
    }  # fmt: skip
