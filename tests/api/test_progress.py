"""The progress line of predictions in a terminal."""

from __future__ import annotations

import io
import sys

from memlab.api import display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
