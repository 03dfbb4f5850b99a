"""How work in the child talks to its parent while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.predictor.child.frames import Writer
from memlab.predictor.child.log import Log


@dataclass(frozen=True, slots=True)
class Channel:
    """What work in the child gets: a way to its parent, and a folder in which it may write."""

    writer: Writer
    scratch: Path
    log: Log

    def send(self, values: dict[str, Any]) -> None:
        """Send plain values, which the parent hands to `on_frame`."""
        self.writer.send("values", values)

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes of the outcome."""
        self.writer.send("note", sentence)


_open: list[Channel] = []


def current() -> Channel | None:
    """The channel of this process; None in a process that is no child."""
    return _open[-1] if _open else None


@contextlib.contextmanager
def opened(channel: Channel) -> Iterator[Channel]:
    """Make it the current one."""
    _open.append(channel)
    try:
        yield channel
    finally:
        _open.remove(channel)
