"""What the work writes and deletes, in a folder of its own: it goes on as if that had happened, and nothing has.

Code that trains makes folders, writes checkpoints and removes old ones; an error at each of them would end a prediction
early. So Python's functions for files (`open`, `os.mkdir`, `os.remove` ...) see a layer over the file system, which is gone
when the child ends. Each path that would have changed is noted. What writes by other ways (C and Rust code, programs,
descriptors of folders) is refused by `fence`.

Limits: real folders are not renamed, and files above COPIED_BYTES are neither appended to nor renamed; those are refused.
A file that was diverted has the path of the layer as its `name`.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memlab.predictor.child.log import Log

COPIED_BYTES = 1 << 30
LAYER = "layer"
_stat, _lstat, _listdir, _scandir = os.stat, os.lstat, os.listdir, os.scandir
_mkdir, _remove, _rmdir, _rename = os.mkdir, os.remove, os.rmdir, os.rename


class Overlay:
    """A layer of files over the real ones, for the functions of this process."""

    def __init__(self, scratch: Path, log: Log, is_free: Callable[[str], bool], shown: Callable[[Any], str]) -> None:
        self._layer = str(scratch / LAYER)
        self._log, self._is_free, self._shown = log, is_free, shown
        self._gone: set[str] = set()
        self._asking = threading.local()
        _mkdir(self._layer)

    def install(self) -> None:
        """Put this process's functions for files over the layer; there is no way back."""
        real = io.open
        builtins.open = io.open = self._opening(real)
        for module in list(sys.modules.values()):  # IPython's shell keeps it as io_open, and cells get that one
            for name in ("open", "io_open"):
                if vars(module).get(name) is real:
                    setattr(module, name, io.open)
        os.open = self._opening_low(os.open)
        for name in ("stat", "lstat", "access", "listdir", "scandir", "chdir", "utime", "chmod", "readlink"):
            setattr(os, name, self._looking(getattr(os, name)))
        os.listdir, os.scandir = self._listing, self._scanning
        os.mkdir = self._plain(os.mkdir, self._make)
        os.rmdir = self._plain(os.rmdir, self._delete)
        os.remove = self._plain(os.remove, self._delete)
        os.unlink = self._plain(os.unlink, self._delete)
        os.rename = self._moving(os.rename)
        os.replace = self._moving(os.replace)

    def writing(self, path: Any, *, keeps: bool = False, creates: bool = True, exclusive: bool = False) -> Any:
        """The path at which to write instead of this one; the same where nothing has to be diverted."""
        full = self._full(path)
        if full is None:
            return path
        over = self._layer + full
        was_there = self._is_there(full)
        if exclusive and was_there:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if self._is_folder(full):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if (not was_there and not creates) or not self._is_folder(_above(full)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not _exists(over):
            if keeps and was_there and not self._copy(full):
                return path  # the fence refuses it
            self._make_parents(full)
        self._gone.discard(full)
        self._log.refused(f"writing {self._shown(path)}")
        return over

    def reading(self, path: Any) -> Any:
        """The path at which to look instead of this one."""
        full = self._full(path)
        if full is None:
            return path
        if _exists(self._layer + full):
            return self._layer + full
        if self._is_gone(full):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path

    def _full(self, path: Any) -> str | None:
        """The absolute path, None for what the layer does not concern: descriptors, the scratch folder, devices."""
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
        return bool(self._gone) and any(full == one or full.startswith(one + os.sep) for one in self._gone)

    def _is_there(self, full: str) -> bool:
        return _exists(self._layer + full) or (_exists(full) and not self._is_gone(full))

    def _is_folder(self, full: str) -> bool:
        return _is_folder(self._layer + full) or (_is_folder(full) and not self._is_gone(full))

    def _make_parents(self, full: str) -> None:
        """The folders above a path in the layer; they are real ones, or there already."""
        place = self._layer
        for part in Path(full).parent.parts[1:]:
            place = f"{place}{os.sep}{part}"
            if not _is_folder(place):
                _mkdir(place)

    def _copy(self, full: str) -> bool:
        """Copy a real file into the layer, where it can be changed."""
        if _stat(full).st_size > COPIED_BYTES:
            return False
        self._make_parents(full)
        shutil.copyfile(full, self._layer + full)
        return True

    # --- what stands for the functions ---

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
            if (
                dir_fd is None
                and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                and not flags & os.O_DIRECTORY
            ):
                keeps, creates = not flags & os.O_TRUNC, bool(flags & os.O_CREAT)
                path = self.writing(path, keeps=keeps, creates=creates, exclusive=creates and bool(flags & os.O_EXCL))
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
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not self._is_folder(_above(full)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._make_parents(full)
        _mkdir(self._layer + full)
        self._log.refused(f"making the folder {self._shown(path)}")

    def _delete(self, path: Any, full: str) -> None:
        if not self._is_there(full):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        is_folder = self._is_folder(full)
        if is_folder and self._listing(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if _exists(self._layer + full):
            (_rmdir if is_folder else _remove)(self._layer + full)
        if _exists(full):
            self._gone.add(full)
            self._log.refused(f"deleting {self._shown(path)}")

    def _moving(self, original: Callable[..., None]) -> Callable[..., None]:
        def move(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            old, new = self._full(src), self._full(dst)
            is_by_folder = src_dir_fd is not None or dst_dir_fd is not None
            if is_by_folder or (old is None and new is None):
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            else:
                self._move(original, (src, old), (dst, new))

        return move

    def _move(self, original: Callable[..., None], old: tuple[Any, str | None], new: tuple[Any, str | None]) -> None:
        """Move within the layer, or into it or out of it; a real file is copied into it first."""
        (src, old_full), (dst, new_full) = old, new
        source = src
        if old_full is not None:
            if not self._is_there(old_full):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src)
            source = self._layer + old_full
            if not _exists(source) and (_is_folder(old_full) or not self._copy(old_full)):
                original(src, dst)  # the fence refuses it
        target = dst
        if new_full is not None:
            if not self._is_folder(_above(new_full)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), dst)
            self._make_parents(new_full)
            target = self._layer + new_full
            self._gone.discard(new_full)
        _rename(source, target)
        if old_full is not None and _exists(old_full):
            self._gone.add(old_full)
        self._log.refused(f"renaming {self._shown(src)} to {self._shown(dst)}")

    def _listing(self, path: Any = ".") -> list[Any]:
        full = self._full(path)
        if full is None or not (self._gone or _exists(self._layer + full)):
            return _listdir(self.reading(path))
        real = _listdir(full) if _is_folder(full) and not self._is_gone(full) else []
        names = {name for name in real if not self._is_gone(f"{full}{os.sep}{name}")}
        if _is_folder(self._layer + full):
            names |= set(_listdir(self._layer + full))
        return [os.fsencode(name) for name in sorted(names)] if isinstance(path, bytes) else sorted(names)

    def _scanning(self, path: Any = ".") -> Any:
        full = self._full(path)
        if full is None or not (self._gone or _exists(self._layer + full)):
            return _scandir(self.reading(path))
        return _Entries(self._entries(path, full))

    def _entries(self, path: Any, full: str) -> Iterator[Any]:
        over = self._layer + full
        ours = list(_scandir(over)) if _is_folder(over) else []
        names = {entry.name for entry in ours}
        if _is_folder(full) and not self._is_gone(full):
            with _scandir(path) as real:
                yield from (e for e in real if e.name not in names and not self._is_gone(f"{full}{os.sep}{e.name}"))
        yield from ours


class _Entries:
    """What `os.scandir` gives: an iterator that can be closed."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *what: Any) -> None:
        pass

    def close(self) -> None:
        """Nothing is open."""


def _above(full: str) -> str:
    return str(Path(full).parent)


def _exists(path: str) -> bool:
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _is_folder(path: str) -> bool:
    try:
        return bool(_stat(path).st_mode & 0o170000 == 0o040000)
    except (OSError, ValueError):
        return False
