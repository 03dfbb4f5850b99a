"""Which line of the user's program asks: the key of an assumption."""

from __future__ import annotations

import functools
import itertools
import os
import re
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
MOST_LINES = 2
"""Of libraries in a key: what reads is often a helper, which several lines call for values of their own."""
_KEY = re.compile(r"(.*?:\d+) ((?:\S+:\d+ )*)(.*)")


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
    users, libraries = _lines(frame or sys._getframe(1))
    return users or libraries[0]


def key(what: str, frame: Any = None) -> str:
    """The key of an assumption: the lines that asked, and what for, as in "train.py:41 rpn.py:271 nonzero".

    The user's line, then what it led to in libraries: the innermost line, after the line of the file that called this one.
    """
    users, libraries = _lines(frame or sys._getframe(1))
    return " ".join(one for one in (users, *libraries[:MOST_LINES][::-1], what) if one)


@functools.cache
def wider(key: str) -> tuple[str, ...]:
    """The keys that stand for this one and for others, with fewer of its lines: the narrowest first, then the innermost."""
    found = _KEY.fullmatch(key)
    if found is None:
        return ()
    outer, inner, what = found.groups()
    lines = [*inner.split()[::-1], outer]
    chosen = (one for count in range(len(lines) - 1, 0, -1) for one in itertools.combinations(lines, count))
    return tuple(" ".join((*one[::-1], what)) for one in chosen)


def _lines(frame: Any) -> tuple[str, list[str]]:
    """The user's line, and the innermost line of each file of libraries that it led to, innermost first.

    Python's own library counts only where there is nothing else.
    """
    libraries: list[str] = []
    last = standard = ""
    while frame is not None:
        of, file = owner(frame), frame.f_code.co_filename
        if of == USERS:
            return _line(frame), libraries
        if of == LIBRARYS and "-packages" not in file:
            standard = standard or _line(frame)
        elif of == LIBRARYS and file != last:
            libraries.append(_line(frame))
            last = file
        frame = frame.f_back
    return "", libraries or [standard]


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    number = cell_number(file)  # the cell that is running is "cell", as its number changes when it runs again
    cell = "cell" if number in (0, latest_number()) else f"cell [{number}]"
    name = cell if number is not None else file.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{frame.f_lineno}"
