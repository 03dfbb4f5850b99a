"""Line marks as passages: stretches of events during which one execution of a line, with all it called, was on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memlab.trace.columns import Array, Marks

MARK_BACKWARD, MARK_AGAIN = "(backward)", "..."
"""What stands in the text of a line mark: see `memlab.probes.line_marks`."""


class Passages:
    """Marks against the events of one device, which are numbered 0, 1, 2, ...

    Per passage, in order of line and time: `line` (a number of `lines`), `begin` and `end` (events begin..end-1 fall into
    it). Per event: `charged` (the line it counts for, -1: none), `in_backward`, and `passage` (that of the innermost line
    that was on, -1: none).
    """

    def __init__(self, marks: Marks, texts: Sequence[str], rows: Array, backward: str) -> None:
        self.lines: dict[str, int] = {}
        self._read(marks, texts, backward)
        begins = np.searchsorted(rows, marks.row, side="left")
        ends = np.append(begins[1:], len(rows)) if len(begins) else begins
        self._divide(begins, ends)
        mark = np.searchsorted(marks.row, rows, side="right") - 1
        known = mark >= 0
        self.charged = np.where(known, _at(self._charged, mark), -1)
        self.in_backward = known & _at(self._is_backward, mark).astype(bool)
        self.passage = np.where(known, _at(self._passage_of_mark, mark), -1)

    def _read(self, marks: Marks, texts: Sequence[str], backward: str) -> None:
        """What the texts of the marks say: per mark the line charged, and all lines that are on."""
        names, inverse = np.unique(marks.name, return_inverse=True)
        read = [self._parsed(texts[name], backward) for name in names.tolist()]
        self._charged = np.array([charged for charged, *_ in read], np.int64)[inverse]
        self._is_backward = np.array([in_backward for _, in_backward, *_ in read], bool)[inverse]
        self._begins = np.array([begins for *_, begins, _ in read], bool)[inverse]
        self._on = [on for *_, on in read]
        self._name = inverse

    def _parsed(self, text: str, backward: str) -> tuple[int, bool, bool, list[int]]:
        """(line charged, whether in backward, whether it begins, lines that are on with the innermost first)."""
        parts = text.split("\n") if text else []
        begins = bool(parts) and parts[-1] != MARK_AGAIN
        parts = parts if begins else parts[:-1]
        in_backward = MARK_BACKWARD in parts
        waits = parts.index(MARK_BACKWARD) + 1 if in_backward else 0
        charged = parts[0] if parts and parts[0] != MARK_BACKWARD else backward if in_backward else ""
        on = [self._number(part) for part in dict.fromkeys(parts[waits:])]
        return self._number(charged) if charged else -1, in_backward, begins and not in_backward, on

    def _number(self, text: str) -> int:
        return self.lines.setdefault(text, len(self.lines))

    def _divide(self, begins: Array, ends: Array) -> None:
        """Cut the marks into passages: line by line, where the line is off in between or begins anew."""
        lengths = np.array([len(on) for on in self._on], np.int64)
        flat = np.array([line for on in self._on for line in on], np.int64)
        count = lengths[self._name]
        mark = np.repeat(np.arange(len(begins)), count)
        firsts = np.cumsum(count) - count
        line = flat[np.arange(len(mark)) + np.repeat((np.cumsum(lengths) - lengths)[self._name] - firsts, count)]
        is_innermost = np.zeros(len(mark), bool)
        is_innermost[firsts[count > 0]] = True
        order = np.lexsort((mark, line))
        mark, line, is_innermost = mark[order], line[order], is_innermost[order]
        starts = np.ones(len(mark), bool)
        follows = (np.diff(line) == 0) & (np.diff(mark) == 1)
        starts[1:] = ~follows | (self._begins[mark[1:]] & is_innermost[1:])
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(mark))[: len(first)] - 1
        self.line = line[first]
        self.begin, self.end = begins[mark[first]], ends[mark[last]]
        self._passage_of_mark = np.full(len(begins), -1)
        number = np.cumsum(starts) - 1
        self._passage_of_mark[mark[is_innermost]] = number[is_innermost]


def _at(table: Array, index: Array) -> Array:
    """Entries of a table that may be empty; what a negative index gives does not matter."""
    return table[np.maximum(index, 0)] if len(table) else np.zeros(len(index), np.int64)
