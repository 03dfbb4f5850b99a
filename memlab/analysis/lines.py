"""Bytes by source line: what each line held, how high memory rose inside it, what it freed; loops aggregated.

A byte allocated or freed is charged once: to the innermost watched line that was running, or, in backward, to the forward
line that backward was working on. So all lines and what lies outside them sum to the change over the run, exactly.

Workspaces that a math library keeps count as outside, whichever line needed them first.

Limits: only watched lines are known. Levels are those of the whole device: what other threads do meanwhile
counts for the line that is running. Where events were lost, figures of lines are too low.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from memlab.analysis.breakdown import workspaces
from memlab.analysis.timeline import Timeline, highest, lives, timeline
from memlab.errors import MemlabError
from memlab.trace.columns import Array, Kind, MarkKind, Marks
from memlab.trace.trace import Trace
from memlab.units import format_bytes

BACKWARD = "backward"
"""The row for what backward did for unknown lines."""
WITH_LINES = "memlab run --lines, %%memtrack --lines, or memlab.track(lines=True)"
"""How a run gets lines."""
MARK_BACKWARD, MARK_AGAIN = "(backward)", "..."
"""The format of a line mark's text: see `memlab.probes.line_marks`."""


@dataclass(frozen=True, slots=True)
class LineGroup:
    """Tensors of one kind that were allocated or freed: count and total bytes. An unknown shape or dtype is ""."""

    count: int
    shape: str
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LineRow:
    """One line. Charged to it alone: `held_bytes` (allocated minus freed), `backward_bytes` (the same, in backward).

    With what it called and waited for: `total_bytes` (allocated minus freed), `peak_bytes` (the highest rise above the
    level at its start), `level_bytes` (the level of the device after its last execution). While it was the innermost:
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
    came: tuple[LineGroup, ...] = ()
    went: tuple[LineGroup, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was allocated or freed in it."""
        moved = self.peak_bytes, self.allocated_bytes, self.freed_bytes, self.backward_bytes, self.total_bytes
        return not any(moved)


@dataclass(frozen=True, slots=True)
class LineTable:
    """The lines of one device, by source and number; `sources` has their text by label and line number, `remark` is the trace's."""

    device: str
    rows: tuple[LineRow, ...]
    start_bytes: int
    end_bytes: int
    outside_bytes: int
    sources: Mapping[str, Mapping[int, str]]
    gaps: tuple[str, ...] = ()
    remark: str = ""

    def __iter__(self) -> Iterator[LineRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, text: str) -> LineRow:
        for row in self.rows:
            if row.text == text:
                return row
        examples = ", ".join(repr(row.text) for row in self.rows[:3]) or "none: the run has no lines"
        raise MemlabError(f"no line {text!r:.100} was executed; the lines are named as in {examples}.")

    @property
    def change_bytes(self) -> int:
        """The change of the level over the run: all lines, backward, and what lies outside."""
        return self.end_bytes - self.start_bytes

    def to_pandas(self) -> Any:
        """One row per line, sizes in bytes."""
        import pandas

        names = [field.name for field in fields(LineRow) if field.name not in ("came", "went")]
        return pandas.DataFrame([{name: getattr(row, name) for name in names} for row in self.rows], columns=names)


def lines(trace: Trace, device: int) -> LineTable:
    """The lines of one device, from a trace recorded with lines."""
    if "executions" not in trace.notes:
        raise MemlabError(f"this run has no lines: measure with {WITH_LINES}.")
    level = timeline(trace, device)
    row, delta = level.row[1:], np.diff(level.bytes)
    is_workspace = workspaces(trace)[trace.events.block[row]]
    spans = _Spans(trace.marks.rows(trace.marks.kind == MarkKind.LINE), trace.texts["mark"], row)
    sums = _sums(spans, level, is_workspace)
    # Allocated and freed in the innermost line: blocks that outlive the span, blocks older than it.
    block, nbytes = trace.events.block[row], trace.events.requested_bytes[row]
    born, died = lives(trace, device)
    born = np.where(np.append(trace.events.kind, -1)[born] == Kind.ALLOC, born, -1)
    inside, edge = (spans.span >= 0) & ~is_workspace, np.append(row, len(trace.events))
    line, begin, end = (np.append(column, 0)[spans.span] for column in (spans.line, spans.begin, spans.end))
    comes, goes = inside & (delta > 0), inside & (delta < 0)
    outlives, older = comes & (died[block] >= edge[end]), goes & (born[block] < edge[begin])
    sums["allocated"] = spans.by_line(line[comes], delta[comes])
    sums["freed"] = spans.by_line(line[older], -delta[older])
    came = _groups(trace, line[outlives], block[outlives], nbytes[outlives])
    went = _groups(trace, line[older], block[older], nbytes[older])

    sources = sources_of(trace)
    order = {source: place for place, source in enumerate([*sources, "", BACKWARD])}
    rows = sorted(
        _rows(_executions(trace), spans, sums, came, went),
        key=lambda row: (order.get(row.text, order.get(row.source, len(sources))), row.source, row.line),
    )
    gaps = [gap.text for gap in trace.gaps if gap.name == "lines"]
    if taken := int(delta[is_workspace].sum()):
        text = f"{format_bytes(taken)} of math library workspaces, which stay allocated, count as outside"
        gaps.append(text)
    return LineTable(
        device=trace.made_by.device(device).label,
        rows=tuple(rows),
        start_bytes=level.start_bytes,
        end_bytes=level.end_bytes,
        outside_bytes=int(delta[is_workspace | (spans.charged < 0)].sum()),
        sources=sources,
        gaps=tuple(gaps),
        remark=trace.remark,
    )


