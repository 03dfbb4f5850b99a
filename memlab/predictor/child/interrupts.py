"""Ctrl-C, let through only while nothing is half done: a child must be ended whatever comes, and whenever."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Gate:
    """Closed, it holds an interrupt back; open, it lets one through to whoever handled them before, and is closed again.

    So a second Ctrl-C, while the first one's error is on its way, cannot get into the cleaning up.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.before: Any = None
        self._came: list[FrameType | None] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self._came.append(frame)
        if self.is_open:
            self.let_through()

    def open(self) -> None:
        """Let interrupts through from here on, and one that came before."""
        self.is_open = True
        self.let_through()

    def let_through(self) -> None:
        """Deliver what came; where its handler raises nothing, the gate stays as it was."""
        was_open, self.is_open = self.is_open, False
        while self._came:
            frame = self._came.pop()
            if callable(self.before):
                self.before(signal.SIGINT, frame)
            elif self.before is signal.SIG_DFL:
                signal.raise_signal(signal.SIGINT)
        self.is_open = was_open


@contextlib.contextmanager
def gate() -> Iterator[Gate]:
    """A gate for the time of a block, closed at first; what is still held back at the end is delivered then.

    Only the main thread handles signals, so in another thread there is nothing to hold.
    """
    made = Gate()
    # None: the handler was not set by Python, which then could not put it back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield made
        return
    made.before = signal.signal(signal.SIGINT, made.handle)
    try:
        yield made
    finally:
        made.is_open = False
        signal.signal(signal.SIGINT, made.before)
    made.let_through()
