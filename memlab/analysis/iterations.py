"""What an iteration of a run is: the sign by which one is told from the next, and the event rows where they end.

The strongest sign counts: optimizer steps, else backwards, else calls of the outermost module, else an allocation that
repeats and is given back. What one pass gathers for its only backward is no repetition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.trace.columns import Array, Category, Kind, MarkKind
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE
from memlab.trace.trace import Trace

MIN_STEPS = 4
"""So many optimizer steps or backwards at least."""
MIN_REPEATS = 2 * MIN_STEPS
"""So many of the weaker signs."""
MAX_ENDS = 2000
_MODULE_BEGINS = (MarkKind.MODULE_BEGIN, MarkKind.MODULE_BEGIN_NO_GRAD)


@dataclass(frozen=True, slots=True, eq=False)
class Births:
    """The blocks that a run allocates on a device: event row of birth and death, bytes, id, and where they come from.

    `line` is a number in the table of lines or, below -1, in that of marks; `origin` numbers the places (line, stack,
    module and operator) from 0. As far as the trace knows them, parameters and buffers are `made_to_stay`, and an optimizer's
    own `states` never are a leak: L-BFGS gathers a history of its steps.
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
    def of(cls, trace: Trace, device: int) -> Births:
        """Those of a trace; a block that is never freed dies after the last event."""
        events, table = trace.events, trace.blocks
        mine = (events.device == device) & (np.arange(len(events)) >= trace.first_row) & (events.block >= 0)
        rows = np.flatnonzero(mine & (events.kind == Kind.ALLOC) & (events.allocated_bytes > 0))
        goes = np.flatnonzero(mine & ((events.kind == Kind.FREE) | (events.kind == Kind.FREE_PENDING)))[::-1]
        died = np.full(len(table), len(events), np.int64)
        died[events.block[goes]] = goes  # the last to be written is the first that happened
        ids = events.block[rows]
        line = _lines(trace, rows, table.line[ids])
        category = table.category[ids]
        made_to_stay, states = np.isin(category, (Category.PARAMETER, Category.BUFFER)), category == Category.OPTIMIZER
        origin = grouped(line, table.stack[ids], table.module[ids], table.op[ids])
        return cls(rows, died[ids], events.allocated_bytes[rows], ids, line, origin, made_to_stay, states)

    def line_text(self, trace: Trace, index: int) -> str:
        """The line of one of them, "" where it is not known."""
        line = int(self.line[index])
        return trace.text("line", line) if line >= -1 else trace.text("mark", -2 - line)


def _lines(trace: Trace, rows: Array, known: Array) -> Array:
    """The line of each birth; where lines are marked and the blocks know none, the one that was at work."""
    marks = trace.marks
    at = np.flatnonzero(marks.kind == MarkKind.LINE)
    if not len(at) or (known >= 0).any():
        return known
    last = np.searchsorted(marks.row[at], rows, side="right") - 1
    return np.where(last >= 0, -2 - marks.name[at[np.maximum(last, 0)]].astype(np.int64), -1)


def grouped(*keys: Array) -> Array:
    """A number for each combination of keys, from 0."""
    group, count = np.zeros(len(keys[0]), np.int64), 1
    for key in keys:
        key = np.asarray(key, np.int64) - key.min(initial=0)
        span = int(key.max(initial=0)) + 1
        if count * span >= 1 << 62:
            group, key = (np.unique(column, return_inverse=True)[1] for column in (group, key))
            count, span = int(group.max(initial=0)) + 1, int(key.max(initial=0)) + 1
        group, count = group * span + key, count * span
    return np.unique(group, return_inverse=True)[1]


