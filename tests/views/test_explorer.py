"""The explorer without a browser: requests are answered with the detail asked for, and errors are shown and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memlab.errors import MemlabError
from memlab.views.explorer import MOST_BINS, Detail, Explorer

Sent = list[tuple[dict[str, Any], list[bytes]]]


class Timeline:
    """A window function that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float, int]] = []

    def __call__(self, begin_s: float, end_s: float, bins: int) -> Detail:
        self.asked.append((begin_s, end_s, bins))
        times = np.linspace(begin_s, end_s, bins, endpoint=False)
        return {"allocated": (times, times * 10, times * 10 + 1), "reserved": (times[:1], [7.0], [9.0])}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The custom messages that explorers send."""
    kept: Sent = []
    monkeypatch.setattr(Explorer, "send", lambda _self, content, buffers=None: kept.append((content, buffers or [])))
    return kept


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def explorer(sent: Sent, timeline: Timeline) -> Iterator[Explorer]:
    made = Explorer(timeline, 12.0, "a run")
    yield made
    made.close()


def ask(explorer: Explorer, begin: Any, end: Any, bins: Any = 100, number: int = 1) -> None:
    explorer._received(None, {"t": "window", "id": number, "begin": begin, "end": end, "bins": bins}, None)


def test_the_overview_is_there_before_anybody_asks(explorer: Explorer, timeline: Timeline) -> None:
    assert timeline.asked == [(0.0, 12.0, 600)]
    assert [(head["name"], head["n"]) for head in explorer.setup["series"]] == [("allocated", 600), ("reserved", 1)]
    assert len(explorer.overview) == 16 * 601


def test_a_request_is_answered_under_its_number_with_exact_times(explorer: Explorer, sent: Sent) -> None:
    ask(explorer, 2.0, 3.0, number=41)
    ((reply, (numbers,)),) = sent
    assert (reply["t"], reply["id"], reply["begin"], reply["end"], reply["error"]) == ("window", 41, 2.0, 3.0, "")
    times = np.frombuffer(numbers, "<f8", 100)
    lows, highs = np.frombuffer(numbers, "<f4", 200, offset=800).reshape(2, 100)
    assert times.tolist() == np.linspace(2.0, 3.0, 100, endpoint=False).tolist()
    assert (highs - lows == 1).all() and lows[0] == 20
    assert np.frombuffer(numbers, "<f4", 2, offset=1608).tolist() == [7.0, 9.0]


def test_the_selection_follows_and_stays_inside_the_run(explorer: Explorer, timeline: Timeline, sent: Sent) -> None:
    ask(explorer, -5.0, 99.0, bins=10**9)
    assert explorer.selection == (0.0, 12.0)
    assert timeline.asked[-1] == (0.0, 12.0, MOST_BINS)
    ask(explorer, 2.0, 3.0)
    assert explorer.selection == (2.0, 3.0)
    # What the browser chose is not sent back to it.
    assert [message["t"] for message, _ in sent] == ["window", "window"]


def test_a_selection_set_in_python_moves_the_view(explorer: Explorer, sent: Sent) -> None:
    explorer.selection = (1.0, 2.0)
    assert sent == [({"t": "show", "begin": 1.0, "end": 2.0}, [])]
    with pytest.raises(MemlabError, match=r"nothing between 20.0 and 12.0 s"):
        explorer.selection = (20.0, 30.0)


@pytest.mark.parametrize("request_", [(3.0, 2.0), (float("nan"), 2.0), ("soon", 2.0), (None, 2.0)])
def test_a_request_that_makes_no_sense_is_answered_with_an_error(
    explorer: Explorer, sent: Sent, request_: tuple[Any, Any]
) -> None:
    ask(explorer, *request_)
    assert sent[0][0]["error"] and sent[0][0]["error"] == explorer.error
    assert explorer.selection == (0.0, 12.0)


def test_an_error_of_the_window_is_sent_kept_and_forgotten_after_success(sent: Sent) -> None:
    def window(begin_s: float, end_s: float, bins: int) -> Detail:
        if end_s < 5:
            raise KeyError("level 3")
        return {"allocated": ([begin_s], [1.0], [1.0])}  # type: ignore[dict-item]

    explorer = Explorer(window, 12.0, "a run")
    ask(explorer, 1.0, 2.0)
    assert explorer.error == sent[0][0]["error"] == "KeyError: 'level 3'"
    ask(explorer, 1.0, 9.0, number=2)
    assert (explorer.error, sent[1][0]["error"]) == ("", "")
    explorer.close()


def test_an_error_in_the_overview_does_not_prevent_the_widget(sent: Sent) -> None:
    explorer = Explorer(lambda *_: {"allocated": ([1.0, 2.0], [1.0], [1.0])}, 12.0)  # type: ignore[dict-item,arg-type]
    assert explorer.error == "ValueError: allocated: 2 times, 1 lows, 1 highs; they must be as many"
    explorer.close()


@pytest.mark.parametrize("span_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_run_without_length_is_refused(span_s: float) -> None:
    with pytest.raises(MemlabError, match="span above 0"):
        Explorer(Timeline(), span_s)


@pytest.mark.parametrize("error", ["", "gone"])
def test_close_tells_the_caller_once_however_it_is_closed_and_an_error_is_kept(sent: Sent, error: str) -> None:
    calls: list[int] = []

    def on_close() -> None:
        calls.append(1)
        if error:
            raise OSError(error)

    explorer = Explorer(Timeline(), 12.0, on_close=on_close)
    for _ in range(2):
        explorer._received(None, {"t": "close"}, None)
    assert explorer.error == ("OSError: gone" if error else "")
    explorer.close()
    assert (calls, explorer.closed) == ([1], True)
