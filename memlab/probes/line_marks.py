"""Line marks: which of the user's lines were executing at each time.

Whole files (the cells of a notebook, a script) and single functions are watched. `torch_internals.tracing` reports the
lines, `line_log` stores them; here they become marks of the trace.

The text of a LINE mark is the stack of lines from there on, innermost first ("f.py:3", "cell:7"), or empty. AGAIN at its
end says that the innermost line does not begin but continues, as a call in it has returned. The line above BACKWARD is the
forward line whose backward runs, if that is known; the lines below it wait for the backward.

Limits: lines of the thread that starts; compiled code has no lines. One line that loops is one execution on Python 3.12 and
later. If another trace function took over, the lines after it are unknown, and a gap says so.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import itertools
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time_ns
from types import CodeType, FrameType
from typing import Any

import numpy as np

from memlab.errors import ProbeError
from memlab.probes.backward import MAX_HOOKED, Backward
from memlab.probes.line_log import OUTSIDE, Chains, LineLog, LineRows, with_events
from memlab.torch_internals import tracing
from memlab.trace.columns import Array, Kind, MarkKind, Marks
from memlab.trace.trace import Gap, Trace

MAX_SOURCE_LINES = 1000
MAX_SOURCE_WIDTH = 160
_MAX_FILES = 50_000
BACKWARD, AGAIN = "(backward)", "..."
_BACKWARD = (1 << 40) - 1
"""The position of BACKWARD in a chain."""


class Watched:
    """Which code is watched: all code of certain files, and single code objects with their nested code."""

    def __init__(self, is_watched: Callable[[str], bool], codes: Iterable[CodeType] = ()) -> None:
        self.files: dict[str, int] = {}
        self._is_watched = is_watched
        self._whole: dict[str, int] = {}
        self._single: dict[int, tuple[CodeType, int]] = {}
        waiting = list(codes)
        while waiting:
            code = waiting.pop(0)
            if id(code) not in self._single:
                self._single[id(code)] = code, self.files.setdefault(code.co_filename, len(self.files))
                waiting = [one for one in code.co_consts if type(one) is CodeType] + waiting

    def number_of(self, code: CodeType) -> int:
        """The number of the file of watched code, -1 for other code."""
        file = code.co_filename
        number = self._whole.get(file)
        if number is None:
            if len(self._whole) > _MAX_FILES:  # code that is made while it runs may have a new name each time
                self._whole = {name: number for name, number in self._whole.items() if number >= 0}
            number = self.files.setdefault(file, len(self.files)) if self._is_watched(file) else -1
            self._whole[file] = number
        if number >= 0 or not self._single:
            return number
        return self._single[id(code)][1] if id(code) in self._single else -1

    def concerns(self, file: str) -> bool:
        """Whether any code of a file is watched."""
        return file in self.files

    def line_of(self, frame: FrameType | None) -> int:
        """The innermost watched line from a frame outwards as a position, -1 if there is none."""
        while frame is not None:
            number = self.number_of(frame.f_code)
            if number >= 0:
                return tracing.position_of(number, frame.f_lineno)
            frame = frame.f_back
        return -1


class EdgeClock:
    """A clock that waits for the next full microsecond, the resolution of allocator history.

    So a line begins later than everything before it. After very many lines it no longer waits; then events in the
    microsecond in which a line begins may count for the line before.
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
    """Follows the lines of one thread from `start` to `stop`, then adds them to a trace."""

    def __init__(
        self,
        watched: Watched,
        label: Callable[[str], str] = str,
        source: Callable[[str], list[str]] = linecache.getlines,
    ) -> None:
        self.watched = watched
        self._label, self._source = label, source
        self._tracer: Any = None
        self._log: LineLog | None = None
        self._backward: Backward | None = None
        self._end_ns = 0
        self._refused = self._lost = ""

    def start(
        self,
        frame: FrameType,
        clock: Callable[[], int],
        event_times: Callable[[], Array],
        moment: Callable[[], int] = time_ns,
    ) -> None:
        """Start, with the running line of `frame`.

        A time of `clock` is later than everything before; `moment` is a cheaper clock.
        """
        log = self._log = LineLog(clock, event_times, moment)

        def line_on(frame: FrameType, is_owner: bool) -> int:
            # The innermost watched line: that of the last report, unless that was the end of a call.
            told = log.last_told() if is_owner else None
            return self.watched.line_of(frame) if told is None or told & 3 == tracing.LEAVE else told >> 2

        self._backward = Backward(line_on, clock)
        self._tracer = tracing.tracer(self.watched, log.tell)
        try:
            self._tracer.start(frame)
        except ProbeError as error:
            self._refused = f"no line is known: {error}"
            self._tracer = None
        self._backward.start()

    def stop(self) -> None:
        """Stop, and restore everything."""
        self._end_ns = self._end_ns or time_ns()
        if self._tracer is not None:
            self._lost = self._tracer.stop()
            self._tracer = None
        if self._backward is not None:
            self._backward.stop()

    def into(self, trace: Trace, start_ns: int) -> Trace:
        """The trace with line marks, a line for blocks that had none, the sources, and gaps."""
        log, backward = self._log, self._backward
        if log is None or backward is None:
            return trace
        rows = log.rows()
        if len(rows):  # if our tracer was replaced, it is unknown when, so the last row says nothing
            last_ns = int(rows.time_ns[-1]) if self._lost else self._end_ns
            before = rows.rows(slice(len(rows) - bool(self._lost)))
            rows = LineRows.joined([before, LineRows(*np.array([[last_ns], [OUTSIDE], [0]]))])
        labels = _distinct([self._label(file) for file in self.watched.files])
        files = dict(zip(self.watched.files, labels, strict=True))
        marked = _marked(trace, start_ns, rows, log.chains, backward, files)
        executions: dict[str, dict[str, int]] = {}
        for position, times in sorted(log.executions.items()):
            number, line = tracing.file_and_line(position)
            executions.setdefault(labels[number], {})[str(line)] = times
        sources = {
            label: sources_of(self._source(file), [int(line) for line in executions[label]])
            for file, label in files.items()
            if label in executions
        }
        gaps = [self._refused]
        if self._lost:
            when = f"{max(int(rows.time_ns[-1]) - start_ns, 0) / 1e9:.3f} s" if len(rows) else "the start"
            gaps.append(f"{self._lost}: from {when} on no line is known")
        if log.dropped_until_ns:
            dropped_s = (log.dropped_until_ns - start_ns) / 1e9
            gaps.append(f"the lines of the first {dropped_s:.3f} s were dropped to bound memory")
        if log.failure:
            gaps.append(f"some lines were lost: {log.failure}")
        if backward.is_cut:
            gaps.append(f"of more than {MAX_HOOKED:,} modules in a graph the rest has no forward line in backward")
        if backward.failures:
            gaps.append(f"{backward.failures} outputs of modules could not be hooked for backward")
        notes = {**marked.notes, "lines": sources, "executions": executions}
        return dataclasses.replace(marked, notes=notes).with_gaps(*(Gap("lines", text) for text in gaps if text))


