"""Which code a track follows line by line: that of the cell or script, and the functions that `-f NAME` names.

Names are looked up without running any user code: no property, no `__getattr__`. A cell is compiled statement by
statement, so a function that it defines exists only as text when the cell begins.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from memlab.errors import MemlabError
from memlab.probes.line_marks import Lines, Watched
from memlab.torch_internals import cell_code

_NOT_THE_USERS = ("memlab", "IPython", "contextlib", "traitlets", "decorator")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MISSING = object()


def caller(frame: FrameType | None) -> FrameType:
    """The user's frame that called memlab."""
    here = frame
    while here is not None and str(here.f_globals.get("__name__", "")).split(".")[0] in _NOT_THE_USERS:
        here = here.f_back
    found = here or frame
    assert found is not None
    return found


def lines_at(frame: FrameType, functions: Sequence[Any] = ()) -> Lines:
    """A line tracker for the code of a frame, the notebook's cells or the script, and these functions."""
    codes = [code for each in functions for code in codes_of(each, frame.f_globals)]
    file = frame.f_code.co_filename

    def is_whole(name: str) -> bool:
        # Asked late: a script that is predicted becomes `__main__` after this.
        script = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
        return cell_code.cell_number(name) is not None or name == script

    here = [] if is_whole(file) else [frame.f_code]
    return Lines(Watched(is_whole, [*here, *codes]), lambda name: label_of(name, file), source_of)


def label_of(file: str, current: str = "") -> str:
    """The label of a file in listings: "cell" for the measured cell, "In[5]" for another, else its name.

    The statement of a line magic is "statement". The cells of marimo have no numbers.
    """
    number = cell_code.cell_number(file)
    if number is None:
        return PurePath(file).name or file
    if file == current:
        return "cell"
    unnumbered = "another cell" if "__marimo__" in file else "statement"
    return f"In[{number}]" if number else unnumbered


def source_of(file: str) -> list[str]:
    """The lines of a file as written; the magic of a tracked cell is kept as a comment."""
    lines = linecache.getlines(file)
    return [line.removeprefix("# ") if line.startswith("# %%memtrack") else line for line in lines]


# --- existing functions -----------------


def codes_of(function: Any, namespace: dict[str, Any]) -> list[CodeType]:
    """The code of a function, a method, or all methods of a class; given as an object or by its dotted name."""
    found = called = function
    if issubclass(type(function), str):
        first, *rest = function.split(".")
        found = namespace.get(first, _MISSING)
        for step in rest:
            found = _attribute(found, step)
        if found is _MISSING:
            why = "there is no such name here. Give the name of a function or class"
            raise MemlabError(f"cannot watch {function!r:.100}: {why}.")
    else:
        name = inspect.getattr_static(found, "__name__", None)
        called = name if type(name) is str else type(found).__name__
    if issubclass(type(found), ModuleType):
        raise MemlabError(f"cannot watch {called!r:.100}: it is a module. Name a function, method or class in it.")
    codes = list(_codes(found))
    if not codes:
        kind = f"of type {type(found).__name__}, without lines of Python"
        what = "not written in Python" if callable(found) else kind
        raise MemlabError(f"cannot watch {called!r:.100}: it is {what}. Name a function, method or class.")
    return codes


def _attribute(thing: Any, name: str) -> Any:
    """An attribute as it is stored, submodules of a module (`nn.Module`) too."""
    stored = inspect.getattr_static(thing, name, _MISSING)
    if stored is _MISSING:
        modules = inspect.getattr_static(thing, "_modules", None)
        return dict.get(modules, name, _MISSING) if type(modules) in (dict, OrderedDict) else _MISSING
    return stored


def _codes(thing: Any) -> Iterator[CodeType]:
    """The code objects behind one object; wrappers are skipped."""
    thing, torch = _unwrapped(thing), sys.modules.get("torch")
    kind = type(thing)  # never isinstance, which may call the object's __class__ property
    if kind is FunctionType:
        yield thing.__code__
    elif issubclass(kind, property):
        yield from (code for part in (thing.fget, thing.fset) if part is not None for code in _codes(part))
    elif issubclass(kind, type):
        members = type.__dict__["__dict__"].__get__(thing).values()
        yield from (code for one in members if not issubclass(type(one), type) for code in _codes(one))
    elif torch is not None and issubclass(kind, torch.nn.Module):
        yield from _codes(kind)


def _unwrapped(thing: Any) -> Any:
    """The function inside of methods, `functools.wraps`, caches and partials."""
    for _ in range(20):
        kind = type(thing)
        if issubclass(kind, staticmethod | classmethod | MethodType):
            inner = thing.__func__
        elif issubclass(kind, functools.partial):
            inner = functools.partial.__dict__["func"].__get__(thing)
        else:
            inner = inspect.getattr_static(thing, "__wrapped__", None) if not issubclass(kind, type) else None
        if inner is None:
            break
        thing = inner
    return thing


# --- functions that the cell will define ----------


def known_by_now(functions: Sequence[Any], frame: FrameType, code: ast.Module | None) -> Iterator[Any]:
    """The functions to look up; those that the frame's code will define are given as code objects.

    A cell is compiled statement by statement, so it exists only as text; but everything defined in it is watched.
    """
    file, names = frame.f_code.co_filename, frame.f_globals
    cell = code or ast.Module([], [])
    if code is None and cell_code.cell_number(file) is not None:
        with contextlib.suppress(SyntaxError):
            cell = ast.parse("".join(linecache.getlines(file)))
    for one in functions:
        if not isinstance(one, str):
            yield one
            continue
        written = list(_written_in(frame.f_code, one))
        for inner in written:  # `lines_at` expects functions
            yield FunctionType(inner, {}, closure=tuple(CellType() for _ in inner.co_freevars))
        first = one.split(".")[0]
        if (written and first not in names) or (first and _is_defined(one.split("."), cell)):
            continue
        if first in _bound_in(cell) - names.keys():
            why = "it gets its value only in this cell. Make it in a cell before"
            raise MemlabError(f"cannot watch {one!r:.100}: {why}; what is written in the notebook is watched anyway.")
        yield one


def _is_defined(steps: list[str], where: ast.AST) -> bool:
    """Whether code defines a function or class of this dotted name."""
    body = getattr(where, "body", [])
    inner = [one for one in body if isinstance(one, _DEFINITIONS) and one.name == steps[0]]
    return any(len(steps) == 1 or _is_defined(steps[1:], one) for one in inner)


def _bound_in(cell: ast.Module) -> set[str]:
    """The names that a cell binds, by assignments, imports, loops, definitions."""
    found = {one.name for one in cell.body if isinstance(one, _DEFINITIONS)}
    for one in ast.walk(cell):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, ast.alias):
            found.add((one.asname or one.name).split(".")[0])
    return found


def _written_in(code: CodeType, name: str) -> Iterator[CodeType]:
    """The code of a function, method or class inside other code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            called = inner.co_qualname.rpartition("<locals>.")[2]
            if called == name or called.startswith(f"{name}."):
                yield inner
            yield from _written_in(inner, name)
