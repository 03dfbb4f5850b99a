"""Calls of modules, read off the marks: what each took, left and needed for a moment.

A call is known from its begin to its end. One that never ended (an interrupt: PyTorch calls no hook then) has no figures;
an error ends a call as a return does. Events of other threads count for the call that was on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.analysis.areas import lives
from memlab.analysis.breakdown import workspaces
from memlab.analysis.timeline import timeline
from memlab.trace.columns import Array, Kind, MarkKind, Marks
from memlab.trace.spans import BACKWARD
from memlab.trace.trace import Trace

NEVER = np.iinfo(np.int64).max
_BEGINS = (int(MarkKind.MODULE_BEGIN), int(MarkKind.MODULE_BEGIN_NO_GRAD))
_END = int(MarkKind.MODULE_END)


class Matched(NamedTuple):
    """A call as two marks: their numbers, the name (an index into the texts of marks), and whether backward made it."""

    begin: int
    end: int
    name: int
    in_backward: bool


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls in the order in which they began, so that those inside of one follow it.

    `begin` and `end` are rows: the events of a call are begin..end-1. `parent` is the call around it (-1: none), `root` the
    outermost one, `last` the last call inside of it. `backward` is the number of the next backward pass, and
    `backward_row` the row in which that begins (NEVER: none came). From row `turn_row[i]` on the innermost call is
    `turn_call[i]`.
    """

    name: Array
    begin: Array
    end: Array
    parent: Array
    root: Array
    last: Array
    in_backward: Array
    backward: Array
    backward_row: Array
    turn_row: Array
    turn_call: Array
    unended: Counter[int]

    def __len__(self) -> int:
        return len(self.name)

    def innermost(self, rows: Array) -> Array:
        """The innermost call that was on in each of these rows; -1 for none."""
        at = np.searchsorted(self.turn_row, rows, side="right")
        return np.append(-1, self.turn_call)[at]


def calls(trace: Trace) -> Calls:
    """Every call of a module in a trace."""
    marks = trace.marks
    matched, unended = _matched(marks, trace.texts["mark"])
    begin, end, name, in_backward = np.array(matched, np.int64).reshape(-1, 4).T
    parent, root = _around(begin, end)
    starts = _backwards(marks, trace.texts["mark"])
    backward = np.searchsorted(starts, end)
    turn = np.concatenate((begin, end))
    order = np.argsort(turn)
    return Calls(
        name=name,
        begin=marks.row[begin],
        end=marks.row[end],
        parent=parent,
        root=root,
        last=np.searchsorted(begin, end) - 1,
        in_backward=in_backward.astype(bool),
        backward=backward,
        backward_row=np.append(marks.row[starts], NEVER)[backward],
        turn_row=marks.row[turn[order]],
        turn_call=np.append(np.arange(len(begin)), parent)[order],
        unended=unended,
    )


def _matched(marks: Marks, texts: Sequence[str]) -> tuple[list[Matched], Counter[int]]:
    """Begins with their ends, in order of the begins, and how many begins of each name have none."""
    found: list[Matched] = []
    unended: Counter[int] = Counter()
    open_calls: list[tuple[int, int, bool]] = []
    depth = 0  # of backward
    for i, (kind, name) in enumerate(zip(marks.kind.tolist(), marks.name.tolist(), strict=True)):
        if kind in _BEGINS:
            open_calls.append((i, name, depth > 0))
        elif kind == _END:
            at = next((at for at in range(len(open_calls) - 1, -1, -1) if open_calls[at][1] == name), -1)
            if at >= 0:
                begin, _, in_backward = open_calls[at]
                found.append(Matched(begin, i, name, in_backward))
                unended.update(other for _, other, _ in open_calls[at + 1 :])
                del open_calls[at:]
        elif kind <= MarkKind.PHASE_END and texts[name] == BACKWARD:
            depth = depth + 1 if kind == MarkKind.PHASE_BEGIN else max(depth - 1, 0)
    unended.update(name for _, name, _ in open_calls)
    return sorted(found), unended


