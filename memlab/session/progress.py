"""How far a prediction is: one line in its place, which in a terminal is gone when it has ended."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, Self

from memlab import seams
from memlab.session.show import ipython
from memlab.units import format_bytes, format_seconds

SILENT_S = 1.0
"""Predictions that are quicker need no line."""


class Progress:
    """Shows the news of a child: in a notebook an output of its own, in a terminal a line that is written over."""

    def __init__(self, what: str) -> None:
        self._what, self._begin = what, time.monotonic()
        self._place: Any = None
        self._in_notebook = seams.is_kernel(ipython())
        self._width = 0

    def show(self, news: dict[str, Any]) -> None:
        """Show what the child says of itself; a front end that fails must not end the prediction."""
        took_s = time.monotonic() - self._begin
        if took_s < SILENT_S or "events" not in news:
            return
        peak = format_bytes(int(news["peak_allocated_bytes"]))
        line = (
            f"predicting for {self._what}: {format_seconds(took_s)}, {int(news['events']):,} events, peak so far {peak}"
        )
        with contextlib.suppress(Exception):
            self._write(line)

    def _write(self, line: str) -> None:
        if self._in_notebook:
            from IPython.display import display

            content = {"text/plain": line}
            if self._place is None:
                self._place = display(content, raw=True, display_id=True)
            else:
                self._place.update(content, raw=True)
        elif sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\r{line.ljust(self._width)}")
            sys.stderr.flush()
            self._width = len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        took = format_seconds(time.monotonic() - self._begin)
        end = (
            f"predicted for {self._what} in {took}"
            if error is None
            else f"stopped predicting for {self._what} after {took}"
        )
        with contextlib.suppress(Exception):
            if self._place is not None:
                self._place.update({"text/plain": end}, raw=True)
            elif self._width:
                sys.stderr.write(f"\r{' ' * self._width}\r")
                sys.stderr.flush()
