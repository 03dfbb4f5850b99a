"""The local variables of a frame, read without leaving anything behind; CPython 3.11 to 3.13.

`frame.f_locals` of 3.11 and 3.12 fills a dict that stays with the frame and keeps the variables' values alive, and where
the user has called `locals()` it changes the user's dict. So there the slots of the frame are read from memory, each
in one C call under the interpreter's lock: PyFrameObject.f_frame at 24 bytes, _PyInterpreterFrame.localsplus at 72, seen in
3.11 and 3.12 (64 bit, no debug build). 3.13 has a proxy that keeps nothing (PEP 667).
"""

from __future__ import annotations

import ctypes
import opcode
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_F_FRAME, _LOCALSPLUS = 24, 72
_KNOWN = (
    sys.implementation.name == "cpython"
    and sys.version_info[:2] in ((3, 11), (3, 12))
    and ctypes.sizeof(ctypes.c_void_p) == 8
    and not hasattr(sys, "gettotalrefcount")
)
_FIRST = _LOCALSPLUS // 8
_OPTIMIZED = 1
_RETURNS = frozenset(number for name, number in opcode.opmap.items() if name.startswith("RETURN"))

can_read_locals = _KNOWN or sys.version_info >= (3, 13)
"""Whether the local variables of functions can be read in this interpreter."""
OWN_FILES = str(Path(__file__).parent.parent) + os.sep
"""How the files of memlab's code begin. A clone may itself be in a folder memlab, with the user's own files beside the package."""


def locals_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The local variables of a function's frame that are bound, as (name, value or the cell that holds it).

    None for code that has no such variables of its own (modules, classes), and none where the interpreter is unknown.
    """
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED:
        return
    if sys.version_info >= (3, 13):
        yield from list(frame.f_locals.items())
    elif _KNOWN and not _is_ending(frame, code):
        slots = ctypes.POINTER(ctypes.py_object).from_address(id(frame) + _F_FRAME)
        cells = (name for name in code.co_cellvars if name not in code.co_varnames)
        for number, name in enumerate([*code.co_varnames, *cells, *code.co_freevars]):
            try:
                yield name, slots[_FIRST + number]
            except ValueError:  # not bound
                continue


def _is_ending(frame: FrameType, code: CodeType) -> bool:
    """Whether the function has returned, and a finalizer runs while its variables are freed one by one."""
    at = frame.f_lasti
    return 0 <= at < len(code.co_code) and code.co_code[at] in _RETURNS


def is_shells(code: CodeType) -> bool:
    """Whether code is that of IPython's shell, which runs cells and calls magics: IPython/core/, seen in 9.18."""
    return "/IPython/core/" in code.co_filename.replace("\\", "/")
