"""A terminal for tests: a real pty, and a screen that does what xterm does with what is written there."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_BEGUN = re.compile(r"\x1b(\[[\d;]*)?\Z")
"""A sequence whose end comes with the next read."""
_PIECE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b([78D])|(\r)|(\n)|(.)", re.DOTALL)


class Screen:
    """Rows of text: printing, CR, LF, and the sequences for cursor, erasing, scroll region, saving and restoring."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.last = columns, rows - 1
        self.lines = [""] * rows
        self.gone: list[str] = []
        self.bottom = self.last
        self.row = self.column = 0
        self._saved = (0, 0)
        self._begun = ""

    def feed(self, text: str) -> None:
        text = self._begun + text
        begun = _BEGUN.search(text)
        self._begun = begun[0] if begun else ""
        text = text.removesuffix(self._begun)
        for piece in _PIECE.finditer(text):
            numbers, final, short, cr, lf, char = piece.groups()
            if char is not None:
                self._print(char)
            elif cr:
                self.column = 0
            elif lf or short == "D":
                self._down()
            elif short == "7":
                self._saved = self.row, self.column
            elif short == "8":
                self.row, self.column = self._saved
            else:
                self._control([int(one) if one else 0 for one in numbers.split(";")], final)

    def _control(self, numbers: list[int], final: str) -> None:
        first = numbers[0]
        if final == "A":
            self.row = max(self.row - max(first, 1), 0)
        elif final == "H":
            self.row, self.column = min(first, self.last + 1) - 1, numbers[1] - 1
        elif final == "K":
            self.lines[self.row] = "" if first == 2 else self.lines[self.row][: self.column]
        elif final == "r":
            self.bottom = numbers[1] - 1 if len(numbers) > 1 else self.last
            self.row = self.column = 0
        elif final != "m":
            raise AssertionError(f"this screen does not know {numbers} {final!r}")

    def _down(self) -> None:
        if self.row == self.bottom:
            self.gone.append(self.lines.pop(0))
            self.lines.insert(self.bottom, "")
        else:
            self.row = min(self.row + 1, self.last)

    def _print(self, char: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
        self.column += 1

    @property
    def everything(self) -> list[str]:
        """All lines, those scrolled away too, without the empty ones at the end."""
        lines = [line.rstrip() for line in (*self.gone, *self.lines)]
        while lines and not lines[-1]:
            lines.pop()
        return lines


class Session:
    """A program in a terminal of its own."""

    def __init__(
        self, words: Sequence[str], folder: Path, columns: int = 80, rows: int = 12, **environment: str
    ) -> None:
        self.screen = Screen(columns, rows)
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.chdir(folder)
            os.execve(words[0], list(words), os.environ | {"TERM": "xterm-256color"} | environment)

    def read(self, until: Callable[[Session], bool] = lambda _: False, limit_s: float = 300) -> None:
        """Read until a condition holds or everything was written."""
        end_s = time.monotonic() + limit_s
        while not until(self):
            assert time.monotonic() < end_s, self.written[-2000:]
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # the last one who writes is gone
                return
            if not data:
                return
            text = self._decoder.decode(data)
            self.written += text
            self.screen.feed(text)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def status(self) -> int:
        self.read()
        _, status = os.waitpid(self.pid, 0)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)
