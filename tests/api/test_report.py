from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from scripted_traces import GPU, HOST, Script, busy

import memlab
from memlab import torch_internals
from memlab.analysis.oom.facts import Failure
from memlab.analysis.oom.text import read_message
from memlab.api.oom import OomExplained
from memlab.api.run import Run
from memlab.trace import Category
from memlab.units import MiB
from memlab.views.live import LiveView
from memlab.views.shown import PLOTLY, SVG


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
    monkeypatch.setattr(torch_internals, "is_kernel", lambda shell: True)
    monkeypatch.setattr("IPython.display.display", display)


def test_a_notebook_shows_a_live_view_that_the_report_replaces(places):
    with memlab.track("shown") as run:
        torch.ones(10)
        figure, table = places
        view = figure.contents[0]
        assert isinstance(view, LiveView) and "uPlot" in view._esm
    assert set(figure.contents[-1]) == {PLOTLY, SVG, "text/plain"}
    assert table.contents[-1] == run.report().table_bundle()
    waiting = table.contents[0]["text/plain"]
    assert "memlab is measuring 'shown'" in waiting and "page was reloaded, it is memlab.runs['shown']" in waiting
    # The widget is closed and leaves no code behind.
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


def test_a_front_end_that_shows_nothing_gets_text(monkeypatch, capsys, places):
    monkeypatch.setattr("IPython.display.display", refuse)
    with memlab.track("dark") as run:
        torch.ones(10)
    assert run.report().text in capsys.readouterr().out


def test_one_without_widgets_gets_the_report_all_the_same(monkeypatch, capsys, places):
    monkeypatch.setattr("memlab.views.live.LiveView.__init__", refuse)
    with memlab.track("dark") as run:
        torch.ones(10)
    assert run.report().text in [place.contents[-1].get("text/plain") for place in places]
    assert not capsys.readouterr().out


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
    assert "It raised ValueError: mine." in capsys.readouterr().out


def test_a_start_that_fails_says_so_where_the_report_would_stand(monkeypatch, places):
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


# --- report ---


def test_a_report_shows_figure_and_table_in_a_notebook_and_text_elsewhere(places, monkeypatch, capsys):
    shown = Run("x", busy(300)).report()
    shown._ipython_display_()
    assert [set(place.contents[0]) for place in places] == [{PLOTLY, SVG, "text/plain"}, {"text/html", "text/plain"}]
    monkeypatch.setattr(torch_internals, "is_kernel", lambda shell: False)
    shown._ipython_display_()
    assert capsys.readouterr().out == shown.text + "\n"


# --- the line that points to memlab.advise ---


def run_of(large: int = 80 * MiB, name: str = "mine", again: str = "step()\n", **notes: object) -> Run:
    script = Script(HOST)
    script.alloc(20 * MiB, category=Category.PARAMETER)
    script.alloc(large, category=Category.ACTIVATION)
    run = Run(name, script.trace(notes=notes))
    run.cell_text = again
    return run


def hint(run: Run) -> str:
    return next((line for line in run.report().text.splitlines() if "memlab.advise" in line), "")


def test_a_cell_points_by_its_name_and_says_how_many_are_tried():
    line = run_of().report().text.splitlines()[-1]
    count = sum(one.kind == "saving" and "activation" in one.attacks and one.patch is not None and one.equality.kind != "changes"
                for one in memlab.techniques.values())  # fmt: skip
    call = "import memlab; memlab.advise(memlab.runs['mine'])"
    assert (
        line
        == f"Activations hold 80 % of the peak: {call} finds out which of {count} techniques, if any, would lower it."
    )
    assert line in run_of().report().html.replace("&#x27;", "'")


def test_nothing_where_it_cannot_be_run_again_or_is_small():
    assert hint(run_of(again="")) == ""
    assert hint(run_of(large=1 * MiB)) == ""
    assert hint(Run("nothing", Script(HOST).trace())) == ""


def test_a_run_of_the_lab_points_too():
    assert "memlab.advise" in hint(run_of(again="", trial={"workload": "gpt", "size": "tiny"}))
    assert hint(run_of(again="", trial={"workload": "mine", "size": ""})) == ""
    assert hint(run_of(again="", trial="?")) == ""


def test_a_name_from_outside_is_escaped():
    report = run_of(name="<i>'\x1b").report()
    assert "<i>" not in report.html
    assert "\x1b" not in report.text


def test_a_report_is_shown_whatever_becomes_of_the_line(monkeypatch):
    monkeypatch.setattr("memlab.api.report.pointer", lambda *args: 1 / 0)
    assert "memlab · mine" in run_of().report().text


def test_an_out_of_memory_ends_with_it_also_after_a_release():
    message = read_message("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB")
    explained = OomExplained(Failure(message), pointer="Activations hold <all>.")
    for one in (explained, explained.released("1 GiB")):
        assert one.text.splitlines()[-1] == "Activations hold <all>."
        assert "Activations hold &lt;all&gt;." in one.html
    assert "Activations hold" not in OomExplained(Failure(message)).text


def test_a_run_of_cuda_that_cannot_be_made_again_points_nowhere():
    script = Script(GPU)
    script.alloc(80 * MiB)
    assert hint(Run("cuda", script.trace())) == ""


def test_a_line_of_a_cell_has_the_cells_number_in_every_table():
    def run(name: str, count: int) -> Run:
        script, file = Script(), f"/tmp/ipykernel_7/{count}.py"
        for _ in range(3):
            script.alloc(1 << 20, category=Category.TEMPORARY, line=f"{file}:8")
        return Run(name, script.trace(notes={"cells": {file: count}}))

    first, second = run("a", 3), run("b", 4)
    assert list(first.with_cells(first.breakdown("tensor"))) == ["temporary of cell [3]:8"]
    lines = memlab.compare(first, second).text
    assert "cell [3]:8" in lines and "cell [4]:8" in lines and "ipykernel" not in lines
