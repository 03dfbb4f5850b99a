"""What IPython tells of the execution of cells: which one has ended, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def depth_of(infos: Sequence[Any], result: Any) -> int:
    """Where in a stack of cells that are being executed (IPython's infos) the one lies that gave this result.

    On some interrupts IPython makes a new info of the same text, and ipykernel has no result at all: then everything has
    ended. A result of no cell in the stack ends nothing (empty cells begin without a word).
    """
    if result is None:
        return 0
    for depth in reversed(range(len(infos))):
        if infos[depth] is result.info:
            return depth
    same = (d for d in reversed(range(len(infos))) if not result.success and infos[d].raw_cell == result.info.raw_cell)
    return next(same, len(infos))


def error_of(result: Any) -> BaseException | None:
    """The error with which a cell ended, None if it did not fail or nobody knows."""
    return None if result is None else result.error_in_exec or result.error_before_exec