def line_at(trace: Trace, row: int) -> str:
    """The watched line that was running at an event, in backward the one that waited for it; "" if unknown."""
    marks = trace.marks
    earlier = np.flatnonzero((marks.kind == MarkKind.LINE) & (marks.row <= row))
    on = trace.text("mark", int(marks.name[earlier[-1]])).split("\n") if len(earlier) else []
    outer = on[on.index(MARK_BACKWARD) + 1 :] if MARK_BACKWARD in on else on
    return next((line for line in outer if line != MARK_AGAIN), "")


def backward_call_at(trace: Trace, row: int) -> str:
    """The user's line that last called backward before an event; "" if unknown."""
    marks = trace.marks
    earlier = np.flatnonzero((marks.kind == MarkKind.BACKWARD_CALL) & (marks.row <= row))
    return trace.text("mark", int(marks.name[earlier[-1]])) if len(earlier) else ""


def _sums(spans: _Spans, level: Timeline, is_workspace: Array) -> dict[str, Array]:
    """Charges of each line, and the levels over its spans: uninterrupted executions, including calls."""
    delta = np.diff(level.bytes)
    known, backward = ~is_workspace & (spans.charged >= 0), spans.in_backward
    sums = {}
    for name, chosen in (("held", known & ~backward), ("backward", known & backward)):
        sums[name] = spans.by_line(spans.charged[chosen], delta[chosen])
    without = level.without(is_workspace)
    begin, end = without[spans.begin], without[spans.end]
    sums["total"] = spans.by_line(spans.line, end - begin)
    sums["peak"], sums["level"] = (np.zeros(len(spans.lines), np.int64) for _ in range(2))
    np.maximum.at(sums["peak"], spans.line, highest(without, spans.begin, spans.end + 1) - begin)
    sums["level"][spans.line] = level.bytes[spans.end]  # spans are in order, so the last one wins
    return sums


_Groups = dict[int, tuple[LineGroup, ...]]


def _rows(
    executions: Mapping[str, int], spans: _Spans, sums: Mapping[str, Array], came: _Groups, went: _Groups
) -> Iterator[LineRow]:
    """All lines that began, and others with charges: `backward`, lines that were running before."""
    charged = sum(sums[name] != 0 for name in ("held", "backward", "allocated", "freed"))
    for name in dict.fromkeys([*executions, *(name for name, at in spans.lines.items() if charged[at])]):
        source, _, number = name.rpartition(":")
        figures: dict[str, Any] = {"executions": executions.get(name, 0)}
        if (at := spans.lines.get(name)) is not None:
            figures |= {f"{column}_bytes": int(values[at]) for column, values in sums.items()}
            figures |= {"came": came.get(at, ()), "went": went.get(at, ())}
        yield LineRow(name, source, _number(number), **figures)


def _groups(trace: Trace, line: Array, block: Array, nbytes: Array) -> _Groups:
    """Line -> tensors of the same size, shape and dtype, the largest groups first."""
    keys = np.stack([line, nbytes, trace.blocks.shape[block], trace.blocks.dtype[block]]).astype(np.int64)
    kinds, counts = np.unique(keys, axis=1, return_counts=True)
    found: dict[int, list[LineGroup]] = {}
    for (one, size, shape, dtype), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        text = trace.text("shape", shape), trace.text("dtype", dtype)
        found.setdefault(one, []).append(LineGroup(count, *text, count * size))
    return {one: tuple(sorted(groups, key=lambda group: -group.bytes)) for one, groups in found.items()}