@dataclass(frozen=True, slots=True, eq=False)
class Iterations:
    """The event rows before which iterations end, `stride` of them at a time; `of` says what one is.

    Those of a weak sign reach to the end of the run: what they gather has to be there at the very end.
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
        """The iteration in which events fall, counted from 0; `count` is after the last one."""
        return np.searchsorted(self.ends, rows, side="right")


def iterations(trace: Trace, device: int, births: Births) -> Iterations | None:
    """The iterations of a run, as far as no event was lost in them; None where there are too few."""
    first = _first_whole_row(trace, device)
    steps = _phase_rows(trace, MarkKind.PHASE_END, (OPTIMIZER, OPTIMIZER_WITH_CLOSURE))
    backwards = _phase_rows(trace, MarkKind.PHASE_BEGIN, (BACKWARD,))
    for of, rows in (("optimizer step", steps), ("backward", backwards)):
        if np.count_nonzero(rows >= first) >= MIN_STEPS:
            return _made(of, rows[rows >= first], births)
    if len(steps) or len(backwards):
        return None  # what a rollout gathers for its one backward is no leak
    name, begins = _root_calls(trace)
    weak = [(f"call of {name}", begins)] if len(begins) >= MIN_STEPS else [("repeat", _repeats(trace, births))]
    for of, rows in weak:
        if np.count_nonzero(rows >= first) >= MIN_REPEATS:
            return _made(of, np.append(rows[rows >= first][1:], len(trace.events)), births, is_weak=True)
    return None


def _made(of: str, ends: Array, births: Births, is_weak: bool = False) -> Iterations:
    """Iterations with few enough ends, of which the last stays.

    On the CPU a free is noticed at the next birth, so those between an end and the birth after it belong before; but not
    after the last end, where all goes that the loop used.
    """
    stride = -(-len(ends) // MAX_ENDS)
    ends = ends[::-1][::stride][::-1].copy()
    following = np.append(births.rows, ends[-1])[np.searchsorted(births.rows, ends, side="left")]
    ends[:-1] = np.minimum(following, ends[-1])[:-1]
    return Iterations(of, ends, stride, is_weak)


def _first_whole_row(trace: Trace, device: int) -> int:
    """The first row after all that was lost or let go of this device."""
    lost_ns = max((b.end_ns for b in trace.made_by.bounded if b.device == device), default=-1)
    return trace.first_row + int(np.searchsorted(trace.events.time_ns[trace.first_row :], lost_ns, side="right"))


def _phase_rows(trace: Trace, kind: MarkKind, names: tuple[str, ...]) -> Array:
    wanted = [index for index, text in enumerate(trace.texts["mark"]) if text in names]
    marks = trace.marks
    return marks.row[(marks.kind == kind) & np.isin(marks.name, wanted)]


def _root_calls(trace: Trace) -> tuple[str, Array]:
    """The module that is called most often from outside of any other, and the rows where its calls begin."""
    marks, open_modules, calls = trace.marks, list[int](), dict[int, list[int]]()
    of_modules = np.isin(marks.kind, (*_MODULE_BEGINS, MarkKind.MODULE_END))
    columns = (column[of_modules].tolist() for column in (marks.row, marks.kind, marks.name))
    for row, kind, name in zip(*columns, strict=True):
        if kind in _MODULE_BEGINS:
            if not open_modules:
                calls.setdefault(name, []).append(row)
            open_modules.append(name)
        elif name in open_modules:  # also closes what raised inside of it
            del open_modules[len(open_modules) - 1 - open_modules[::-1].index(name) :]
    if not calls:
        return "", np.empty(0, np.int64)
    most = max(calls, key=lambda name: len(calls[name]))
    return trace.text("mark", most), np.array(calls[most])


def _repeats(trace: Trace, births: Births) -> Array:
    """The births of what is allocated again and again at one place and size and given back, the largest of that kind."""
    if not len(births.rows):
        return births.rows
    group = grouped(births.origin, births.nbytes)
    born = np.bincount(group)
    gone = np.bincount(group, births.died < len(trace.events))
    passing = (born >= MIN_REPEATS) & (gone >= 0.8 * born)
    if not passing.any():
        return births.rows[:0]
    return births.rows[group == int(np.where(passing, np.bincount(group, births.nbytes), -1).argmax())]
