"""Which code comes from the cells of a notebook: the names that IPython, ipykernel and marimo give it."""

from __future__ import annotations

import re
import sys


def cell_number(file: str) -> int | None:
    """The execution count of the cell that code with this file name comes from, 0 if it has none; None for other code.

    IPython names a cell's code after its text and keeps the names: shell.compile._filename_map, seen in IPython 8 to 9.18.
    """
    names = _numbers()
    if file in names:
        return int(names[file] or 0)
    is_cell = file.startswith("<ipython-input-") or _CELL_FILE.search(file) is not None
    return 0 if is_cell else None


def latest_number() -> int:
    """The execution count of the cell that began last, 0 if none has one."""
    return max((number or 0 for number in _numbers().values()), default=0)


def _numbers() -> dict[str, int | None]:
    module = sys.modules.get("IPython.core.interactiveshell")
    if module is None or not module.InteractiveShell.initialized():
        return {}
    return getattr(module.InteractiveShell.instance().compile, "_filename_map", {})


_CELL_FILE = re.compile(r"[\\/](ipykernel_\d+[\\/]\d+|__marimo__cell_\w+)\.py$")
"""Names of cells in a folder of temporary files that need not exist: ipykernel.compiler, and marimo 0.25's _ast.compiler."""
