"""A figure as one value: panels with axes, and the curves, bands, bars and labels in them.

Values are data, not pixels: `svg` and `plotly` draw the same scene.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from memlab.trace.columns import Array
from memlab.units import GiB, KiB, MiB, one_line
from memlab.views import theme

_LINE_OF_HEADING = 105  # characters
EVENTS = "events"
"""The unit of an axis of the order of events."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, with ticks (value, text); hover text is in `unit`s of `divisor`."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    title: str = ""
    divisor: int = 1
    unit: str = ""
    has_grid: bool = False
    has_zero: bool = False

    @classmethod
    def of_bytes(cls, top_bytes: float) -> Axis:
        """An axis from zero up in MiB, or a smaller unit for small runs."""
        ticks = tuple((tick, short_bytes(tick)) for tick in byte_ticks(top_bytes))
        divisor, unit = next((unit for unit in ((MiB, "MiB"), (KiB, "KiB")) if top_bytes >= unit[0]), (1, "B"))
        return cls(0.0, top_bytes, ticks, divisor=divisor, unit=unit, has_grid=True)

    @classmethod
    def of_seconds(cls, duration_s: float, count: int, title: str = "") -> Axis:
        """An axis of time from the start of a run."""
        scales = ((60, "min", 180), (1, "s", 1), (1e-3, "ms", 1e-3))
        scale, unit = next((one[:2] for one in scales if duration_s >= one[2]), (1e-6, "µs"))
        ticks = tuple(
            (at * scale, f"{at:g} {unit}" if at else "0") for at in ticks_from_zero(duration_s / scale, count)
        )
        return cls(0.0, duration_s, ticks, title, unit="s")

    @classmethod
    def of_events(cls, count: int) -> Axis:
        """An axis of the order of events, for a run whose seconds mean nothing."""
        first, *further = ticks_from_zero(max(count, 1), 5)
        ticks = ((first, "0"), *((at, f"{at:,.0f}") for at in further))
        return cls(0.0, max(count, 1), ticks, "allocations and frees, in order", unit=EVENTS)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A curve. `shape` is "stair" (it holds its value until the next point), "samples" or "joined"; `fill` the area's opacity.

    A `hidden` one can be switched on in interactive figures; one that is not `named` has no legend entry. `axis` is the
    number of the horizontal axis, if a panel has several.
    """

    name: str
    x: Array
    y: Array
    colour: str
    width: float = 1.2
    fill: float = 0.0
    shape: str = "stair"
    hidden: bool = False
    named: bool = True
    axis: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """Stacked areas, bottom first: name -> height at each x."""

    x: Array
    layers: Mapping[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """Stacked bars at 0, 1, 2, ...: name -> height in each, bottom first."""

    layers: Mapping[str, Sequence[float]]
    opacity: tuple[float, ...]
    width: ClassVar = 0.66  # of the space between two bars


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """A strip of equal bins below the curves: indices into `colours`; "" is not drawn."""

    codes: Array
    colours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shade:
    """A range of the horizontal axis, behind everything."""

    begin: float
    end: float
    colour: str
    opacity: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A level across the panel; its text stands below it at the right end, or at the left one."""

    y: float
    colour: str
    text: str
    at_left: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A point: a "dot", a "ring" or a "cross", with hover text."""

    x: float
    y: float
    kind: str
    colour: str
    text: str


@dataclass(frozen=True, slots=True)
class Label:
    """A label above a point, and above the value `over` if that is higher; with `points` the point is marked."""

    x: float
    y: float
    text: str
    colour: str = theme.TEXT
    is_bold: bool = False
    points: bool = False
    over: float = 0.0


Item = Line | Bands | Bars | Strip | Shade | Rule | Mark | Label


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the figure from `begin` to `end` of its width.

    `views` are its horizontal axes by name, which the reader can switch; `opened` is the initial one.
    """

    y: Axis
    views: Mapping[str, tuple[Axis, ...]]
    items: tuple[Item, ...]
    opened: str = ""
    begin: float = 0.0
    end: float = 1.0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The initial horizontal axes."""
        return self.views[self.opened]


@dataclass(frozen=True, slots=True)
class Scene:
    """Panels on one vertical axis, and a heading above them.

    `title` and `words` are its text alternative. `keys` (name, colour) explain a strip.
    """

    title: str
    words: str
    panels: tuple[Panel, ...]
    heading: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    height: int = 260
    left: int = 72
    top: int = 22
    bottom: int = 30
    line_height: ClassVar = 17

    @property
    def heading_lines(self) -> list[str]:
        """The heading, wrapped to the width of the figure."""
        return textwrap.wrap(one_line(self.heading, 500), _LINE_OF_HEADING)

    @property
    def above(self) -> int:
        """The height of the heading in pixels."""
        return self.line_height * len(self.heading_lines)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of bands and bars, bottom first, in the order of categories."""
        items = (item for panel in self.panels for item in panel.items if isinstance(item, Bands | Bars))
        names = list(dict.fromkeys(name for item in items for name in item.layers))
        known = [*theme.CATEGORIES, *names]
        return tuple(sorted(names, key=known.index))

    @property
    def legend(self) -> tuple[str, ...]:
        """The layers that need a legend entry."""
        return () if self.layers == ("other",) else self.layers


def ticks_from_zero(top: float, count: int) -> list[float]:
    """About `count` steps of 1, 2 or 5 times a power of ten, from 0.

    >>> ticks_from_zero(618, 5), ticks_from_zero(3.1, 5)
    ([0, 100, 200, 300, 400, 500, 600], [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    """
    power = 10 ** math.floor(math.log10(top / count))
    step = next(power * by for by in (1, 2, 5, 10) if power * by * (count + 1.5) >= top)
    return [step * i for i in range(int(top / step * (1 + 1e-9)) + 1)]


def byte_ticks(top_bytes: float, count: int = 4) -> list[int]:
    """About `count` round steps, in the unit that suits the top.

    >>> [short_bytes(n) for n in byte_ticks(2.2 * GiB)]
    ['0', '512 MiB', '1 GiB', '1.5 GiB', '2 GiB']
    """
    step = 2 ** round(math.log2(max(top_bytes / count, 1)))
    return [int(step * i) for i in range(int(top_bytes // step) + 1)]


def round_ticks(first: int, last: int, count: int = 5) -> list[int]:
    """About `count` round numbers between two."""
    step = next(
        size * 10**power for power in range(18) for size in (1, 2, 5) if size * 10**power * count >= last - first
    )
    return list(range(-(-first // step) * step, last + 1, step))


def short_bytes(count: int) -> str:
    """A tick's text, without unnecessary digits.

    >>> short_bytes(512 * MiB), short_bytes(3 * GiB // 2)
    ('512 MiB', '1.5 GiB')
    """
    for size, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B" if count else "0"
