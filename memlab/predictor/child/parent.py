"""The parent of a child: what it prints is shown as it comes, and however it ends there is one line to say so.

Ctrl-C ends the child with all that it started. The child's bytes are never run nor unpickled here.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from memlab.errors import PredictionError
from memlab.predictor.child import interrupts
from memlab.predictor.child.frames import Reader
from memlab.predictor.child.log import FAILED, Found, counted
from memlab.predictor.child.outcome import ChildError, Outcome

TAIL = 1 << 16
"""So many characters of what was printed are kept."""


class Child(Protocol):
    """A child that can be started, listened to and ended."""

    notes: list[str]

    def start(self) -> None:
        """Bring it to life."""

    def listen(self, timeout_s: float) -> Iterator[tuple[str, bytes]]:
        """(source, bytes) of what came within the time."""

    def drain(self) -> Iterator[tuple[str, bytes]]:
        """What was printed by other ways than messages, so far."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come."""

    def ask_where(self) -> None:
        """Let it write down where it is."""

    def end(self) -> int | None:
        """Kill it, with what it started; its exit code."""

    def close(self) -> tuple[str, bytes]:
        """What it wrote when it died, and the log of its fence."""


@dataclass(slots=True)
class Heard:
    """What came from the child so far."""

    on_values: Callable[[dict[str, Any]], None] | None
    publish: Callable[[str, Any], None] | None
    result: bytes | None = None
    error: ChildError | None = None
    is_done: bool = False
    notes: list[str] = field(default_factory=list)
    drain: Callable[[], Iterator[tuple[str, bytes]]] | None = None
    file: str = ""
    """The file name of the cell's code, to which a line in the news of its death has to belong."""
    _printed: list[str] = field(default_factory=list)
    _printed_characters: int = 0
    _reader: Reader = field(default_factory=Reader)
    _decoders: dict[str, Any] = field(default_factory=dict)

    def take(self, source: str, data: bytes) -> None:
        """Bytes from a pipe: messages, or text that C code or a program printed."""
        if source == "frames":
            for kind, content, payload in self._reader.feed(data):
                self._message(kind, content, payload)
        else:
            decoder = self._decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")("replace"))
            self._print(source, decoder.decode(data))

    def _message(self, kind: str, content: Any, payload: bytes) -> None:
        if kind == "text":
            self._print(*content)
        elif kind == "values":
            if self.on_values is not None:
                self.on_values(content)
        elif kind == "result":
            self.result = payload
        elif kind == "raised":
            self.error = ChildError(content["name"], content["text"], tuple(content["traceback"]))
        elif kind == "sync" and self.drain is not None:
            for source, data in self.drain():
                self.take(source, data)
        elif kind == "note":
            self.notes.append(content)
        elif kind == "file":
            self.file = content
        elif kind == "done":
            self.is_done = True
        elif kind == "shown" and self.publish is not None:
            self.publish(content["kind"], content["content"])

    def _print(self, name: str, text: str) -> None:
        stream = sys.stderr if name == "stderr" else sys.stdout
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a terminal of few characters, or text that is none
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._printed.append(text)
        self._printed_characters += len(text)
        if self._printed_characters > 4 * TAIL:
            self._printed = [self.printed]
            self._printed_characters = TAIL

    @property
    def printed(self) -> str:
        """The last of what was printed."""
        return "".join(self._printed)[-TAIL:]


def watch(
    make: Callable[[Path], Child],
    heard: Heard,
    limit_s: float | None,
    what: str,
) -> Outcome:
    """Start a child, hear it out, end it; `what` is what its end is told of: "the predicted cell"."""
    began = time.monotonic()
    with contextlib.suppress(Exception):
        sys.stdout.flush()  # or the child would say it again
        sys.stderr.flush()
    stopped, end = False, _End()
    with interrupts.gate() as gate:
        try:
            child = end.begin(make)
            gate.open()
            stopped = _hear(child, heard, None if limit_s is None else began + limit_s)
        finally:
            gate.is_open = False
            end.come()
    code, box, held = end.code, end.box, end.held
    found = Found.of(end.log)
    found.refused.update(f"writing {name!r}, which was open" for name in held)
    if box.strip().endswith(FAILED) and not heard.is_done:
        raise PredictionError(f"{what} could not be prepared: {box.strip().splitlines()[-2]}")
    return Outcome(
        heard.result,
        "" if heard.is_done else f"{what} {_end(stopped, limit_s, code)}{_where(box, heard.file)}",
        heard.error,
        counted(found.refused),
        counted(found.started),
        (*child.notes, *heard.notes, *found.notes),
        heard.printed,
        time.monotonic() - began,
    )


@dataclass(slots=True)
class _End:
    """The child and its folder, and what is left of them once they have gone."""

    code: int | None = None
    box: str = ""
    log: bytes = b""
    held: list[str] = field(default_factory=list)
    _scratch: Path | None = None
    _child: Child | None = None

    def begin(self, make: Callable[[Path], Child]) -> Child:
        """Make the folder, and start the child."""
        self._scratch = Path(tempfile.mkdtemp(prefix="memlab-"))
        self._child = make(self._scratch)
        self._child.start()
        return self._child

    def come(self) -> None:
        """Kill what lives, read what it left, delete the folder."""
        if self._child is not None:
            self.code = self._child.end()
            self.box, self.log = self._child.close()
        if self._scratch is not None:
            self.held = _held(self._scratch)
            shutil.rmtree(self._scratch, ignore_errors=True)


def _held(scratch: Path) -> list[str]:
    """The files that were open in the parent, and that the child would have written to."""
    if not (scratch / "held").exists():
        return []
    from memlab.predictor.child.inherit import written_to_open_files

    return written_to_open_files(scratch)


def _hear(child: Child, heard: Heard, deadline: float | None) -> bool:
    """Listen until the child is over; whether it was stopped because its time was up."""
    heard.drain = child.drain
    while not child.is_over:
        left = 60.0 if deadline is None else deadline - time.monotonic()
        if left <= 0:
            child.ask_where()
            return True
        for source, data in child.listen(min(left, 60.0)):
            heard.take(source, data)
    return False


def _end(stopped: bool, limit_s: float | None, code: int | None) -> str:
    if stopped:
        return f"was stopped after {limit_s:.3g} s"
    if code is None:
        return "ended, and something else in this process took its exit status"
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (possibly because memory ran out)" if name == "SIGKILL" else "")


_PLACE = re.compile(r'File "([^"]*)", line (\d+)(?: in (\S+))?')
_OTHERS = re.compile(r"site-packages|dist-packages|[\\/]memlab[\\/]|lib[\\/]python3|<frozen|<string>")


def _where(box: str, cell: str) -> str:
    """Where the child was when it died, as faulthandler saw it; nothing where that is not known."""
    for file, line, name in _PLACE.findall(box):
        if file == cell:
            return f" at line {line}"
        if not cell and not _OTHERS.search(file):
            return f" at line {line} of {file}" + (f", in {name}" if name else "")
    return ""