def _distinct(labels: list[str]) -> list[str]:
    """The labels, each on one line and different from the others."""
    found: list[str] = []
    for label in labels:
        plain = "".join(c if c.isprintable() else " " for c in label)[:200]
        numbered = itertools.chain([plain], (f"{plain} ({n})" for n in itertools.count(2)))
        found.append(next(one for one in numbered if one not in found))
    return found


def sources_of(text: list[str], executed: Sequence[int]) -> dict[str, str]:
    """The source by line number of all top-level statements and methods in which a line was executed."""
    shown: set[int] = set()
    for begin, end in _statements(text):
        at = bisect.bisect_left(executed, begin)
        if at < len(executed) and executed[at] <= end:
            shown.update(range(begin, end + 1))
    wanted = sorted(shown or {line for line in executed if line <= len(text)})[:MAX_SOURCE_LINES]
    return {str(line): text[line - 1].rstrip("\n")[:MAX_SOURCE_WIDTH] for line in wanted if 0 < line <= len(text)}


def _statements(text: list[str]) -> list[tuple[int, int]]:
    if len(text) > 20_000:
        return []
    try:
        tree = ast.parse("".join(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [(1, len(text))] if len(text) <= MAX_SOURCE_LINES else []  # a cell with magics
    found = []
    parts = [one.body if isinstance(one, ast.ClassDef) else [one] for one in tree.body]
    for node in itertools.chain.from_iterable(parts):
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        found.append((first, node.end_lineno or node.lineno))
    return found


def _marked(
    trace: Trace, start_ns: int, rows: LineRows, chains: Chains, backward: Backward, files: Mapping[str, str]
) -> Trace:
    """The trace with these rows as LINE marks; `files` has the label of each watched file, in the order of their numbers."""
    labels = list(files.values())
    rows = rows.replace(time_ns=np.maximum(rows.time_ns - start_ns, 0))
    windows = [(begin - start_ns, end - start_ns) for begin, end in backward.windows]
    reached, forward = backward.reached()
    rows = _with_backward(rows, chains, windows, reached - start_ns, forward)
    times = trace.events.time_ns[trace.first_row :]
    rows = with_events(rows, times, chains)
    row = trace.first_row + np.searchsorted(times, rows.time_ns, side="right")
    keys, names = np.unique(rows.chain.astype(np.int64) * 2 + rows.begins, return_inverse=True)
    texts = []
    for key in keys.tolist():
        positions, begins = chains.positions[key // 2], key % 2
        goes_on = bool(positions) and not begins and _BACKWARD not in positions
        texts.append("\n".join([*(_text(one, labels) for one in positions), *([AGAIN] if goes_on else [])]))
    first = len(trace.texts["mark"])
    ours = Marks(row, rows.time_ns, np.full(len(row), MarkKind.LINE), first + names.reshape(-1))
    marks = Marks.joined([trace.marks, ours])
    marks = marks.rows(np.argsort(marks.time_ns, kind="stable"))
    trace = dataclasses.replace(trace, marks=marks, texts={**trace.texts, "mark": (*trace.texts["mark"], *texts)})
    return _with_lines_of_blocks(trace, row, chains.innermost(rows.chain), files)


def _text(position: int, labels: Sequence[str]) -> str:
    if position == _BACKWARD:
        return BACKWARD
    number, line = tracing.file_and_line(position)
    return f"{labels[number]}:{line}"


def _with_backward(
    rows: LineRows, chains: Chains, windows: Sequence[tuple[int, int]], reached: Array, forward: Array
) -> LineRows:
    """Rows in which, while backward runs, the `forward` line (-1: unknown) that it works on is on top."""
    chain, added = rows.chain.copy(), []
    for begin, end in windows:
        inside = slice(*np.searchsorted(rows.time_ns, [begin, end], side="right").tolist())
        waiting = int(rows.chain[inside.start - 1]) if inside.start else OUTSIDE
        around = (_BACKWARD, *chains.positions[waiting])
        hooks = slice(*np.searchsorted(reached, [begin, end], side="right").tolist())
        times = np.concatenate([[begin], reached[hooks]])
        lines = [-1, *forward[hooks].tolist()]
        over = np.array([chains.number((line, *around) if line >= 0 else around) for line in lines], "i4")
        # Watched code that runs within backward (a Function's own, a recomputed forward) counts for itself.
        own = rows.chain[inside] != waiting
        last = np.searchsorted(times, rows.time_ns[inside], side="right") - 1
        chain[inside] = np.where(own, rows.chain[inside], over[last])
        before = np.searchsorted(rows.time_ns[inside], times, side="right") - 1
        shows = ~own[before] | (before < 0) if len(own) else np.ones(len(times), bool)
        after = int(rows.chain[inside.stop - 1]) if inside.stop else OUTSIDE
        added.append(LineRows(times[shows], over[shows], np.zeros(int(shows.sum()))))
        added.append(LineRows(*np.array([[end], [after], [0]])))
    begins = rows.begins & (chain == rows.chain)
    joined = LineRows.joined([LineRows(rows.time_ns, chain, begins), *added])
    return joined.rows(np.argsort(joined.time_ns, kind="stable"))


def _with_lines_of_blocks(trace: Trace, row: Array, innermost: Array, files: Mapping[str, str]) -> Trace:
    """The trace, with blocks without a line assigned to the one executing when they were made."""
    lines: dict[str, int] = {}
    known = []
    for text in trace.texts["line"]:  # name files from the history as in the marks
        file, _, number = text.rpartition(":")
        known.append(lines.setdefault(f"{files[file]}:{number}" if file in files else text, len(lines)))
    line = np.array([*known, -1], "i4")[trace.blocks.line]
    made = np.flatnonzero(trace.events.kind == Kind.ALLOC)
    at = np.searchsorted(row, made, side="right") - 1
    position = np.where(at >= 0, innermost[np.maximum(at, 0)] if len(innermost) else -1, -1)
    block = trace.events.block[made]
    fills = (line[block] < 0) & (position >= 0) & (position != _BACKWARD)
    positions, inverse = np.unique(position[fills], return_inverse=True)
    texts = [_text(one, list(files.values())) for one in positions.tolist()]
    numbers = np.array([lines.setdefault(text, len(lines)) for text in texts], "i4")
    line[block[fills]] = numbers[inverse]
    return dataclasses.replace(
        trace, blocks=trace.blocks.replace(line=line), texts={**trace.texts, "line": tuple(lines)}
    )
