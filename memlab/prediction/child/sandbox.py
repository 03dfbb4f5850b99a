"""The sandbox: keep a child from writing or deleting outside its scratch folder, connecting, and signalling others.

A best effort, in three layers: a file overlay (`overlay`) in which writing and deleting appear to work; an audit hook that
refuses other ways, with the errors of a read-only system; and Landlock, if Linux has it (5.13, not in some containers), for
what no audit hook sees: C++ code and programs started by the child, but not files that are already open, nor connections
other than TCP. What the first two blocked is listed, and so are programs that start.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import platform
import socket
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memlab.prediction.child.channel import NOTES, REFUSED, STARTED, Log
from memlab.prediction.child.overlay import Overlay, exists
from memlab.torch_internals import process

_WHY = "blocked in a prediction, which leaves files and connections as they are"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
"""Writable parts of /dev: pseudo-terminals for programs that are started, shm for DataLoader workers."""


def enter(scratch: Path, log: Log) -> None:
    """Sandbox this process permanently."""
    held = restrict([scratch, *(Path("/dev", name) for name in _DEVICES)])
    hook = _AuditHook(scratch, log, held > 0)
    overlay = Overlay(scratch, log, hook.may_write, _shown)
    if held < 4:
        missing = "their connections" if held else "what C++ code and they themselves write"
        system = f"{os.uname().sysname} {os.uname().release}" if hasattr(os, "uname") else sys.platform
        text = f"The sandbox does not hold programs that are started in it: {missing} ({system} lacks the means)."
        log.write(NOTES, text)
    overlay.install()
    process.divert_torch_files(overlay.writing)
    sys.addaudithook(hook)


# --- the audit hook ---

_PATHS: dict[str, tuple[str, int, int, bool | None]] = {
    "os.remove": ("deleting", 0, 1, True),
    "os.rmdir": ("deleting", 0, 1, True),
    "os.mkdir": ("making the folder", 0, 2, False),
    "os.link": ("linking", 1, 3, None),
    "os.symlink": ("linking", 1, 2, None),
    "os.chmod": ("changing", 0, 2, None),
    "os.chown": ("changing", 0, 3, None),
    "os.utime": ("changing", 0, 3, None),
    **dict.fromkeys(
        ("os.truncate", "os.lchown", "os.chflags", "os.setxattr", "os.removexattr"), ("changing", 0, 9, None)
    ),
}
"""Event -> what it does, which argument is the path and which the descriptor of the folder that it is relative to.

