"""Two runs as a small SVG: what a saved notebook shows where plotly cannot draw (GitHub, nbconvert, e-mail)."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from memlab.analysis.comparison import UNTOLD, Drawn, Picture
from memlab.analysis.peak import UNKNOWN_BYTES
from memlab.units import format_seconds, one_line
from memlab.views import theme
from memlab.views.comparison_table import SIDES, interval_text
from memlab.views.svg import byte_ticks, short_bytes

WIDTH, HEIGHT = 880, 290
_LEFT, _TOP, _BOTTOM = 72, 30, 44
_RIGHT = 560  # where the timelines end
_BARS = (600, 690)  # where each bar begins
_BAR = 66
_KEYS = 782
_ROOM = 1.12


def comparison_svg(picture: Picture, words: str) -> str:
    """Draw both runs; the sentence is part of it, as its twin for whoever cannot see it."""
    top = picture.top_bytes * _ROOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{theme.TEXT}">',
        f"<title>{_text(' against '.join(one.name for one in reversed(picture.sides)), 300)}</title>",
        f"<desc>{_text(words, 500)}</desc>",
        *_grid(picture, top),
        *(_stair(drawn, index, picture, top) for index, drawn in enumerate(picture.sides)),
        *(part for index, drawn in enumerate(picture.sides) for part in _bar(drawn, index, top)),
        *_keys(picture),
    ]
    return "".join(parts) + "</svg>"


def _y(count: float, top: float) -> int:
    return round(HEIGHT - _BOTTOM - count / top * (HEIGHT - _TOP - _BOTTOM))


def _grid(picture: Picture, top: float) -> Iterator[str]:
    for tick in byte_ticks(top):
        y = _y(tick, top)
        path = f"M{_LEFT} {y}H{_RIGHT}M{_BARS[0] - 8} {y}H{_BARS[1] + _BAR + 8}"
        yield f'<path d="{path}" stroke="{theme.TEXT}" stroke-opacity=".25"/>'
        yield f'<text x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{short_bytes(tick)}</text>'
    for i in range(5):
        text = f"{25 * i} %" if picture.by_share else format_seconds(picture.duration_s * i / 4) if i else "0"
        x, anchor = _LEFT + (_RIGHT - _LEFT) * i // 4, "end" if i == 4 else "middle"
        yield f'<text x="{x}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{text}</text>'
    why = f" ({picture.why})" if picture.why else ""
    axis = f"share of each run{why}" if picture.by_share else "seconds since the start of each"
    yield f'<text x="{(_LEFT + _RIGHT) // 2}" y="{HEIGHT - 8}" text-anchor="middle">{_text(axis, 120)}</text>'


def _stair(drawn: Drawn, index: int, picture: Picture, top: float) -> str:
    """One path for the line and the shade below it: the dash ends with the line, so the sides stay bare."""
    whole = drawn.duration_s if picture.by_share else picture.duration_s
    x = np.round(_LEFT + drawn.time_s / max(whole, 1e-9) * (_RIGHT - _LEFT)).astype(int)
    y = np.array([_y(count, top) for count in drawn.bytes.tolist()])
    turns = np.append(np.flatnonzero(np.diff(y)) + 1, len(y) - 1)
    x, y = np.append(x[0], x[turns]), np.append(y[0], y[turns])
    steps = "".join(
        (f"h{across}" if across else "") + (f"v{down}" if down else "")
        for across, down in zip(np.diff(x).tolist(), np.diff(y).tolist(), strict=True)
    )
    length = int(np.abs(np.diff(x)).sum() + np.abs(np.diff(y)).sum())
    look = f'fill="{SIDES[index]}" fill-opacity=".1" stroke="{SIDES[index]}" stroke-width="1.6"'
    path = f"M{x[0]} {y[0]}{steps}V{HEIGHT - _BOTTOM}H{x[0]}Z"
    return f'<path d="{path}" {look} stroke-dasharray="{length} 99999"/>'


def _bar(drawn: Drawn, index: int, top: float) -> Iterator[str]:
    left, below = _BARS[index], 0
    for name, count in drawn.shares:
        y, height = _y(below + count, top), _y(below, top) - _y(below + count, top)
        below += count
        if height:
            yield f'<rect x="{left}" y="{y}" width="{_BAR}" height="{height}" fill="{_colour(name)}"/>'
    high = drawn.high_bytes if drawn.high_bytes < UNKNOWN_BYTES else drawn.low_bytes
    middle = left + _BAR // 2
    if high > drawn.low_bytes:
        path = f"M{middle} {_y(drawn.low_bytes, top)}V{_y(high, top)}m-6 0h12"
        yield f'<path d="{path}" fill="none" stroke="{theme.TEXT}" stroke-width="2"/>'
    words = interval_text(drawn.low_bytes, drawn.high_bytes).split(" to ")
    for line, part in enumerate(words):
        y = _y(max(high, drawn.low_bytes), top) - 5 - 13 * (len(words) - 1 - line)
        text = f"to {part}" if line else part
        yield f'<text x="{middle}" y="{max(y, 10)}" text-anchor="middle" font-size="11" fill="{SIDES[index]}">{text}</text>'
    yield f'<text x="{middle}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{"ab"[index]}</text>'


def _keys(picture: Picture) -> Iterator[str]:
    """The runs in a line above; what the bars are made of beside them, as it lies."""
    for index, drawn in enumerate(picture.sides):
        x = _LEFT + index * (_RIGHT - _LEFT) // 2
        yield f'<rect x="{x}" y="8" width="12" height="9" fill="{SIDES[index]}"/>'
        yield f'<text x="{x + 17}" y="17">{"ab"[index]}: {_text(drawn.name, 32)}</text>'
    names = {name: None for drawn in picture.sides for name, _ in drawn.shares}
    order = [name for name in theme.CATEGORIES if name in names]
    order += [name for name in names if name not in order]
    for i, name in enumerate(reversed(order)):
        y = _TOP + 18 + 19 * i
        yield f'<rect x="{_KEYS}" y="{y - 8}" width="10" height="8" fill="{_colour(name)}"/>'
        yield f'<text x="{_KEYS + 14}" y="{y}">{_text(name, 16)}</text>'


def _colour(name: str) -> str:
    return theme.CATEGORIES["other"] if name == UNTOLD else theme.colour_of(name)


def _text(text: str, limit: int) -> str:
    """Escaped, and without the characters that XML forbids even when escaped."""
    return escape(one_line(text, limit))
