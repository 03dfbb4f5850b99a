"""The curves of a run as a scene: its timeline, with categories, phases, peak and capacity."""

from __future__ import annotations

import itertools

import numpy as np

from memlab.analysis.curves import Curve, Curves
from memlab.trace.columns import Phase
from memlab.units import format_bytes, format_seconds
from memlab.views import theme
from memlab.views.scene import Axis, Bands, Item, Label, Line, Panel, Rule, Scene, Shade, Strip

_CAPACITY_SHOWN_FROM = 0.5  # the capacity is drawn if the curves come at least this close to it, or memory ran out
_LABEL_SHARE = 0.09  # of the height: what a label above a point takes


def timeline_scene(curves: Curves, title: str = "") -> Scene:
    """The curves, the limits, the peak and the phases; over the events in their order where seconds mean nothing."""
    capacity, peak, duration_s = curves.device.capacity_bytes, curves.peak, max(curves.duration_s, 1e-9)
    axis = Axis.of_seconds(duration_s, 5) if curves.has_times else Axis.of_events(round(duration_s))
    scale = axis.high / duration_s
    top = max(curves.top_bytes, 1)
    shows_capacity = capacity > 0 and (top >= _CAPACITY_SHOWN_FROM * capacity or curves.device.num_ooms > 0)
    items: list[Item] = []
    if curves.areas is not None:
        items.append(Bands(scale * curves.curves[0].time_s, curves.areas.layers))
    for curve in curves.curves:
        is_area = curve.name == "allocated" and curves.areas is None
        width, fill = (1.6, 0.14) if is_area else (1.2, 0.0)
        colour, shape = theme.SERIES[curve.name], "stair" if curve.is_stair else "samples"
        hidden = curve not in curves.in_scale
        items.append(Line(curve.name, scale * curve.time_s, curve.bytes, colour, width, fill, shape, hidden))
    if curves.lowest is not None:
        colour = theme.LOWEST if curves.areas else theme.SERIES["allocated"]
        items.append(Line("lowest", scale * curves.lowest.time_s, curves.lowest.bytes, colour, 1.0, named=False))
        # Above the middle of the line, which is white only across areas.
        middle = len(curves.lowest.bytes) // 2
        at = float(scale * curves.lowest.time_s[middle])
        items.append(Label(at, int(curves.lowest.bytes[middle]), "lowest of each moment", colour))
    names = [phase.name.lower() for phase in Phase]
    if len(curves.phases):
        items.append(Strip(curves.phases, ("", *(theme.PHASE_COLOURS[name] for name in names[1:]))))
    lost = "not all events of this stretch are known"
    items += [Shade(scale * begin_s, scale * end_s, theme.TEXT, 0.12, lost) for begin_s, end_s in curves.lost]
    limits = {"capacity": capacity if shows_capacity else 0, "budget": curves.budget_bytes}
    if curves.budget_bytes * _CAPACITY_SHOWN_FROM > top:
        del limits["budget"]
    for what, limit in limits.items():
        at_left = peak.time_ns / 1e9 > duration_s / 2  # away from the label of the peak
        items += [Rule(limit, theme.CAPACITY, f"{what} {format_bytes(limit)}", at_left)] if limit else []
    height = max(top, *limits.values()) * 1.06
    if peak.time_ns >= 0:
        text = f"peak {'' if peak.is_exact else '≥ '}{format_bytes(peak.low_bytes)}"
        at, colour = scale * peak.time_ns / 1e9, theme.SERIES["allocated"]
        crossing = [limit for limit in limits.values() if 0 <= limit - peak.low_bytes < _LABEL_SHARE * height]
        items.append(Label(at, peak.low_bytes, text, colour, True, points=True, over=max(crossing, default=0)))
    y = Axis.of_bytes(height)
    panel = Panel(y, {"": (axis,)}, tuple(items))
    present = [names[code] for code in np.unique(curves.phases) if code]
    keys = tuple((name, theme.PHASE_COLOURS[name]) for name in present)
    keys += tuple(
        (f"{names[code]} {round(100 * share)} %", theme.PHASE_COLOURS[names[code]])
        for code, share in curves.phase_shares.items()
    )
    below = 30 if curves.has_times else 52  # the title of the axis
    return Scene(title, described(curves), (panel,), title, keys, height=230 + below, bottom=below)


def described(curves: Curves) -> str:
    """The text alternative of the figure, in a sentence or two."""
    allocated, peak = curves.curves[0], curves.peak
    over = f" over {format_seconds(curves.duration_s)}" if curves.has_times else f" ({curves.source})"
    when = f" at {format_seconds(peak.time_ns / 1e9)}" if peak.time_ns >= 0 and curves.has_times else ""
    bound = "" if peak.is_exact else "at least "
    first, last = format_bytes(curves.start_bytes), format_bytes(int(allocated.bytes[-1]))
    # The categories that held the peak, largest first, if the drawn curve reaches it.
    at, held = int(allocated.bytes.argmax()), ""
    if curves.areas is not None and peak.time_ns >= 0 and int(allocated.bytes[at]) == peak.low_bytes:
        levels = ((int(level[at]), name) for name, level in curves.areas.layers.items() if level[at])
        named = (f"{name} {format_bytes(count)}" for count, name in sorted(levels, reverse=True))
        held = f"Held at the peak: {', '.join(named)}. "
    return (
        f"Memory of {curves.device.label}{over}: allocated began at {first}, "
        f"peaked at {bound}{format_bytes(peak.low_bytes)}{when} and ended at {last}. {held}"
        f"{sparkline(allocated, curves.duration_s)}"
    )


def sparkline(curve: Curve, duration_s: float, width: int = 60) -> str:
    """A step curve as a row of block characters: the highest value in each bin.

    >>> from numpy import array
    >>> sparkline(Curve("a", array([0.0, 1.0, 2.0]), array([0, 8, 4]), True), 3.0, width=3)
    '▁█▅'
    """
    highest = []
    for begin_s, end_s in itertools.pairwise(np.linspace(0, max(duration_s, 1e-9), width + 1)):
        first = max(int(np.searchsorted(curve.time_s, begin_s, side="right")) - 1, 0)
        last = max(int(np.searchsorted(curve.time_s, end_s)), first + 1)
        highest.append(int(curve.bytes[first:last].max()))
    top = max(*highest, 1)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * max(value, 0) / top)] for value in highest)
