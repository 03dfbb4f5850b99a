"""Line events of Python: `sys.settrace` up to 3.11, `sys.monitoring` from 3.12 on; both give everything back.

A tracer tells of watched code only, and only in the thread that started it: a frame begins or goes on (ENTER), a line
begins (LINE), a frame ends or pauses (LEAVE). `number_of(code)` says which file of the watched ones code belongs to, -1 for
none. What is told is one number: `position << 2 | what`, where a position is `file number << 24 | line`.

`sys.settrace` slows down everything in its thread, so it is off inside of functions that are known to call nothing of the
user's: memlab's hooks and the insides of PyTorch's optimizers.

Limits: with `sys.settrace` a trace function set later (by a debugger) ends ours; `stop` then says so. It is
off for longer where such a function raised and its traceback is kept.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

from memlab.errors import ProbeError

_monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12 and later
LINE, ENTER, LEAVE = 0, 1, 2
TAKEN_OVER = "another trace function (a debugger?) took over, or Ctrl-C fell into ours"
KEPT_OFF = "an error in an optimizer, whose traceback is kept, kept line tracing off"
FILE_SHIFT = 24
Tell = Callable[[int], None]
NumberOf = Callable[[CodeType], int]
Local = Callable[[FrameType, str, Any], Any]


class Watching(Protocol):
    """Who knows which code is watched."""

    def number_of(self, code: CodeType) -> int:
        """The number of the file of watched code, -1 for other code."""

    def concerns(self, file: str) -> bool:
        """Whether any code of a file is watched."""


def tracer(watched: Watching, tell: Tell) -> SettraceTracer | MonitoringTracer:
    """The tracer for this version of Python."""
    return (MonitoringTracer if sys.version_info >= (3, 12) else SettraceTracer)(watched, tell)


def position_of(number: int, line: int | None) -> int:
    """A line of a watched file as one number."""
    return number << FILE_SHIFT | (line or 0)


def file_and_line(position: int) -> tuple[int, int]:
    """The number of the file, and the line."""
    return position >> FILE_SHIFT, position & (1 << FILE_SHIFT) - 1


def watched_frames(frame: FrameType | None, number_of: NumberOf) -> dict[FrameType, int]:
    """The frames of watched code from here outwards, with the numbers of their files; the outermost comes first."""
    found = [(here, number_of(here.f_code)) for here in _outwards(frame)]
    return {here: number for here, number in reversed(found) if number >= 0}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class SettraceTracer:
    """Line events by `sys.settrace`, passed on to a trace function that is already there.

    Coverage's own puts itself back whenever it is called, and a debugger that goes on without breakpoints takes itself
    off: ours stays in both cases, and calls the other for as long as it wants to be called.
    """

    def __init__(self, watched: Watching, tell: Tell) -> None:
        self._watched, self._told = watched, tell
        self._locals: dict[int, Local] = {}
        self._theirs: dict[Local, Any] = {}  # our local function -> theirs, which it calls
        self._previous: Any = None
        self._raised = False
        self._is_on = True
        self._off: weakref.ref[_Off] | None = None
        self._global, self._new_local, self._hush = self._functions()
        # A property's getter is called with the instance alone: this sets our function, whatever else it is given, in C.
        # As the callback of a weak reference, Python code would swallow Ctrl-C.
        self._resume = functools.partial(property(sys.settrace).__get__, self._global)

    def start(self, frame: FrameType) -> None:
        """Watch from here on, the frames of watched code that are running already as well."""
        self._previous = sys.gettrace()
        numbers = watched_frames(frame, self._watched.number_of)
        for here, number in numbers.items():
            self._told(position_of(number, here.f_lineno) << 2 | ENTER)
        for here in _outwards(sys._getframe()):
            theirs = here.f_trace if self._previous is not None else None
            if here in numbers or theirs is not None:
                here.f_trace = self._local_of(numbers.get(here, -1), theirs)
        sys.settrace(self._global)

    def stop(self) -> str:
        """Give the trace function back; why no line was told of at the end, "" if all is well."""
        now, off = sys.gettrace(), self._off() if self._off is not None else None
        self._off, self._is_on = None, False
        self._hush()
        frames = list(_outwards(sys._getframe()))
        is_ours = now is self._global or (now is None and off is not None and any(f.f_trace is off for f in frames))
        if is_ours or (now is None and (self._raised or off is not None)):
            sys.settrace(self._previous)
        for here in frames:
            local = here.f_trace
            if type(local) is FunctionType and (local in self._theirs or local in self._locals.values()):
                here.f_trace = self._theirs.get(local)
        frames.clear()  # this function's own is one of them: a cycle, which keeps what its callers' variables held
        self._locals.clear()
        self._theirs.clear()
        return "" if is_ours else KEPT_OFF if now is None and off is not None else TAKEN_OVER

    def _functions(self) -> tuple[Local, Callable[[int], Local], Callable[[], None]]:
        """The trace function, the maker of local ones, and what silences them all: generators may keep some."""
        tell, number_of, is_on = self._told, self._watched.number_of, True
        plain: set[str] = set()  # files without watched code, and without closed code
        closed: dict[str, frozenset[str]] = {}  # files of closed code, and the functions in them that are not

        def begin(frame: FrameType, event: str, arg: Any) -> Any:
            previous, code, theirs = self._previous, frame.f_code, None
            try:
                if not is_on:  # it was ended by another thread, which cannot take it off: make room for who was there
                    if sys.gettrace() is self._global:
                        sys.settrace(previous)
                    return previous(frame, event, arg) if previous is not None else None
                if previous is not None:
                    theirs = previous(frame, event, arg)
                    self._stay()
                else:
                    if code.co_filename in plain:
                        return None
                    if (calls_on := closed.get(code.co_filename)) is not None and is_closed(code, calls_on):
                        return self._pause()
                number = number_of(code)
                if number >= 0:
                    tell((number << FILE_SHIFT | frame.f_lineno) << 2 | ENTER)
                    return self._local_of(number, theirs)
                if theirs is not None:
                    return self._local_of(-1, theirs)
                return self._uninteresting(code, plain, closed)
            except BaseException:
                self._raised = True  # Python takes off a trace function that raises (Ctrl-C may fall into it)
                raise

        def new_local(number: int) -> Local:
            base = number << FILE_SHIFT

            def local(frame: FrameType, event: str, arg: Any) -> Any:
                try:
                    if event == "line":
                        tell((base | frame.f_lineno) << 2)
                    elif event == "return":
                        tell(LEAVE)
                except BaseException:
                    self._raised = True
                    raise
                return local

            return local

        def hush() -> None:
            nonlocal tell, is_on
            tell, is_on = _nobody, False

        return begin, new_local, hush

    def _uninteresting(self, code: CodeType, plain: set[str], closed: dict[str, frozenset[str]]) -> Any:
        """What the trace function returns for code that is not watched; it takes note of the file."""
        file = code.co_filename
        if self._previous is not None or self._watched.concerns(file):
            return None
        if len(plain) > 50_000:  # code that is made while it runs may have a new name each time
            plain.clear()
        calls_on = open_in(file)
        if calls_on is None:
            plain.add(file)
            return None
        closed[file] = calls_on
        return self._pause() if is_closed(code, calls_on) else None

    def _pause(self) -> Any:
        """Take tracing off until the frame that has just begun has ended: then what stands in its `f_trace` goes."""
        if sys.gettrace() is not self._global:
            return None  # another one calls us, and must not miss anything
        off = _Off()
        self._off = weakref.ref(off, self._resume)
        sys.settrace(None)
        return off

    def _stay(self) -> None:
        """Put ours back where the other one has put itself, or nothing, into its place."""
        now = sys.gettrace()
        if now is not self._global and self._is_on and (now is None or now is self._previous):
            self._previous = now
            sys.settrace(self._global)

    def _local_of(self, number: int, theirs: Any) -> Local:
        """The function that gets the events of one frame, and passes them on to theirs if there is one."""
        if theirs is None:
            if number not in self._locals:
                self._locals[number] = self._new_local(number)
            return self._locals[number]
        ours: Callable[..., Any] = self._new_local(number) if number >= 0 else _nobody

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal theirs
            ours(frame, event, arg)
            theirs = theirs(frame, event, arg) or theirs  # None leaves the function in place
            self._stay()
            if event == "return":
                self._theirs.pop(local, None)
            return local

        self._theirs[local] = theirs
        return local


class _Off:
    """Stands in a frame's `f_trace` while tracing is off; a debugger that comes meanwhile may call it."""

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Nothing: there is no interest in the frame."""


def is_closed(code: CodeType, calls_on: frozenset[str]) -> bool:
    """Whether nothing of the user's is called from here until its frame ends; that of a generator does not soon."""
    return code.co_name not in calls_on and not code.co_flags & _GENERATORS


