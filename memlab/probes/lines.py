"""Which line of the user's was being executed when: line marks, on every engine.

Watched are whole files (the cells of a notebook, a script) and single functions. Lines are told by `seams.tracing`, kept by
`line_log`, and become marks of the trace by `line_marks`.

Limits: lines of one thread, the one that starts; code that runs compiled has no lines. One line that loops is one execution
on Python 3.12 and later. Where another trace function took over, the lines after it are unknown, and a gap says so.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import itertools
import linecache
from collections.abc import Callable, Iterable, Sequence
from time import time_ns
from types import CodeType, FrameType
from typing import Any

import numpy as np

from memlab.errors import ProbeError
from memlab.probes import line_marks
from memlab.probes.backward import MAX_HOOKED, Backward
from memlab.probes.line_log import OUTSIDE, LineLog, Rows
from memlab.seams import tracing
from memlab.trace.columns import Array
from memlab.trace.trace import Gap, Trace

MAX_SOURCE_LINES = 1000
MAX_SOURCE_WIDTH = 160
_MAX_FILES = 50_000


class Watched:
    """Which code is watched: all that comes from certain files, and single code objects with what is nested in them."""

    def __init__(self, is_watched: Callable[[str], bool], codes: Iterable[CodeType] = ()) -> None:
        self.files: list[str] = []
        self._is_watched = is_watched
        self._whole: dict[str, int] = {}
        self._single: dict[int, tuple[CodeType, int]] = {}
        for code in codes:
            self._add(code)

    def _add(self, code: CodeType) -> None:
        if id(code) not in self._single:
            self._single[id(code)] = code, self._number(code.co_filename)
            for constant in code.co_consts:
                if type(constant) is CodeType:
                    self._add(constant)

    def number_of(self, code: CodeType) -> int:
        """The number of the file of watched code, -1 for other code."""
        number = self._whole.get(code.co_filename)
        if number is None:
            number = self._meet(code.co_filename)
        if number >= 0 or not self._single:
            return number
        return self._single[id(code)][1] if id(code) in self._single else -1

    def concerns(self, file: str) -> bool:
        """Whether any code of a file is watched."""
        return file in self.files

    def _meet(self, file: str) -> int:
        if len(self._whole) > _MAX_FILES:  # code that is made while it runs may have a new name each time
            self._whole = {name: number for name, number in self._whole.items() if number >= 0}
        number = self._whole[file] = self._number(file) if self._is_watched(file) else -1
        return number

    def _number(self, file: str) -> int:
        if file not in self.files:
            self.files.append(file)
        return self.files.index(file)

    def line_of(self, frame: FrameType | None) -> int:
        """The innermost watched line from a frame outwards, as a position; -1 if there is none."""
        while frame is not None:
            number = self.number_of(frame.f_code)
            if number >= 0:
                return tracing.position_of(number, frame.f_lineno)
            frame = frame.f_back
        return -1


class EdgeClock:
    """Dates lines between the microseconds that allocator history knows, so that what came before has an earlier one.

    It waits for the next microsecond, half of one on average. In a loop of very many lines it stops doing so: then what
    happens within the microsecond in which a line begins may count for its neighbour.
    """

    MAX_WAITS = 500_000

    def __init__(self, clock_ns: Callable[[], int], is_needed: Callable[[], bool]) -> None:
        self._clock, self._is_needed = clock_ns, is_needed
        self._waits = 0

    def __call__(self) -> int:
        """The time, in nanoseconds of the Unix clock."""
        now = self._clock()
        if self._waits >= self.MAX_WAITS or not self._is_needed():
            return now
        self._waits += 1
        edge = now - now % 1000 + 1000
        while time_ns() < edge:
            pass
        return edge


class Lines:
    """Follows the lines of one thread from `start` to `stop`, and puts them into a trace."""

    def __init__(
        self,
        watched: Watched,
        label: Callable[[str], str] = str,
        source: Callable[[str], list[str]] = linecache.getlines,
    ) -> None:
        self.watched = watched
        self._label, self._source = label, source
        self._gaps: list[Gap] = []
        self._tracer: Any = None
        self._log: LineLog | None = None
        self._backward: Backward | None = None
        self._end_ns = 0
        self._lost = ""

    def start(
        self,
        frame: FrameType,
        clock: Callable[[], int],
        event_times: Callable[[], Array],
        moment: Callable[[], int] = time_ns,
    ) -> None:
        """Begin, from the running line of `frame` outwards; `clock` dates a line later than what happened before it.

        `moment` is a cheaper clock.
        """
        self._log = LineLog(clock, event_times, moment)
        self._backward = Backward(self._line_on, clock)
        self._tracer = tracing.tracer(self.watched, self._log.tell)
        try:
            self._tracer.start(frame)
        except ProbeError as error:
            self._gaps.append(Gap("lines", f"no line is known: {error}"))
            self._tracer = None
        self._backward.start()

    def _line_on(self, frame: FrameType, is_owner: bool) -> int:
        """The innermost watched line that is on; what was told last says it, unless that is the end of a call."""
        told = self._log.last_told() if is_owner and self._log is not None else None
        if told is None or told & 3 == tracing.LEAVE:
            return self.watched.line_of(frame)
        return told >> 2

    def stop(self) -> None:
        """End, and leave everything as it was."""
        self._end_ns = self._end_ns or time_ns()
        if self._tracer is not None:
            self._lost = self._tracer.stop()
            self._tracer = None
        if self._backward is not None:
            self._backward.stop()

    # --- into the trace -------------------------------------------------------------------------------------------------

    def into(self, trace: Trace, start_ns: int) -> Trace:
        """The trace with line marks, the lines of blocks that had none, the sources, and what was not seen."""
        if self._log is None or self._backward is None:
            return trace
        rows = self._ended(self._log.rows())
        labels = _distinct([self._label(file) for file in self.watched.files])
        files = dict(zip(self.watched.files, labels, strict=True))
        marked = line_marks.marked(trace, start_ns, rows, self._log.chains, self._backward, files)
        notes = {**marked.notes, **self._notes(labels)}
        return dataclasses.replace(marked, notes=notes).with_gaps(*self._all_gaps(rows, start_ns))

    def _ended(self, rows: Rows) -> Rows:
        """The rows, and the end: where ours was replaced, it is not known when, so what the last one says is not either."""
        if not len(rows.time_ns):
            return rows
        if self._lost:
            chain = rows.chain.copy()
            chain[-1] = OUTSIDE
            return dataclasses.replace(rows, chain=chain)
        end = Rows(np.array([self._end_ns]), np.array([OUTSIDE], "i4"), np.array([False]))
        return Rows.joined([rows, end])

    def _notes(self, labels: list[str]) -> dict[str, Any]:
        """The text of the lines, and how often each began, by label and line number."""
        assert self._log is not None
        executions: dict[str, dict[str, int]] = {label: {} for label in labels}
        for position, times in sorted(self._log.executions.items()):
            number, line = tracing.file_and_line(position)
            executions[labels[number]][str(line)] = times
        sources = {
            label: sources_of(self._source(file), [int(line) for line in executions[label]])
            for label, file in zip(labels, self.watched.files, strict=True)
            if executions[label]
        }
        return {"lines": sources, "executions": {label: counts for label, counts in executions.items() if counts}}

    def _all_gaps(self, rows: Rows, start_ns: int) -> list[Gap]:
        assert self._log is not None
        assert self._backward is not None
        gaps = list(self._gaps)
        if self._lost:
            when = f"{max(int(rows.time_ns[-1]) - start_ns, 0) / 1e9:.3f} s" if len(rows.time_ns) else "the start"
            gaps.append(Gap("lines", f"{self._lost}: from {when} on no line is known"))
        if self._log.dropped_until_ns:
            gaps.append(Gap("lines", LET_GO.format((self._log.dropped_until_ns - start_ns) / 1e9)))
        if self._log.failure:
            gaps.append(Gap("lines", f"some lines were lost: {self._log.failure}"))
        if self._backward.is_cut:
            gaps.append(
                Gap("lines", f"of more than {MAX_HOOKED:,} modules in a graph the rest has no forward line in backward")
            )
        if self._backward.failures:
            gaps.append(Gap("lines", f"{self._backward.failures} outputs of modules could not be hooked for backward"))
        return gaps


LET_GO = "the lines of the first {:.3f} s were let go to bound memory"


def _distinct(labels: list[str]) -> list[str]:
    """The labels, on one line each, and no two the same."""
    found: list[str] = []
    for label in labels:
        plain = "".join(c if c.isprintable() else " " for c in label)[:200]
        also = next(one for n in itertools.count(1) if (one := plain if n == 1 else f"{plain} ({n})") not in found)
        found.append(also)
    return found


def sources_of(text: list[str], executed: Sequence[int]) -> dict[str, str]:
    """The lines of a file by number: of all top-level statements and methods in which a line was executed."""
    shown = {
        line for begin, end in _statements(text) for line in range(begin, end + 1) if _any_in(executed, begin, end)
    }
    wanted = sorted(shown or {line for line in executed if line <= len(text)})[:MAX_SOURCE_LINES]
    return {str(line): text[line - 1].rstrip("\n")[:MAX_SOURCE_WIDTH] for line in wanted if 0 < line <= len(text)}


def _any_in(executed: Sequence[int], begin: int, end: int) -> bool:
    at = bisect.bisect_left(executed, begin)
    return at < len(executed) and executed[at] <= end


def _statements(text: list[str]) -> list[tuple[int, int]]:
    """(first line, last line) of what a listing shows as a whole."""
    if len(text) > 20_000:
        return []
    try:
        tree = ast.parse("".join(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [(1, len(text))] if len(text) <= MAX_SOURCE_LINES else []  # a cell with magics
    nodes = [part for node in tree.body for part in (node.body if isinstance(node, ast.ClassDef) else [node])]
    return [(_first_line(node), node.end_lineno or node.lineno) for node in nodes]


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])
