"""The stack of executing lines at each time, from the reports of a line tracer.

A *position* is a line of a watched file as one number. A *chain* is the tuple of positions on the stack, innermost
first. Memory is bounded: rows between which nothing happened are dropped first, then the oldest half.

Limits: a line is in a chain only once, so recursion counts as one execution.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memlab.torch_internals.tracing import ENTER, LEAVE, LINE, Tell
from memlab.trace.columns import I4, I8, U1, Array, Columns

OUTSIDE = 0
"""The empty chain."""
MAX_ROWS = 1_000_000
MAX_CHAINS = 100_000
_CHUNK = 1 << 14
_BITS = 40  # of a position: a file's number and a line
_LOW = (1 << _BITS) - 1
_STEP = np.zeros(4, np.int64)
_STEP[[ENTER, LEAVE]] = 1, -1


@dataclass(frozen=True, slots=True, eq=False)
class LineRows(Columns):
    """From `time_ns[i]` on `chain[i]` is executing; `begins[i]` (0 or 1): its innermost line begins there."""

    time_ns: I8
    chain: I4
    begins: U1


def _pairs(chain: Array, position: Array) -> tuple[list[tuple[int, int]], Array]:
    # As one number, which sorts fast.
    pairs, inverse = np.unique(chain.astype(np.int64) << _BITS | position, return_inverse=True)
    return [(pair >> _BITS, pair & _LOW) for pair in pairs.tolist()], inverse


class Chains:
    """Numbers the chains; 0 is the empty one."""

    def __init__(self) -> None:
        self.positions: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): OUTSIDE}
        self._inside: dict[tuple[int, int], int] = {}

    def number(self, positions: tuple[int, ...]) -> int:
        """The number of a chain."""
        known = self._numbers.get(positions)
        if known is None:
            known = self._numbers[positions] = len(self.positions)
            self.positions.append(positions)
        return known

    def inside(self, outer: Array, position: Array) -> Array:
        """The chains of these lines inside outer chains; a line within itself adds nothing."""
        pairs, inverse = _pairs(outer, position)
        found = []
        for pair in pairs:
            known = self._inside.get(pair)
            if known is None:
                around = self.positions[pair[0]] if len(self.positions) < MAX_CHAINS else ()
                if around[:1] != pair[1:]:
                    around = (pair[1], *(one for one in around if one != pair[1]))
                known = self._inside[pair] = self.number(around)
            found.append(known)
        return np.array(found, "i4")[inverse]

    def has(self, chain: Array, position: Array) -> Array:
        """Whether each of these chains contains the position given with it."""
        pairs, inverse = _pairs(chain, position)
        return np.array([one in self.positions[number] for number, one in pairs], bool)[inverse]

    def innermost(self, chain: Array) -> Array:
        """The innermost position of each of these chains, -1 for the empty one."""
        table = np.array([positions[0] if positions else -1 for positions in self.positions], np.int64)
        return table[chain]


class LineLog:
    """Receives a tracer's reports. `executions` counts how often each line began."""

    def __init__(
        self,
        clock: Callable[[], int],
        event_times: Callable[[], Array],
        moment: Callable[[], int] | None = None,
    ) -> None:
        self.chains = Chains()
        self.executions: Counter[int] = Counter()
        self.dropped_until_ns = 0
        self.failure = ""
        self._event_times, self._max_rows = event_times, MAX_ROWS
        self._parts: list[LineRows] = []
        self._count = 0
        self._stack = [OUTSIDE]
        self.tell, self._take, self.last_told = self._new_writer(clock, moment or clock)

    def _new_writer(
        self, clock: Callable[[], int], moment: Callable[[], int]
    ) -> tuple[Tell, Callable[[], None], Callable[[], int | None]]:
        """The function that is called for every user line and writes two numbers; and two that read them.

        `moment` is a cheaper clock, for the start of a frame: nothing happens between that and its first line.
        """
        told, times = (array("q", bytes(8 * _CHUNK)) for _ in range(2))
        count = 0

        def tell(what: int) -> None:
            nonlocal count
            if count == _CHUNK:
                take()
            told[count] = what
            times[count] = moment() if what & 3 == ENTER else clock()
            count += 1

        def take() -> None:
            nonlocal count
            try:
                if count:
                    self._add(np.array(told[:count], np.int64), np.array(times[:count], np.int64))
            except Exception as error:  # it must not fail the user's line
                self.failure = f"{type(error).__name__}: {error}"
            count = 0

        def last() -> int | None:
            return told[count - 1] if count else None

        return tell, take, last

    def rows(self) -> LineRows:
        """Everything so far."""
        self._take()
        self._parts = [LineRows.joined(self._parts)]
        return self._parts[0]

    def _add(self, told: Array, time_ns: Array) -> None:
        position, what = told >> 2, told & 3
        chain, outer = self._followed(position, what)
        pairs, pair = _pairs(outer, position)
        around = [self.chains.positions[number] for number, _ in pairs]
        # Whether a line that begins there is new in that chain, and whether it counts as an execution.
        is_new = np.array([one not in outside for outside, (_, one) in zip(around, pairs, strict=True)], bool)
        counts = np.array([outside[:1] != (one,) for outside, (_, one) in zip(around, pairs, strict=True)], bool)
        is_line = what == LINE
        for one, times in enumerate(np.bincount(pair[counts[pair] & is_line], minlength=len(pairs)).tolist()):
            if times:
                self.executions[pairs[one][1]] += times
        self._parts.append(LineRows(time_ns, chain, is_new[pair] & is_line))
        self._count += len(told)
        if self._count > self._max_rows:
            # Drop rows between which nothing happened; if that is not enough, the oldest half.
            rows = with_events(LineRows.joined(self._parts), np.sort(self._event_times()), self.chains)
            if len(rows) > self._max_rows // 2:
                rows = rows.rows(slice(len(rows) // 2, None))
                self.dropped_until_ns = int(rows.time_ns[0])
            self._parts, self._count = [rows], len(rows)

    def _followed(self, position: Array, what: Array) -> tuple[Array, Array]:
        """The chain after each report, and the chain around the line that it is about."""
        depth = len(self._stack) - 1 + np.cumsum(_STEP[what])
        depth -= np.minimum(np.minimum.accumulate(depth), 0)
        chain, outer = np.zeros(len(depth), "i4"), np.zeros(len(depth), "i4")
        order = np.argsort(depth, kind="stable")
        edges = np.searchsorted(depth[order], np.arange(int(depth.max()) + 2))
        stack = self._stack[: int(depth[-1]) + 1]
        above = above_chain = np.empty(0, np.int64)
        for level in range(1, int(depth.max()) + 1):
            at = order[edges[level] : edges[level + 1]]
            leaves = what[at] == LEAVE
            sets, back = at[~leaves], at[leaves]
            outer[sets] = self._latest(above, above_chain, sets, level - 1)
            above, above_chain = sets, self.chains.inside(outer[sets], position[sets])
            chain[sets] = above_chain
            chain[back] = self._latest(above, above_chain, back, level)
            if level <= depth[-1] and len(sets):
                stack[level:] = [int(above_chain[-1])]
        self._stack = stack
        return chain, outer

    def _latest(self, at: Array, chain: Array, when: Array, level: int) -> Array:
        """The last of these chains before each of these rows, or the stack at that depth before all of them."""
        before = self._stack[level] if level < len(self._stack) else OUTSIDE
        index = np.searchsorted(at, when) - 1
        return np.where(index >= 0, chain[np.maximum(index, 0)], before) if len(at) else np.full(len(when), before)


def with_events(rows: LineRows, event_times: Array, chains: Chains) -> LineRows:
    """The rows after which something happened before the next one.

    The start of a line is also kept if later rows belong to that line.
    """
    while len(rows):
        begins = rows.begins.astype(bool)
        happened = np.diff(np.searchsorted(event_times, rows.time_ns, side="right"), append=len(event_times)) > 0
        following = np.append(rows.chain[1:], OUTSIDE)
        innermost = chains.innermost(rows.chain)
        restarts = np.append(begins[1:], False) & (chains.innermost(following) == innermost)
        keep = happened | (begins & chains.has(following, innermost) & ~restarts)
        if keep.all():
            break
        rows = rows.rows(keep)
    return rows
