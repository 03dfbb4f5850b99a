"""What front ends other than JupyterLab need of us, as far as it can be seen without them. docs/hosts.md has the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import memlab
from memlab.lesson.guess_plot import GuessPlot
from memlab.lesson.progress_file import StoredGuess
from memlab.lesson.sweep import Sweep
from memlab.views import shown

STATIC = Path(shown.__file__).parent / "static"
OWN = ("chart.js", "explorer.js", "live.js")


def run() -> memlab.Run:
    with memlab.track("step", show=False, lines=True) as made:
        torch.zeros(1000, 1000).sum()
    return made


RESULTS = {
    "run": run,
    "report": lambda: run().report(),
    "modules": lambda: run().modules(),
    "lines": lambda: run().lines(),
    "compare": lambda: memlab.compare(run(), run()),
    "who": lambda: memlab.who(torch.zeros(10)),
    "size": lambda: memlab.size(torch.nn.Linear(2, 2), torch.zeros(1, 2)),
    "doctor": memlab.doctor,
    "sweep": lambda: Sweep("batch", {8: 1, 16: 2}),
    "guesses": lambda: GuessPlot([StoredGuess("01", "Peak?", 2.0)]),
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS.keys())
def test_every_result_has_a_form_that_every_front_end_draws(make):
    """VS Code, Colab and GitHub: SVG, HTML and text need no extension; plotly's MIME type alone would be a blank."""
    result = make()
    bundle = result._repr_mimebundle_()
    assert {"text/html", "image/svg+xml"} & set(bundle)
    assert bundle["text/plain"].strip()
    assert not any("widget" in kind for kind in bundle)
    kind, content = result._mime_()  # marimo's
    assert kind == "text/html"
    assert "<script" not in content
    for part in ("text/html", "image/svg+xml"):
        assert bundle.get(part, "").removeprefix("<svg ") in content


def test_a_run_that_has_no_figures_yet_is_a_line():
    with memlab.track("step", show=False) as made:
        assert made._mime_() == ("text/plain", repr(made))


def test_text_alone_is_escaped():
    assert shown.html_of({"text/plain": "<b>"}) == "<pre>&lt;b&gt;</pre>"


def test_widgets_ask_for_nothing_that_only_jupyterlab_has():
    """No global of JupyterLab, no other module, no address: VS Code, Colab and marimo load one file by anywidget."""
    for name in OWN:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert not re.search(
            r"jupyterapp|window\.jupyter|require\(|https?://|^import |\bimport\(", text, re.MULTILINE
        ), name
    css = (STATIC / "memlab.css").read_text(encoding="utf-8")
    assert not re.findall(r"var\(--jp-[\w-]+\)", css), "a colour of JupyterLab's without one for other front ends"
    assert ".jp-" not in css


def test_outside_of_marimo_nothing_imports_it():
    assert shown.marimo_notebook() is None
