"""Messages from the child to the parent over a pipe: a kind, plain values as JSON, and bytes that nobody interprets.

Only the process that made a writer sends by it. What a process that it forked prints goes to its stdout as it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

_HEAD = struct.Struct("=IQ")
"""How many bytes of JSON follow, and how many bytes behind them."""

Frame = tuple[str, Any, bytes]


def pack(kind: str, content: Any, payload: bytes = b"") -> bytes:
    """One message as bytes. Values that are not plain are sent as their text."""
    text = json.dumps([kind, content], default=str, skipkeys=True).encode()
    return _HEAD.pack(len(text), len(payload)) + text + payload


class Writer:
    """Sends messages whole and in order, from any thread, also from a signal handler in the middle of another one."""

    def __init__(self, fd: int) -> None:
        self._fd, self._owner = fd, os.getpid()
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self.is_mixed = False

    def mix(self) -> None:
        """From now on programs may print by themselves: text goes where theirs does, and is shown before any message."""
        self.is_mixed = True

    @property
    def is_mine(self) -> bool:
        """Whether this process may send; one that it forked may not."""
        return os.getpid() == self._owner

    def send(self, kind: str, content: Any, payload: bytes = b"") -> None:
        """Send a message; where another thread is just sending, that one sends it."""
        if not self.is_mine:
            return
        if self.is_mixed:
            self._waiting.append(pack("sync", None))
        self._waiting.append(pack(kind, content, payload))
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._write_waiting()
            finally:
                self._lock.release()

    def _write_waiting(self) -> None:
        while self._waiting:
            data = memoryview(self._waiting.popleft())
            while data:
                data = data[os.write(self._fd, data) :]

    def drain(self, limit_s: float = 10.0) -> None:
        """Wait until everything has gone out, also what another thread is sending."""
        end = time.monotonic() + limit_s
        while (self._waiting or self._lock.locked()) and time.monotonic() < end:
            time.sleep(0.001)


class Reader:
    """Makes messages of bytes, however they were cut on the way."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The messages that are whole with these bytes."""
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= _HEAD.size:
            text_bytes, payload_bytes = _HEAD.unpack_from(self._bytes, start)
            begin = start + _HEAD.size
            end = begin + text_bytes + payload_bytes
            if len(self._bytes) < end:
                break
            kind, content = json.loads(self._bytes[begin : begin + text_bytes])
            payload = bytes(self._bytes[begin + text_bytes : end])
            start = end
            yield kind, content, payload
        del self._bytes[:start]


class Printed(io.TextIOBase):
    """Stands for `sys.stdout` or `sys.stderr` in the child: every write is a message, so order with displays is kept."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, writer: Writer, name: str, fd: int) -> None:
        self._writer, self.name, self._fd = writer, name, fd
        self.buffer = io.FileIO(fd, "w", closefd=False)

    def write(self, text: str) -> int:
        """Send a text as it is."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._writer.is_mine and not self._writer.is_mixed:
            if text:
                self._writer.send("text", [self.name, text])
        else:
            data = memoryview(text.encode(self.encoding, self.errors))
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._fd, data) :]
        return len(text)

    def writable(self) -> bool:
        """It is written to."""
        return True

    def fileno(self) -> int:
        """The descriptor to which C code prints."""
        return self._fd
