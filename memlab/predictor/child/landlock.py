"""Linux's own fence (Landlock, 5.13): what Python does not see, as C++ code and started programs, cannot write either.

Not there on older systems, in some containers, and elsewhere; then only the audit hook of `fence` holds. Files that are
already open, and connections other than TCP, are not its business.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# linux/landlock.h; the numbers of the calls are the same on every architecture but alpha.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_REMOVE_AND_MAKE = sum(
    1 << bit for bit in range(4, 13)
)  # remove dir and file; make char, dir, reg, sock, fifo, block, sym
_REFER = 1 << 13
_CONNECT_TCP = 1 << 1
_SIGNALS = 1 << 1
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h

DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
"""What may be written of /dev: pseudo-terminals are for programs that are started, shm for the workers of loaders."""


def version() -> int:
    """The version of Landlock of this system, 0 where it has none."""
    if not sys.platform.startswith("linux") or platform.machine() == "alpha":
        return 0
    try:
        return max(0, _call(_CREATE_RULESET, None, 0, _GET_VERSION))
    except OSError:
        return 0


def restrict(writable: Sequence[Path]) -> int:
    """Let this thread, and what it starts, write below these folders only and connect nowhere by TCP; 0 if it cannot.

    There is no way back. Answers the version of Landlock, of which 4 is the first that knows of connections, and 6 keeps
    signals from other processes.
    """
    found = version()
    if not found:
        return 0
    handled = _WRITE_FILE | _REMOVE_AND_MAKE | (_REFER if found >= 2 else 0) | (_TRUNCATE if found >= 3 else 0)
    size = 8 if found < 4 else 16 if found < 6 else 24
    asked = struct.pack("=QQQ", handled, _CONNECT_TCP, _SIGNALS)[:size]
    try:
        rules = _call(_CREATE_RULESET, asked, size, 0)
        try:
            for path in writable:
                _allow(rules, path, handled)
            if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
                return 0
            _call(_RESTRICT_SELF, rules, 0)
        finally:
            os.close(rules)
    except OSError:
        return 0
    return found


def _allow(rules: int, path: Path, handled: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = handled if path.is_dir() else handled & (_WRITE_FILE | _TRUNCATE)
        _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, place), 0)
    finally:
        os.close(place)


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = int(libc.syscall(ctypes.c_long(number), *arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
