"""The temporary folder of a job that keeps nothing, and the folders that processes which were killed have left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OURS = re.compile(r"memlab-(?:run|ranks|child)-(\d{1,10})-[a-z0-9_]{8}")
"""A folder of `memlab run`, a tracked cell that starts ranks, or a prediction; it has the id of the process that made it."""
OLD_S = 24 * 3600.0
"""A job outlives a parent that was killed, and its files may be wanted: what was written to within a day is left alone."""


def new_folder() -> Path:
    """A folder that `remove_leftovers` of a later process removes if this one is killed."""
    return Path(tempfile.mkdtemp(prefix=f"memlab-run-{os.getpid()}-"))


def remove_leftovers() -> None:
    """Remove the folders that processes which are gone have left, if nothing was written to them for a day."""
    if os.name != "posix":  # whose folders they are is not known there
        return
    with contextlib.suppress(OSError):
        for folder in list(_old_folders(Path(tempfile.gettempdir()))):
            shutil.rmtree(folder, ignore_errors=True)


def _old_folders(where: Path) -> Iterator[Path]:
    now_s = time.time()
    with os.scandir(where) as entries:
        for one in entries:
            ours = OURS.fullmatch(one.name)
            if ours is None or not one.is_dir(follow_symlinks=False) or _is_alive(int(ours[1])):
                continue
            with contextlib.suppress(OSError):  # of another user, or being removed
                if one.stat().st_uid == os.getuid() and now_s - _written_s(Path(one.path)) > OLD_S:
                    yield Path(one.path)


def _is_alive(pid: int) -> bool:
    import psutil  # only where there is such a folder

    return bool(psutil.pid_exists(pid))


def _written_s(folder: Path) -> float:
    """When something in it was last written to; a rank that still runs does so a few times a second."""
    return max(one.lstat().st_mtime for one in (folder, *folder.rglob("*")))
