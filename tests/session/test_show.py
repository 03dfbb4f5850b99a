from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from handmade import HOST, Script, busy

import memlab
from memlab.session import explore, show
from memlab.session.run import Run
from memlab.views.bundle import PLOTLY, SVG
from memlab.views.live import LiveView


class Place:
    """What `display(..., display_id=True)` gives: remembers what was put there."""

    def __init__(self, first: Any) -> None:
        self.contents = [first]

    def update(self, content: Any, raw: bool = False) -> None:
        self.contents.append(content)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """A notebook that shows whatever it gets."""
    found: list[Place] = []

    def display(content: Any, raw: bool = False, display_id: bool = False) -> Place:
        found.append(Place(content))
        return found[-1]

    in_notebook(monkeypatch, display)
    return found


def in_notebook(monkeypatch: pytest.MonkeyPatch, display: Any) -> None:
    monkeypatch.setattr(show.seams, "is_kernel", lambda shell: True)
    monkeypatch.setattr("IPython.display.display", display)


def test_a_notebook_shows_a_live_view_that_the_report_replaces(places):
    with memlab.track("shown") as run:
        torch.ones(10)
    figure, table = places
    assert isinstance(figure.contents[0], LiveView)
    assert set(figure.contents[-1]) == {PLOTLY, SVG, "text/plain"}
    assert table.contents[-1] == run.report().table_bundle()
    assert "memlab measures 'shown'" in table.contents[0]["text/plain"]


def test_the_widget_is_closed_and_leaves_no_code_behind(places):
    with memlab.track("closed"):
        view = places[0].contents[0]
        assert "uPlot" in view._esm
    assert view.comm is None
    assert (len(view._esm) < 100, view._css, view.key, view.setup) == (True, "", b"", {})


def test_without_live_there_is_no_widget(places):
    with memlab.track("still", live=False):
        pass
    assert [isinstance(place.contents[0], dict) for place in places] == [True, True]
    assert PLOTLY in places[0].contents[-1]


def test_a_track_inside_of_another_shows_itself_only_when_asked(places):
    with memlab.track("outer"):
        with memlab.track("silent"):
            pass
        assert len(places) == 2
        with memlab.track("asked", show=True):
            pass
        assert len(places) == 4
    with memlab.track("never", show=False):
        pass
    assert len(places) == 4


def test_outside_of_a_notebook_only_text_and_only_when_asked(capsys):
    with memlab.track("silent"):
        pass
    assert capsys.readouterr().out == ""
    with memlab.track("asked", show=True) as run:
        pass
    assert capsys.readouterr().out == run.report().text + "\n"


# --- a display that fails must not fail the cell ---


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no front end")


def test_a_front_end_that_shows_nothing_gets_text(monkeypatch, capsys):
    in_notebook(monkeypatch, refuse)
    with memlab.track("dark") as run:
        torch.ones(10)
    assert run.report().text in capsys.readouterr().out


def test_a_widget_that_cannot_be_made_gets_text(monkeypatch, capsys, places):
    monkeypatch.setattr(LiveView, "__init__", refuse)
    with memlab.track("no widget") as run:
        torch.ones(10)
    assert run.report().text in capsys.readouterr().out


@pytest.mark.parametrize("place", ["update", "close", "finish", "push"])
def test_whatever_breaks_in_between_the_cell_goes_on(monkeypatch, capsys, places, place):
    monkeypatch.setattr(Place if place == "update" else LiveView, place, refuse)
    ran = []
    with memlab.track("broken") as run:
        ran.append(1)
    assert ran == [1]
    assert run.peak_bytes >= 0
    said = capsys.readouterr().out + str(places[0].contents[-1])
    assert "memlab · broken" in said or "Memory of cpu" in said


def test_a_broken_display_does_not_hide_the_users_error(monkeypatch, capsys):
    in_notebook(monkeypatch, refuse)
    with pytest.raises(ValueError, match="mine"), memlab.track("dark"):
        raise ValueError("mine")
    assert "The cell raised ValueError: mine." in capsys.readouterr().out


def test_a_start_that_fails_says_so_where_the_report_would_stand(monkeypatch, places):
    monkeypatch.setattr(show, "LiveView", None, raising=False)
    monkeypatch.setattr("memlab.probes.cpu.CpuProbe.start", refuse)
    with pytest.raises(RuntimeError, match="no front end"), memlab.track("unborn"):
        pass
    assert "could not report on 'unborn': RuntimeError: no front end" in places[0].contents[-1]["text/plain"]


def test_a_terminal_that_lacks_characters_gets_the_report_all_the_same(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    with memlab.track("plain", show=True):
        pass
    sys.stdout.flush()
    assert b"memlab ? plain" in raw.getvalue()


def test_a_terminal_that_is_closed_is_no_error(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with memlab.track("unheard", show=True) as run:
        pass
    assert run.peak_bytes >= 0


# --- report and explorer ---


def test_a_report_shows_figure_and_table_in_a_notebook_and_text_elsewhere(places, monkeypatch, capsys):
    shown = Run("x", busy(300)).report()
    shown._ipython_display_()
    assert [set(place.contents[0]) for place in places] == [{PLOTLY, SVG, "text/plain"}, {"text/html", "text/plain"}]
    monkeypatch.setattr(show.seams, "is_kernel", lambda shell: False)
    shown._ipython_display_()
    assert capsys.readouterr().out == shown.text + "\n"


def test_closing_the_explorer_leaves_the_static_figure(places):
    explorer = Run("x", busy(300)).explore()
    assert places[0].contents == [explorer]
    explorer.close()
    assert PLOTLY in places[0].contents[-1]
    assert "text/html" in places[1].contents[0]


def test_the_explorer_gets_the_detail_of_any_part():
    windows = explore.Windows(Run("x", busy(3000)))
    detail = windows(0.0, windows.span_s, 50)
    assert set(detail) == {"allocated", "reserved"}
    for times, low, high in detail.values():
        assert len(times) == len(low) == len(high) <= 50
        assert (low <= high).all()
    script = Script(HOST)
    assert set(explore.Windows(Run("cpu", script.trace()))(0, 1, 20)) == {"allocated"}