def _around(begin: Array, end: Array) -> tuple[Array, Array]:
    """Of each call the one around it, and the outermost one."""
    parent, root = np.full(len(begin), -1), np.arange(len(begin))
    around: list[int] = []
    ends = end.tolist()
    for call, first in enumerate(begin.tolist()):
        while around and ends[around[-1]] < first:
            around.pop()
        if around:
            parent[call], root[call] = around[-1], around[0]
        around.append(call)
    return parent, root


def _backwards(marks: Marks, texts: Sequence[str]) -> Array:
    """The marks at which backward passes begin."""
    name = texts.index(BACKWARD) if BACKWARD in texts else -1
    return np.flatnonzero((marks.kind == MarkKind.PHASE_BEGIN) & (marks.name == name))


def components(path: str) -> list[str]:
    """The parts of a path; what stands in brackets belongs to one.

    >>> components("nets['a.b'].layers.0")
    ["nets['a.b']", 'layers', '0']
    """
    return re.findall(r"(?:\[[^\]]*\]|[^.\[]|\[)+", path) or [path]


def prefixes(path: str) -> list[str]:
    """A path and all those above it, the outermost first."""
    parts = components(path)
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def kept_by(trace: Trace, device: int, made: Calls) -> Array:
    """Per call what it leaves for backward: what was still there when the next one began."""
    return left_by(trace, device, made, made.backward_row)


def left_by(trace: Trace, device: int, made: Calls, limit: Array) -> Array:
    """Per call the allocated bytes of blocks that came in it, or in a call inside of it, and were still there in row `limit`.

    A limit is no smaller for the call around. Workspaces are no module's.
    """
    come, go = lives(trace, device)
    block = np.flatnonzero((come >= trace.first_row) & ~workspaces(trace))
    block = block[trace.events.kind[come[block]] == Kind.ALLOC]
    inner = made.innermost(come[block])
    block, inner = block[inner >= 0], inner[inner >= 0]
    size = trace.events.allocated_bytes[come[block]]
    total = np.zeros(len(made) + 1, np.int64)  # the last is for what no call has to give up again
    np.add.at(total, inner, size)
    np.subtract.at(total, _outlived(inner, go[block], limit, made.parent), size)
    sums = np.append(0, np.cumsum(total[:-1]))
    return sums[made.last + 1] - sums[:-1]


def _outlived(call: Array, go: Array, limit: Array, parent: Array) -> Array:
    """From each call outwards the first before whose limit the block had gone; -1 where it outlived them all."""
    call = call.copy()
    going = np.arange(len(call))
    while len(going):
        going = going[call[going] >= 0]
        going = going[go[going] >= limit[call[going]]]
        call[going] = parent[call[going]]
    return call


def rise_of(trace: Trace, device: int, made: Calls) -> Array:
    """Per call the highest level of *allocated* inside of it, less the level at its begin; workspaces apart."""
    line = timeline(trace, device)
    row = line.row
    level = line.bytes - _workspace_level(trace, device, row)
    before = level[np.searchsorted(row, made.begin) - 1]
    highest = before.copy()
    cuts = np.searchsorted(row, made.turn_row)
    moved = np.flatnonzero(np.diff(np.append(cuts, len(row))) > 0)  # turns after which something happened
    moved = moved[made.turn_call[moved] >= 0]
    tops = np.maximum.reduceat(
        np.append(level, 0), np.append(cuts, len(level))[np.stack((moved, moved + 1), 1)].ravel()
    )
    np.maximum.at(highest, made.turn_call[moved], tops[::2])
    for call in range(len(made) - 1, -1, -1):
        around = made.parent[call]
        if around >= 0 and highest[call] > highest[around]:
            highest[around] = highest[call]
    return highest - before


def _workspace_level(trace: Trace, device: int, row: Array) -> Array:
    """What workspaces took in the run up to each of these rows; those that are told as such are never freed."""
    events = trace.events
    come = (events.device == device) & (events.kind == Kind.ALLOC) & np.append(workspaces(trace), False)[events.block]
    come[: trace.first_row] = False
    at = np.flatnonzero(come)
    sums = np.append(0, np.cumsum(events.allocated_bytes[at]))
    found: Array = sums[np.searchsorted(at, row, side="right")]
    return found
