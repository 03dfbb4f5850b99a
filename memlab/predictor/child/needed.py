"""Which names of a notebook a piece of code needs: those it reads, before it binds them itself.

Code is read, not run. Names in the text of a magic (`%time f(x)`) count as read; those made by `exec` or `globals()` are
not found.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Collection, Iterator
from types import CodeType

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL")
_WORD = re.compile(r"[^\W\d]\w*")
_BINDS = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def of_code(code: CodeType) -> Iterator[str]:
    """The global names that a function's code reads, and the code inside of it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from of_code(constant)


def of_cell(source: str, known: Collection[str]) -> list[str]:
    """The known names that a cell (as Python, after IPython's transformations) needs, in order."""
    bound: set[str] = set()
    needed: dict[str, None] = {}
    for statement in ast.parse(source).body:
        for name in _read_by(statement):
            if name in known and name not in bound:
                needed[name] = None
        if isinstance(statement, _BINDS):
            bound |= set(_bound_by(statement))
    return list(needed)


def _read_by(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Call) and "get_ipython()" in ast.unparse(node.func):
            yield from _in_text(node)


def _in_text(call: ast.Call) -> Iterator[str]:
    """The words in what a magic was given."""
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _WORD.findall(node.value)


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield (alias.asname or alias.name).partition(".")[0]
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]  # type: ignore[attr-defined]
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name):
                yield node.id
