"""A real marimo notebook, run and exported: results and runs show themselves, without magics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("marimo")
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = """
import marimo

app = marimo.App()

@app.cell
def _():
    import torch
    import memlab
    return memlab, torch

@app.cell
def _(memlab, torch):
    with memlab.track("first", lines=True) as run:
        net = torch.nn.Linear(500, 500)
        net(torch.ones(1000, 500)).sum().backward()
    return net, run

@app.cell
def _(run):
    run

@app.cell
def _(memlab, net):
    memlab.who(net.weight)

@app.cell
def _(memlab, torch):
    with memlab.track("broken"):
        torch.zeros(1000, 1000)
        raise ValueError("mine")

@app.cell
def _(memlab, torch):
    with memlab.track("quiet", show=False):
        torch.zeros(10)

@app.cell
def _(memlab):
    memlab.doctor()

@app.cell
def _(run):
    run.explore()
"""
TRACKED, LAST_VALUE, WHO, BROKEN, QUIET, DOCTOR, EXPLORER = range(1, 8)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What each cell shows, and what it printed."""
    folder = tmp_path_factory.mktemp("marimo")
    (folder / "notebook.py").write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "-q", "export", "html", "notebook.py", "-o", "notebook.html"], check=False,
        timeout=600, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    sessions = list((folder / "__marimo__/session").glob("*.json"))
    assert len(sessions) == 1, done.stderr
    session = json.loads(sessions[0].read_text())
    return [("".join(shown(cell)), "".join(one["text"] for one in cell["console"])) for cell in session["cells"]]


def shown(cell: dict[str, Any]) -> Iterator[str]:
    for output in cell["outputs"]:
        for kind, content in output.get("data", {"error": str(output)}).items():
            yield f"{kind} {content}"


def test_a_tracked_block_shows_its_report_with_the_picture_and_its_lines(cells):
    shown, printed = cells[TRACKED]
    assert shown.startswith("text/html") and "<svg" in shown and "Peak" in shown
    assert "net(torch.ones(1000, 500)).sum().backward()" in shown
    assert "__marimo__cell" not in shown, "the file of a cell says nothing to the user"
    assert printed == ""


def test_a_run_that_is_the_last_value_is_the_same_report(cells):
    shown, _ = cells[LAST_VALUE]
    assert shown.startswith("text/html") and shown.count("<svg") == 1 and "Peak" in shown


def test_other_results_are_html_and_no_dict_of_mime_types(cells):
    for cell in (WHO, DOCTOR):
        assert cells[cell][0].startswith("text/html") and "'text/plain'" not in cells[cell][0]
    assert "marimo: memlab.track() and results show themselves" in cells[DOCTOR][0]


def test_the_report_of_a_block_that_raised_is_printed_as_marimo_shows_the_error_alone(cells):
    shown, printed = cells[BROKEN]
    assert "mine" in shown
    assert "Peak" in printed and "3.81 MiB" in printed


def test_what_shall_not_be_shown_is_not(cells):
    assert cells[QUIET] == ("text/plain ", "")


def test_the_explorer_has_a_frame_in_which_its_script_runs(cells):
    kind, _, content = cells[EXPLORER][0].partition(" ")
    assert kind == "text/html" and content.startswith("<iframe") and "memlab-explorer" in content
    assert not content.count("<script"), "it is inside of the frame, escaped"
