"""Whether how long a program runs depends on a value that it reads, found in the source of the functions that are running.

From the expression that reads, the value is followed through assignments, methods that take it (`stopper.step(loss)`),
branches (`if loss < best: bad = 0`), and what functions return or keep in `self`, up to the condition of a `while`, to
`range(...)`, or to an `if` that leaves a loop. A number of elements (of `nonzero`, `x[mask]`) is followed as lengths and shapes.

Checks for inf and nan do not count, nor do errors: they end a program that fails. Limits: values kept in globals and in
objects of libraries are not followed; there, only what is named after stopping (`EarlyStoppingCallback`) is found.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import linecache
import opcode
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from memlab.fake_cuda.places import INNER, USERS, owner
from memlab.torch_internals.frames import OWN_FILES, locals_of


class Flow(NamedTuple):
    """What leaves a function: its result is the value, or has its length; and attributes of `self` that have it."""

    value: bool = False
    size: bool = False
    attributes: frozenset[str] = frozenset()


NOTHING = Flow()
_STOPPERS = re.compile(r"early_?stop|stopp(ing|er)|patience", re.IGNORECASE)
_ENDINGS = re.compile(r"^\w*(stop|exit|interrupt)", re.IGNORECASE)
_EXITS = frozenset({"exit", "_exit", "quit"})
"""Names of classes of things that end training early, of errors that end a loop, and of functions that end the program."""
_RANGES = frozenset({"range", "trange", "islice", "repeat"})
_CHECKS = frozenset({"isnan", "isinf", "isfinite"})
_NO_VALUES = _CHECKS | {"len", "isinstance", "type", "id", "shape", "dtype", "device", "ndim"}
_LENGTHS = frozenset({"size", "numel", "shape"})
_SAME_LENGTH = frozenset({
    "len", "range", "enumerate", "zip", "min", "max", "int", "list", "tuple", "reversed", "sorted", "trange", "tqdm",
    "split", "chunk", "unbind", "tolist", "cpu", "cuda", "to", "squeeze", "flatten", "long", "unique", "nonzero", "item",
}) | _LENGTHS  # fmt: skip
"""Calls whose result has the length of what they are given, or is that length."""
_STATELESS = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
"""Globals that keep no values."""
_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def depends(is_size: bool, count: int) -> bool:
    """Whether the length of the program depends on the value that is being read, for the `count`th time by this line.

    Without source, what is read again is taken for the condition of a loop.
    """
    frame: Any = sys._getframe(1)
    flow = Flow(not is_size, is_size)
    while frame is not None and (count == 1 or flow != NOTHING):
        of = owner(frame)
        if of != INNER:
            if count == 1 and _stops_early(frame):
                return True
            if flow != NOTHING:
                names = (name for name in frame.f_code.co_names if isinstance(frame.f_globals.get(name), _STATELESS))
                found = _followed(frame.f_code, frame.f_lasti, flow, frozenset(names))
                if found is None:
                    return count > 1
                ends, flow = found
                if ends:
                    return True
                if of != USERS:
                    flow = flow._replace(attributes=frozenset())
        frame = frame.f_back
    return False


def without_error() -> bool | None:
    """What the condition that is being read must be for the program to go on; None where it guards neither `raise` nor `assert`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    return None if frame is None else _guarded(frame.f_code, frame.f_lasti)


@functools.cache
def _guarded(code: Any, at: int) -> bool | None:
    tree, seed = _read_at(code, at)
    if tree is None or seed is None:
        return None
    is_itself = isinstance(seed, ast.Call) and _called(seed) in ("item", "bool")
    while isinstance(seed, ast.UnaryOp) and isinstance(seed.op, ast.Not):
        seed = seed.operand
    for node in ast.walk(tree):
        last = node.body[-1] if isinstance(node, ast.If) else None
        ends = isinstance(last, ast.Raise) and last.exc is not None and not _ENDINGS.search(ast.unparse(last.exc))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and ends):
            parts = dict(_parts(node.test, isinstance(node, ast.Assert)))
            if seed in parts:  # of several, Python 3.11 does not tell which is read, unless a call reads
                return parts[seed] if is_itself or len(set(parts.values())) == 1 else None
    return None


