"""One line at the bottom of the terminal while a script runs.

The scroll region of the terminal ends one row earlier, so prints, half-finished lines and progress bars stay as the script
wrote them. A line that is redrawn at the cursor would break into them; and a library that reserves rows asks the terminal
what it is, which answers on the script's stdin.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Self

_SAVE, _RESTORE, _CLEAR_LINE = "\x1b7", "\x1b8", "\x1b[2K"
_MAKE_ROOM = "\x1bD\x1b[A"
"""One row down, which scrolls at the bottom, and up again: the column stays, unlike after a newline."""
_GIVE_BACK = f"{_SAVE}\x1b[r\x1b[999;1H{_CLEAR_LINE}{_RESTORE}"
_REVERSED, _PLAIN = "\x1b[7m", "\x1b[0m"
_LEAST_ROWS, _LEAST_COLUMNS = 4, 20
EVERY_S = 0.5
SILENT_S = 1.0
"""A shorter script shows no line."""


class LiveLine:
    """The last row of a terminal. Whatever fails ends the line, never the script."""

    def __init__(self, terminal: int, is_plain: bool = False) -> None:
        self._terminal: int | None = os.dup(terminal)  # the script may close or redirect its own
        self._is_plain = is_plain
        self._lock = threading.Lock()
        self._size = (0, 0)
        self._begin_s, self._shown_s = time.monotonic(), 0.0
        self._guard = self._start_guard(self._terminal)

    @classmethod
    def if_possible(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """A line if stderr is a terminal that understands it; of the processes of one job only the first has one."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_first = environment.get("LOCAL_RANK", "0") == "0"
            is_terminal = os.name == "posix" and sys.stderr.isatty() and os.isatty(2)
            if is_first and is_terminal and environment.get("TERM", "dumb") != "dumb":
                return cls(2, is_plain=bool(environment.get("NO_COLOR")))
        return None

    @staticmethod
    def _start_guard(terminal: int) -> int:
        """A shell that gives the row back if this process is killed or replaced; the end of a pipe that it reads.

        It is no child of this process (a script may wait for all of its children), and no signal of the terminal reaches it.
        """
        import subprocess  # only where there is a terminal

        reading, writing = os.pipe()
        restore = _GIVE_BACK.replace("\x1b", "\\033")
        # A shell gives what it starts in the background another stdin, hence 3. First comes a line once a row is taken.
        waits = f"exec 3<&0; (read taken <&3 && (read done <&3 || printf '{restore}' >&2)) &"
        try:
            subprocess.run(
                ["/bin/sh", "-c", waits], stdin=reading, stdout=subprocess.DEVNULL, stderr=terminal, cwd="/",
                start_new_session=True, check=True,
            )  # fmt: skip
        finally:
            os.close(reading)
        return writing

    def show(self, text: str) -> None:
        """Show a text, at most twice a second; nothing in the first second, and nothing while the job is in the background."""
        now_s = time.monotonic()
        if now_s - self._begin_s < SILENT_S or now_s - self._shown_s < EVERY_S:
            return
        self._shown_s = now_s
        try:
            with self._lock:
                self._show(text)
        except OSError:
            self.close()

    def _show(self, text: str) -> None:
        if self._terminal is None or os.tcgetpgrp(self._terminal) != os.getpgrp():
            return
        columns, rows = os.get_terminal_size(self._terminal)
        if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
            return
        reserve = ""
        if (columns, rows) != self._size:
            if self._size == (0, 0):
                os.write(self._guard, b"taken\n")
            self._size = columns, rows
            reserve = f"{_MAKE_ROOM}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"
        shown = "".join(one if one.isprintable() else "?" for one in text)[: columns - 1]
        shown = shown if self._is_plain else f"{_REVERSED}{shown}{_PLAIN}"
        # In one call, so that nothing of the script comes between.
        everything = f"{reserve}{_SAVE}\x1b[{rows};1H{_CLEAR_LINE}{shown}{_RESTORE}"
        os.write(self._terminal, everything.encode("utf-8", "replace"))

    def close(self) -> None:
        """Give the row back."""
        with self._lock:
            terminal, self._terminal = self._terminal, None
            if terminal is None:
                return
            if self._size != (0, 0):
                with contextlib.suppress(OSError):
                    os.write(terminal, _GIVE_BACK.encode())
                    os.write(self._guard, b"done\n")
            os.close(self._guard)
            os.close(terminal)
