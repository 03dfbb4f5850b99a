"""What a child may not do to the world: write and delete outside of its scratch folder, connect, signal others.

A best effort, not a sandbox. Three walls, from the inside out: a layer of files (`overlay`) in which writing and deleting
seem to work; an audit hook that refuses what goes by other ways, with the error that code expects of a closed system
(PermissionError, ConnectionRefusedError); and Landlock, where Linux has it, for what no audit hook sees: C++ code and
programs that the child starts. What the first two held off is listed, and so are programs when they start.

An audit hook cannot be removed: it lives as long as the child.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memlab.predictor.child import landlock
from memlab.predictor.child.log import Log
from memlab.predictor.child.overlay import Overlay
from memlab.seams import process

WHY = "held off in a prediction, which leaves files and connections as they are"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def build(scratch: Path, log: Log) -> None:
    """Fence this process in, for as long as it lives."""
    devices = [Path("/dev", name) for name in landlock.DEVICES]
    held = landlock.restrict([scratch, *devices])
    fence = Fence(scratch, log, held > 0)
    overlay = Overlay(scratch, log, fence.may_write, _shown)
    if held < 4:
        missing = "their connections" if held else "what C++ code and they themselves write"
        log.note(f"The fence does not hold programs that the cell starts: {missing} ({_system()} lacks the means).")
    overlay.install()
    process.divert_torch_files(overlay.writing)
    sys.addaudithook(fence.hook)


def _system() -> str:
    return f"{os.uname().sysname} {os.uname().release}" if hasattr(os, "uname") else sys.platform


class Fence:
    """The audit hook: one method per kind of event, by name of the event."""

    def __init__(self, scratch: Path, log: Log, system_holds: bool) -> None:
        self._inside = os.path.realpath(scratch) + os.sep
        self._system_holds = system_holds
        self._log, self._group = log, os.getpgrp() if hasattr(os, "getpgrp") else 0
        self._answers: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.remove": self._deleting,
            "os.rmdir": self._deleting,
            "os.rename": self._renaming,
            "os.mkdir": self._making,
            "os.link": self._linking,
            "os.symlink": self._linking,
            "os.truncate": self._changing,
            "os.chmod": self._changing,
            "os.chown": self._changing,
            "os.lchown": self._changing,
            "os.chflags": self._changing,
            "os.utime": self._changing,
            "os.setxattr": self._changing,
            "os.removexattr": self._changing,
            "sqlite3.connect": self._database,
            "socket.connect": self._connecting,
            "socket.sendto": self._connecting,
            "socket.sendmsg": self._connecting,
            "socket.getaddrinfo": self._looking_up,
            "socket.gethostbyname": self._looking_up,
            "os.kill": self._signalling,
            "os.killpg": self._signalling_group,
            "subprocess.Popen": self._starting,
            "os.system": self._starting_shell,
            "os.exec": self._replacing,
            "os.posix_spawn": self._starting,
            "os.startfile": self._starting_shell,
        }

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Called by Python before it does what the event names; an error keeps it from doing so."""
        answer = self._answers.get(event)
        if answer is not None:
            answer(*args)

    def _open(self, path: Any, mode: Any, flags: Any) -> None:
        if (isinstance(flags, int) and flags & _WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
            self._path(path, "writing")

    def _deleting(self, path: Any, folder_fd: int = -1) -> None:
        if folder_fd >= 0 or _is_there(path):
            self._path(path, "deleting", folder_fd)

    def _making(self, path: Any, mode: int = 0, folder_fd: int = -1) -> None:
        if folder_fd >= 0 or not _is_there(path):  # else the system says that there is one
            self._path(path, "making the folder", folder_fd)

    def _changing(self, path: Any, *rest: Any) -> None:
        self._path(path, "changing")

    def _renaming(self, old: Any, new: Any, old_fd: int = -1, new_fd: int = -1) -> None:
        may = self.may_write(old, old_fd) and self.may_write(new, new_fd)
        if not may and (old_fd >= 0 or _is_there(old)):
            self._refuse_path(f"renaming {_shown(old)} to {_shown(new)}", old)

    def _linking(self, old: Any, new: Any, *fds: int) -> None:
        self._path(new, "linking", fds[-1] if fds else -1)

    def _database(self, path: Any) -> None:
        is_memory = not path or ":memory:" in os.fsdecode(path)
        if not is_memory and not (self._system_holds and _is_there(path)):  # to be read, which sqlite does by itself
            self._path(path, "opening the database")

    def _path(self, path: Any, doing: str, folder_fd: int = -1) -> None:
        if not self.may_write(path, folder_fd):
            self._refuse_path(f"{doing} {_shown(path)}", path)

    def may_write(self, path: Any, folder_fd: int = -1) -> bool:
        """Whether a path lies in the scratch folder, or is a device that keeps nothing; a descriptor is open already."""
        if isinstance(path, int):
            return True
        try:
            name = os.fsdecode(path)
            if folder_fd >= 0:  # which means nothing where the path is absolute
                name = str(Path(f"/proc/self/fd/{folder_fd}").readlink() / name)
            real = os.path.realpath(name)
        except (OSError, TypeError, ValueError):
            return True  # Python itself is going to complain about it
        return (real + os.sep).startswith(self._inside) or _keeps_nothing(real)

    def _refuse_path(self, what: str, path: Any) -> None:
        self._log.refused(what)
        raise PermissionError(errno.EPERM, WHY, os.fsdecode(path))

    def _connecting(self, where: Any, address: Any = None) -> None:
        family = getattr(where, "family", None)
        if family in _FAMILIES and address is not None:
            self._refuse_connection(f"connecting to {address[0]}:{address[1]}")
        elif family == getattr(socket, "AF_UNIX", -1) and address and not self.may_write(address):
            self._refuse_connection(f"connecting to {_shown(address)}")

    def _looking_up(self, host: Any, *rest: Any) -> None:
        if host and not _is_known(os.fsdecode(host)):
            self._log.refused(f"looking up {os.fsdecode(host)}")
            raise socket.gaierror(socket.EAI_AGAIN, WHY)

    def _refuse_connection(self, what: str) -> None:
        self._log.refused(what)
        raise ConnectionRefusedError(errno.ECONNREFUSED, WHY)

    def _signalling(self, pid: int, signal: int) -> None:
        if signal and pid != os.getpid() and not (pid > 0 and self._is_ours(pid)):
            self._refuse_signal(f"sending signal {int(signal)} to process {pid}")

    def _signalling_group(self, group: int, signal: int) -> None:
        if signal and group not in (0, self._group):
            self._refuse_signal(f"sending signal {int(signal)} to process group {group}")

    def _is_ours(self, pid: int) -> bool:
        """Whether a process is in our group, or in a session below us."""
        while pid > 1 and pid != os.getppid():
            try:
                if os.getpgid(pid) == self._group:
                    return True
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return True  # it is gone: the system says so
        return False

    def _refuse_signal(self, what: str) -> None:
        self._log.refused(what)
        raise PermissionError(errno.EPERM, WHY)

    def _starting(self, program: Any, arguments: Any = (), *rest: Any) -> None:
        if isinstance(arguments, str | bytes):
            arguments = [arguments]
        words = [os.fsdecode(word) for word in arguments] or [os.fsdecode(program)]
        self._log.started(" ".join(words))

    def _replacing(self, program: Any, arguments: Any, *rest: Any) -> None:
        if Path(os.fsdecode(program)).exists():  # `os.execvp` tries one folder after the other
            self._starting(program, arguments)

    def _starting_shell(self, command: Any, *rest: Any) -> None:
        self._log.started(os.fsdecode(command))


def _is_known(host: str) -> bool:
    """Whether a name needs no server to be known."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", socket.gethostname())
    return True


def _is_there(path: Any) -> bool:
    """Whether a path leads to something; what is not there cannot be deleted, and the system says so itself."""
    try:
        os.lstat(path)
    except (OSError, ValueError, TypeError):
        return False
    return True


def _keeps_nothing(real: str) -> bool:
    """Whether a path is a terminal or a device like /dev/null, or shared memory, which the workers of loaders need."""
    if real.startswith(("/dev/shm/", "/dev/pts/")):
        return True
    if real == os.devnull or real.lower() == "nul":
        return True
    if not real.startswith("/dev/"):
        return False
    try:
        return stat.S_ISCHR(Path(real).stat().st_mode)
    except OSError:
        return False


def _shown(path: Any) -> str:
    """A path as the user knows it: relative to the folder they work in, where it lies below."""
    name = os.fsdecode(path)
    try:
        return repr(name.removeprefix(f"{Path.cwd()}{os.sep}"))
    except OSError:  # the folder is gone
        return repr(name)
