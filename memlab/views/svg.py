"""Draw a scene as a small SVG, where plotly is not available (GitHub, nbconvert, e-mail)."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from memlab.trace.columns import Array
from memlab.units import one_line
from memlab.views import theme
from memlab.views.scene import Bands, Bars, Item, Label, Line, Mark, Panel, Rule, Scene, Shade, Strip

WIDTH = 880
RIGHT, LEGEND_WIDTH = 14, 96  # a legend of layers needs too many names for one line
_STRIP_HEIGHT = 7
_CHARACTER = 7  # pixels, about, of which one is room
_ORDER = (Strip, Shade, Bands, Bars, Line, Rule, Mark, Label)  # from the lowest to the highest


def svg(scene: Scene) -> str:
    """Draw a scene, including its title and text alternative."""
    above, heading = scene.above, ""
    for number, line in enumerate(scene.heading_lines):
        heading += f'<text x="10" y="{14 + scene.line_height * number}" font-weight="600">{_text(line)}</text>'
    parts: list[str] = []
    for number, panel in enumerate(scene.panels):
        space = Space(scene, panel)
        parts += _axes(space, has_levels=not number)
        for kind in _ORDER:
            items = [item for item in panel.items if isinstance(item, kind)]
            for item in reversed(items) if kind is Line else items:  # the first curve is drawn on top
                parts += _drawn(item, space)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {scene.height + above}" width="{WIDTH}" role="img" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{theme.TEXT}">'
        f"<title>{_text(scene.title)}</title><desc>{_text(scene.words)}</desc>{heading}"
        f'<g transform="translate(0 {above})">{"".join([*parts, *_keys(scene)])}</g></svg>'
    )


class Space:
    """The coordinates of a panel in the figure."""

    def __init__(self, scene: Scene, panel: Panel) -> None:
        self.panel = panel
        whole = right_of(scene) - scene.left
        self.left, self.right = (round(scene.left + share * whole) for share in (panel.begin, panel.end))
        self.top, self.floor, self.height = scene.top, scene.height - scene.bottom, scene.height

    def x(self, value: Array | float, axis: int = 0) -> Array:
        """Pixels from the left."""
        low, high = self.panel.axes[axis].low, self.panel.axes[axis].high
        return np.round(self.left + (np.asarray(value) - low) / (high - low) * (self.right - self.left)).astype(int)

    def y(self, value: Array | float) -> Array:
        """Pixels from the top."""
        low, high = self.panel.y.low, self.panel.y.high
        return np.round(self.floor - (np.asarray(value) - low) / (high - low) * (self.floor - self.top)).astype(int)


def right_of(scene: Scene) -> int:
    """The bottom of the panels."""
    return WIDTH - RIGHT - (LEGEND_WIDTH if scene.legend else 0)


def _axes(space: Space, has_levels: bool) -> Iterator[str]:
    """The grid, the labels on its left, and the ticks below it."""
    levels = [(int(space.y(value)), text) for value, text in space.panel.y.ticks]
    lines = "".join(f"M{space.left} {y}H{space.right}" for y, _ in levels)
    yield f'<path d="{lines}" stroke="{theme.TEXT}" stroke-opacity=".25"/>'
    if has_levels:
        texts = (f'<text x="{space.left - 7}" y="{y + 4}">{_text(text)}</text>' for y, text in levels)
        yield f'<g text-anchor="end">{"".join(texts)}</g>'
    axis = space.panel.axes[0]
    below = 25 if any(isinstance(item, Strip) for item in space.panel.items) else 16
    for value, text in axis.ticks:
        x = int(space.x(value))
        if axis.has_grid:
            strength = ".8" if axis.has_zero and not value else ".25"
            yield f'<path d="M{x} {space.top}V{space.floor}" stroke="{theme.TEXT}" stroke-opacity="{strength}"/>'
        anchor = "end" if x > WIDTH - 30 else "middle"
        yield f'<text x="{x}" y="{space.floor + below}" text-anchor="{anchor}">{_text(text)}</text>'
    if axis.title:
        middle = (space.left + space.right) // 2
        yield f'<text x="{middle}" y="{space.height - 8}" text-anchor="middle">{_text(axis.title)}</text>'


def _drawn(item: Item, space: Space) -> Iterator[str]:
    match item:
        case Strip():
            yield from _strip(item, space)
        case Bands():
            yield from _bands(item, space)
        case Bars():
            yield from _bars(item, space)
        case Line():
            yield from _line(item, space)
        case Label():
            yield from _label(item, space)
        case Shade():
            x, end = int(space.x(item.begin)), min(int(space.x(item.end)), space.right)
            box = f'x="{x}" y="{space.top}" width="{max(end - x, 1)}" height="{space.floor - space.top}"'
            title = f"<title>{_text(item.text)}</title>" if item.text else ""
            yield f'<rect {box} fill="{item.colour}" fill-opacity="{item.opacity:g}">{title}</rect>'
        case Rule():
            y = int(space.y(item.y))
            yield f'<path d="M{space.left} {y}H{space.right}" stroke="{item.colour}" stroke-dasharray="6 3"/>'
            x, anchor = (space.left + 4, "start") if item.at_left else (space.right - 4, "end")
            width = _CHARACTER * len(item.text)
            if item.text:  # on its colour: it may lie over areas, on which red cannot be read
                box = f'x="{(x if item.at_left else x - width) - 4}" y="{y}" width="{width + 8}" height="18"'
                yield f'<rect {box} fill="{item.colour}"/>'
                yield f'<text x="{x}" y="{y + 13}" text-anchor="{anchor}" fill="{theme.ON_CAPACITY}">{_text(item.text)}</text>'
        case Mark():
            x, y, title = int(space.x(item.x)), int(space.y(item.y)), f"<title>{_text(item.text)}</title>"
            outline = f'fill="none" stroke="{item.colour}" stroke-width="1.7"'
            if item.kind == "cross":
                yield f'<path d="M{x - 4} {y - 4}l8 8m0 -8l-8 8" {outline}>{title}</path>'
            else:
                look = outline if item.kind == "ring" else f'fill="{item.colour}"'
                yield f'<circle cx="{x}" cy="{y}" r="5" fill-opacity=".85" {look}>{title}</circle>'


def _line(line: Line, space: Space) -> Iterator[str]:
    if line.hidden:
        return
    x, y = space.x(line.x, line.axis), space.y(line.y)
    path, stroke = _outline(x, y), f'stroke="{line.colour}" stroke-width="{line.width:g}"'
    if line.shape != "stair":
        steps = zip(np.diff(x).tolist(), np.diff(y).tolist(), strict=True)
        path = f"M{x[0]} {y[0]}" + "".join(f"l{a} {b}" for a, b in steps)
        stroke += ' stroke-dasharray="5 3"' if line.shape == "samples" else ""
    if line.fill:
        # One path for line and area: the dash pattern ends with the curve, so the sides have no stroke.
        length = int(np.abs(np.diff(x)).sum() + np.abs(np.diff(y)).sum())
        area = f'd="{path}V{space.floor}H{x[0]}Z" fill="{line.colour}" fill-opacity="{line.fill:g}"'
        yield f'<path {area} {stroke} stroke-dasharray="{length} 99999"/>'
    else:
        yield f'<path d="{path}" fill="none" {stroke}/>'


def _outline(x: Array, y: Array) -> str:
    """A step curve as a path, with points only at its corners."""
    turns = np.append(np.flatnonzero(np.diff(y)) + 1, len(y) - 1)
    across, down = np.diff(np.append(x[0], x[turns])).tolist(), np.diff(np.append(y[0], y[turns])).tolist()
    steps = ((f"h{a}" if a else "") + (f"v{b}" if b else "") for a, b in zip(across, down, strict=True))
    return f"M{x[0]} {y[0]}" + "".join(steps)


def _bands(bands: Bands, space: Space) -> Iterator[str]:
    """The layers from the top down, each opaque and to the bottom: no gaps at the edges."""
    x, below, edge = space.x(bands.x), "", np.zeros(len(bands.x))
    paths = []
    for name, height in bands.layers.items():
        edge = edge + height
        path = _outline(x, space.y(edge))
        if path != below:  # else it would be invisible
            paths.append(f'<path d="{path}V{space.floor}H{x[0]}Z" fill="{theme.category_colour(name)}"/>')
        below = path
    yield from reversed(paths)


def _bars(bars: Bars, space: Space) -> Iterator[str]:
    width = int(space.x(bars.width) - space.x(0.0))
    for at, opacity in enumerate(bars.opacity):
        left, below = int(space.x(at - bars.width / 2)), 0.0
        look = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        for name, heights in bars.layers.items():
            top, floor = int(space.y(below + heights[at])), int(space.y(below))
            below += heights[at]
            if floor > top:
                box = f'x="{left}" y="{top}" width="{width}" height="{floor - top}"'
                yield f'<rect {box} fill="{theme.category_colour(name)}"{look}/>'


def _strip(strip: Strip, space: Space) -> Iterator[str]:
    """One path per code: a small box for each run of bins with it."""
    edges = np.round(np.linspace(space.left, space.right, len(strip.codes) + 1)).astype(int)
    changes = np.flatnonzero(np.diff(strip.codes.astype(int), prepend=-1))
    boxes = [""] * len(strip.colours)
    for begin, end in zip(changes, np.append(changes[1:], len(strip.codes)), strict=True):
        boxes[strip.codes[begin]] += f"M{edges[begin]} {space.floor + 2}H{edges[end]}v{_STRIP_HEIGHT}H{edges[begin]}z"
    for path, colour in zip(boxes, strip.colours, strict=True):
        if path and colour:
            yield f'<path d="{path}" fill="{colour}"/>'


def _label(label: Label, space: Space) -> Iterator[str]:
    x, y = int(space.x(label.x)), int(space.y(label.y))
    anchor, dx, size = "middle", 0, ' font-size="11"'
    if label.points:
        yield f'<circle cx="{x}" cy="{y}" r="3.5" fill="{label.colour}"/>'
        anchor, dx, size = ("end", -8, "") if x > WIDTH / 2 else ("start", 8, "")
    weight = ' font-weight="600"' if label.is_bold else ""
    look = f'text-anchor="{anchor}"{size} fill="{label.colour}"{weight}'
    lines = label.text.split("\n")
    for number, line in enumerate(lines):
        up = max(min(y, int(space.y(label.over))) - 5 - 13 * (len(lines) - 1 - number), 11)
        yield f'<text x="{x + dx}" y="{up}" {look}>{_text(line)}</text>'


def _keys(scene: Scene) -> Iterator[str]:
    """Legend of curves and strip in one line above; names of layers next to them, in order."""
    lines = [item for panel in scene.panels for item in panel.items if isinstance(item, Line)]
    named = [(one.name, one.colour) for one in lines if one.named and not one.hidden]
    x, keys = scene.left, []
    for name, colour in (*named, *scene.keys):
        keys.append((x, 13, one_line(name, 60), colour))
        x += 30 + 7 * min(len(name), 60)
    for number, name in enumerate(reversed(scene.legend)):
        keys.append((right_of(scene) + 12, 40 + 19 * number, one_line(name, 16), theme.category_colour(name)))
    for x, y, name, colour in keys:
        box = f'<rect x="{x}" y="{y - 8}" width="10" height="8" fill="{colour}"/>'
        yield f'{box}<text x="{x + 14}" y="{y}">{_text(name)}</text>'


def _text(text: str) -> str:
    """Escaped, and without the characters that XML forbids even when escaped."""
    return escape(one_line(text, 600))
