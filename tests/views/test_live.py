"""The live view without a browser: what it sends is read back, weighed and compared with what was pushed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memlab.views import live, theme
from memlab.views.live import LiveView

SERIES = ("allocated", "reserved", "used", "rss")


class Wire:
    """Everything a widget sends, and a reader that does what the browser's side does with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self.failure: Exception | None = None
        monkeypatch.setattr(LiveView, "_send", lambda _view, message, buffers=None: self._take(message, buffers))

    def _take(self, message: dict[str, Any], buffers: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent.append((message, [bytes(buffer) for buffer in buffers or ()]))

    def weights(self) -> list[int]:
        texts = [json.dumps(message, ensure_ascii=False).encode() for message, _ in self.sent]
        return [len(text) + sum(map(len, buffers)) for text, (_, buffers) in zip(texts, self.sent, strict=True)]

    def key_frames(self) -> list[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
        return [read_key(buffers[0]) for message, buffers in self.sent if message["method"] == "update"]

    def chunks(self) -> list[dict[str, Any]]:
        return [message["content"] for message, _ in self.sent if message["method"] == "custom"]


def read_body(raw: bytes, count: int, phases: int, at: float, rows: int = 4) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.frombuffer(raw, "<f4", count * (1 + rows) + 2 * phases).astype("f8")
    points = numbers[: count * (1 + rows)].reshape(1 + rows, count)
    points[0] += at
    table = numbers[count * (1 + rows) :].reshape(2, phases) + at
    codes = np.frombuffer(raw, "u1", phases, offset=4 * len(numbers))
    assert len(raw) == 4 * len(numbers) + phases
    return points, np.column_stack((table.T, codes))


def read_key(raw: bytes) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    length = int(np.frombuffer(raw, "<u4", 1)[0])
    head = json.loads(raw[4 : 4 + length])
    return head, *read_body(raw[4 + length :], head["n"] + head["tail"], head["m"] + head["mtail"], head["at"])


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


@pytest.fixture
def view(wire: Wire) -> Iterator[LiveView]:
    made = LiveView("a cell", SERIES, capacity_bytes=80 << 30, can_stop=True)
    wire.sent.clear()
    yield made
    wire.failure = None
    made.close()


def push(view: LiveView, at: float, value: float = 1.0, **more: Any) -> None:
    view.push([at], {name: [value] for name in SERIES}, elapsed_s=at, **more)


def test_every_point_arrives_in_a_view_that_missed_nothing(view: LiveView, wire: Wire) -> None:
    values = np.arange(60) * 1e9
    for tick, value in enumerate(values):
        push(view, tick / 10, value)
    got: list[float] = []
    for message, buffers in wire.sent:
        if message["method"] == "update":
            head, points, _ = read_key(buffers[0])
            got += points[1, head["n"] :].tolist()
        else:
            got += read_body(buffers[0], message["content"]["n"], 0, 0.0)[0][1].tolist()
    assert got == values.astype("f4").astype("f8").tolist()
    assert view.broken is None


def test_messages_are_numbered_and_key_frames_come_soon_then_seldom(view: LiveView, wire: Wire) -> None:
    for tick in range(80):
        push(view, tick / 10)
    view.finish()
    keys = wire.key_frames()
    assert [head["e"] for head, _, _ in keys] == [0.0, 0.2, 0.5, 1.0, 3.0, 5.0, 7.0, 7.9]
    assert [head["done"] for head, _, _ in keys] == [False] * 7 + [True]
    numbers = sorted([head["seq"] for head, _, _ in keys] + [chunk["seq"] for chunk in wire.chunks()])
    assert numbers == list(range(81))


def test_a_late_view_gets_the_whole_history(view: LiveView, wire: Wire) -> None:
    for tick in range(40):
        push(view, tick / 10, float(tick))
    wire.sent.clear()
    view.received(None, {"t": "hello"}, None)
    push(view, 4.0, 40.0)
    ((_, points, _),) = wire.key_frames()
    assert points[1].tolist() == list(range(41))
    assert points[0].tolist() == pytest.approx([tick / 10 for tick in range(41)])


def test_no_tick_is_heavier_than_4_kb_whatever_is_pushed(view: LiveView, wire: Wire) -> None:
    rng = np.random.default_rng(0)
    for tick in range(100):
        at = tick / 10
        times = at + np.arange(500) / 5000
        phases = [(at + i / 2000, at + (i + 1) / 2000, i % 3) for i in range(200)]
        notes = [f'{tick} "ä" €' * 80] * 30
        view.push(times, dict.fromkeys(SERIES, rng.random(500) * 1e11), phases, 2**45, True, at, notes)
    view.finish()
    envelope = 800  # Jupyter's headers, ids and offsets; measured in the browser: below 750 bytes
    assert view.broken is None
    assert len(wire.sent) == 101
    assert max(wire.weights()) + envelope <= 4096


def test_the_peak_is_sent_exactly_and_keeps_whether_it_is_exact(view: LiveView, wire: Wire) -> None:
    push(view, 0.0, peak_bytes=np.int64(2**40 + 1), peak_is_exact=True)
    push(view, 0.1, peak_bytes=2**40 + 3)
    head, _, _ = wire.key_frames()[0]
    (chunk,) = wire.chunks()
    assert (head["p"], head["x"], chunk["p"], chunk["x"]) == (2**40 + 1, 1, 2**40 + 3, 0)


def test_notes_go_out_when_they_change_and_with_every_key_frame(view: LiveView, wire: Wire) -> None:
    for tick in range(12):
        push(view, tick / 10, notes=("host memory is low",) if tick >= 3 else ())
    assert [chunk["notes"] for chunk in wire.chunks() if "notes" in chunk] == [["host memory is low"]]
    said = ["host memory is low"]
    assert [head["notes"] for head, _, _ in wire.key_frames()] == [[], [], said, said]


def test_notes_left_out_are_counted() -> None:
    assert live.shorten(["a"]) == ["a"]
    kept = live.shorten(["x" * 500] * 9)
    assert kept[-1] == "7 more notes in the report"
    assert all(len(note) == 200 for note in kept[:-1])


def test_a_phase_that_goes_on_is_one_phase(view: LiveView, wire: Wire) -> None:
    push(view, 0.0, phases=[(0.0, 0.1, 0)])
    push(view, 0.1, phases=[(0.0, 0.15, 0), (0.15, 0.2, 1)])
    push(view, 0.2, phases=[(0.15, 0.3, 1)])
    view.finish()
    _, _, phases = wire.key_frames()[-1]
    assert phases.tolist() == [pytest.approx(row, abs=1e-6) for row in ([0.0, 0.15, 0], [0.15, 0.3, 1])]


def test_an_absent_column_is_a_gap(view: LiveView, wire: Wire) -> None:
    view.push([0.0, 0.1], {"allocated": [1, 2]}, elapsed_s=0.1)
    _, points, _ = wire.key_frames()[0]
    assert points[1].tolist() == [1, 2]
    assert np.isnan(points[2:]).all()


def test_a_broken_wire_switches_the_view_off_quietly(view: LiveView, wire: Wire) -> None:
    wire.failure = OSError("no socket")
    push(view, 0.0)
    assert view.broken == "OSError: no socket"
    wire.failure = None
    push(view, 0.1)
    view.finish()
    assert (view.broken, wire.sent) == ("OSError: no socket", [])


def test_a_wrong_column_is_told_and_not_raised(view: LiveView) -> None:
    view.push([0.0], {"alocated": [1.0]})
    assert view.broken is not None and "alocated" in view.broken and "allocated" in view.broken


@pytest.mark.parametrize("error", ["", "nothing runs"])
def test_stop_calls_once_and_acknowledges_and_says_why_it_fails(wire: Wire, error: str) -> None:
    calls: list[int] = []

    def on_stop() -> None:
        calls.append(1)
        if error:
            raise RuntimeError(error)

    view = LiveView("a cell", on_stop=on_stop, can_stop=True)
    wire.sent.clear()
    for _ in range(2):
        view.received(None, {"t": "stop"}, None)
    said = [{"t": "ack", "error": f"RuntimeError: {error}"}] if error else []
    assert (calls, view.stop_requested, wire.chunks()) == ([1], True, [{"t": "ack"}, *said])
    assert view.broken is None
    view.close()


@pytest.mark.parametrize("limit", [3, 10, 99, 1000])
def test_thinning_keeps_every_extreme(limit: int) -> None:
    rng = np.random.default_rng(limit)
    points = np.vstack((np.arange(5000.0), rng.normal(size=(2, 5000)).cumsum(axis=1)))
    points[1, 1234], points[2, 4321] = 1e6, -1e6
    thinned = live.thin(points, limit)
    assert thinned.shape[1] <= limit
    assert (thinned.max(axis=1)[1:] == points.max(axis=1)[1:]).all()
    assert (thinned.min(axis=1)[1:] == points.min(axis=1)[1:]).all()
    assert (np.diff(thinned[0]) >= 0).all()
    assert (thinned[:, -1] == points[:, -1]).all()


def test_thinning_leaves_gaps_and_short_curves_alone() -> None:
    points = np.vstack((np.arange(100.0), np.where(np.arange(100) < 50, np.nan, 3.0)))
    assert live.thin(points, 100) is points
    thinned = live.thin(points, 20)
    assert np.isnan(thinned[1, :8]).all() and (thinned[1, 8:] == 3.0).all()


def test_the_history_is_bounded_and_keeps_the_peak() -> None:
    history = live.History(1)
    for start in range(0, 100_000, 100):
        times = np.arange(start, start + 100.0)
        values = np.where(times == 31_415, 9.0, 1.0)
        history.add(np.vstack((times, values)), live.phase_table([(start, start + 100, 0)]))
        points, phases = history.seen(48)
        assert points.shape[1] <= live.HISTORY_POINTS + 100 and len(phases) <= 48
    assert points[1].max() == 9.0


def test_short_phases_are_called_mixed_and_long_ones_stay() -> None:
    short = [(10 + i / 100, 10 + (i + 1) / 100, i % 3) for i in range(300)]
    folded = live.fold(live.phase_table([(0, 10, 0), *short, (13, 23, 1)]), 20)
    assert folded.tolist() == [[0, 10, 0], [10, 13, live.MIXED], [13, 23, 1]]


def test_setup_names_capacity_and_colours(view: LiveView) -> None:
    assert view.setup["capacity"] == 80 << 30
    assert [row["name"] for row in view.setup["series"]] == list(SERIES)
    assert [row["name"] for row in view.setup["phases"]] == ["forward", "backward", "optimizer", "other"]
    assert "'a cell'" in repr(view)


def test_everything_the_browser_runs_is_bundled() -> None:
    script, style = str(LiveView._esm), str(LiveView._css)
    assert "uPlot" in script and "export default" in script
    assert "innerHTML" not in theme.static("chart.js", "live.js", "explorer.js")
    assert "@import" not in style and "url(" not in style and "fetch(" not in script
