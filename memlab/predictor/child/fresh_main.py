"""What a fresh child does: it takes what it was sent, fences itself in, works, and ends."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from memlab.predictor.child.channel import Channel, opened
from memlab.predictor.child.frames import Printed, Writer
from memlab.predictor.child.fresh import BOX, FRAMES_FD, NOTES
from memlab.predictor.child.log import FAILED, Log
from memlab.units import format_bytes


def main() -> None:
    """The whole life of a fresh child."""
    frames, out = _descriptors()
    size = int.from_bytes(_exactly(sys.stdin.buffer, 8), "little")
    head, _, payload = _exactly(sys.stdin.buffer, size).partition(b"\n")
    told = json.loads(head)
    scratch = Path(told["scratch"])
    box = (scratch / BOX).open("wb")
    try:
        _settle_in(box, told["path"], scratch)
        notes = os.open(scratch / NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        writer, log = Writer(frames), Log(notes)
        from memlab.predictor.child import fence, sending  # with torch, once the path is known

        shell = _shell(told["shell"], scratch) if told["shell"] is not None else None
        fence.build(scratch, log)
        sys.stdout, sys.stderr = Printed(writer, "stdout", out), Printed(writer, "stderr", 2)
        with opened(Channel(writer, scratch, log)) as channel:
            _work(sending.receive(payload), shell, channel)
        for kept in filter(None, (sys.__stdout__, sys.__stderr__)):  # to which code may have printed
            kept.flush()
        writer.drain()
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(box.fileno(), f"{traceback.format_exc()}{FAILED}\n".encode())
    finally:
        os._exit(0)


def _descriptors() -> tuple[int, int]:
    """Where messages go, and where what is printed by C code does: without a descriptor of their own, with the errors."""
    if FRAMES_FD in os.environ:
        frames = int(os.environ.pop(FRAMES_FD))
        os.set_inheritable(frames, False)
        return frames, 1
    frames = os.dup(1)
    os.dup2(2, 1)
    return frames, 2


def _exactly(pipe: Any, size: int) -> bytes:
    data: bytes = pipe.read(size)
    if len(data) < size:
        os._exit(0)  # the parent is gone
    return data


def _settle_in(box: IO[bytes], path: list[str], scratch: Path) -> None:
    sys.path[:] = path
    faulthandler.enable(box, all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, box, all_threads=False)
    threading.Thread(target=_die_with_parent, args=(os.dup(0),), name="memlab parent", daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    sys.dont_write_bytecode = True
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins  # autograd's warnings look for it


def _die_with_parent(pipe: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(pipe, 1 << 16):
            pass
    os._exit(1)


def _shell(told: dict[str, Any], scratch: Path) -> Any:
    from memlab.seams import shell as shells

    return shells.fresh(vars(sys.modules["__main__"]), scratch, told)


def _work(unpickler: pickle.Unpickler, shell: Any, channel: Channel) -> None:
    """Load what the surroundings are, and within them all the rest: pretend tensors have to be made there."""
    from memlab.predictor.child import sending
    from memlab.predictor.child.cell import perform_cell
    from memlab.predictor.child.step import perform

    around = unpickler.load()
    work, text, above = unpickler.load(), unpickler.load(), unpickler.load()
    inside = _Loading(around, lambda: sending.receive_names(unpickler), channel)
    if text is not None:
        perform_cell(shell, text, above, inside, channel)
    else:
        perform(work, inside, channel)


class _Loading:
    """`around`, after whose beginning the names of the notebook are loaded."""

    def __init__(
        self, around: Callable[[], AbstractContextManager[Any]], load: Callable[[], int], channel: Channel
    ) -> None:
        self._around, self._load, self._channel = around, load, channel

    @contextlib.contextmanager
    def __call__(self) -> Any:
        """Enter the surroundings, then load."""
        with self._around() as value:
            unsent_bytes = self._load()
            if unsent_bytes:
                self._channel.note(
                    f"{format_bytes(unsent_bytes)} of parameters were sent to a process of their own without their values."
                )
            yield value
