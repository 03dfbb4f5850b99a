"""The timeline as a small SVG: what a saved notebook shows where plotly cannot draw (GitHub, nbconvert, e-mail)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from html import escape

import numpy as np

from memlab.analysis.curves import Curve, Curves
from memlab.trace.columns import Phase
from memlab.units import GiB, KiB, MiB, format_bytes, format_seconds, plain
from memlab.views import theme

WIDTH, HEIGHT = 880, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 14, 22, 30
_LEGEND_WIDTH = 96  # beside areas, which need too many names for one line
_STRIP = 7  # height of the strip of phases below the curves
_CAPACITY_SHOWN_FROM = 0.25  # the capacity is a line where the curves come at least this near to it


def timeline_svg(curves: Curves, title: str) -> str:
    """Draw the curves; the title and the text twin of the picture are part of it."""
    frame = Frame(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{theme.TEXT}">',
        f"<title>{_text(title)}</title><desc>{_text(described(curves))}</desc>",
        *_grid(frame),
        *_phase_strip(curves, frame),
        *_areas(curves, frame),
        *_lost(curves, frame),
        *(_path(curve, frame, curves.areas is not None) for curve in reversed(curves.in_scale)),
        *_lowest(curves, frame),
        *_capacity(curves, frame),
        *_peak(curves, frame),
        *_legend(curves, frame),
    ]
    return "".join(parts) + "</svg>"


def described(curves: Curves) -> str:
    """The picture in a sentence or two: its twin for whoever cannot see it."""
    allocated = curves.curves[0]
    when = f" at {format_seconds(curves.peak.time_ns / 1e9)}" if curves.peak.time_ns >= 0 else ""
    bound = "" if curves.peak.is_exact else "at least "
    first, last = format_bytes(curves.start_bytes), format_bytes(int(allocated.bytes[-1]))
    peak = format_bytes(curves.peak.low_bytes)
    return (
        f"Memory of {curves.device.label} over {format_seconds(curves.duration_s)}: allocated began at {first}, "
        f"peaked at {bound}{peak}{when} and ended at {last}. {_held_at_peak(curves)}"
        f"{sparkline(allocated, curves.duration_s)}"
    )


def _held_at_peak(curves: Curves) -> str:
    """Which categories held the peak, the largest first, where the drawn curve reaches it."""
    total = curves.curves[0].bytes
    at = int(total.argmax())
    if curves.areas is None or curves.peak.time_ns < 0 or int(total[at]) != curves.peak.low_bytes:
        return ""
    held = sorted(((int(level[at]), name) for name, level in curves.areas.layers.items() if level[at]), reverse=True)
    return f"Held at the peak: {', '.join(f'{name} {format_bytes(count)}' for count, name in held)}. "


def sparkline(curve: Curve, duration_s: float, width: int = 60) -> str:
    """A stair as a row of block characters: the highest value in each stretch.

    >>> from numpy import array
    >>> sparkline(Curve("a", array([0.0, 1.0, 2.0]), array([0, 8, 4]), True), 3.0, width=3)
    '▁█▅'
    """
    edges = np.linspace(0, max(duration_s, 1e-9), width + 1)
    highest = [_highest_between(curve, a, b) for a, b in itertools.pairwise(edges)]
    top = max(max(highest), 1)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * max(value, 0) / top)] for value in highest)


def _highest_between(curve: Curve, begin_s: float, end_s: float) -> int:
    first = max(int(np.searchsorted(curve.time_s, begin_s, side="right")) - 1, 0)
    last = max(int(np.searchsorted(curve.time_s, end_s)), first + 1)
    return int(curve.bytes[first:last].max())


class Frame:
    """Where seconds and bytes lie in the picture."""

    def __init__(self, curves: Curves) -> None:
        self.right = WIDTH - _RIGHT - (_LEGEND_WIDTH if curves.areas else 0)
        top = max(curves.top_bytes, 1)
        capacity = curves.device.capacity_bytes
        self.shows_capacity = capacity > 0 and top >= _CAPACITY_SHOWN_FROM * capacity
        self.top_bytes = max(top, capacity if self.shows_capacity else 0) * 1.06
        self.duration_s = max(curves.duration_s, 1e-9)

    def x(self, seconds: np.ndarray | float) -> np.ndarray:
        """Pixels from the left."""
        return np.round(_LEFT + np.asarray(seconds) / self.duration_s * (self.right - _LEFT)).astype(int)

    def y(self, count: np.ndarray | float) -> np.ndarray:
        """Pixels from the top."""
        return np.round(HEIGHT - _BOTTOM - np.asarray(count) / self.top_bytes * (HEIGHT - _TOP - _BOTTOM)).astype(int)

    def ticks(self) -> list[int]:
        """Round numbers of bytes from zero up."""
        return byte_ticks(self.top_bytes)


def byte_ticks(top_bytes: float, count: int = 4) -> list[int]:
    """About `count` round steps, in the unit that suits the top.

    >>> [format_bytes(n) for n in byte_ticks(2.2 * GiB)]
    ['0 B', '512.0 MiB', '1.00 GiB', '1.50 GiB', '2.00 GiB']
    """
    rough = max(top_bytes / count, 1)
    step = 2 ** round(math.log2(rough))
    return [int(step * i) for i in range(int(top_bytes // step) + 1)]


def short_bytes(count: int) -> str:
    """A tick's text: no needless digits.

    >>> short_bytes(512 * MiB), short_bytes(3 * GiB // 2)
    ('512 MiB', '1.5 GiB')
    """
    for size, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B" if count else "0"


def _grid(frame: Frame) -> Iterator[str]:
    for tick in frame.ticks():
        y = frame.y(tick)
        yield f'<path d="M{_LEFT} {y}H{frame.right}" stroke="{theme.TEXT}" stroke-opacity=".25"/>'
        yield f'<text x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{short_bytes(tick)}</text>'
    for i in range(6):
        seconds = frame.duration_s * i / 5
        anchor = "end" if i == 5 else "middle"
        yield f'<text x="{frame.x(seconds)}" y="{HEIGHT - 5}" text-anchor="{anchor}">{format_seconds(seconds) if i else 0}</text>'


def _areas(curves: Curves, frame: Frame) -> Iterator[str]:
    """The layers from the highest down, each opaque and to the floor: so only upper edges need drawing, and none leaks."""
    if curves.areas is None:
        return
    x, below = frame.x(curves.curves[0].time_s), ""
    paths = []
    for name, edge in curves.areas.edges().items():
        path = _outline(x, frame.y(edge))
        if path != below:  # else nobody could see it
            paths.append(f'<path d="{path}V{HEIGHT - _BOTTOM}H{x[0]}Z" fill="{theme.CATEGORIES[name]}"/>')
        below = path
    yield from reversed(paths)


def _lowest(curves: Curves, frame: Frame) -> Iterator[str]:
    """The other end of a curve that shows the highest of each stretch."""
    if curves.lowest is not None:
        colour = theme.LOWEST if curves.areas else theme.SERIES["allocated"]
        path = _outline(frame.x(curves.lowest.time_s), frame.y(curves.lowest.bytes))
        yield f'<path d="{path}" fill="none" stroke="{colour}"/>'


def _path(curve: Curve, frame: Frame, has_areas: bool) -> str:
    colour = theme.SERIES[curve.name]
    x, y = frame.x(curve.time_s), frame.y(curve.bytes)
    width = 1.6 if curve.name == "allocated" and not has_areas else 1.2
    line = _outline(x, y) if curve.is_stair else f"M{x[0]} {y[0]}" + "".join(_joined(x, y))
    stroke = f'stroke="{colour}" stroke-width="{width}"'
    if curve.name == "allocated" and not has_areas:
        # One path for line and area: the dash ends with the curve, so the sides stay bare.
        length = int(np.abs(np.diff(x)).sum() + np.abs(np.diff(y)).sum())
        area = f"{line}V{HEIGHT - _BOTTOM}H{x[0]}Z"
        return f'<path d="{area}" fill="{colour}" fill-opacity=".14" {stroke} stroke-dasharray="{length} 99999"/>'
    dash = "" if curve.is_stair else ' stroke-dasharray="5 3"'
    return f'<path d="{line}" fill="none" {stroke}{dash}/>'


def _joined(x: np.ndarray, y: np.ndarray) -> Iterator[str]:
    return (f"l{across} {down}" for across, down in zip(np.diff(x).tolist(), np.diff(y).tolist(), strict=True))


def _outline(x: np.ndarray, y: np.ndarray) -> str:
    """A stair as a path, with a point only where it turns."""
    turns = np.append(np.flatnonzero(np.diff(y)) + 1, len(y) - 1)
    return f"M{x[0]} {y[0]}" + "".join(_steps(np.append(x[0], x[turns]), np.append(y[0], y[turns])))


def _steps(x: np.ndarray, y: np.ndarray) -> Iterator[str]:
    for across, down in zip(np.diff(x).tolist(), np.diff(y).tolist(), strict=True):
        yield (f"h{across}" if across else "") + (f"v{down}" if down else "")


def _phase_strip(curves: Curves, frame: Frame) -> Iterator[str]:
    """One path per phase: a little box for each run of stretches in which it prevailed."""
    count = len(curves.phases)
    if not count:
        return
    edges = frame.x(np.linspace(0, frame.duration_s, count + 1))
    changes = np.flatnonzero(np.diff(curves.phases, prepend=-1))
    ends = np.append(changes[1:], count)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        spans = [(edges[a], edges[b]) for a, b in zip(changes, ends, strict=True) if curves.phases[a] == phase]
        if spans:
            top = HEIGHT - _BOTTOM + 2
            path = "".join(f"M{a} {top}H{b}v{_STRIP}H{a}z" for a, b in spans)
            yield f'<path d="{path}" fill="{theme.PHASE_COLOURS[phase.name.lower()]}"/>'


def _lost(curves: Curves, frame: Frame) -> Iterator[str]:
    """A shade over each stretch whose events are not all there."""
    for begin_s, end_s in curves.lost:
        x, end = int(frame.x(begin_s)), int(frame.x(min(end_s, frame.duration_s)))
        box = f'x="{x}" y="{_TOP}" width="{max(end - x, 1)}" height="{HEIGHT - _TOP - _BOTTOM}"'
        yield f'<rect {box} fill-opacity=".12"><title>not all events of this stretch are known</title></rect>'


def _capacity(curves: Curves, frame: Frame) -> Iterator[str]:
    if not frame.shows_capacity:
        return
    y = frame.y(curves.device.capacity_bytes)
    text = f"capacity {format_bytes(curves.device.capacity_bytes)}"
    yield f'<path d="M{_LEFT} {y}H{frame.right}" stroke="{theme.CAPACITY}" stroke-dasharray="6 3"/>'
    yield f'<text x="{frame.right}" y="{y + 14}" text-anchor="end" fill="{theme.CAPACITY}">{text}</text>'


def _peak(curves: Curves, frame: Frame) -> Iterator[str]:
    if curves.peak.time_ns < 0:
        return
    x, y = int(frame.x(curves.peak.time_ns / 1e9)), int(frame.y(curves.peak.low_bytes))
    anchor, dx = ("end", -8) if x > WIDTH / 2 else ("start", 8)
    colour = theme.SERIES["allocated"]
    yield f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>'
    yield (
        f'<text x="{x + dx}" y="{max(y - 6, 12)}" text-anchor="{anchor}" fill="{colour}" font-weight="600">'
        f"peak {format_bytes(curves.peak.low_bytes)}</text>"
    )


def _legend(curves: Curves, frame: Frame) -> Iterator[str]:
    """In one line above; the names of areas beside them, as they lie."""
    lines = [(curve.name, theme.SERIES[curve.name]) for curve in curves.in_scale]
    present = {Phase(code).name.lower() for code in np.unique(curves.phases)} - {"other"}
    x = _LEFT
    for name, colour in lines + [(name, theme.PHASE_COLOURS[name]) for name in theme.PHASES if name in present]:
        yield _key(x, 13, name, colour)
        x += 30 + 7 * len(name)
    for i, name in enumerate(reversed([*curves.areas.layers] if curves.areas else [])):
        yield _key(frame.right + 12, 40 + 19 * i, name, theme.CATEGORIES[name])


def _key(x: int, y: int, name: str, colour: str) -> str:
    return f'<rect x="{x}" y="{y - 8}" width="10" height="8" fill="{colour}"/><text x="{x + 14}" y="{y}">{name}</text>'


def _text(text: str) -> str:
    """Escaped, and without the characters that XML forbids even when escaped."""
    return escape(plain(text))