The flag says in which case the call is harmless, as the system itself refuses it: True if the path is missing, False if
it exists.
"""


class _AuditHook:
    """Called by Python before an audited operation; an error prevents it."""

    def __init__(self, scratch: Path, log: Log, system_holds: bool) -> None:
        self._inside = os.path.realpath(scratch) + os.sep
        self._system_holds, self._log = system_holds, log
        self._group = os.getpgrp() if hasattr(os, "getpgrp") else 0
        self._answers: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.rename": self._renaming,
            "sqlite3.connect": self._database,
            "socket.connect": self._connecting,
            "socket.sendto": self._connecting,
            "socket.sendmsg": self._connecting,
            "socket.getaddrinfo": self._looking_up,
            "socket.gethostbyname": self._looking_up,
            "os.kill": self._signalling,
            "os.killpg": self._signalling_group,
            "subprocess.Popen": self._starting,
            "os.system": self._starting,
            "os.startfile": lambda path, *rest: self._starting(path),
            "os.exec": self._replacing,
            "os.posix_spawn": self._starting,
        }

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        answer = self._answers.get(event)
        if answer is not None:
            answer(*args)
        elif event in _PATHS:
            doing, at, folder_at, must_exist = _PATHS[event]
            folder_fd = args[folder_at] if folder_at < len(args) else -1
            if must_exist is None or folder_fd >= 0 or exists(args[at]) is must_exist:
                self._path(doing, args[at], folder_fd)

    def _refuse(self, what: str, error: OSError) -> NoReturn:
        self._log.write(REFUSED, what)
        raise error

    def _path(self, doing: str, path: Any, folder_fd: int = -1) -> None:
        if not self.may_write(path, folder_fd):
            self._refuse(f"{doing} {_shown(path)}", PermissionError(errno.EPERM, _WHY, os.fsdecode(path)))

    def may_write(self, path: Any, folder_fd: int = -1) -> bool:
        """Whether a path is in the scratch folder, or a device that stores nothing; a descriptor is open already."""
        if isinstance(path, int):
            return True
        try:
            name = os.fsdecode(path)
            if folder_fd >= 0:  # which means nothing where the path is absolute
                name = str(Path(f"/proc/self/fd/{folder_fd}").readlink() / name)
            real = os.path.realpath(name)
        except (OSError, TypeError, ValueError):
            return True  # Python itself will raise an error
        return (real + os.sep).startswith(self._inside) or _keeps_nothing(real)

    def _open(self, path: Any, mode: Any, flags: Any) -> None:
        if (isinstance(flags, int) and flags & _WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
            self._path("writing", path)

    def _renaming(self, old: Any, new: Any, old_fd: int = -1, new_fd: int = -1) -> None:
        may = self.may_write(old, old_fd) and self.may_write(new, new_fd)
        if not may and (old_fd >= 0 or exists(old)):
            what = f"renaming {_shown(old)} to {_shown(new)}"
            self._refuse(what, PermissionError(errno.EPERM, _WHY, os.fsdecode(old)))

    def _database(self, path: Any) -> None:
        is_memory = not path or ":memory:" in os.fsdecode(path)
        if not is_memory and not (self._system_holds and exists(path)):  # to be read, which sqlite does by itself
            self._path("opening the database", path)

    def _connecting(self, where: Any, address: Any = None) -> None:
        family, what = getattr(where, "family", None), ""
        if family in (socket.AF_INET, socket.AF_INET6) and address is not None:
            what = f"connecting to {address[0]}:{address[1]}"
        elif family == getattr(socket, "AF_UNIX", -1) and address and not self.may_write(address):
            what = f"connecting to {_shown(address)}"
        if what:
            self._refuse(what, ConnectionRefusedError(errno.ECONNREFUSED, _WHY))

    def _looking_up(self, host: Any, *rest: Any) -> None:
        name = os.fsdecode(host) if host else "localhost"
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if name not in ("localhost", socket.gethostname()):  # which need no name server
                self._refuse(f"looking up {name}", socket.gaierror(socket.EAI_AGAIN, _WHY))

    def _signalling(self, pid: int, signal: int) -> None:
        if signal and pid != os.getpid() and not (pid > 0 and self._is_ours(pid)):
            self._refuse(f"sending signal {int(signal)} to process {pid}", PermissionError(errno.EPERM, _WHY))

    def _signalling_group(self, group: int, signal: int) -> None:
        if signal and group not in (0, self._group):
            what = f"sending signal {int(signal)} to process group {group}"
            self._refuse(what, PermissionError(errno.EPERM, _WHY))

    def _is_ours(self, pid: int) -> bool:
        while pid > 1 and pid != os.getppid():
            try:
                if os.getpgid(pid) == self._group:
                    return True
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return True  # it is gone: the system says so
        return False

    def _starting(self, program: Any, arguments: Any = (), *rest: Any) -> None:
        words = [arguments] if isinstance(arguments, str | bytes) else list(arguments)
        self._log.write(STARTED, " ".join(map(os.fsdecode, words or [program])))

    def _replacing(self, program: Any, arguments: Any, *rest: Any) -> None:
        if Path(os.fsdecode(program)).exists():  # `os.execvp` tries folder by folder
            self._starting(program, arguments)


def _keeps_nothing(real: str) -> bool:
    """Whether a path is a terminal or a device like /dev/null, or shared memory, which DataLoader workers need."""
    if real.startswith(("/dev/shm/", "/dev/pts/")) or real == os.devnull or real.lower() == "nul":
        return True
    try:
        return real.startswith("/dev/") and stat.S_ISCHR(Path(real).stat().st_mode)
    except OSError:
        return False


def _shown(path: Any) -> str:
    name = os.fsdecode(path)
    try:
        return repr(name.removeprefix(f"{Path.cwd()}{os.sep}"))
    except OSError:  # the folder is gone
        return repr(name)


# --- Landlock ---

# linux/landlock.h; the numbers of the calls are the same on every architecture but alpha.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_REMOVE_AND_MAKE = 0x1FF0  # remove dir and file; make char, dir, reg, sock, fifo, block, sym
_CONNECT_TCP, _SIGNALS = 1 << 1, 1 << 1
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h


def landlock_version() -> int:
    """The Landlock version of this system; 0 without Landlock."""
    if not sys.platform.startswith("linux") or platform.machine() == "alpha":
        return 0
    try:
        return max(0, _call(_CREATE_RULESET, None, 0, _GET_VERSION))
    except OSError:
        return 0


def restrict(writable: Sequence[Path]) -> int:
    """Restrict this thread, and what it starts, to writing below these folders, without TCP connections, permanently.

    Returns the version of Landlock: 4 is the first to cover connections, 6 to cover signals; 0 without Landlock.
    """
    found = landlock_version()
    if not found:
        return 0
    handled = _WRITE_FILE | _REMOVE_AND_MAKE | (_REFER if found >= 2 else 0) | (_TRUNCATE if found >= 3 else 0)
    size = 8 if found < 4 else 16 if found < 6 else 24
    asked = struct.pack("=QQQ", handled, _CONNECT_TCP, _SIGNALS)[:size]
    try:
        rules = _call(_CREATE_RULESET, asked, size, 0)
        try:
            for path in writable:
                try:
                    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                except OSError:  # missing, or a dangling link (/dev/ptmx without /dev/pts)
                    continue
                allowed = handled if path.is_dir() else handled & (_WRITE_FILE | _TRUNCATE)
                try:
                    _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, place), 0)
                finally:
                    os.close(place)
            if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
                return 0
            _call(_RESTRICT_SELF, rules, 0)
        finally:
            os.close(rules)
    except OSError:
        return 0
    return found


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = int(libc.syscall(ctypes.c_long(number), *arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
