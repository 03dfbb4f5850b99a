"""The explorer: a widget in which zooming and panning request detail of the visible part from the kernel.

It holds no timeline: the caller's `window` function returns any part of it. As a widget it is shown next to a static
output and never replaces one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import numpy as np
import traitlets

from memlab.errors import MemlabError
from memlab.torch_internals import let_clicks_through
from memlab.views import theme
from memlab.views.live import static

# Per series: the start times (seconds) of bins, and the lowest and highest value in each.
Detail = Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
Window = Callable[[float, float, int], Detail]

FEWEST_BINS, MOST_BINS, OVERVIEW_BINS = 16, 4000, 600


class Explorer(anywidget.AnyWidget):
    """A timeline to zoom into. `selection` is (begin_s, end_s) of the visible part; set it to move.

    Without `has_times`, where seconds mean nothing, it shows percent of the run.
    """

    _esm = static("uPlot.iife.min.js", "chart.js", "explorer.js")
    _css = static("uPlot.min.css", "memlab.css")
    setup = traitlets.Dict().tag(sync=True)
    overview = traitlets.Bytes(b"").tag(sync=True)
    selection = traitlets.Tuple(traitlets.Float(), traitlets.Float())
    error = traitlets.Unicode("").tag(sync=True)
    closed = False
    _on_close: Callable[[], object] | None = None

    def __init__(
        self,
        window: Window,
        span_s: float,
        title: str = "",
        on_close: Callable[[], object] | None = None,
        has_times: bool = True,
    ) -> None:
        if not (math.isfinite(span_s) and span_s > 0):
            raise MemlabError(f"an explorer needs a span above 0 seconds, got {span_s!r}; was anything recorded?")
        self._window, self.span_s, self.title = window, float(span_s), title
        self._asked = (0.0, self.span_s)
        heads, numbers, error = self._detail(0.0, self.span_s, OVERVIEW_BINS)
        setup = {"title": title, "span": self.span_s, "series": heads, "has_times": has_times}
        super().__init__(setup=setup, overview=numbers, selection=(0.0, self.span_s), error=error)
        self._on_close = on_close
        self.on_msg(self._received)
        let_clicks_through(self)

    def __repr__(self) -> str:
        return f"memlab explorer of {self.title!r} (needs a running kernel)"

    @traitlets.validate("selection")
    def _inside(self, proposal: Mapping[str, Any]) -> tuple[float, float]:
        return self._clamped(*proposal["value"])

    def _clamped(self, begin_s: float, end_s: float) -> tuple[float, float]:
        begin_s, end_s = max(begin_s, 0.0), min(end_s, self.span_s)
        if not begin_s < end_s:  # also false for NaN, which max() and min() keep if it comes first
            raise MemlabError(f"nothing between {begin_s} and {end_s} s; the run lasts from 0 to {self.span_s} s")
        return begin_s, end_s

    @traitlets.observe("selection")
    def _moved(self, change: Mapping[str, Any]) -> None:
        # The browser's own request is not echoed: while the mouse moves it would be out of date on arrival.
        if change["new"] != self._asked:
            self.send({"t": "show", "begin": change["new"][0], "end": change["new"][1]})

    def close(self) -> None:
        """Close the widget and notify the caller, once."""
        if not self.closed:
            self.closed = True
            self._quietly(self._on_close)
        super().close()

    def _detail(self, begin_s: float, end_s: float, bins: int) -> tuple[list[dict[str, Any]], bytes, str]:
        try:
            return *packed(self._window(begin_s, end_s, bins)), ""
        except Exception as error:
            return [], b"", f"{type(error).__name__}: {error}"

    def _received(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        if content.get("t") == "close" and not self.closed:
            self.closed = True
            self._quietly(self._on_close)
        if content.get("t") != "window":
            return
        heads: list[dict[str, Any]] = []
        numbers = b""
        try:
            self._asked = self._clamped(float(content["begin"]), float(content["end"]))
            self.selection = self._asked
            bins = min(MOST_BINS, max(FEWEST_BINS, int(content["bins"])))
            heads, numbers, self.error = self._detail(*self.selection, bins)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        reply = {"t": "window", "id": content.get("id"), "series": heads, "error": self.error}
        self.send({**reply, "begin": self.selection[0], "end": self.selection[1]}, [numbers])

    def _quietly(self, call: Callable[[], object] | None) -> None:
        try:
            if call is not None:
                call()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


def packed(detail: Detail) -> tuple[list[dict[str, Any]], bytes]:
    """The headers of all series, and their numbers in one buffer: f8 times, f4 lows, f4 highs."""
    heads, parts = [], []
    for position, (name, (times, lows, highs)) in enumerate(detail.items()):
        if not len(times) == len(lows) == len(highs):
            raise ValueError(f"{name}: {len(times)} times, {len(lows)} lows, {len(highs)} highs; they must be as many")
        heads.append({"name": name, "n": len(times), "colour": theme.colour_of(name, position)})
        parts += [np.asarray(times, "<f8"), np.asarray(lows, "<f4"), np.asarray(highs, "<f4")]
    return heads, b"".join(part.tobytes() for part in parts)
