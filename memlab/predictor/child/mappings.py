"""Memory that a forked child shares with its parent, made the child's own: writing there would change the parent's data.

Shared are tensors in shared memory (batches of loaders with workers among them), writable `numpy.memmap`s, and `mmap`s.
Semaphores stay shared: the child's own workers need them. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) (\S+) (\d+) *(.*)")
_DELETED = " (deleted)"
_FIXED, _MAY_MOVE_FIXED = 0x10, 1 | 2  # linux/mman.h: MAP_FIXED; MREMAP_MAYMOVE | MREMAP_FIXED
MOST_COPIED_BYTES = 4 << 30
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Mapping:
    """A stretch of memory, and the file behind it."""

    start: int
    nbytes: int
    is_executable: bool
    offset: int
    inode: int
    path: str


def make_private() -> int:
    """Make every writable shared mapping of this process private to it; how many bytes are still shared after that."""
    left = 0
    for found in list(shared_and_writable()):
        try:
            _replace(found)
        except OSError:
            left += found.nbytes
    return left


def shared_and_writable() -> Iterator[Mapping]:
    """The mappings that processes share by a file, by its name in /dev/shm, or by nothing but the fork itself."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            match = _LINE.match(line)
            if match and match[3][1] == "w" and match[3][3] == "s" and _is_data(match[7]):
                start, end = int(match[1], 16), int(match[2], 16)
                yield Mapping(start, end - start, match[3][2] == "x", int(match[4], 16), int(match[6]), match[7])


def _is_data(path: str) -> bool:
    """Devices are for their drivers, and semaphores for locks."""
    if path.startswith("/dev/"):
        return path.startswith("/dev/zero") or (path.startswith("/dev/shm/") and "/sem." not in path)
    return path.startswith("/")


def _replace(found: Mapping) -> None:
    """Map the same bytes again at the same place, copied only when they are written, where the file can be opened."""
    if not found.path.endswith(_DELETED) and not found.path.startswith("/dev/zero"):
        with contextlib.suppress(OSError):
            descriptor = os.open(found.path, os.O_RDONLY)
            try:
                if os.fstat(descriptor).st_ino == found.inode:  # else the file was replaced by another of its name
                    _map(found.start, found, mmap.MAP_PRIVATE | _FIXED, descriptor, found.offset)
                    return
            finally:
                os.close(descriptor)
    if found.nbytes > MOST_COPIED_BYTES:
        raise OSError(errno.ENOMEM, "too much to copy")
    copy = _map(None, found, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    ctypes.memmove(copy, found.start, found.nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    nbytes = ctypes.c_size_t(found.nbytes)
    _check(libc.mremap(ctypes.c_void_p(copy), nbytes, nbytes, _MAY_MOVE_FIXED, ctypes.c_void_p(found.start)))


def _map(place: int | None, found: Mapping, flags: int, descriptor: int, offset: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    protection = mmap.PROT_READ | mmap.PROT_WRITE | (mmap.PROT_EXEC if found.is_executable else 0)
    return _check(
        libc.mmap(
            ctypes.c_void_p(place),
            ctypes.c_size_t(found.nbytes),
            protection,
            flags,
            descriptor,
            ctypes.c_long(offset),
        )
    )


def _check(address: int | None) -> int:
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
