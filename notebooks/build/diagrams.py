"""The diagram below the head of a lesson: an SVG written by hand beside its source, and the PNG that is kept of it.

The SVG names things, as in `<rect class="activation" ...>`; the colours are those of all figures. Its `<title>` is the alt text.
The PNG holds a digest of what it was drawn from, so that a changed SVG is noticed without a browser.
"""

from __future__ import annotations

import hashlib
import re
from html import unescape
from pathlib import Path

from memlab.views import theme
from notebooks.build import png
from notebooks.build.pictures import Draw

SCALE = 2
MAX_BYTES = 20_000
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
_DEFS = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
    f' orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0 8 4 0 8z" fill="{theme.TEXT}"/></marker></defs>'
)


def alt(svg: Path) -> str:
    """The alt text of a diagram, in one line."""
    found = _TITLE.search(svg.read_text(encoding="utf-8"))
    assert found, f"{svg.name}: it has no <title>, which is its alt text"
    return unescape(" ".join(found[1].split()))


def styled(svg: Path) -> str:
    """The SVG with the colours of its classes."""
    text = svg.read_text(encoding="utf-8")
    return text.replace("</title>", f"</title>{_DEFS}<style>{stylesheet()}</style>", 1)


def stylesheet() -> str:
    """A class for each category, which fills, and for each series, which is a line; text in a filled group is legible on it."""
    rules = [
        f"text {{ font: 13px sans-serif; fill: {theme.TEXT} }}",
        ".small { font-size: 12px } .strong { font-weight: bold } .code { font-family: monospace }",
        ".middle { text-anchor: middle } .end { text-anchor: end }",
        f".line, .box, .gone, .arrow {{ fill: none; stroke: {theme.TEXT}; stroke-width: 1.5 }}",
        ".gone { stroke-dasharray: 4 3 } .arrow { marker-end: url(#tip) } .box { rx: 4px }",
        f".limit {{ fill: none; stroke: {theme.CAPACITY}; stroke-width: 2 }}",
    ]
    for name, colour in theme.CATEGORIES.items():
        rules.append(f".{name} {{ fill: {colour} }} .{name} text {{ fill: {_ink(colour)} }}")
    for name, colour in theme.SERIES.items():
        rules.append(
            f".{name} {{ fill: none; stroke: {colour}; stroke-width: 2 }} .area.{name} {{ fill: {colour}; stroke: none }}"
        )
        rules.append(f".area.{name} text {{ fill: {_ink(colour)} }}")
    return "\n".join(rules)


def _ink(colour: str) -> str:
    """White or nearly black, whichever can be read better on a colour of middle lightness."""
    red, green, blue = theme.channels(colour)
    return "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 120 else "#111"


def digest(svg: Path) -> str:
    """Of all that is drawn."""
    return hashlib.sha256(styled(svg).encode()).hexdigest()[:16]


def is_current(svg: Path) -> bool:
    """Whether the PNG beside an SVG was drawn from it as it is now."""
    path = svg.with_suffix(".png")
    return path.exists() and png.source(path.read_bytes()) == digest(svg)


def write(svg: Path, draw: Draw) -> Path:
    """Draw an SVG beside itself."""
    path = svg.with_suffix(".png")
    path.write_bytes(png.written(png.pixels(draw(styled(svg))), digest(svg)))
    return path
