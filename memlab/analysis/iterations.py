"""Find the iterations of a run: what marks their ends, and the event rows of these ends.

The strongest marker counts: optimizer steps, else backwards, else calls of the outermost module, else an allocation that
repeats and is freed. What one pass collects for its only backward is not a repetition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.analysis.modules import calls
from memlab.analysis.timeline import lives
from memlab.trace.columns import MODULE_BEGINS, Array, Category, Kind, MarkKind
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE
from memlab.trace.trace import Trace

MIN_STEPS = 4
"""At least this many optimizer steps or backwards."""
MIN_REPEATS = 2 * MIN_STEPS
"""At least this many of the weaker markers."""
_MAX_ENDS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class StepBirths:
    """The blocks that a run allocates on a device: rows of allocation and free, bytes, id, and origin.

    `line` is a number in the table of lines or, below -1, in that of marks; `origin` numbers the places (line, stack,
    module and operator) from 0. As far as the trace knows them, parameters and buffers are `made_to_stay`, and an optimizer's
    own `states` never are a leak: L-BFGS gathers a history of its steps. A block that is never freed dies after the last event.
    """

    rows: Array
    died: Array
    nbytes: Array
    ids: Array
    line: Array
    origin: Array
    made_to_stay: Array
    states: Array

    @classmethod
    def of(cls, trace: Trace, device: int) -> StepBirths:
        """Those of a trace."""
        events, table, marks = trace.events, trace.blocks, trace.marks
        rows, died = lives(trace, device)
        rows = np.sort(rows[rows >= trace.first_row])
        rows = rows[events.kind[rows] == Kind.ALLOC]
        ids = events.block[rows]
        line, at = table.line[ids], np.flatnonzero(marks.kind == MarkKind.LINE)
        if len(at) and not (line >= 0).any():  # lines are marked and blocks have none: the line that was running
            last = np.searchsorted(marks.row[at], rows, side="right") - 1
            line = np.where(last >= 0, -2 - marks.name[at[last]].astype(np.int64), -1)
        category = table.category[ids]
        origin, _ = distinct(line, table.stack[ids], table.module[ids], table.op[ids])
        stay, states = np.isin(category, (Category.PARAMETER, Category.BUFFER)), category == Category.OPTIMIZER
        return cls(rows, died[ids], events.allocated_bytes[rows], ids, line, origin, stay, states)

    def line_text(self, trace: Trace, index: int) -> str:
        """The line of a block, "" if unknown."""
        line = int(self.line[index])
        return trace.text("line", line) if line >= -1 else trace.text("mark", -2 - line)


def distinct(*columns: Array) -> tuple[Array, Array]:
    """For every row of these columns the number of its kind, from 0; and where the first row of each kind is."""
    number, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        column = np.asarray(column, np.int64) - column.min(initial=0)
        span = int(column.max(initial=0)) + 1
        if count * span >= 1 << 62:  # sorting takes longest: it is done only where the numbers would overflow
            number, column = (np.unique(one, return_inverse=True)[1] for one in (number, column))
            count, span = int(number.max(initial=0)) + 1, int(column.max(initial=0)) + 1
        number, count = number * span + column, count * span
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    return number, first


@dataclass(frozen=True, slots=True, eq=False)
class Iterations:
    """The event rows before which iterations end, `stride` of them at a time; `of` says what one is.

    Those of a weak marker reach to the end of the run: what they collect has to exist at the very end.
    """

    of: str
    ends: Array
    stride: int = 1
    is_weak: bool = False

    @property
    def count(self) -> int:
        """How many ends there are."""
        return len(self.ends)

    def index(self, rows: Array) -> Array:
        """The iteration of each event, counted from 0; `count` means after the last one."""
        return np.searchsorted(self.ends, rows, side="right")


def iterations(trace: Trace, device: int, births: StepBirths) -> Iterations | None:
    """The iterations of a run without lost events; None if there are too few."""
    first = trace.first_known_row(device)
    marks, has_phases = trace.marks, False
    begun = np.flatnonzero((marks.kind == MarkKind.PHASE_BEGIN) & trace.marks_named(BACKWARD))
    for of, at in (("optimizer step", step_ends(trace)), ("backward", begun)):
        rows = marks.row[at]
        has_phases |= len(rows) > 0
        if np.count_nonzero(rows >= first) >= MIN_STEPS:
            return _thinned(of, rows[rows >= first], births)
    if has_phases:
        return None  # what a rollout collects for its one backward is not a leak
    of, rows = _root_calls(trace)
    if len(rows) < MIN_STEPS:
        of, rows = "repeat", _repeats(trace, births)
    if np.count_nonzero(rows >= first) >= MIN_REPEATS:
        return _thinned(of, np.append(rows[rows >= first][1:], len(trace.events)), births, is_weak=True)
    return None


def step_ends(trace: Trace) -> Array:
    """The marks at which optimizer steps end, in order; a step that calls that of another optimizer is one.

    The end of a step that began before the measurement is none, unless no beginning was marked at all.
    """
    marks = trace.marks
    is_step = trace.marks_named(OPTIMIZER, OPTIMIZER_WITH_CLOSURE)
    is_step &= np.isin(marks.kind, (int(MarkKind.PHASE_BEGIN), int(MarkKind.PHASE_END)))
    is_work = np.isin(marks.kind, MODULE_BEGINS) | ((marks.kind == MarkKind.PHASE_BEGIN) & trace.marks_named(BACKWARD))
    at, work_before, ends = np.flatnonzero(is_step), np.cumsum(is_work), []
    depth = work = 0
    if not (marks.kind[at] == MarkKind.PHASE_BEGIN).any():
        return at
    has_closure = trace.marks_named(OPTIMIZER_WITH_CLOSURE)[at]
    columns = (at.tolist(), marks.kind[at].tolist(), work_before[at].tolist(), has_closure.tolist())
    for mark, kind, done, calls_closure in zip(*columns, strict=True):
        if kind == MarkKind.PHASE_BEGIN:
            # A step without a closure calls no module: if one was called since, that step had raised.
            depth = depth + 1 if done == work or calls_closure else 1
            work = done
        elif depth:
            depth -= 1
            if not depth:
                ends.append(mark)
    return np.array(ends, np.int64)


def _thinned(of: str, ends: Array, births: StepBirths, is_weak: bool = False) -> Iterations:
    """Iterations with few enough ends, of which the last stays.

    On the CPU a free is noticed at the next allocation, so frees between an end and the next allocation belong before the
    end; but not after the last end, when everything the loop used is freed.
    """
    stride = -(-len(ends) // _MAX_ENDS)
    ends = ends[::-1][::stride][::-1].copy()
    following = np.append(births.rows, ends[-1])[np.searchsorted(births.rows, ends, side="left")]
    ends[:-1] = np.minimum(following, ends[-1])[:-1]
    return Iterations(of, ends, stride, is_weak)


def _root_calls(trace: Trace) -> tuple[str, Array]:
    """Calls of the outermost module that is called most often, and the rows where they begin."""
    made = calls(trace)
    outermost = made.depth == 0
    last = np.array(made.still_open, np.int64).reshape(-1, 2)  # as where the run ended with an error
    name, begin = np.append(made.name[outermost], last[:, 0]), np.append(made.begin[outermost], last[:, 1])
    names, counts = np.unique(name, return_counts=True)
    most = int(names[counts.argmax()]) if len(names) else -1
    return f"call of {trace.text('mark', most)}", np.sort(begin[name == most])


def _repeats(trace: Trace, births: StepBirths) -> Array:
    """Rows of the largest allocation that repeats at one place and size and is freed each time."""
    if not len(births.rows):
        return births.rows
    group, _ = distinct(births.origin, births.nbytes)
    born = np.bincount(group)
    gone = np.bincount(group, births.died < len(trace.events))
    passing = (born >= MIN_REPEATS) & (gone >= 0.8 * born)
    largest = int(np.where(passing, np.bincount(group, births.nbytes), -1).argmax())
    repeated: Array = births.rows[(group == largest) & passing[largest]]
    return repeated