_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def open_in(file: str) -> frozenset[str] | None:
    """Of a file whose functions call nothing of the user's, those that may all the same; None for other files."""
    return _CALL_ON if file.startswith(_OURS) else _STEP if _ALGORITHM.search(file) else None


_OURS = tuple(str(Path(__file__).parent.parent / room) + os.sep for room in ("probes", "references", "torch_internals"))
_CALL_ON = frozenset(("engine", "__torch_dispatch__", "_higher_order", "start", "stop", "_stop_watching"))
_STEP = frozenset(("step",))
_ALGORITHM = re.compile(
    r"[\\/]torch[\\/]optim[\\/](?:adadelta|_adafactor|adagrad|adam|adamax|adamw|asgd|nadam|radam|rmsprop|rprop|sgd)\.py$"
)


class MonitoringTracer:
    """Line events by `sys.monitoring`: events of lines on watched code alone, under a tool id of its own.

    Code of the cell is compiled while it runs, so the first start of any code is looked at once, and never again where it
    is not watched.
    """

    NAME = "memlab lines"
    _IDS = (3, 4, 2, 1, 0)  # the last three are kept for profilers, coverage and debuggers by custom

    def __init__(self, watched: Watching, tell: Tell) -> None:
        self._number_of, self._tell = watched.number_of, tell
        self._thread = 0
        self._tool: int | None = None
        self._bases: dict[int, int] = {}
        self._codes: list[CodeType] = []

    def start(self, frame: FrameType) -> None:
        """Watch from here on, the frames of watched code that are running already as well."""
        monitoring = _monitoring
        tool = next((one for one in self._IDS if monitoring.get_tool(one) is None), None)
        if tool is None:
            raise ProbeError("all tool ids of sys.monitoring are taken: end a profiler, coverage or debugger first.")
        monitoring.use_tool_id(tool, self.NAME)
        self._tool, self._thread = tool, get_ident()
        events = monitoring.events
        for event, callback in self._callbacks().items():
            monitoring.register_callback(tool, event, callback)
        for one, number in watched_frames(frame, self._number_of).items():
            self._meet(one.f_code, number)
            self._tell(position_of(number, one.f_lineno) << 2 | ENTER)
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME | events.PY_THROW | events.PY_UNWIND)
        monitoring.restart_events()  # code that an earlier tracer had no interest in may be watched now

    def stop(self) -> str:
        """Give everything back; nobody can have replaced it."""
        if self._tool is None:
            return ""
        monitoring, tool = _monitoring, self._tool
        monitoring.set_events(tool, 0)
        for code in self._codes:
            monitoring.set_local_events(tool, code, 0)
        for event in self._callbacks():
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
        self._tool = None
        self._bases.clear()
        self._codes.clear()
        return ""

    def _meet(self, code: CodeType, number: int) -> int:
        """Ask for the lines of some code."""
        if (base := self._bases.get(id(code))) is not None:
            return base
        self._codes.append(code)  # so that its id stays its own
        base = self._bases[id(code)] = number << FILE_SHIFT
        events = _monitoring.events
        _monitoring.set_local_events(self._tool, code, events.LINE | events.PY_RETURN | events.PY_YIELD)
        return base

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        events, no_interest = _monitoring.events, _monitoring.DISABLE
        bases, thread, tell, meet, number_of = self._bases, self._thread, self._tell, self._meet, self._number_of

        def line(code: CodeType, number: int) -> None:
            if get_ident() == thread and (base := bases.get(id(code))) is not None:
                tell((base | number) << 2)

        def begin(code: CodeType, offset: int, *error: Any) -> Any:
            base = bases.get(id(code))
            if base is None:
                number = number_of(code)
                if number < 0:
                    return None if error else no_interest  # PY_THROW cannot be disabled
                base = meet(code, number)
            if get_ident() == thread:
                tell((base | sys._getframe(1).f_lineno) << 2 | ENTER)
            return None

        def end(code: CodeType, offset: int, result: Any) -> None:
            if id(code) in bases and get_ident() == thread:
                tell(LEAVE)

        begins = (events.PY_START, events.PY_RESUME, events.PY_THROW)
        ends = (events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND)
        return dict.fromkeys(begins, begin) | dict.fromkeys(ends, end) | {events.LINE: line}


def _nobody(*told: Any) -> None:
    """Whom a tracer tells when it has ended: frames of suspended generators may keep its functions."""
