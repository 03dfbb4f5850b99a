"""A file overlay: writing and deleting appear to work, but change nothing on disk.

Training code makes folders, writes checkpoints and removes old ones; an error at any of these would end a prediction early.
So Python's file functions see an overlay over the file system, which is discarded with the child. Each path that would
have changed is logged. Other writes (C and Rust code, programs) are refused by `sandbox`.

Limits: real folders are not renamed, and files above COPIED_BYTES are neither appended to nor renamed; those are refused.
A redirected file has its path in the overlay as `name`.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memlab.prediction.child.channel import REFUSED, Log

COPIED_BYTES = 1 << 30
_stat, _lstat, _listdir, _scandir = os.stat, os.lstat, os.listdir, os.scandir
_mkdir, _remove, _rmdir, _rename = os.mkdir, os.remove, os.rmdir, os.rename


def exists(path: Any) -> bool:
    """Whether a path exists on the disk itself."""
    try:
        _lstat(path)
    except (OSError, ValueError, TypeError):
        return False
    return True


class Overlay:
    """The overlay for the file functions of this process."""

    def __init__(self, scratch: Path, log: Log, is_free: Callable[[str], bool], shown: Callable[[Any], str]) -> None:
        self._layer = str(scratch / "layer")
        self._log, self._is_free, self._shown = log, is_free, shown
        self._gone: set[str] = set()
        self._asking = threading.local()
        _mkdir(self._layer)

    def install(self) -> None:
        """Patch this process's file functions to use the overlay; this cannot be undone."""
        real = io.open
        builtins.open = io.open = self._opening(real)
        for module in list(sys.modules.values()):  # IPython's shell keeps it as io_open, and cells get that one
            for name in ("open", "io_open"):
                if vars(module).get(name) is real:
                    setattr(module, name, io.open)
        os.open = self._opening_low(os.open)
        for name in ("stat", "lstat", "access", "chdir", "utime", "chmod", "readlink"):
            setattr(os, name, self._looking(getattr(os, name)))
        os.listdir, os.scandir = self._listing, self._scanning
        os.mkdir = self._plain(os.mkdir, self._make)
        for name in ("rmdir", "remove", "unlink"):
            setattr(os, name, self._plain(getattr(os, name), self._delete))
        os.rename, os.replace = self._moving(os.rename), self._moving(os.replace)

    def writing(self, path: Any, *, keeps: bool = False, creates: bool = True, exclusive: bool = False) -> Any:
        """The path to write to instead of this one; unchanged if it is not redirected."""
        full = self._full(path)
        if full is None:
            return path
        was_there = self._is_there(full)
        if exclusive and was_there:
            raise _error(errno.EEXIST, path)
        if self._is_folder(full):
            raise _error(errno.EISDIR, path)
        if (not was_there and not creates) or not self._is_folder(os.path.dirname(full)):  # noqa: PTH120
            raise _error(errno.ENOENT, path)
        if keeps and was_there and not self._copied(full):
            return path  # the audit hook refuses it
        over = self._place(full)
        self._gone.discard(full)
        self._note(f"writing {self._shown(path)}")
        return over

    def reading(self, path: Any) -> Any:
        """The path to read instead of this one."""
        full = self._full(path)
        if full is None:
            return path
        if exists(self._layer + full):
            return self._layer + full
        if self._is_gone(full):
            raise _error(errno.ENOENT, path)
        return path

    def _full(self, path: Any) -> str | None:
        """The absolute path; None for paths outside the overlay: descriptors, the scratch folder, devices."""
        if isinstance(path, int) or path is None:
            return None
        try:
            full = os.path.normpath(Path(os.fsdecode(path)).absolute())
        except (TypeError, ValueError, OSError):
            return None
        if getattr(self._asking, "now", False):  # the answer needs the functions that are replaced here
            return None
        self._asking.now = True
        try:
            return None if self._is_free(full) else full
        finally:
            self._asking.now = False

    def _is_gone(self, full: str) -> bool:
        return any(full == one or full.startswith(one + os.sep) for one in self._gone)

    def _is_there(self, full: str) -> bool:
        return exists(self._layer + full) or (exists(full) and not self._is_gone(full))

    def _is_folder(self, full: str) -> bool:
        return _is_folder(self._layer + full) or (_is_folder(full) and not self._is_gone(full))

    def _place(self, full: str) -> str:
        over = self._layer + full
        Path(over).parent.mkdir(parents=True, exist_ok=True)
        return over

    def _copied(self, full: str) -> bool:
        """Whether a file is in the overlay, where it can be changed: a real one is copied there if it is not too large."""
        if not exists(self._layer + full):
            if _stat(full).st_size > COPIED_BYTES:
                return False
            shutil.copyfile(full, self._place(full))
        return True

    def _note(self, what: str) -> None:
        self._log.write(REFUSED, what)

    # --- replacements of functions ------

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def open(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and set(mode) & set("wax+"):
                keeps = not set(mode) & set("wx")
                file = self.writing(file, keeps=keeps, creates="r" not in mode, exclusive="x" in mode)
            else:
                file = self.reading(file)
            return original(file, mode, *args, **kwargs)

        return open

    def _opening_low(self, original: Callable[..., int]) -> Callable[..., int]:
        def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and not flags & os.O_DIRECTORY
            if dir_fd is None and writes:
                keeps, creates = not flags & os.O_TRUNC, bool(flags & os.O_CREAT)
                exclusive = creates and bool(flags & os.O_EXCL)
                path = self.writing(path, keeps=keeps, creates=creates, exclusive=exclusive)
            elif dir_fd is None:
                path = self.reading(path)
            return original(path, flags, mode, dir_fd=dir_fd)

        return open

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".", *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if dir_fd is not None:
                return original(path, *args, dir_fd=dir_fd, **kwargs)
            return original(self.reading(path), *args, **kwargs)

        return look

    def _plain(self, original: Callable[..., None], instead: Callable[[Any, str], None]) -> Callable[..., None]:
        def act(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            full = self._full(path) if dir_fd is None else None
            if full is None:
                original(path, *args, dir_fd=dir_fd)
            else:
                instead(path, full)

        return act

    def _make(self, path: Any, full: str) -> None:
        if self._is_there(full):
            raise _error(errno.EEXIST, path)
        if not self._is_folder(os.path.dirname(full)):  # noqa: PTH120
            raise _error(errno.ENOENT, path)
        _mkdir(self._place(full))
        self._note(f"making the folder {self._shown(path)}")

    def _delete(self, path: Any, full: str) -> None:
        if not self._is_there(full):
            raise _error(errno.ENOENT, path)
        is_folder = self._is_folder(full)
        if is_folder and self._listing(path):
            raise _error(errno.ENOTEMPTY, path)
        if exists(self._layer + full):
            (_rmdir if is_folder else _remove)(self._layer + full)
        if exists(full):
            self._gone.add(full)
            self._note(f"deleting {self._shown(path)}")

    def _moving(self, original: Callable[..., None]) -> Callable[..., None]:
        def move(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            """Move within, into or out of the overlay; a real file is copied into it first."""
            old, new = self._full(src), self._full(dst)
            is_by_folder = src_dir_fd is not None or dst_dir_fd is not None
            if is_by_folder or (old is None and new is None):
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                return
            if old is not None:
                if not self._is_there(old):
                    raise _error(errno.ENOENT, src)
                if not exists(self._layer + old) and (_is_folder(old) or not self._copied(old)):
                    original(src, dst)  # the audit hook refuses it
            if new is not None and not self._is_folder(os.path.dirname(new)):  # noqa: PTH120
                raise _error(errno.ENOENT, dst)
            _rename(src if old is None else self._layer + old, dst if new is None else self._place(new))
            self._gone.discard(new or "")
            if old is not None and exists(old):
                self._gone.add(old)
            self._note(f"renaming {self._shown(src)} to {self._shown(dst)}")

        return move

    def _listing(self, path: Any = ".") -> list[Any]:
        if self._is_untouched(path):
            return _listdir(self.reading(path))
        return sorted(entry.name for entry in self._scanning(path))

    def _scanning(self, path: Any = ".") -> Any:
        if self._is_untouched(path):
            return _scandir(self.reading(path))
        full, entries = str(self._full(path)), list[Any]()
        over = self._layer + full
        if _is_folder(over):
            entries += _scandir(os.fsencode(over) if isinstance(path, bytes) else over)
        names = {entry.name for entry in entries}
        if _is_folder(full) and not self._is_gone(full):
            with _scandir(path) as real:
                others = [entry for entry in real if entry.name not in names]
            entries += [one for one in others if not self._is_gone(f"{full}{os.sep}{os.fsdecode(one.name)}")]
        return _Entries(entries)

    def _is_untouched(self, path: Any) -> bool:
        full = self._full(path)
        return full is None or not (self._gone or exists(self._layer + full))


class _Entries(contextlib.AbstractContextManager["_Entries"]):
    """What `os.scandir` gives: an iterator that can be closed; nothing is open."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *what: Any) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), path)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except (OSError, ValueError):
        return False
