"""The colours of memlab: one per category, series and phase, legible on white and on black pages; its scripts and style sheets.

Independent of figure libraries and front ends.
"""

from __future__ import annotations

from pathlib import Path

# A saved figure cannot know the background of its page, so its colours are of middle lightness:
# text and series reach a contrast of 4.1 on both #ffffff and #111111, areas (which have edges and labels) 3.0.
PAGES = ("#ffffff", "#111111")
TEXT = "#757982"
GRID = "rgba(117, 121, 130, 0.22)"
CAPACITY = "#d74450"
ON_CAPACITY = "#ffffff"
WARNING = "#bd600f"

SERIES = {"allocated": "#2e75e8", "reserved": "#bd600f", "used": "#148971", "rss": "#a35dba"}

# In stacking order. They differ in lightness too, so that neighbors can be distinguished with colour blindness.
CATEGORIES = {
    "parameter": "#586fdf",
    "buffer": "#13a0c8",
    "optimizer": "#97459d",
    "gradient": "#cd7e68",
    "activation": "#17722a",
    "input": "#9d7e00",
    "temporary": "#c03c4c",
    "other": "#939393",
    "rounding": "#6f6f6f",
}
LOWEST = "#ffffff"  # a line across the areas, which are of middle lightness

# The position in this tuple is the phase's code.
PHASES = ("forward", "backward", "optimizer", "other")
PHASE_COLOURS = {"forward": "#269872", "backward": "#da5918", "optimizer": "#9052c5", "other": "#7c818b"}
PHASE_ALPHA = {"forward": 0.12, "backward": 0.11, "optimizer": 0.16, "other": 0.0}

# For names without their own colour (modules, lines, tensors); neighbors differ.
PALETTE = tuple(CATEGORIES[name] for name in CATEGORIES if name not in ("other", "rounding"))


def category_colour(name: str) -> str:
    """The colour of a category or series; any other name has that of `other`."""
    return CATEGORIES.get(name) or SERIES.get(name, CATEGORIES["other"])


def shade(colour: str, alpha: float) -> str:
    """The same colour, transparent: `shade("#ff0000", 0.2)` is `rgba(255, 0, 0, 0.2)`."""
    red, green, blue = channels(colour)
    return f"rgba({red}, {green}, {blue}, {alpha:g})"


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue (0 to 255) of a colour written as #rrggbb."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def static(*names: str) -> str:
    """The bundled files as one text: the browser fetches nothing."""
    return "\n".join((Path(__file__).parent / "static" / name).read_text("utf-8") for name in names)
