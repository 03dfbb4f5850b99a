"""A child that is a process of its own, where none can be forked: it gets the values that the work names, and no more.

It starts with `python -c`, so it takes the time that importing torch does. What it gets is pickled in this process; what
it sends are messages, as those of a forked child.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

BOX, NOTES = "black box", "notes"
"""Files in the scratch folder: what faulthandler writes, and the log of the fence."""
FRAMES_FD = "MEMLAB_CHILD_FRAMES"
"""The variable that says at which descriptor messages go out; without it they take the place of stdout."""
_CODE = "from memlab.predictor.child.fresh_main import main; main()"


class FreshChild:
    """The parent's side of a child in a fresh process; the same face as that of a forked one."""

    def __init__(self, payload: bytes, scratch: Path, display: dict[str, Any] | None = None) -> None:
        self.notes: list[str] = []
        self._payload, self._scratch, self._display = payload, scratch, display
        self._process: subprocess.Popen[bytes] | None = None
        self._heard: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0

    def start(self) -> None:
        """Start the process and hand it what it needs."""
        head = {"scratch": str(self._scratch), "path": sys.path, "shell": self._display}
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        command = [sys.executable, "-c", _CODE]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if os.name == "posix":
            read, write = os.pipe()
            environment[FRAMES_FD] = str(write)
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=(write,), start_new_session=True, **pipes
            )
            os.close(write)
            self._read("frames", io.FileIO(read))
            self._read("stdout", self._process.stdout)
        else:
            self._process = subprocess.Popen(command, env=environment, **pipes)
            self._read("frames", self._process.stdout)
        self._read("stderr", self._process.stderr)
        self._run(lambda: self._feed(json.dumps(head).encode() + b"\n" + self._payload))

    def _feed(self, data: bytes) -> None:
        """Hand over the payload. The pipe stays open: when it closes, the child knows that this process is gone."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)
            self._process.stdin.flush()

    def _read(self, source: str, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._open += 1

        def pump() -> None:
            with pipe, contextlib.suppress(OSError, ValueError):
                while data := os.read(pipe.fileno(), 1 << 20):
                    self._heard.put((source, data))
            self._heard.put((source, b""))

        self._run(pump)

    def _run(self, work: Any) -> None:
        thread = threading.Thread(target=work, name="memlab child pipe", daemon=True)
        self._threads.append(thread)
        thread.start()

    def listen(self, timeout_s: float) -> Iterator[tuple[str, bytes]]:
        """What came within the time."""
        try:
            source, data = self._heard.get(timeout=max(0.0, min(timeout_s, 0.5)))
        except queue.Empty:
            if self._process is not None and self._process.poll() is not None:
                self._kill()  # what it left behind may hold its pipes
            return
        if data:
            yield source, data
        else:
            self._open -= 1

    def drain(self) -> Iterator[tuple[str, bytes]]:
        """Nothing: what comes from all pipes waits in one queue, in the order in which it came."""
        return iter(())

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come."""
        return self._open == 0

    def ask_where(self) -> None:
        """Let it write down where it is; Windows has no signal for that."""
        if self._process is not None and hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(0.05)

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def end(self) -> int | None:
        """Kill what is left of it; its exit code."""
        if self._process is None:
            return None
        if self.is_over:  # it has closed everything, and is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._kill()
        code = self._process.wait()
        for thread in self._threads:
            thread.join(2.0)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return code

    def close(self) -> tuple[str, bytes]:
        """What it wrote when it died, and the log of its fence."""
        box, notes = self._scratch / BOX, self._scratch / NOTES
        return (
            box.read_text(errors="replace") if box.exists() else "",
            notes.read_bytes() if notes.exists() else b"",
        )