class _Spans:
    """Stretches of the events of one device, numbered 0, 1, 2, ..., during which one execution of a line ran.

    Per span, in order of line and time: `line` (a number of `lines`), `begin` and `end` (events begin..end-1 fall into
    it). Per event: `charged` (the line it counts for, -1: none), `in_backward`, and `span` (that of the innermost line
    that was on, -1: none).
    """

    def __init__(self, marks: Marks, texts: Sequence[str], rows: Array) -> None:
        self.lines: dict[str, int] = {}
        names, which = np.unique(marks.name, return_inverse=True)
        read = [self._parsed(texts[name]) for name in names.tolist()]
        charged, in_backward, anew = (np.array([one[i] for one in read], np.int64)[which] for i in range(3))
        depth = np.array([len(one[3]) for one in read], np.int64)
        table = np.full((len(read), depth.max(initial=0)), -1)
        for number, (*_, on) in enumerate(read):
            table[number, : len(on)] = on
        # For each line the marks during which it runs, split where it stops in between or begins again.
        count = depth[which]
        mark = np.repeat(np.arange(len(marks)), count)
        place = np.arange(len(mark)) - np.repeat(np.cumsum(count) - count, count)
        line = table[which[mark], place]
        order = np.lexsort((mark, line))
        mark, line, is_innermost = mark[order], line[order], place[order] == 0
        follows = (np.diff(line, prepend=-1) == 0) & (np.diff(mark, prepend=-1) == 1)
        starts = ~follows | (is_innermost & (anew[mark] > 0))
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(mark))[: len(first)] - 1
        begins = np.searchsorted(rows, marks.row, side="left")
        self.line, self.begin = line[first], begins[mark[first]]
        self.end = np.append(begins, len(rows))[mark[last] + 1]
        innermost = np.full(len(marks) + 1, -1)
        innermost[mark[is_innermost]] = (np.cumsum(starts) - 1)[is_innermost]
        at = np.searchsorted(marks.row, rows, side="right") - 1  # -1, before all marks, indexes the last of these:
        self.charged, self.span = np.append(charged, -1)[at], innermost[at]
        self.in_backward = np.append(in_backward, 0)[at] > 0

    def _parsed(self, text: str) -> tuple[int, bool, bool, list[int]]:
        """(line charged, whether in backward, whether it begins, running lines, innermost first)."""
        parts = text.split("\n") if text else []
        begins = bool(parts) and parts[-1] != MARK_AGAIN
        parts = parts if begins else parts[:-1]
        in_backward = MARK_BACKWARD in parts
        waits = parts.index(MARK_BACKWARD) + 1 if in_backward else 0
        charged = parts[0] if parts and parts[0] != MARK_BACKWARD else BACKWARD if in_backward else ""
        on = [self._line_number(part) for part in dict.fromkeys(parts[waits:])]
        return self._line_number(charged) if charged else -1, in_backward, begins and not in_backward, on

    def _line_number(self, text: str) -> int:
        return self.lines.setdefault(text, len(self.lines))

    def by_line(self, line: Array, nbytes: Array) -> Array:
        """The sum of bytes for each line."""
        sums = np.zeros(len(self.lines), np.int64)
        np.add.at(sums, line, nbytes)
        return sums


# --- notes about lines; they may come from a file, so malformed ones are skipped ------------------------------------------

_CELL = re.compile(r"cell|In\[\d+\]")
"""Sources that IPython compiles statement by statement: `a = 1; b = 2` begins its line twice."""


def sources_of(trace: Trace) -> dict[str, dict[int, str]]:
    """The text of the lines, by label and number, as far as it was recorded."""
    found = {}
    for label, texts in _noted(trace, "lines"):
        found[label] = {_number(number): str(text) for number, text in texts.items() if _number(number)}
    return found


def _executions(trace: Trace) -> dict[str, int]:
    """How often each line began, by name."""
    sources = sources_of(trace)
    found: dict[str, int] = {}
    for label, by_line in _noted(trace, "executions"):
        parts = _statements(sources.get(label, {})) if _CELL.fullmatch(label) else Counter[int]()
        for line, count in by_line.items():
            if type(count) is int:
                among = max(parts[_number(line)], 1)
                found[f"{label}:{line}"] = count if count % among else count // among
    return found


def _statements(texts: Mapping[int, str]) -> Counter[int]:
    """Line -> number of top-level statements of the cell that begin in it."""
    whole = [texts.get(number, "") for number in range(1, max(texts, default=0) + 1)]
    whole = ["0" if text[:1] in ("%", "!", "?") else text for text in whole]
    try:
        return Counter(one.lineno for one in ast.parse("\n".join(whole)).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Counter()


def _noted(trace: Trace, name: str) -> list[tuple[str, Mapping[Any, Any]]]:
    return [(str(label), inner) for label, inner in trace.noted(name).items() if isinstance(inner, Mapping)]


def _number(text: Any) -> int:
    """A line number, 0 for anything else."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 10 else 0
