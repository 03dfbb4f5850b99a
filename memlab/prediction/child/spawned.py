"""A child in a new process, where forking is impossible: it gets only the values that the work names.

It starts with `python -c`, so it takes the time of importing torch. Its input is pickled in this process; its output is
messages, as for a forked child.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from memlab.prediction.child.channel import ERR, FRAMES, OUT, Channel, ChannelWriter, Log, Printed, life
from memlab.units import format_bytes

_BOX, _LOG = "black box", "log"
"""Files in the scratch folder: the dump of faulthandler, and the log of the sandbox."""
_FRAMES_FD = "MEMLAB_CHILD_FRAMES"
"""The variable with the descriptor for messages; without it they use stdout."""


class SpawnedProcess:
    """The parent's side of a child in a new process; the same interface as for a forked one."""

    def __init__(self, payload: bytes, display: dict[str, Any] | None, scratch: Path) -> None:
        self.notes: list[str] = []
        self._payload, self._scratch, self._display = payload, scratch, display
        self._process: subprocess.Popen[bytes] | None = None
        self._heard: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0

    def start(self) -> None:
        """Start the process and send its input."""
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        if os.name == "posix":
            read, write = os.pipe()
            environment[_FRAMES_FD] = str(write)
            options |= {"pass_fds": (write,), "start_new_session": True}
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        self._process = subprocess.Popen(command, env=environment, **options)
        if os.name == "posix":
            os.close(write)
            self._read(FRAMES, io.FileIO(read))
        self._read(OUT if os.name == "posix" else FRAMES, self._process.stdout)
        self._read(ERR, self._process.stderr)
        head = {"scratch": str(self._scratch), "path": sys.path, "shell": self._display}
        data = json.dumps(head).encode() + b"\n" + self._payload
        pipe = self._process.stdin
        assert pipe is not None

        def feed() -> None:
            """Keep the pipe open: when it closes, the child knows that this process is gone."""
            with contextlib.suppress(OSError):
                pipe.write(len(data).to_bytes(8, "little") + data)
                pipe.flush()

        self._run(feed)

    def _read(self, source: str, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._open += 1

        def pump() -> None:
            with pipe, contextlib.suppress(OSError, ValueError):
                while data := os.read(pipe.fileno(), 1 << 20):
                    self._heard.put((source, data))
            self._heard.put((source, b""))

        self._run(pump)

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="memlab child pipe", daemon=True)
        self._threads.append(thread)
        thread.start()

    def listen(self, timeout_s: float) -> Iterator[tuple[str, bytes]]:
        """Output within the timeout."""
        try:
            source, data = self._heard.get(timeout=max(0.0, min(timeout_s, 0.5)))
        except queue.Empty:
            if self._process is not None and self._process.poll() is not None:
                self._kill()  # programs it started may hold its pipes
            return
        if data:
            yield source, data
        else:
            self._open -= 1

    def drain(self) -> Iterator[tuple[str, bytes]]:
        """Nothing: the output of all pipes is in one queue, in order."""
        return iter(())

    @property
    def is_over(self) -> bool:
        """Whether there can be no more output."""
        return self._open == 0

    def ask_where(self) -> None:
        """Let it dump its stack; Windows has no signal for that."""
        if self._process is not None and hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(0.05)

    def _kill(self) -> None:
        assert self._process is not None
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
        """Its crash log, and the log of its sandbox."""
        box, log = self._scratch / _BOX, self._scratch / _LOG
        written, logged = (file.read_bytes() if file.exists() else b"" for file in (box, log))
        return written.decode(errors="replace"), logged


# --- in the new process ---


def main() -> None:
    """The main function of a spawned child: read the input, enter the sandbox, work, end."""
    if _FRAMES_FD in os.environ:
        frames, out = int(os.environ.pop(_FRAMES_FD)), 1
        os.set_inheritable(frames, False)
    else:  # C code prints to stderr
        frames, out = os.dup(1), 2
        os.dup2(2, 1)
    head, _, payload = _exactly(int.from_bytes(_exactly(8), "little")).partition(b"\n")
    settings = json.loads(head)
    scratch = Path(settings["scratch"])
    with (scratch / _BOX).open("wb") as box, life(box, scratch):
        sys.path[:] = settings["path"]
        _settle_in()
        writer = ChannelWriter(frames)
        log = Log(os.open(scratch / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        from memlab.prediction.child import sandbox  # with torch, once the path is known
        from memlab.torch_internals import shell as shells

        shell = None
        if settings["shell"] is not None:
            shell = shells.spawned(vars(sys.modules["__main__"]), scratch, settings["shell"])
        sandbox.enter(scratch, log)
        sys.stdout, sys.stderr = Printed(writer, OUT, out), Printed(writer, ERR, 2)
        _work(payload, shell, Channel(writer, scratch, log))
        for kept in filter(None, (sys.__stdout__, sys.__stderr__)):  # to which code may have printed
            kept.flush()
        writer.drain()


def _exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        os._exit(0)  # the parent is gone
    return data


def _settle_in() -> None:
    pipe = os.dup(0)

    def die_with_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe, 1 << 16):
                pass
        os._exit(1)

    threading.Thread(target=die_with_parent, name="memlab parent", daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins  # autograd's warnings look for it


def _work(payload: bytes, shell: Any, channel: Channel) -> None:
    """Load the context of the work, and inside it everything else: fake tensors must be created there."""
    from memlab.prediction.child.sending import receive_names
    from memlab.prediction.child.work import perform, perform_cell

    unpickler, works = pickle.Unpickler(io.BytesIO(payload)), []
    around, text, above = unpickler.load()

    @contextlib.contextmanager
    def loading() -> Iterator[Any]:
        with around() as value:
            work, unsent_bytes = receive_names(unpickler)
            works.append(work)
            if unsent_bytes:
                size = format_bytes(unsent_bytes)
                channel.note(f"{size} of parameters were sent to a new process without their values.")
            channel.writer.send("hello", None)
            yield value

    if text is None:
        perform(lambda channel: works[0](channel), loading, channel)
    else:
        perform_cell(shell, text, above, loading, channel)
