"""A forked child: it inherits everything from the parent, and returns only messages. Linux only.

If a GPU is visible, libc's `_Fork` is used, because after a backward pass autograd refuses to work in a child of `os.fork`.
`_Fork` leaves malloc's locks as other threads held them, so the child sends a hello first, and one that cannot is replaced.
A plain fork just before makes OpenBLAS end its threads, as its fork handler does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn

from memlab.errors import PredictionError
from memlab.prediction.child import isolation, sandbox
from memlab.prediction.child.channel import ERR, FRAMES, OUT, REFUSED, Channel, ChannelWriter, Log, Printed, guard, life
from memlab.torch_internals import process

AFTER_DEATH_S = 2.0
"""How long the pipes of a dead child are read: a process of another session may still be writing."""
PATIENCE_S = (1.0, 3.0, 9.0)
"""Timeouts for the hello of the first child, and of those that replace it."""


class ForkedProcess:
    """The parent's side of a forked child: `start`, `listen` for its output, and always `end`."""

    def __init__(self, work: Callable[[Channel], None], scratch: Path) -> None:
        self._work, self._scratch = work, scratch
        self.pid, self._parent = 0, os.getpid()
        self._sources: dict[int, str] = {}
        self._death, self._died_at = -1, 0.0
        self._box: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._log: IO[bytes] = tempfile.TemporaryFile("ab+")  # noqa: SIM115
        self.notes: list[str] = []

    def start(self) -> None:
        """Fork, until a child says hello."""
        isolation.flush_all(())  # of C code; or the child would print it again
        skips = process.gpu_in_sight()
        if skips and not process.can_skip_handlers():
            skips = False
            self.notes.append(
                "This system's libc has no _Fork (glibc 2.34 has): after a backward pass in the notebook "
                "autograd refuses to work in the prediction."
            )
        for patience_s in PATIENCE_S:
            with guard.get()():
                self.fork(skips)
                if self.says_hello(patience_s):
                    return
            self.end()
            for path in self._scratch.iterdir():  # discard what a child that was too slow has done meanwhile
                shutil.rmtree(path)
            for file in (self._box, self._log):
                file.truncate(0)
        raise PredictionError(
            f"none of {len(PATIENCE_S)} forked children started: threads of this kernel that are busy all the time "
            "keep them from it. Restart the kernel, or predict without those threads."
        )

    def fork(self, skips: bool) -> None:
        """Fork; `skips` leaves out the fork handlers of native libraries, which may hang."""
        if skips:  # OpenBLAS's fork handler, like all others, runs in the parent of this one
            short = process.fork(skip_handlers=False)
            if short == 0:
                os._exit(0)
            death = os.pidfd_open(short)
            if not _ready((death,), PATIENCE_S[0]):
                os.kill(short, signal.SIGKILL)
            os.close(death)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(short, 0)
        ends = [os.pipe() for _ in range(3)]
        try:
            pid = process.fork(skip_handlers=skips)
        except BaseException:
            for descriptor in (end for pair in ends for end in pair):
                os.close(descriptor)
            raise
        if pid == 0:
            self._be_child([write for _, write in ends])
        self.pid = pid
        for (read, write), source in zip(ends, (FRAMES, OUT, ERR), strict=True):
            os.close(write)
            os.set_blocking(read, False)
            self._sources[read] = source
        self._death = os.pidfd_open(pid)

    def says_hello(self, patience_s: float) -> bool:
        """Wait until the pipe has the first message, or the child is dead."""
        frames = next(fd for fd, name in self._sources.items() if name == FRAMES)
        return bool(_ready((frames, self._death), patience_s))

    def listen(self, timeout_s: float) -> Iterator[tuple[str, bytes]]:
        """(source, bytes) of output within the timeout; `is_over` says when there is no more."""
        ready = _ready((*self._sources, self._death), timeout_s)
        if self._death in ready:
            self._died_at = self._died_at or time.monotonic()
            self._kill_group()  # programs it started must not keep its pipes open forever
        if ready == {self._death} or (self._died_at and time.monotonic() - self._died_at > AFTER_DEATH_S):
            self._close_sources()
        else:
            for descriptor in [one for one in self._sources if one in ready]:
                yield from self._read(descriptor)

    def drain(self) -> Iterator[tuple[str, bytes]]:
        """The output of C code and programs so far."""
        for descriptor in [one for one, source in self._sources.items() if source != FRAMES]:
            yield from self._read(descriptor)

    def _read(self, descriptor: int) -> Iterator[tuple[str, bytes]]:
        if descriptor not in self._sources:  # closed while another one was being read
            return
        try:
            data = os.read(descriptor, 1 << 20)
        except BlockingIOError:  # it was drained meanwhile
            return
        if data:
            yield self._sources[descriptor], data
        else:
            del self._sources[descriptor]
            os.close(descriptor)

    @property
    def is_over(self) -> bool:
        """Whether there can be no more output."""
        return not self._sources

    def ask_where(self) -> None:
        """Let a living child dump its stack; faulthandler responds at once, whatever it is doing."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._death, signal.SIGUSR1)
            time.sleep(0.05)

    def end(self) -> int | None:
        """Kill what is left, and return the exit code (negative: the signal); None if it was reaped elsewhere."""
        if not self.pid:
            return None
        self._kill_group()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)  # just before it had its own process group
        code = None
        with contextlib.suppress(ChildProcessError):  # a SIGCHLD handler reaped it
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._close_sources()
        os.close(self._death)
        self.pid, self._death = 0, -1
        return code

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close_sources(self) -> None:
        """The child is dead and nothing is left to read, even if others hold the pipes open."""
        for descriptor in self._sources:
            os.close(descriptor)
        self._sources.clear()

    def close(self) -> tuple[str, bytes]:
        """The dump of faulthandler, and the log of the sandbox."""
        held = (f"writing {name!r}, which was open" for name in isolation.written_to_open_files(self._scratch))
        with self._box, self._log:
            self._box.seek(0)
            self._log.seek(0)
            lines = [self._log.read(), *(json.dumps([REFUSED, text]).encode() for text in held)]
            return self._box.read().decode(errors="replace"), b"\n".join(lines)

    def _be_child(self, ends: list[int]) -> NoReturn:
        """Run the child."""
        with life(self._box, self._scratch):
            frames, out, err = ends
            writer = ChannelWriter(frames)
            bytes(100_000)  # a malloc too large for this thread's cache
            writer.send("hello", None)
            isolation.leave(self._parent, out, err)
            log = Log(self._log.fileno(), on_start=lambda: setattr(writer, "is_mixed", True))
            isolation.make_own((*ends, self._box.fileno(), self._log.fileno()), self._scratch, log)
            kept = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
            sys.stdout, sys.stderr = Printed(writer, OUT, 1), Printed(writer, ERR, 2)
            sandbox.enter(self._scratch, log)
            self._work(Channel(writer, self._scratch, log))
            isolation.flush_all(kept)
            writer.drain()
        raise AssertionError  # never reached


def _ready(descriptors: tuple[int, ...], timeout_s: float) -> set[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1000)}
