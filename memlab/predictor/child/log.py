"""What the fence noted: short lines in a file without a name, which survive any death of the child.

Processes that the child forks write into the same file: each line is one write at the end of it, and short.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_LINES = 5000
FAILED = "memlab failed in the child"
"""The last line of the black box where the child could not do its work for a reason of ours."""


@dataclass(slots=True)
class Log:
    """Writes lines of notes to a descriptor that was opened for appending."""

    fd: int
    on_start: Callable[[], None] | None = None
    lines: int = 0

    def refused(self, what: str) -> None:
        """Something was held off."""
        self._write("refused", what)

    def started(self, command: str) -> None:
        """A program was started."""
        if self.on_start is not None:
            self.on_start()
        self._write("started", command)

    def note(self, sentence: str) -> None:
        """Something else is to be known."""
        self._write("notes", sentence)

    def _write(self, kind: str, text: str) -> None:
        self.lines += 1
        if self.lines > MOST_LINES:
            return
        if self.lines == MOST_LINES:
            kind, text = "notes", f"More than {MOST_LINES} attempts were held off; those after that are not listed."
        shown = text if len(text) <= 200 else text[:199] + "…"
        line = json.dumps([kind, shown]) + "\n"
        with contextlib.suppress(OSError):
            os.write(self.fd, line.encode())


@dataclass(slots=True)
class Found:
    """The notes of a child and of what it forked, each once, in order."""

    refused: Counter[str] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(text: bytes) -> Found:
        """Read a log; a line that was cut off by a death is left out."""
        found = Found()
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                kind, what = json.loads(line)
                getattr(found, kind)[what] += 1
        return found


def counted(found: Counter[str]) -> tuple[str, ...]:
    """Texts with how often they came, where that was more than once."""
    return tuple(text if count == 1 else f"{text} ({count} times)" for text, count in found.items())
