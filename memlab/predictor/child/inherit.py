"""What a forked child inherits, made its own: nothing it does with it reaches the process that it was forked from.

Signals, standard streams, open files and connections, shared memory, loaders, thread pools, event loops. What stays:
locks that other threads held, and what user code keeps with a process id in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import io
import os
import signal
import stat
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from memlab.predictor.child import mappings
from memlab.predictor.child.log import Log
from memlab.seams import process
from memlab.units import format_bytes

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
HELD = "held"
"""The folder, below the scratch folder, of what was written to files that were open."""


def leave_the_group(parent: int) -> None:
    """A session of its own: Jupyter interrupts the whole group of the kernel, and a terminal stops readers in others."""
    os.setsid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be said
        os._exit(0)
    with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as score:
        score.write("1000")  # where memory runs out this process goes first, not the kernel
    signal.set_wakeup_fd(-1)  # it would wake the parent's event loop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def replace_streams(out: int, err: int) -> None:
    """Nothing to read at descriptor 0; what C code prints goes to the parent."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(new, old)
    os.close(nothing)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")


def flush_all(streams: Iterable[Any]) -> None:
    """Write out what C code and the standard streams that Python code may have kept hold back; nobody else does it."""
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        with contextlib.suppress(ValueError):
            libc.fflush(ctypes.c_void_p.in_dll(libc, name))


def make_own(keep: Collection[int], scratch: Path, log: Log) -> None:
    """Everything that is left, once the streams are replaced. `keep` are descriptors of ours."""
    Path(scratch, HELD).mkdir()
    for descriptor in _descriptors() - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):
            _detach(descriptor, Path(scratch, HELD))
    shared = mappings.make_private()
    if shared:
        log.note(
            f"{format_bytes(shared)} of shared memory are still shared with the notebook; writing there changes it."
        )
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are gone; it says so at every use otherwise
    sys.dont_write_bytecode = True
    process.keep_one_thread()
    process.disown_processes()
    process.disown_loaders()
    process.disown_pools()
    process.leave_running_loop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of policies, from Python 3.14 on
        asyncio.set_event_loop(asyncio.new_event_loop())


def _descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def _detach(descriptor: int, held: Path) -> None:
    """Let an inherited descriptor mean something that the parent does not share.

    An open file has one position for parent and child; a connection has one peer; an epoll has one list.
    """
    place = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    if place.startswith(("socket:", "pipe:", "anon_inode:[eventpoll]")):
        _replace(descriptor, os.open(os.devnull, os.O_RDWR))
        return
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or place.startswith(("/dev/", "/memfd:")):
        return
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        new = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    else:
        new = os.open(held / str(descriptor), os.O_RDWR | os.O_CREAT | (flags & os.O_APPEND), 0o600)
        (held / f"{descriptor}.name").write_text(place)
    os.lseek(new, position, os.SEEK_SET)
    _replace(descriptor, new)


def _replace(descriptor: int, new: int) -> None:
    os.dup2(new, descriptor, inheritable=False)
    os.close(new)


def written_to_open_files(scratch: Path) -> list[str]:
    """The names of files that were open in the parent and to which the child wrote; asked by the parent, at the end."""
    names = sorted(Path(scratch, HELD).glob("*.name"))
    return [name.read_text() for name in names if name.with_suffix("").stat().st_size]
