"""Isolate what a forked child inherits, so that nothing it does reaches its parent.

Not isolated: locks that other threads held, semaphores (the child's own workers need them), and user state with a process
id in it. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import re
import signal
import stat
import sys
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from memlab.prediction.child.channel import NOTES, Log
from memlab.torch_internals import process
from memlab.units import format_bytes

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
HELD = "held"
"""The subfolder of the scratch folder for writes to files that were open."""


def leave(parent: int, out: int, err: int) -> None:
    """Start a new session, as Jupyter interrupts the kernel's whole process group, and a terminal stops background readers.

    Descriptor 0 is empty; the output of C code goes to the parent.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)
    with contextlib.suppress(OSError):  # if host memory runs out, this process is killed first, not the kernel
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.set_wakeup_fd(-1)  # a signal would wake the parent's event loop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(new, old)
    os.close(nothing)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")


def flush_all(streams: Iterable[Any]) -> None:
    """Flush C's buffers and saved references to the standard streams; nothing else does."""
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        with contextlib.suppress(ValueError):
            libc.fflush(ctypes.c_void_p.in_dll(libc, name))


def make_own(keep: Collection[int], scratch: Path, log: Log) -> None:
    """Isolate everything else, once the streams are replaced. `keep` are our descriptors."""
    Path(scratch, HELD).mkdir()
    for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):
            _detach(descriptor, Path(scratch, HELD))
    if shared := _make_mappings_private():
        text = f"{format_bytes(shared)} of shared memory are still shared with the notebook; writing there changes it."
        log.write(NOTES, text)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are gone, of which it would warn at every use
    process.keep_one_thread()
    process.disown_processes()
    process.disown_loaders()
    process.disown_pools()
    process.leave_running_loop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of policies, from Python 3.14 on
        asyncio.set_event_loop(asyncio.new_event_loop())


# --- files and connections ---


def _detach(descriptor: int, held: Path) -> None:
    """Replace inherited descriptors: files share their position with the parent, connections their peer, epolls their list."""
    place = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    if place.startswith(("socket:", "pipe:", "anon_inode:[eventpoll]")):
        new = os.open(os.devnull, os.O_RDWR)
    elif not stat.S_ISREG(os.fstat(descriptor).st_mode) or place.startswith(("/dev/", "/memfd:")):
        return
    else:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            new = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        else:
            new = os.open(held / str(descriptor), os.O_RDWR | os.O_CREAT | (flags & os.O_APPEND), 0o600)
            (held / f"{descriptor}.name").write_text(place)
        os.lseek(new, position, os.SEEK_SET)
    os.dup2(new, descriptor, inheritable=False)
    os.close(new)


def written_to_open_files(scratch: Path) -> list[str]:
    """The files open in the parent that the child wrote to; called by the parent, at the end."""
    names = sorted(Path(scratch, HELD).glob("*.name"))
    return [name.read_text() for name in names if name.with_suffix("").stat().st_size]


# --- shared memory ---

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .w(.)s ([0-9a-f]+) \S+ (\d+) *(/.*)")
"""A writable and shared mapping in /proc/self/maps: start, end, whether executable, offset, inode, file."""
_FIXED, _MAY_MOVE_FIXED = 0x10, 1 | 2  # linux/mman.h: MAP_FIXED; MREMAP_MAYMOVE | MREMAP_FIXED
_MOST_COPIED_BYTES = 4 << 30


def _make_mappings_private() -> int:
    """Make memory that is shared with the parent private; return the bytes that are still shared.

    Tensors (such as batches from DataLoader workers), writable `numpy.memmap`s and `mmap`s: by a file, by its name in
    /dev/shm, or by nothing but the fork itself (/dev/zero).
    """
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        found = [match for match in map(_LINE.match, lines) if match]
    left = 0
    for match in found:
        start, end = int(match[1], 16), int(match[2], 16)
        path = match[6]
        is_data = path.startswith(("/dev/zero", "/dev/shm/")) and "/sem." not in path
        if path.startswith("/dev/") and not is_data:  # of a driver, or a semaphore
            continue
        protection = mmap.PROT_READ | mmap.PROT_WRITE | (mmap.PROT_EXEC if match[3] == "x" else 0)
        try:
            _make_private(start, end - start, protection, path, int(match[5]), int(match[4], 16))
        except OSError:
            left += end - start
    return left


def _make_private(start: int, nbytes: int, protection: int, path: str, inode: int, offset: int) -> None:
    """Map the same bytes again at the same address, copy-on-write, if the file can be opened."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p

    def mapped(place: int | None, flags: int, descriptor: int, offset: int) -> int:
        where, size = ctypes.c_void_p(place), ctypes.c_size_t(nbytes)
        return _checked(libc.mmap(where, size, protection, flags, descriptor, ctypes.c_long(offset)))

    if not path.endswith(" (deleted)") and not path.startswith("/dev/zero"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if os.fstat(descriptor).st_ino == inode:  # else the file was replaced by another of its name
                    mapped(start, mmap.MAP_PRIVATE | _FIXED, descriptor, offset)
                    return
            finally:
                os.close(descriptor)
    if nbytes > _MOST_COPIED_BYTES:
        raise OSError(errno.ENOMEM, "too much to copy")
    copy = mapped(None, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    ctypes.memmove(copy, start, nbytes)
    size = ctypes.c_size_t(nbytes)
    _checked(libc.mremap(ctypes.c_void_p(copy), size, size, _MAY_MOVE_FIXED, ctypes.c_void_p(start)))


def _checked(address: int | None) -> int:
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    assert address is not None
    return address
