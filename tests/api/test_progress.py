"""The progress line of predictions in a terminal."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

from memlab import torch_internals
from memlab.api import display
from memlab.views.page import Page
from memlab.views.table import Column, Table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_notebook_the_table_so_far_stands_below_the_line(monkeypatch):
    shown = []
    place = SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.setattr("IPython.display.display", lambda data, **how: shown.append(data) or place)
    monkeypatch.setattr(display, "SILENT_S", 0)
    monkeypatch.setattr(display, "EVERY_S", 0)
    monkeypatch.setattr(torch_internals, "is_kernel", lambda shell: True)
    line = display.Progress()
    line.write("working", lambda: None)
    line.write("working", lambda: Page("a title", (Table("", (Column("tried"),), (("checkpoint",),)),)))
    assert shown[0] == {"text/plain": "working"}
    assert shown[1]["text/plain"].startswith("working\na title") and "checkpoint" in shown[1]["text/html"]


def test_a_long_line_is_cut_to_the_terminal_so_that_it_can_be_overwritten(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(display, "SILENT_S", 0)
    monkeypatch.setattr(display, "EVERY_S", 0)
    monkeypatch.setenv("COLUMNS", "40")
    line = display.Progress()
    for text in ("x" * 39, "x" * 40, "short"):
        line.write(text)
    line.close()
    shown = sys.stderr.getvalue().split("\r")[1:]
    assert shown == ["x" * 39, "x" * 38 + "…", "short".ljust(39), " " * 5, ""]
