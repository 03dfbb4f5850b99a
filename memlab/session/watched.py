"""The functions that `-f NAME` names where the cell that names them is still going to define them.

A cell is compiled statement by statement, so of what it defines there is only its text when it begins.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from memlab.errors import MemlabError
from memlab.seams import cells


def known_by_now(functions: Sequence[Any], frame: FrameType, code: ast.Module | None) -> Iterator[Any]:
    """The functions to look up; those that the code of the frame is still going to define are there as their code.

    A cell is compiled statement by statement, so of one there is only the text; but whatever is defined in it is watched.
    """
    file = frame.f_code.co_filename
    cell = code or (_parsed(file) if cells.cell_number(file) is not None else ast.Module([], []))
    for one in functions:
        written = list(_written_in(frame.f_code, one)) if isinstance(one, str) else []
        for inner in written:  # what `lines_at` takes are functions
            yield FunctionType(inner, {}, closure=tuple(CellType() for _ in inner.co_freevars))
        first = one.split(".")[0] if isinstance(one, str) else ""
        if (written and first not in frame.f_globals) or (first and _is_defined(one.split("."), cell)):
            continue
        if first in _bound_in(cell) - frame.f_globals.keys():
            raise MemlabError(
                f"cannot watch {one!r:.100}: it gets its value only in this cell. Make it in a cell before; what is written in "
                "the notebook is watched anyway."
            )
        yield one


def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _is_defined(steps: list[str], where: ast.AST) -> bool:
    """Whether there is a definition of a function or class under this dotted name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inner = [one for one in getattr(where, "body", []) if isinstance(one, kinds) and one.name == steps[0]]
    return any(len(steps) == 1 or _is_defined(steps[1:], one) for one in inner)


def _bound_in(cell: ast.Module) -> set[str]:
    """The names that a cell gives a value, by assignments, imports, loops, definitions."""
    found = {one.id for one in ast.walk(cell) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    found |= {one.name for one in cell.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return found | {(a.asname or a.name).split(".")[0] for a in ast.walk(cell) if isinstance(a, ast.alias)}


def _written_in(code: CodeType, name: str) -> Iterator[CodeType]:
    """The code of a function, method or class that is written inside of other code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            called = inner.co_qualname.rpartition("<locals>.")[2]
            if called == name or called.startswith(f"{name}."):
                yield inner
            yield from _written_in(inner, name)
