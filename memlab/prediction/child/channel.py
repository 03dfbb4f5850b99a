"""Communication between child and parent: messages while the work runs, the log of the sandbox, the outcome at the end.

A message is a kind, plain values as JSON, and opaque bytes, over a pipe. The log is an unnamed file, which survives any
crash; processes forked by the child append to it too, one short write per line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_HEAD = struct.Struct("=IQ")
"""The lengths of the JSON and of the bytes that follow."""
FRAMES, OUT, ERR = "frames", "stdout", "stderr"
"""The pipes of a child: messages, and output that bypasses them."""
MOST_LINES = 5000
REFUSED, STARTED, NOTES = "refused", "started", "notes"
"""The kinds of lines in a log: what was blocked, the programs that were started, and sentences."""
FAILED = "memlab failed in the child"
"""The last line of the crash log if memlab itself failed in the child."""


class ChannelWriter:
    """Sends whole messages in order, from any thread, and even from a signal handler that interrupts another send.

    If it `is_mixed`, programs may print directly: text goes to the same pipe, and is shown before any message.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._owner = fd, os.getpid()
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self.is_mixed = False

    @property
    def is_mine(self) -> bool:
        """Whether this process may send; processes that it forks may not."""
        return os.getpid() == self._owner

    def send(self, kind: str, content: Any, payload: bytes = b"") -> None:
        """Send a message, converting other values to text; if another thread is sending, that one sends it."""
        if not self.is_mine:
            return
        messages: list[tuple[str, Any, bytes]] = [("sync", None, b"")] if self.is_mixed else []
        for name, values, data in [*messages, (kind, content, payload)]:
            text = json.dumps([name, values], default=str, skipkeys=True).encode()
            self._waiting.append(_HEAD.pack(len(text), len(data)) + text + data)
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                while self._waiting:
                    _write_all(self._fd, self._waiting.popleft())
            finally:
                self._lock.release()

    def drain(self, limit_s: float = 10.0) -> None:
        """Wait until everything is sent, also by another thread."""
        end = time.monotonic() + limit_s
        while (self._waiting or self._lock.locked()) and time.monotonic() < end:
            time.sleep(0.001)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class ChannelReader:
    """Decodes messages from a byte stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[str, Any, bytes]]:
        """The messages (kind, values, bytes) completed by these bytes."""
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= _HEAD.size:
            text_bytes, payload_bytes = _HEAD.unpack_from(self._bytes, start)
            begin = start + _HEAD.size
            middle, end = begin + text_bytes, begin + text_bytes + payload_bytes
            if len(self._bytes) < end:
                break
            kind, content = json.loads(self._bytes[begin:middle])
            payload, start = bytes(self._bytes[middle:end]), end
            yield kind, content, payload
        del self._bytes[:start]


class Printed(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr` in the child: every write is a message, so the order with displays is kept."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, writer: ChannelWriter, name: str, fd: int) -> None:
        self._writer, self.name, self._fd = writer, name, fd
        self.buffer = io.FileIO(fd, "w", closefd=False)

    def write(self, text: str) -> int:
        """Send text unchanged."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if not self._writer.is_mine or self._writer.is_mixed:
            with contextlib.suppress(OSError):
                _write_all(self._fd, text.encode(self.encoding, self.errors))
        elif text:
            self._writer.send("text", [self.name, text])
        return len(text)

    def writable(self) -> bool:
        """It is written to."""
        return True

    def fileno(self) -> int:
        """The descriptor to which C code prints."""
        return self._fd


@dataclass(slots=True)
class Log:
    """Writes lines to a descriptor that was opened for appending; `on_start` is called before a program is started."""

    fd: int
    on_start: Callable[[], None] | None = None
    lines: int = 0

    def write(self, kind: str, text: str) -> None:
        """A line of a kind: REFUSED, STARTED or NOTES."""
        if kind == STARTED and self.on_start is not None:
            self.on_start()
        self.lines += 1
        if self.lines > MOST_LINES:
            return
        if self.lines == MOST_LINES:
            kind, text = NOTES, f"More than {MOST_LINES} attempts were blocked; those after that are not listed."
        shown = text if len(text) <= 200 else text[:199] + "…"
        with contextlib.suppress(OSError):
            os.write(self.fd, (json.dumps([kind, shown]) + "\n").encode())


def read_log(text: bytes) -> dict[str, Counter[str]]:
    """Count the lines of a log by kind, in order; a truncated last line is ignored."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in (REFUSED, STARTED, NOTES)}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            kind, what = json.loads(line)
            found[kind][what] += 1
    return found


def counted(found: Counter[str]) -> tuple[str, ...]:
    """Texts with their counts, if above one."""
    return tuple(text if count == 1 else f"{text} ({count} times)" for text, count in found.items())


@contextlib.contextmanager
def life(box: IO[bytes], scratch: Path) -> Iterator[None]:
    """A context that ends the child process, whatever happens: it must never return to its caller.

    Where it crashed, or which error of memlab's occurred, is written to the crash log. Temporary files go to its scratch
    folder.
    """
    try:
        faulthandler.enable(box, all_threads=False)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, box, all_threads=False)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
        sys.dont_write_bytecode = True
        yield
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(box.fileno(), f"{traceback.format_exc()}{FAILED}\n".encode())
    finally:
        gc.disable()
        os._exit(0)  # no atexit, no destructors: they belong to the parent


@dataclass(frozen=True, slots=True)
class Channel:
    """The argument of work in the child: a connection to its parent, and a folder for its files."""

    writer: ChannelWriter
    scratch: Path
    log: Log

    def __post_init__(self) -> None:
        _open.append(self)

    def send(self, values: dict[str, Any]) -> None:
        """Send plain values, which the parent passes to `on_news`."""
        self.writer.send("values", values)

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes of the outcome."""
        self.writer.send("note", sentence)


guard: ContextVar[Callable[[], AbstractContextManager[object]]] = ContextVar("guard", default=contextlib.nullcontext)
"""Entered by the parent while it forks, to keep other threads still, and often while it listens; its error ends the child."""

_open: list[Channel] = []


def current() -> Channel | None:
    """The channel of this process; None in any other process."""
    return _open[-1] if _open else None


@dataclass(frozen=True, slots=True)
class ChildError:
    """An error raised by the work, as text: nothing from the child is unpickled in the parent."""

    name: str
    text: str
    traceback: tuple[str, ...] = ()
    """Formatted as by the shell, else as by Python."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """The result of a child, or how it failed, and what was blocked."""

    result: bytes | None = None
    ended: str = ""
    """One line if the child died or was stopped, "" if it ended by itself: "the step was killed by SIGSEGV at line 4"."""
    error: ChildError | None = None
    refused: tuple[str, ...] = ()
    """What the sandbox blocked: "writing 'model.pt' (3 times)"."""
    started: tuple[str, ...] = ()
    """Programs that were started, which Python's part of the sandbox cannot see into."""
    notes: tuple[str, ...] = ()
    """Further remarks, as sentences."""
    printed: str = ""
    """The end of its output, all of which was shown as it came."""
    duration_s: float = 0.0
