"""Rows of lines as marks of a trace, with backward laid over the lines that wait for it.

The text of a LINE mark is the lines on from there, the innermost first, one under the other ("f.py:3", "cell:7"); empty
where no watched line is on. A last AGAIN says that the innermost line does not begin but goes on (a call in it has
returned). Above BACKWARD stands the forward line for which backward works, if that is known; below it the line that waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from memlab.probes.backward import Backward
from memlab.probes.line_log import OUTSIDE, Chains, Rows, with_events
from memlab.seams import tracing
from memlab.trace.columns import Array, Kind, MarkKind, Marks
from memlab.trace.trace import Trace

BACKWARD, AGAIN = "(backward)", "..."
_BACKWARD = (1 << 40) - 1
"""Stands for BACKWARD among the positions of a chain."""


def marked(
    trace: Trace, start_ns: int, rows: Rows, chains: Chains, backward: Backward, files: Mapping[str, str]
) -> Trace:
    """The trace with these rows as LINE marks, and with the lines of blocks that had none.

    `files` has what each watched file is called, in the order of their numbers.
    """
    rows = dataclasses.replace(rows, time_ns=np.maximum(rows.time_ns - start_ns, 0))
    windows = [(begin - start_ns, end - start_ns) for begin, end in backward.windows()]
    reached, forward = backward.reached()
    rows = with_backward(rows, chains, windows, (reached - start_ns, forward))
    times = trace.events.time_ns[trace.first_row :]
    rows = with_events(rows, times, chains)
    row = trace.first_row + np.searchsorted(times, rows.time_ns, side="right")
    names, texts = _texts(rows, chains, list(files.values()))
    first = len(trace.texts["mark"])
    ours = Marks(row, rows.time_ns, np.full(len(row), MarkKind.LINE), first + names)
    marks = Marks.joined([trace.marks, ours])
    marks = marks.rows(np.argsort(marks.time_ns, kind="stable"))
    trace = dataclasses.replace(trace, marks=marks, texts={**trace.texts, "mark": (*trace.texts["mark"], *texts)})
    return with_lines_of_blocks(trace, row, chains.innermost(rows.chain), files)


def _texts(rows: Rows, chains: Chains, labels: Sequence[str]) -> tuple[Array, list[str]]:
    """The number of each row's text, and the texts."""
    keys, inverse = np.unique(rows.chain.astype(np.int64) * 2 + rows.begins, return_inverse=True)
    texts = []
    for key in keys.tolist():
        positions, begins = chains.positions[key // 2], key % 2
        goes_on = bool(positions) and not begins and _BACKWARD not in positions
        texts.append("\n".join([*(_text(one, labels) for one in positions), *([AGAIN] if goes_on else [])]))
    return inverse.reshape(-1), texts


def _text(position: int, labels: Sequence[str]) -> str:
    if position == _BACKWARD:
        return BACKWARD
    number, line = tracing.file_and_line(position)
    return f"{labels[number]}:{line}"


# --- backward ---------------------------------------------------------------------------------------------------------


def with_backward(rows: Rows, chains: Chains, windows: Sequence[tuple[int, int]], reached: tuple[Array, Array]) -> Rows:
    """Rows in which the line that waits for backward makes room for the forward lines for which it works."""
    chain, added = rows.chain.copy(), [rows]
    for begin, end in windows:
        inside = slice(*np.searchsorted(rows.time_ns, [begin, end], side="right").tolist())
        waiting = int(rows.chain[inside.start - 1]) if inside.start else OUTSIDE
        hooks = slice(*np.searchsorted(reached[0], [begin, end], side="right").tolist())
        times = np.concatenate([[begin], reached[0][hooks]])
        over = np.array([_over(chains, waiting, line) for line in [-1, *reached[1][hooks].tolist()]], "i4")
        # Watched code that runs within backward (a Function's own, a recomputed forward) counts for itself.
        own = rows.chain[inside] != waiting
        last = np.searchsorted(times, rows.time_ns[inside], side="right") - 1
        chain[inside] = np.where(own, rows.chain[inside], over[last])
        before = np.searchsorted(rows.time_ns[inside], times, side="right") - 1
        shows = ~own[before] | (before < 0) if len(own) else np.ones(len(times), bool)
        after = int(rows.chain[inside.stop - 1]) if inside.stop else OUTSIDE
        added.append(Rows(times[shows], over[shows], np.zeros(int(shows.sum()), bool)))
        added.append(Rows(np.array([end]), np.array([after], "i4"), np.array([False])))
    begins = rows.begins & (chain == rows.chain)
    joined = Rows.joined([Rows(rows.time_ns, chain, begins), *added[1:]])
    return joined.at(np.argsort(joined.time_ns, kind="stable"))


def _over(chains: Chains, waiting: int, line: int) -> int:
    """The chain while backward works for a line (-1: not known), and another one waits."""
    around = (_BACKWARD, *chains.positions[waiting])
    return chains.number((line, *around) if line >= 0 else around)


# --- blocks -----------------------------------------------------------------------------------------------------------


def with_lines_of_blocks(trace: Trace, row: Array, innermost: Array, files: Mapping[str, str]) -> Trace:
    """The trace with a line for each block that was made while one was on, where none was known before."""
    trace = _relabelled(trace, files)
    made = np.flatnonzero(trace.events.kind == Kind.ALLOC)
    at = np.searchsorted(row, made, side="right") - 1
    position = np.where(at >= 0, innermost[np.maximum(at, 0)] if len(innermost) else -1, -1)
    block = trace.events.block[made]
    fills = (trace.blocks.line[block] < 0) & (position >= 0) & (position != _BACKWARD)
    lines = {text: index for index, text in enumerate(trace.texts["line"])}
    positions, inverse = np.unique(position[fills], return_inverse=True)
    labels = list(files.values())
    numbers = [lines.setdefault(_text(one, labels), len(lines)) for one in positions.tolist()]
    line = trace.blocks.line.copy()
    line[block[fills]] = np.array(numbers, "i4")[inverse] if len(numbers) else 0
    return dataclasses.replace(
        trace, blocks=trace.blocks.replace(line=line), texts={**trace.texts, "line": tuple(lines)}
    )


def _relabelled(trace: Trace, files: Mapping[str, str]) -> Trace:
    """The trace in which lines that history knows by file are called as those of the marks are."""
    lines: dict[str, int] = {}
    numbers = []
    for text in trace.texts["line"]:
        file, _, line = text.rpartition(":")
        numbers.append(lines.setdefault(f"{files[file]}:{line}" if file in files else text, len(lines)))
    line = np.array([*numbers, -1], "i4")[trace.blocks.line]
    return dataclasses.replace(
        trace, blocks=trace.blocks.replace(line=line), texts={**trace.texts, "line": tuple(lines)}
    )
