"""Bytes by source line: what each line newly held, how high memory rose inside it, what it freed; loops aggregated.

A byte that comes or goes is charged once: to the innermost watched line that was on, or, in backward, to the forward line
for which backward worked. So the sum over all lines and what lies outside of them is the change over the run, exactly.

Workspaces that a math library takes for itself and keeps count as outside, whichever line was the first to need them.

Limits: lines are known where they were watched. Levels are those of the whole device: what other threads do meanwhile
counts for the line that is on. Where events were lost, figures of lines are too low.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from memlab.analysis.breakdown import workspaces
from memlab.analysis.passages import Passages
from memlab.errors import MemlabError
from memlab.trace.columns import Array, Kind, MarkKind, deltas
from memlab.trace.trace import Trace
from memlab.units import format_bytes

BACKWARD = "backward"
"""The row of what backward did for lines that nobody knows."""
OUTSIDE = "outside of all watched lines"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one kind that came or went: how many, and their bytes together. A shape or dtype not known is ""."""

    count: int
    shape: str
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LineRow:
    """One line. Charged to it alone: `held_bytes` (come less gone while it was on), `backward_bytes` (the same, in backward).

    With what it called and waited for: `total_bytes` (come less gone), `peak_bytes` (the most above the level at its
    start, in any execution), `level_bytes` (the level of the device after its last execution). While it was the innermost:
    `allocated_bytes`, `freed_bytes` (of blocks older than the execution), `came` (tensors that outlived it) and `went`.
    """

    text: str
    source: str
    line: int
    executions: int = 0
    held_bytes: int = 0
    backward_bytes: int = 0
    total_bytes: int = 0
    peak_bytes: int = 0
    level_bytes: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0
    came: tuple[Group, ...] = ()
    went: tuple[Group, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing came or went in it."""
        return not (
            self.peak_bytes or self.allocated_bytes or self.freed_bytes or self.backward_bytes or self.total_bytes
        )


@dataclass(frozen=True, slots=True)
class LineTable:
    """The lines of one device, by source and number; `sources` has their text by label and line number."""

    device: str
    rows: tuple[LineRow, ...]
    start_bytes: int
    end_bytes: int
    outside_bytes: int
    sources: Mapping[str, Mapping[int, str]]
    gaps: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[LineRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, text: str) -> LineRow:
        for row in self.rows:
            if row.text == text:
                return row
        raise MemlabError(f"no line {text!r:.100} was executed; the lines are named as in {self._examples()}.")

    def _examples(self) -> str:
        return ", ".join(repr(row.text) for row in self.rows[:3]) or "nothing: there are none"

    @property
    def change_bytes(self) -> int:
        """By how much the level changed over the run: what all rows held, backward's part, and what lies outside."""
        return self.end_bytes - self.start_bytes

    def to_pandas(self) -> Any:
        """One row per line, sizes in bytes."""
        import pandas

        names = [field.name for field in fields(LineRow) if field.name not in ("came", "went")]
        return pandas.DataFrame([{name: getattr(row, name) for name in names} for row in self.rows], columns=names)


def lines(trace: Trace, device: int) -> LineTable:
    """The lines of a trace that was made with lines on, for one device."""
    if "executions" not in trace.notes:
        raise MemlabError("this run has no lines: measure with %%memtrack --lines, or memlab.track(lines=True).")
    found = _Tally(trace, device)
    known = sources_of(trace)
    rows = [_row(text, found) for text in _names(trace, found)]
    return LineTable(
        device=trace.made_by.device(device).label,
        rows=tuple(sorted(rows, key=lambda row: _order(row, list(known)))),
        start_bytes=int(found.level[0]),
        end_bytes=int(found.level[-1]),
        outside_bytes=found.outside_bytes,
        sources=known,
        gaps=(*(gap.text for gap in trace.gaps if gap.name == "lines"), *_about_workspaces(found.workspace_bytes)),
    )


def _about_workspaces(nbytes: int) -> Iterator[str]:
    if nbytes:
        yield f"{format_bytes(nbytes)} of workspaces, which a math library took for itself and keeps, count as outside"


def sources_of(trace: Trace) -> dict[str, dict[int, str]]:
    """The text of the lines, by label and number, as far as it was kept."""
    return {
        label: {_number(number): str(text) for number, text in texts.items() if _number(number)}
        for label, texts in _noted(trace, "lines")
    }


def executions_of(trace: Trace) -> dict[str, int]:
    """How often each line began, by its name."""
    sources = sources_of(trace)
    found: dict[str, int] = {}
    for label, by_line in _noted(trace, "executions"):
        parts = _statements(sources.get(label, {})) if _CELL.fullmatch(label) else Counter[int]()
        for line, count in by_line.items():
            if type(count) is int:
                among = max(parts[_number(line)], 1)
                found[f"{label}:{line}"] = count if count % among else count // among
    return found


_CELL = re.compile(r"cell|In\[\d+\]")
"""Sources that IPython runs statement by statement, each compiled alone: `a = 1; b = 2` begins its line twice."""


def _statements(texts: Mapping[int, str]) -> Counter[int]:
    """Line -> how many statements of a cell's top level begin in it."""
    whole = [
        "" if not (text := texts.get(n, "")) else "0" if text[0] in "%!?" else text
        for n in range(1, max(texts, default=0) + 1)
    ]
    try:
        return Counter(one.lineno for one in ast.parse("\n".join(whole)).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Counter()


def _noted(trace: Trace, name: str) -> list[tuple[str, Mapping[Any, Any]]]:
    """A note that is a mapping of mappings; it may come from a file, so what is none is left out."""
    noted = trace.notes.get(name)
    items = noted.items() if isinstance(noted, Mapping) else ()
    return [(str(label), inner) for label, inner in items if isinstance(inner, Mapping)]


def _number(text: Any) -> int:
    """A line's number, 0 for what is none."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 10 else 0


def _names(trace: Trace, found: _Tally) -> list[str]:
    """All lines that began, and of the others those that anything is charged to: `backward`, lines that were on before."""
    began = executions_of(trace)
    return [*began, *(name for name in found.passages.lines if name not in began and found.is_charged(name))]


def _order(row: LineRow, sources: list[str]) -> tuple[int, str, int]:
    place = sources.index(row.source) if row.source in sources else len(sources)
    return place if row.text != BACKWARD else len(sources) + 1, row.source, row.line


def _row(text: str, found: _Tally) -> LineRow:
    source, _, number = text.rpartition(":")
    return LineRow(text, source, _number(number), **found.figures(text))


class _Tally:
    """Every figure of every line of one device: arrays with one entry per line of `passages.lines`."""

    def __init__(self, trace: Trace, device: int) -> None:
        self.trace = trace
        self.executions = executions_of(trace)
        delta = deltas(trace.events, "allocated")
        mine = np.flatnonzero((trace.events.device == device) & (delta != 0))
        before = mine < trace.first_row
        start = int(delta[mine[before]].sum())
        self.row = mine[~before]
        self.delta = delta[self.row]
        self.level = np.concatenate(([start], start + np.cumsum(self.delta)))
        self.is_workspace = workspaces(trace)[trace.events.block[self.row]]
        self.workspace_bytes = int(self.delta[self.is_workspace].sum())
        work = np.where(self.is_workspace, 0, self.delta)
        self.work_level = np.concatenate(([start], start + np.cumsum(work)))
        marks = trace.marks.rows(trace.marks.kind == MarkKind.LINE)
        self.passages = Passages(marks, trace.texts["mark"], self.row, BACKWARD)
        self._charge()
        self._measure()
        self._sort_out()

    def _charge(self) -> None:
        charged = np.where(self.is_workspace, -1, self.passages.charged)
        in_backward = self.passages.in_backward
        self.outside_bytes = int(self.delta[charged < 0].sum())
        self.held = self._sums(charged, ~in_backward)
        self.backward = self._sums(charged, in_backward)

    def _sums(self, line: Array, chosen: Array) -> Array:
        """The sum of what came and went by line, over the chosen events of known line."""
        chosen = chosen & (line >= 0)
        return self._by_line(line[chosen], self.delta[chosen])

    def _by_line(self, line: Array, nbytes: Array) -> Array:
        sums = np.zeros(len(self.passages.lines), np.int64)
        np.add.at(sums, line, nbytes)
        return sums

    def _measure(self) -> None:
        """Levels over each passage: one uninterrupted execution of a line, with what it called."""
        passages, count = self.passages, len(self.passages.lines)
        begin, end = self.work_level[passages.begin], self.work_level[passages.end]
        self.total = self._by_line(passages.line, end - begin)
        edges = np.stack([passages.begin, passages.end + 1], axis=1).reshape(-1)
        padded = np.append(self.work_level, self.work_level[-1])
        highest = np.maximum.reduceat(padded, edges)[::2] if len(edges) else begin
        self.peak, self.last_level = np.zeros(count, np.int64), np.zeros(count, np.int64)
        np.maximum.at(self.peak, passages.line, highest - begin)
        self.last_level[passages.line] = self.level[passages.end]  # passages come in order, so the last one stays

    def _sort_out(self) -> None:
        """What came and went in the innermost line: what is older than the passage, what outlives it."""
        events, passages = self.trace.events.rows(self.row), self.passages
        passage, inside = passages.passage, (passages.passage >= 0) & ~self.is_workspace
        line = np.where(inside, passages.line[passage] if len(passages.line) else -1, -1)
        comes, goes = inside & (self.delta > 0), inside & (self.delta < 0)
        born, died = self._lives()
        outlives = comes.copy()
        outlives[comes] = died[events.block[comes]] >= passages.end[passage[comes]]
        older = goes.copy()
        older[goes] = born[events.block[goes]] < passages.begin[passage[goes]]
        self.allocated = self._by_line(line[comes], self.delta[comes])
        self.freed = self._by_line(line[older], -self.delta[older])
        self.came = self._groups(line[outlives], events.block[outlives], events.requested_bytes[outlives])
        self.went = self._groups(line[older], events.block[older], events.requested_bytes[older])

    def _lives(self) -> tuple[Array, Array]:
        """By block: the number among this device's events at which it came (-1: before) and went (never: the largest)."""
        block, count = self.trace.events.block[self.row], len(self.trace.blocks)
        born, died = np.full(count, -1), np.full(count, len(self.row) + 1)
        numbers, comes = np.arange(len(self.row)), self.delta > 0
        is_new = comes & (self.trace.events.kind[self.row] == Kind.ALLOC)
        born[block[is_new]] = numbers[is_new]
        died[block[~comes]] = numbers[~comes]
        return born, died

    def _groups(self, line: Array, block: Array, nbytes: Array) -> dict[int, tuple[Group, ...]]:
        """Line -> tensors of the same size, shape and dtype, the largest groups first."""
        blocks = self.trace.blocks
        keys = np.stack([line, nbytes, blocks.shape[block], blocks.dtype[block]]).astype(np.int64)
        kinds, counts = np.unique(keys, axis=1, return_counts=True)
        found: dict[int, list[Group]] = {}
        for (one, size, shape, dtype), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
            text = self.trace.text("shape", shape), self.trace.text("dtype", dtype)
            found.setdefault(one, []).append(Group(count, *text, count * size))
        return {one: tuple(sorted(groups, key=lambda group: -group.bytes)) for one, groups in found.items()}

    def is_charged(self, text: str) -> bool:
        """Whether anything is charged to this line."""
        at = self.passages.lines.get(text, -1)
        return at >= 0 and any(sums[at] for sums in (self.held, self.backward, self.allocated, self.freed))

    def figures(self, text: str) -> dict[str, Any]:
        """Everything about one line, by the names of a LineRow."""
        known: dict[str, Any] = {"executions": self.executions.get(text, 0)}
        at = self.passages.lines.get(text)
        if at is None:
            return known
        names = ("held", "backward", "total", "peak", "allocated", "freed")
        sizes = {f"{name}_bytes": int(getattr(self, name)[at]) for name in names}
        groups = {"came": self.came.get(at, ()), "went": self.went.get(at, ())}
        return {**known, **sizes, **groups, "level_bytes": int(self.last_level[at])}
