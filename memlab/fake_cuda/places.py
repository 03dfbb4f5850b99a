"""Which line of the user's program asks: the key of an assumption."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memlab.torch_internals.cell_code import cell_number, latest_number
from memlab.torch_internals.frames import OWN_FILES

_INNER = (OWN_FILES, str(Path(torch.__file__).parent) + os.sep, "<frozen ")
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
USERS, LIBRARYS, INNER = range(3)
"""Whose code it is: the user's, that of libraries, PyTorch's or memlab's."""


def owner(frame: FrameType) -> int:
    """Whose code a frame runs."""
    file = frame.f_code.co_filename
    if file == "<string>":  # `python -c`, or what Python has generated
        return USERS if frame.f_globals.get("__name__") == "__main__" else INNER
    return _owner(file)


@functools.cache
def _owner(file: str) -> int:
    if file.startswith(_INNER):
        return INNER
    is_library = "-packages" in file or (file.startswith(_STANDARD) and cell_number(file) is None)
    return LIBRARYS if is_library else USERS


def where(frame: Any = None) -> str:
    """The innermost line of the user's, or else of a library: "train.py:41", "cell:3"; "" if there is none.

    From this frame, or the caller's, outwards.
    """
    frame = frame or sys._getframe(1)
    nearest = ""
    while frame is not None:
        of = owner(frame)
        if of == USERS or (of == LIBRARYS and not nearest):
            file = frame.f_code.co_filename
            number = cell_number(file)  # the cell that is running is "cell", as its number changes when it runs again
            cell = "cell" if number in (0, latest_number()) else f"cell [{number}]"
            name = cell if number is not None else file.replace("\\", "/").rpartition("/")[2]
            nearest = f"{name}:{frame.f_lineno}"
            if of == USERS:
                break
        frame = frame.f_back
    return nearest


def key(what: str, frame: Any = None) -> str:
    """The key of an assumption: the line that asked, and what for, as in "train.py:41 nonzero"."""
    place = where(frame)
    return f"{place} {what}" if place else what
