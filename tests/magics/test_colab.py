"""Colab cannot run here: a module of its name stands for it, in a real kernel, with the two functions of its widget manager.

Widgets other than those of ipywidgets are shown there once `enable_custom_widget_manager()` was called; anywidget does so.
"""

from __future__ import annotations

import pytest

FAKE_COLAB = """
import sys, types
calls = []
colab, output = types.ModuleType("google.colab"), types.ModuleType("google.colab.output")
output._widgets = types.SimpleNamespace(_installed_url=None)
refuses = False
def enable():
    calls.append("enabled")
    if refuses:
        raise ValueError("Unknown widgets version")
    output._widgets._installed_url = "https://example.org/manager.js"
output.enable_custom_widget_manager = enable
colab.output = output
sys.modules.update({"google.colab": colab, "google.colab.output": output})
"""
SETUP = ("import torch", FAKE_COLAB, "%load_ext memlab", "import memlab")
SMALL = "%%memtrack --name one\ntorch.zeros(1000, 1000).sum()"


def test_the_live_view_enables_custom_widgets(notebook):
    assert notebook.ok("print(calls)").stdout.strip() == "[]"
    assert "Peak" in notebook.ok(SMALL).report
    assert "enabled" in notebook.ok("print(calls)").stdout


@pytest.mark.parametrize("cell", [SMALL, "memlab.last_run()"])
def test_what_stays_of_a_cell_needs_no_script(notebook, cell):
    """Colab and VS Code draw SVG, HTML and text by themselves; plotly and widgets only where something is installed."""
    for kinds in notebook.ok(cell).kinds:
        assert kinds & {"text/html", "image/svg+xml"}
        assert "text/plain" in kinds
        assert not any("widget-view" in kind for kind in kinds)


def test_where_widgets_are_refused_the_report_is_whole(notebook):
    notebook.ok("refuses = True")
    reply = notebook.ok(SMALL)
    assert "Peak" in reply.report
    assert {"image/svg+xml", "text/html"} <= set.union(*reply.kinds)
    assert reply.stdout == ""
