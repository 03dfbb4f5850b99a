"""Files that are written whole or not at all: beside the target, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole(target: Path) -> Iterator[BinaryIO]:
    """An open file that becomes `target` when the block ends well, and nothing when it does not; OSError goes out."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=target.name[:100] + ".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())  # mkstemp makes private files; what is saved is an ordinary one
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