def _parts(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.AST, bool]]:
    """The parts of a condition, and what each must be for it to be as `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for one in test.values:
            yield from _parts(one, wanted)
    else:
        yield test, wanted


def _stops_early(frame: Any) -> bool:
    """Whether it is a method of something that stops training early, or of a trainer that has such a callback."""
    name, one = next(locals_of(frame), ("", None))
    if name != "self":
        return False
    one = one.cell_contents if isinstance(one, types.CellType) else one
    handler = getattr(one, "__dict__", {}).get("callback_handler")
    callbacks = getattr(handler, "__dict__", {}).get("callbacks", ())
    return any(_STOPPERS.search(type(each).__name__) for each in (one, *callbacks))


@functools.cache
def _followed(code: Any, at: int, flow: Flow, stateless: frozenset[str]) -> tuple[bool, Flow] | None:
    """Follow what an instruction gets in its function: does it end a loop, and what leaves; None without source."""
    if code.co_flags & inspect.CO_OPTIMIZED and code.co_name.startswith("<") and code.co_name != "<lambda>":
        return False, flow._replace(attributes=frozenset())  # a comprehension: a result
    tree, seed = _read_at(code, at)
    if tree is None or seed is None:
        return None
    if code.co_name == "<lambda>":
        inside = [one for one in ast.walk(tree) if isinstance(one, ast.Lambda) and seed in ast.walk(one.body)]
        tree = inside[-1] if inside else tree
    is_next = opcode.opname[code.co_code[at]] == "FOR_ITER"
    return _Values(tree, seed, flow, stateless, is_next).found()


def _read_at(code: Any, at: int) -> tuple[ast.AST | None, ast.AST | None]:
    """The tree of a function, and the expression of one of its instructions."""
    tree = _parsed(code)
    line, end_line, column, end_column = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    if tree is None or line is None or end_line is None or column is None or end_column is None:
        return tree, None
    return tree, _expression(tree, (line, column), (end_line, end_column))


def _parsed(code: Any) -> ast.AST | None:
    """The tree of a function, or of the module, with its lines numbered as in the file."""
    lines, first = linecache.getlines(code.co_filename), 1
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    try:
        if is_function:
            first = code.co_firstlineno
            lines = inspect.getblock(lines[first - 1 :])
        is_inner = lines[0][:1].isspace()
        tree = ast.parse("".join(["if 1:\n"] * is_inner + lines))
    except (SyntaxError, ValueError, IndexError):
        return None
    ast.increment_lineno(tree, first - 1 - is_inner)
    found: Any = tree.body[0] if is_function else tree
    return found.body[0] if is_function and is_inner else found


def _expression(tree: ast.AST, begin: tuple[int, int], end: tuple[int, int]) -> ast.AST | None:
    """The smallest expression that covers these characters; of a whole `if` or `while`, as 3.11 says, the last of its condition."""
    found = None
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.If | ast.While | ast.Assert):
            first, last = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            is_here = (first, last) == (begin, end) if isinstance(node, ast.stmt) else first <= begin and end <= last
            found = node if is_here else found  # `walk` comes to inner ones later
    test = found.test if isinstance(found, ast.If | ast.While | ast.Assert) else found
    return test.values[-1] if isinstance(test, ast.BoolOp) and test is not found else test


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node, but not what is in functions and classes that it defines."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _nodes(child)


def _path(node: ast.AST) -> str:
    """`self.best` of a name with attributes; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _path(node.value)):
        return f"{before}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return "self"
    return ""


def _container(node: ast.AST) -> ast.AST:
    """`history` of `history["loss"][0]`."""
    while isinstance(node, ast.Starred | ast.Subscript):
        node = node.value
    return node


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


