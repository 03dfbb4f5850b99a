"""Run something in a child process: its output is streamed, and its end is reported in one line.

Ctrl-C ends the child and everything it started. Bytes from the child are never executed or unpickled here.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from memlab.errors import PredictionError
from memlab.prediction.child import channel
from memlab.prediction.child.channel import Channel, ChildError, ChildOutcome
from memlab.prediction.child.work import Around, dedented, is_ours, perform, perform_cell
from memlab.torch_internals import shell as shells
from memlab.torch_internals.traceback import running_shell

if TYPE_CHECKING:
    from memlab.prediction.child.forked import ForkedProcess
    from memlab.prediction.child.spawned import SpawnedProcess

    Process: TypeAlias = ForkedProcess | SpawnedProcess
How = Literal["fork", "spawn"]
OnNews = Callable[[dict[str, Any]], None]
TAIL = 1 << 16
"""How many characters of the output are kept."""
START_S = 300.0
"""How long a new process may take to import torch and what the work needs, if its limit is not longer."""


@dataclass(frozen=True, slots=True)
class Child:
    """Runs work, or the body of a cell, in a sandboxed child; this process does not change.

    It is forked on Linux. Elsewhere, and with `how="spawn"`, a new process gets what the work names, and what cannot be
    sent is refused by name. `limit_s` begins when it has that. `on_news` gets the messages of the work. `is_quiet` hides its
    output. `what` begins the line that says how it ended.
    """

    limit_s: float | None = None
    on_news: OnNews | None = None
    how: How | None = None
    is_quiet: bool = False
    what: str = ""

    def __post_init__(self) -> None:
        if self.limit_s is not None and not self.limit_s > 0:
            raise PredictionError(f"limit_s must be a number of seconds above 0, got {self.limit_s!r}.")
        if self.how not in (None, "fork", "spawn"):
            raise PredictionError(f"how must be 'fork' or 'spawn', got {self.how!r}.")
        if self.how == "fork" and sys.platform != "linux":
            raise PredictionError(f"a child cannot be forked on {sys.platform!r}; use how='spawn'.")

    @property
    def forks(self) -> bool:
        """Fork on Linux only: libraries loaded by the kernel do not survive it (macOS), or it does not exist (Windows)."""
        return self.how != "spawn" and sys.platform == "linux"

    def run(self, work: Callable[[Channel], bytes], around: Around = contextlib.nullcontext) -> ChildOutcome:
        """Run `work(channel)` within `around()`; the bytes that it returns are the outcome's `result`.

        `around()` is entered in the child, and before a spawned process unpickles the work.
        """
        if not callable(work):
            raise PredictionError(f"a child needs a function to run, got {type(work).__name__}.")
        shell, what = running_shell(), "the predicted step"
        if self.forks:
            return self._watch(_forked(functools.partial(perform, work, around)), shell, what)
        return self._watch(_spawned((around, None, ""), work, (), shell), shell, what)

    def run_cell(
        self, shell: Any, text: str, around: Around = contextlib.nullcontext, above: str = "%%memtrack"
    ) -> ChildOutcome:
        """Run a cell's body (the text below the line of the magic, which is `above`) within `around()`.

        An error of the cell passes through the `__exit__` of `around()`. If its `with` value is a function, that is called
        afterwards, and the bytes it returns are the outcome's `result`, even if the cell raised.
        """
        what = "the predicted cell"
        if self.forks:
            return self._watch(_forked(functools.partial(perform_cell, shell, text, above, around)), shell, what)
        from memlab.prediction.child.sending import names_of_cell

        code, _ = shells.transform(shell, above, dedented(text))
        names: list[str] = []
        with contextlib.suppress(SyntaxError, ValueError):  # which the child reports
            names = names_of_cell(code, shell.user_ns)
        return self._watch(_spawned((around, text, above), None, names, shell), shell, what)

    def _watch(self, make: Callable[[Path], Process], shell: Any, what: str) -> ChildOutcome:
        received = _Received(self, shell)
        try:
            return received.watch(make, self.what or what)
        except KeyboardInterrupt as interrupt:
            if shell is not None:
                shells.show_without(interrupt, shell, is_ours)
            raise


def _forked(work: Callable[[Channel], None]) -> Callable[[Path], Process]:
    from memlab.prediction.child.forked import ForkedProcess

    return functools.partial(ForkedProcess, work)


def _spawned(first: Any, work: Any, names: Sequence[str], shell: Any) -> Callable[[Path], Process]:
    from memlab.prediction.child.sending import send
    from memlab.prediction.child.spawned import SpawnedProcess

    payload = send(first, work, names, vars(sys.modules["__main__"]) if shell is None else shell.user_ns)
    return functools.partial(SpawnedProcess, payload, None if shell is None else shells.look(shell))


class _Received:
    """What a child has sent so far."""

    def __init__(self, child: Child, shell: Any) -> None:
        self._child = child
        self._publish = None if shell is None or child.is_quiet else functools.partial(shells.publish, shell)
        self._process: Process | None = None
        self._result: bytes | None = None
        self._error: ChildError | None = None
        self._notes: list[str] = []
        self._file = ""  # the name of the cell's code
        self._printed, self._printed_characters = [""], 0
        self._reader = channel.ChannelReader()
        self._decoders: dict[str, Any] = {}
        self._is_done = False
        self._allow(max(child.limit_s, START_S) if child.limit_s is not None else math.inf)

    def _allow(self, seconds: float) -> None:
        self._allowed_s, self._deadline = seconds, time.monotonic() + seconds

    def watch(self, make: Callable[[Path], Process], what: str) -> ChildOutcome:
        """Start a process, listen until it ends, and always clean up; `what` begins the line about it."""
        began = time.monotonic()
        with contextlib.suppress(Exception):
            sys.stdout.flush()  # or the child would print it again
            sys.stderr.flush()
        scratch: Path | None = None
        stopped, code, box, log = False, None, "", b""
        with open_gate() as gate:
            try:
                scratch = Path(tempfile.mkdtemp(prefix=f"memlab-child-{os.getpid()}-"))
                process = self._process = make(scratch)
                process.start()
                gate.open()
                stopped = self._listen(process)
            finally:
                gate.is_open = False
                if self._process is not None:
                    code = self._process.end()
                    box, log = self._process.close()
                if scratch is not None:
                    shutil.rmtree(scratch, ignore_errors=True)
        noted = channel.read_log(log)
        if box.strip().endswith(channel.FAILED) and not self._is_done:
            raise PredictionError(f"{what} could not be prepared: {box.strip().splitlines()[-2]}")
        end = _ended(code) if not stopped else f"was stopped after {self._allowed_s:.3g} s"
        return ChildOutcome(
            self._result,
            "" if self._is_done else f"{what} {end}{self._where(box)}",
            self._error,
            channel.counted(noted[channel.REFUSED]),
            channel.counted(noted[channel.STARTED]),
            (*process.notes, *self._notes, *noted[channel.NOTES]),
            self._tail(),
            time.monotonic() - began,
        )

    def _listen(self, process: Process) -> bool:
        while not process.is_over:
            left = self._deadline - time.monotonic()
            if left <= 0:
                process.ask_where()
                return True
            with channel.guard.get()():
                pass
            for source, data in process.listen(min(left, 0.5)):
                self._take(source, data)
        return False

    def _take(self, source: str, data: bytes) -> None:
        if source == channel.FRAMES:
            for kind, content, payload in self._reader.feed(data):
                self._message(kind, content, payload)
        else:
            decoder = self._decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")("replace"))
            self._print(source, decoder.decode(data))

    def _message(self, kind: str, content: Any, payload: bytes) -> None:
        match kind:
            case "hello" if self._child.limit_s is not None:
                self._allow(self._child.limit_s)
            case "text":
                self._print(*content)
            case "values" if self._child.on_news is not None:
                self._child.on_news(content)
            case "result":
                self._result = payload
            case "raised":
                self._error = ChildError(content["name"], content["text"], tuple(content["traceback"]))
            case "sync" if self._process is not None:
                for source, data in self._process.drain():
                    self._take(source, data)
            case "note":
                self._notes.append(content)
            case "file":
                self._file = content
            case "done":
                self._is_done = True
            case "shown" if self._publish is not None:
                self._publish(content["kind"], content["content"])

    def _print(self, name: str, text: str) -> None:
        stream = sys.stderr if name == channel.ERR else sys.stdout
        if not self._child.is_quiet:
            try:
                stream.write(text)
            except UnicodeEncodeError:  # a terminal with a limited encoding, or invalid text
                encoding = getattr(stream, "encoding", None) or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._printed.append(text)
        self._printed_characters += len(text)
        if self._printed_characters > 4 * TAIL:
            self._printed, self._printed_characters = [self._tail()], TAIL

    def _tail(self) -> str:
        return "".join(self._printed)[-TAIL:]

    def _where(self, box: str) -> str:
        """Where the child was when it died, from faulthandler; "" if unknown."""
        for file, line, name in _PLACE.findall(box):
            if file == self._file:
                return f" at line {line}"
            if not self._file and not is_ours(file) and not _OTHERS.search(file):
                return f" at line {line} of {file}" + (f", in {name}" if name else "")
        return ""


_PLACE = re.compile(r'File "([^"]*)", line (\d+)(?: in (\S+))?')
_OTHERS = re.compile(r"site-packages|dist-packages|lib[\\/]python3|<frozen|<string>")


def _ended(code: int | None) -> str:
    if code is None:
        return "ended, and something else in this process took its exit status"
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (possibly because memory ran out)" if name == "SIGKILL" else "")


class _Gate:
    """Closed, it delays an interrupt; open, it delivers one to the previous handler, and is closed again.

    So a second Ctrl-C, while the error of the first propagates, cannot interrupt the cleanup.
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
        """Deliver interrupts from here on, and a pending one."""
        self.is_open = True
        self.let_through()

    def let_through(self) -> None:
        """Deliver a pending interrupt; if its handler does not raise, the gate stays as it was."""
        was_open, self.is_open = self.is_open, False
        while self._came:
            frame = self._came.pop()
            if callable(self.before):
                self.before(signal.SIGINT, frame)
            elif self.before is signal.SIG_DFL:
                signal.raise_signal(signal.SIGINT)
        self.is_open = was_open


@contextlib.contextmanager
def open_gate() -> Iterator[_Gate]:
    """A gate for a `with` block, closed at first; an interrupt still pending at the end is delivered then."""
    made = _Gate()
    # Only the main thread handles signals. None: a handler that Python has not set, and could not put back.
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
