"""The notebook's names in a cell: which it reads, and which it makes anew before it reads them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from itertools import count
from types import CodeType, FunctionType
from typing import Any

_CALLED = re.compile(r"get_ipython\(\).*")
_BY_TEXT = frozenset({"globals", "locals", "vars", "dir", "eval", "exec", "get_ipython"})
"""What reads names that do not stand in the code."""


def parsed(text: str) -> ast.Module:
    """The text without magics, `!` and `?`, its lines where they were; what cannot be read is empty."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        pass
    try:
        return ast.parse(_without_magics(text))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _without_magics(text: str) -> str:
    """The text with None in the place of each of them; IPython knows where a line begins, and where an operator is meant."""
    kind = getattr(sys.modules.get("IPython.core.inputtransformer2"), "TransformerManager", None)
    if kind is None:  # only a notebook has magics
        return text
    manager, lines = kind(), [f"{line}\n" for line in text.split("\n")]
    while True:
        is_changed, found = manager.do_one_token_transform(lines)
        if not is_changed:
            return "".join(lines)
        row = next(row for row, (old, new) in enumerate(zip(lines, found, strict=False)) if old != new)
        found[row] = _CALLED.sub("None", found[row])
        lines = [*found[: row + 1], *["\n"] * (len(lines) - len(found)), *found[row + 1 :]]


def names_read(text: str, names: Mapping[str, Any]) -> list[str]:
    """The notebook's names that a cell reads, itself or in functions of the notebook, before it assigns them."""
    tree = parsed(text)
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    waiting = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    read: dict[str, None] = {}
    while waiting:
        name = waiting.pop(0)
        if name in read or name in assigned or name not in names:
            continue
        read[name] = None
        value = names[name]
        if type(value) is FunctionType and value.__globals__ is names:
            waiting += _globals_of(value.__code__)
    return list(read)


def names_made_anew(text: str, names: Mapping[str, Any]) -> list[str]:
    """The notebook's names that a cell makes anew before anything in it can read them, in their order.

    What they hold when the cell begins is of no use to it. Functions and classes of the notebook that the cell names could
    read any of their globals; a name that is made in a block (a loop may run not once) is read in that block alone.
    """
    order = _Order()
    order.visit(parsed(text))
    if order.made.keys() & _BY_TEXT or "import *" in text:
        return []
    made = [name for name, block in order.made.items() if block is not None and name in names]
    read, waiting = set[str](), [name for name in order.made if name not in made]
    while waiting:
        if (name := waiting.pop()) in read:
            continue
        read.add(name)
        value = names.get(name)
        # No isinstance and no getattr on what is the user's: they run properties.
        kind = value if issubclass(type(value), type) else type(value)
        scopes = (type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind))
        methods = (one for scope in scopes if scope.get("__module__") == "__main__" for one in scope.values())
        for one in (value, *methods):
            function = one.__func__ if type(one) in (staticmethod, classmethod) else one
            if type(function) is FunctionType and function.__globals__ is names:
                waiting += _globals_of(function.__code__)
    return [name for name in made if name not in read]


def _globals_of(code: CodeType) -> list[str]:
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [*code.co_names, *(name for one in inside for name in _globals_of(one))]


_Block = tuple[int, ...]


class _Order(ast.NodeVisitor):
    """Names in the order in which they are evaluated: the block in which each is made, None if it may have been read before."""

    def __init__(self) -> None:
        self.made: dict[str, _Block | None] = {}
        self._block: _Block = ()
        self._numbers = count()
        self._is_inner = False

    def _in_order(self, *parts: Any) -> None:
        for one in parts:
            for node in one if isinstance(one, list) else [one]:
                if node is not None:
                    self.visit(node)

    def _in_block(self, *parts: Any) -> None:
        outer, self._block = self._block, (*self._block, next(self._numbers))
        self._in_order(*parts)
        self._block = outer

    def _read(self, name: str) -> None:
        block = self.made.setdefault(name, None)
        if block is not None and self._block[: len(block)] != block:
            self.made[name] = None

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            self._read(node.id)
        elif not self._is_inner:
            self.made.setdefault(node.id, self._block)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._in_order(node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._in_order(node.annotation, node.value, *[node.target] * (node.value is not None))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self._in_order(node.value, node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._in_order(node.value)
        self._in_block(node.target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._in_order(node.iter)
        self._in_block(node.target, node.body)
        self._in_block(node.orelse)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        self._in_order(*(part for one in node.items for part in (one.context_expr, one.optional_vars)))
        self._in_block(node.body)

    def _visit_parts(self, node: ast.AST) -> None:
        """Each list of statements is a block, as it may not run."""
        for _, part in ast.iter_fields(node):
            if isinstance(part, list) and part and isinstance(part[0], ast.stmt):
                self._in_block(part)
            elif isinstance(part, list | ast.AST):
                self._in_order(part)

    def _visit_scope(self, node: ast.AST) -> None:
        """What has names of its own: whatever it reads could be the notebook's."""
        outer, self._is_inner = self._is_inner, True
        self.generic_visit(node)
        self._is_inner = outer

    def visit_Global(self, node: ast.Global) -> None:
        self.made.update(dict.fromkeys(node.names))

    visit_AsyncFor, visit_AsyncWith = visit_For, visit_With
    visit_If = visit_While = visit_Try = visit_TryStar = visit_ExceptHandler = visit_Match = visit_match_case = (
        _visit_parts
    )
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _visit_scope
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_scope
