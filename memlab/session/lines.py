"""Line listings: which code a track watches, and `run.lines()`, the value that shows what each line took.

Names of functions are looked up without running anything of the user's: no property, no `__getattr__`.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from memlab.analysis.lines import LineRow, LineTable
from memlab.analysis.lines import lines as lines_of
from memlab.errors import MemlabError
from memlab.probes.lines import Lines, Watched
from memlab.seams import cells
from memlab.views import lines as views

if TYPE_CHECKING:
    from memlab.session.run import Run

_NOT_THE_USERS = ("memlab", "IPython", "contextlib", "traitlets", "decorator")


# --- what is watched --------------------------------------------------------------------------------------------------


def caller(frame: FrameType | None) -> FrameType:
    """The user's frame that a call of ours came from."""
    here = frame
    while here is not None and str(here.f_globals.get("__name__", "")).split(".")[0] in _NOT_THE_USERS:
        here = here.f_back
    found = here or frame
    assert found is not None
    return found


def lines_at(frame: FrameType, functions: Sequence[Any] = ()) -> Lines:
    """What follows the lines of the code of a frame, of the notebook's cells or the script, and of these functions."""
    codes = [code for each in functions for code in codes_of(each, frame.f_globals)]
    script = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    file = frame.f_code.co_filename

    def is_whole(name: str) -> bool:
        return cells.cell_number(name) is not None or name == script

    here = [] if is_whole(file) else [frame.f_code]
    return Lines(Watched(is_whole, [*here, *codes]), lambda name: label_of(name, file), source_of)


def label_of(file: str, current: str = "") -> str:
    """What a file is called in listings: "cell" for the cell that is measured, "In[5]" for another, else its name.

    What a magic was given to run is no cell: "statement".
    """
    number = cells.cell_number(file)
    if number is None:
        return PurePath(file).name or file
    if file == current:
        return "cell"
    return f"In[{number}]" if number else "statement"


def source_of(file: str) -> list[str]:
    """The lines of a file, as they were written."""
    return [_ARMED.sub(_as_written, line) for line in linecache.getlines(file)]


_ARMED = re.compile(r"""(; )?get_ipython\(\)\._memlab_arm\((['"])(.*)\2\)""")


def _as_written(call: re.Match[str]) -> str:
    """The first line of a tracked cell, which IPython was given as a call."""
    return "" if call[1] else f"%%memtrack {call[3]}".rstrip()


def codes_of(function: Any, namespace: dict[str, Any]) -> list[CodeType]:
    """The code of a function, a method, or all methods of a class; given as such or by its dotted name."""
    is_name = issubclass(type(function), str)
    found = _named(function, namespace) if is_name else function
    called = function if is_name else _called(found)
    if issubclass(type(found), ModuleType):
        raise MemlabError(f"cannot watch {called!r:.100}: it is a module. Name a function, method or class in it.")
    codes = list(_codes(found))
    if not codes:
        what = (
            f"of type {type(found).__name__}, without lines of Python"
            if not callable(found)
            else "not written in Python"
        )
        raise MemlabError(f"cannot watch {called!r:.100}: it is {what}. Name a function, method or class.")
    return codes


def _named(name: str, namespace: dict[str, Any]) -> Any:
    """The object behind a dotted name."""
    first, *rest = name.split(".")
    found = namespace.get(first, _MISSING)
    for step in rest:
        found = _attribute(found, step)
    if found is _MISSING:
        raise MemlabError(
            f"cannot watch {name!r:.100}: there is no such name here. Give the name of a function or class."
        )
    return found


_MISSING = object()


def _attribute(thing: Any, name: str) -> Any:
    """An attribute as it is stored, submodules of a module (`nn.Module`) too."""
    stored = inspect.getattr_static(thing, name, _MISSING)
    if stored is _MISSING:
        modules = inspect.getattr_static(thing, "_modules", None)
        return dict.get(modules, name, _MISSING) if type(modules) in (dict, OrderedDict) else _MISSING
    return stored


def _codes(thing: Any) -> Iterator[CodeType]:
    """The code objects behind one thing; what wraps a function is left out."""
    thing = _unwrapped(thing)
    kind = type(thing)  # never isinstance: it asks an object that is none for its __class__
    if kind is FunctionType:
        yield thing.__code__
    elif issubclass(kind, property):
        yield from (code for part in (thing.fget, thing.fset) if part is not None for code in _codes(part))
    elif issubclass(kind, type):
        members = type.__dict__["__dict__"].__get__(thing).values()
        yield from (code for one in members if not issubclass(type(one), type) for code in _codes(one))
    elif _is_module(kind):
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


def _is_module(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.nn.Module)


def _called(thing: Any) -> str:
    """A name for a message, without asking the object."""
    name = inspect.getattr_static(thing, "__name__", None)
    return name if type(name) is str else type(thing).__name__


# --- the value --------------------------------------------------------------------------------------------------------


class LineReport:
    """What each line took: `print` it, let a notebook show it; `plain()` is the classic form, `table` has the figures.

    It is a sequence of rows, and `report["cell:12"]` is the row of one line.
    """

    def __init__(self, table: LineTable, name: str = "") -> None:
        self.table = table
        self.name = name

    def __iter__(self) -> Iterator[LineRow]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, line: str) -> LineRow:
        return self.table[line]

    @property
    def text(self) -> str:
        """The listing in words."""
        return views.listing_text(self.table, self.name)

    @property
    def html(self) -> str:
        """The listing for a notebook."""
        return views.listing_html(self.table, self.name)

    def plain(self) -> str:
        """Line by line the total, and the tensors that came and went."""
        return views.plain_text(self.table)

    def section(self) -> dict[str, str]:
        """MIME type -> the listing as it stands below the report of a tracked cell: cut short where it is long."""
        return {
            "text/html": views.listing_html(self.table, self.name, limit=views.SECTION_HTML),
            "text/plain": views.listing_text(self.table, self.name, limit=views.SECTION_TEXT),
        }

    def to_pandas(self) -> Any:
        """One row per line, sizes in bytes."""
        return self.table.to_pandas()

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}


def has_lines(run: Run) -> bool:
    """Whether lines were asked for when the run was measured."""
    return "executions" in run.trace.notes


def lines(run: Run, device: int | None = None) -> LineReport:
    """The lines of a run, of the device with the largest peak if none is named."""
    if device is None and not run.devices:
        raise MemlabError(f"run {run.name!r} used no device of those it measured: its lines took nothing.")
    index = run.devices[0].device.index if device is None else device
    return LineReport(lines_of(run.trace, index), run.name)
