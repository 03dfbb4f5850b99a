"""The live view: a widget that draws the memory of a cell while the cell runs, fed by the sampler's thread.

It measures nothing, is not exact (the report is) and never raises into the thread that feeds it.

The protocol, at most 4 kB a tick: numbered chunks (`{t: "a", seq, ...}` and one buffer with the new points)
and, at rising intervals and at the end, a key frame (the synced trait `key`): the history thinned to its extremes, then
the new points as in a chunk. A view that missed nothing uses only its new points; any other starts from it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import anywidget
import numpy as np
import traitlets

from memlab.torch_internals import let_clicks_through
from memlab.views import theme

# 4,096 bytes minus Jupyter's message envelope and a margin: on the websocket the largest message was 3,436 bytes.
PAYLOAD_BYTES = 2900
NOTES_BYTES = 600
PHASES_PER_CHUNK, PHASES_PER_KEY = 24, 48
HISTORY_POINTS, HISTORY_PHASES = 4096, 512
KEY_TIMES_S, KEY_EVERY_S = (0.2, 0.5, 1.0), 2.0
MIXED = 255  # the code of a bin whose phases are too short to be drawn


class LiveView(anywidget.AnyWidget):
    """A live curve of memory, with an optional Stop button; with a `remark` on its figures it shows no times."""

    _esm = theme.static("uPlot.iife.min.js", "chart.js", "live.js")
    _css = theme.static("uPlot.min.css", "memlab.css")
    setup = traitlets.Dict().tag(sync=True)
    key = traitlets.Bytes(b"").tag(sync=True)

    def __init__(
        self,
        title: str,
        series: Sequence[str] = ("allocated", "reserved", "used", "rss"),
        capacity_bytes: int | None = None,
        can_stop: bool = False,
        on_stop: Callable[[], object] | None = None,
        remark: str = "",
    ) -> None:
        setup = {
            "title": title,
            "series": [{"name": name, "colour": theme.SERIES[name]} for name in series],
            "phases": [
                {"name": name, "shade": theme.shade(colour, theme.PHASE_ALPHA[name])}
                for name, colour in theme.PHASE_COLOURS.items()
            ],
            "capacity": capacity_bytes,
            "capacity_colour": theme.CAPACITY,
            "can_stop": can_stop,
            "remark": remark,
        }
        super().__init__(setup=setup)
        self.series, self.title = tuple(series), title
        self.broken: str | None = None
        self.stop_requested = False
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._history = History(len(self.series))
        self._sequence, self._next_key_s, self._wants_key = -1, 0.0, True
        self._head: dict[str, Any] = {}
        self._notes: tuple[str, ...] = ()
        self.on_msg(self.received)
        let_clicks_through(self)

    def __repr__(self) -> str:
        return f"memlab live view of {self.title!r} (needs a running kernel; the report replaces it)"

    def push(
        self,
        times_s: Sequence[float],
        columns: Mapping[str, Sequence[float]],
        phases: Iterable[tuple[float, float, int]] = (),
        peak_bytes: int = 0,
        peak_is_exact: bool = False,
        elapsed_s: float = 0.0,
        notes: Sequence[str] = (),
    ) -> None:
        """Show new points. `phases` are those begun or ended since the last push; the same begin again moves its end.

        Times are seconds since the start. A column that is absent, or NaN, is a gap. More points than fit into a tick
        (about 100) are thinned to their extremes. The first error is stored in `broken`.
        """

        def send() -> None:
            points, table = self._points(times_s, columns), phase_table(phases)
            self._head = {"e": round(float(elapsed_s), 3), "p": int(peak_bytes), "x": int(peak_is_exact)}
            news = {} if tuple(notes) == self._notes else {"notes": shorten(notes)}
            self._notes = tuple(notes)
            if self._wants_key or elapsed_s >= self._next_key_s:
                self._send_key(points, table)
            else:
                self._send_chunk(points, fold(table, PHASES_PER_CHUNK), news)

        self._quietly(send)

    def finish(self) -> None:
        """Send the last key frame: later views show the whole curve, and no Stop button."""
        self._quietly(lambda: self._send_key(self._points((), {}), phase_table(()), done=True))

    def close(self) -> None:
        """Close the widget; the caller has already replaced its output."""
        with contextlib.suppress(Exception):
            # nbconvert saves the last state of every widget, 70 kB of JavaScript each.
            with self.hold_sync():
                self.set_trait("_esm", "export default {}")
                self.set_trait("_css", "")
                self.set_trait("key", b"")
                self.set_trait("setup", {})
            layout = self.layout  # a separate widget, which closing the view leaves open
            super().close()
            layout.close()

    def _quietly(self, send: Callable[[], None]) -> None:
        if self.broken is not None:
            return
        try:
            with self._lock:
                send()
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"

    def _points(self, times_s: Sequence[float], columns: Mapping[str, Sequence[float]]) -> np.ndarray:
        unknown = set(columns) - set(self.series)
        if unknown:
            raise ValueError(f"columns {sorted(unknown)} are not among the series {self.series} of this view")
        points = np.full((1 + len(self.series), len(times_s)), np.nan)
        points[0] = times_s
        for row, name in enumerate(self.series, start=1):
            if name in columns:
                points[row] = columns[name]
        return points

    def _send_chunk(self, points: np.ndarray, phases: np.ndarray, news: dict[str, Any]) -> None:
        self._sequence += 1
        points = thin(points, self._room(len(phases), news))
        at = float(points[0, 0]) if points.size else 0.0
        counts = {"seq": self._sequence, "at": at, "n": points.shape[1], "m": len(phases)}
        self.send({"t": "a", **counts, **self._head, **news}, [body(points, phases, at)])
        self._history.add(points, phases)

    def _send_key(self, points: np.ndarray, phases: np.ndarray, done: bool = False) -> None:
        self._sequence += 1
        self._wants_key = False
        # The first interval is short, because a view may take a second to appear.
        elapsed_s = self._head.get("e", 0.0)
        self._next_key_s = next((at for at in KEY_TIMES_S if at > elapsed_s), elapsed_s + KEY_EVERY_S)
        notes = shorten(self._notes)
        phases = fold(phases, PHASES_PER_KEY // 2)
        old_points, old_phases = self._history.seen(PHASES_PER_KEY - len(phases))
        room = self._room(len(phases) + len(old_phases), notes)
        points = thin(points, room // 2)
        self._history.add(points, phases)
        old_points = thin(old_points, room - points.shape[1])
        counts = {"n": old_points.shape[1], "tail": points.shape[1], "m": len(old_phases), "mtail": len(phases)}
        head = {"seq": self._sequence, "at": 0.0, **counts, **self._head, "notes": notes, "done": done}
        # The length of the header (u4), the header as JSON padded to a multiple of four, the numbers.
        text = json.dumps(head, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 4)
        numbers = body(np.hstack((old_points, points)), np.vstack((old_phases, phases)), 0.0)
        self.key = np.array([len(text)], "<u4").tobytes() + text + numbers

    def _room(self, phase_count: int, said: Any) -> int:
        """How many points fit into a message."""
        head_bytes = 220
        left = PAYLOAD_BYTES - head_bytes - len(json.dumps(said)) - 9 * phase_count
        return left // (4 * (1 + len(self.series)))

    def received(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        """Take a message of the page: it is there, or its stop button was pressed."""
        if content.get("t") == "hello":
            self._wants_key = True
        elif content.get("t") == "stop" and not self.stop_requested:
            self.stop_requested = True
            try:
                self.send({"t": "ack"})
                if self._on_stop is not None:
                    self._on_stop()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                self._quietly(lambda: self.send({"t": "ack", "error": problem[:300]}))


class History:
    """Every point pushed so far, thinned to its extremes once there are too many."""

    def __init__(self, series_count: int) -> None:
        self._points = [np.empty((1 + series_count, 0))]
        self._phases = phase_table(())

    def add(self, points: np.ndarray, phases: np.ndarray) -> None:
        """Append new points and phases; a phase that begins where the last one did replaces it."""
        self._points.append(points)
        old = self._phases
        if len(old) and len(phases) and old[-1, 0] == phases[0, 0]:
            old = old[:-1]
        self._phases = fold(np.vstack((old, phases)), HISTORY_PHASES)

    def seen(self, phase_limit: int) -> tuple[np.ndarray, np.ndarray]:
        """All points kept, and the phases folded to at most `phase_limit`."""
        points = np.hstack(self._points)
        self._points = [thin(points, HISTORY_POINTS // 2) if points.shape[1] > HISTORY_POINTS else points]
        return self._points[0], fold(self._phases, phase_limit)


def thin(points: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` points (row 0: times), two per bin: its lowest and its highest value, row by row.

    The two are in the order in which they occur, so that no peak is lost and no plateau is bent. The last point is kept:
    the view shows it as the current value. A limit below 3 counts as 3.
    """
    count = points.shape[1]
    if count <= limit:
        return points
    stretches = max(1, (limit - 1) // 2)
    edges = np.linspace(0, count - 1, stretches + 1).astype(np.int64)
    starts, ends = edges[:-1], edges[1:] - 1
    lows, highs = np.fmin.reduceat(points[1:], starts, axis=1), np.fmax.reduceat(points[1:], starts, axis=1)
    rises = points[1:, ends] >= points[1:, starts]
    thinned = np.empty((len(points), 2 * stretches + 1))
    thinned[0, 0:-1:2], thinned[0, 1::2] = points[0, starts], points[0, ends]
    thinned[1:, 0:-1:2], thinned[1:, 1::2] = np.where(rises, lows, highs), np.where(rises, highs, lows)
    thinned[:, -1] = points[:, -1]
    return thinned


def phase_table(phases: Iterable[tuple[float, float, int]]) -> np.ndarray:
    """Phases as rows of begin, end, code."""
    return np.array([tuple(phase) for phase in phases], dtype=np.float64).reshape(-1, 3)


def fold(phases: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` rows: short neighbors are merged into one row, MIXED."""
    if len(phases) <= limit:
        return phases
    span = phases[-1, 1] - phases[0, 0]
    short = phases[:, 1] - phases[:, 0] <= span / max(1, (limit - 1) // 2)
    continues = np.concatenate(([False], short[1:] & short[:-1]))
    starts = np.flatnonzero(~continues)
    ends = np.maximum.reduceat(phases[:, 1], starts)
    alone = np.diff(np.append(starts, len(phases))) == 1
    return np.column_stack((phases[starts, 0], ends, np.where(alone, phases[starts, 2], MIXED)))


def body(points: np.ndarray, phases: np.ndarray, at: float) -> bytes:
    """The numbers of a message: f4 times since `at`, f4 rows, f4 begins, f4 ends, u1 codes."""
    shifted = np.vstack((points[:1] - at, points[1:])).astype("<f4")
    return shifted.tobytes() + (phases[:, :2] - at).T.astype("<f4").tobytes() + phases[:, 2].astype("u1").tobytes()


def shorten(notes: Sequence[str]) -> list[str]:
    """Notes that fit into a tick; a last line counts those that do not."""
    kept: list[str] = []
    for position, note in enumerate(note[:200] for note in notes):
        if len(json.dumps([*kept, note])) > NOTES_BYTES:
            left = len(notes) - position
            return [*kept, f"{left} more {'note' if left == 1 else 'notes'} in the report"]
        kept.append(note)
    return kept
