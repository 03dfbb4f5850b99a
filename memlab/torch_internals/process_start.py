"""The function in which every process begins that torch.multiprocessing starts; seen in 2.12 and 2.13.

`spawn`, `start_processes`, accelerate's launchers and torch elastic all go through `_wrap` of the module
torch.multiprocessing.spawn (the package's attribute of that name is the function). It gets (function, index, arguments, file
for an error), and leaves by `sys.exit(1)` if the function raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MODULE, _ENTRY = "torch.multiprocessing.spawn", "_wrap"
_theirs: Callable[..., Any] | None = None


def entry() -> Callable[..., Any]:
    """PyTorch's own function, also where ours is in its place: here, and in a forked process."""
    found: Callable[..., Any] = vars(sys.modules[_MODULE])[_ENTRY]
    return _theirs or found


def leave() -> Callable[..., Any]:
    """In a new process: PyTorch's own function, which processes that this one starts begin in again."""
    global _theirs
    theirs = entry()
    setattr(sys.modules[_MODULE], _ENTRY, theirs)
    _theirs = None
    return theirs


def replace_entry(ours: Callable[..., Any]) -> bool:
    """Let processes that are started from now on begin in `ours`, which can be pickled; False if this version has none."""
    global _theirs
    module = vars(sys.modules.get(_MODULE, object))
    if _theirs is not None or not callable(module.get(_ENTRY)):
        return False
    _theirs = module[_ENTRY]
    setattr(sys.modules[_MODULE], _ENTRY, ours)
    return True


def restore_entry(ours: Callable[..., Any]) -> None:
    """Take `replace_entry` back, unless somebody has wrapped ours meanwhile."""
    global _theirs
    if vars(sys.modules[_MODULE])[_ENTRY] is ours:
        setattr(sys.modules[_MODULE], _ENTRY, _theirs)
    _theirs = None