class _Values:
    """Which names of one function have the value, and which its length."""

    def __init__(self, tree: ast.AST, seed: ast.AST, flow: Flow, stateless: frozenset[str], is_next: bool) -> None:
        if any(isinstance(one, ast.Call) and _called(one) in _CHECKS for one in ast.walk(seed)):
            flow = flow._replace(value=False)
        self.tree, self.seed, self.flow = tree, None if is_next else seed, flow
        self._stateless = stateless | vars(builtins).keys()
        self.values, self.sizes = set[str](), set[str]()
        if is_next:  # a generator has given the next value
            for node in ast.walk(tree):
                if isinstance(node, ast.For | ast.AsyncFor) and node.iter is seed:
                    self._assign(node.target, flow.value, flow.size)
        called = seed.func if isinstance(seed, ast.Call) else seed
        receiver = called.value if isinstance(called, ast.Attribute) else called if called is not seed else None
        if receiver is not None and (path := _path(receiver)):
            self.values |= {f"{path}.{name}" for name in flow.attributes}

    def found(self) -> tuple[bool, Flow]:
        """Whether a loop of this function ends by it, and what leaves the function."""
        before = -1
        while before != len(self.values) + len(self.sizes):
            before = len(self.values) + len(self.sizes)
            for node in _nodes(self.tree):
                self._step(node)
        kept = frozenset(path.split(".")[1] for path in self.values if path.startswith("self."))
        results = [
            node.value
            for node in _nodes(self.tree)
            if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value
        ]
        results += [self.tree.body] if isinstance(self.tree, ast.Lambda) else []
        is_value = any(map(self.has_value, results)) or any(map(self._returns, _nodes(self.tree)))
        return any(map(self._ends, _nodes(self.tree))), Flow(is_value, any(map(self.has_size, results)), kept)

    def _step(self, node: ast.AST) -> None:
        """One statement or expression: what it assigns, or hands to an object."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, self.has_value(value), self.has_size(value))
            case ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                self._assign(node.target, self.has_value(node.value), self.has_size(node.value))
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._assign(node.target, self.has_value(node.iter), False)
            case ast.Call(func=func) if any(map(self.has_value, _arguments(node))):
                path = _path(_container(func.value)) if isinstance(func, ast.Attribute) else _path(func)
                if path not in ("", "self", "cls") and path.partition(".")[0] not in self._stateless:
                    self.values.add(path)
                if isinstance(func, ast.Attribute) and path == "self":  # `self.stopper(loss)`
                    self.values.add(_path(func))
            case ast.If() | ast.While() if self._decides(node.test):
                for inner in _nodes(node):
                    if isinstance(inner, ast.Assign):
                        for target in inner.targets:
                            self._assign(target, True, False)
                    elif isinstance(inner, ast.AugAssign):
                        self._assign(inner.target, True, False)

    def _assign(self, target: ast.AST, is_value: bool, is_size: bool) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._assign(one, is_value, is_size)
            return
        path = _path(_container(target))
        self.values |= {path} if is_value and path else set()
        self.sizes |= {path} if is_size and path == _path(target) else set()

    def has_value(self, node: ast.AST) -> bool:
        """Whether an expression depends on the value."""
        if node is self.seed:
            return self.flow.value
        if isinstance(node, _SCOPES):
            return False
        if isinstance(node, ast.Name | ast.Attribute) and (path := _path(node)):
            parts = path.split(".")
            if parts[-1] in _NO_VALUES:
                return False
            if any(".".join(parts[:length]) in self.values for length in range(1, len(parts) + 1)):
                return True
        if isinstance(node, ast.Call):
            if _called(node) in _NO_VALUES:
                return False
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return any(map(self.has_value, [*inner, *_arguments(node)]))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return False
        return any(map(self.has_value, ast.iter_child_nodes(node)))

    def has_size(self, node: ast.AST) -> bool:
        """Whether an expression is a length that depends on the value, or has one."""
        if node is self.seed:
            return self.flow.size
        if isinstance(node, ast.Name | ast.Attribute) and _path(node) in self.sizes:
            return True
        match node:
            case ast.Attribute(value=value, attr=name):
                return name in _LENGTHS and self.has_size(value)
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self.has_size(value)
            case ast.Call():
                inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                return _called(node) in _SAME_LENGTH and any(map(self.has_size, [*inner, *_arguments(node)]))
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return False
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp() | ast.NamedExpr():
                return any(map(self.has_size, ast.iter_child_nodes(node)))
        if isinstance(node, _COMPREHENSIONS):
            return any(self.has_size(one.iter) for one in node.generators)
        return False

    def _decides(self, test: ast.AST) -> bool:
        return self.has_value(test) or self.has_size(test)

    def _returns(self, node: ast.AST) -> bool:
        """Whether which result it gives is decided by the value."""
        decides = isinstance(node, ast.If) and self._decides(node.test)
        return decides and any(isinstance(one, ast.Return) for one in _nodes(node))

    def _ends(self, node: ast.AST) -> bool:
        """Whether a loop's length depends on the value."""
        if isinstance(node, ast.While) and self._decides(node.test):
            return True
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            iterated = (node.iter, *_nodes(node.iter))
            calls = [one for one in iterated if isinstance(one, ast.Call) and _called(one) in _RANGES]
            is_read = self.flow.value and self.seed in calls  # `range(tensor)` reads it itself
            if (
                is_read
                or self.has_size(node.iter)
                or any(self.has_value(one) for call in calls for one in _arguments(call))
            ):
                return True
        if isinstance(node, _LOOPS):
            inside = [one for one in _nodes(node) if isinstance(one, ast.If) and self._decides(one.test)]
            return any(_leaves(one) for one in inside)
        return False


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(one.value for one in call.keywords)]


def _leaves(branch: ast.If) -> bool:
    """Whether a branch leaves the loop around it: by break or return, or as what it raises or calls says."""
    inner = {one for loop in _nodes(branch) if isinstance(loop, _LOOPS) for one in _nodes(loop)}
    for node in _nodes(branch):
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and node not in inner):
            return True
        if isinstance(node, ast.Call) and _called(node) in _EXITS:
            return True
        if isinstance(node, ast.Raise) and node.exc is not None and _ENDINGS.search(ast.unparse(node.exc)):
            return True
    return False
