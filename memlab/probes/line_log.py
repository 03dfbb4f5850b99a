"""What a tracer tells, kept as rows: at each time the lines that were being executed, one inside of the other.

A *position* is a line of a watched file as one number. A *chain* is the tuple of positions that are on at a time, the
innermost first; chains are interned, so that a row is a time, the number of a chain, and whether a line begins there.
Memory is bounded: rows between which nothing happened are let go first, then the oldest half.

Limits: a line that calls itself again stands in a chain once, so recursion is one execution that lasts.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memlab.seams.tracing import ENTER, LEAVE, LINE, Tell
from memlab.trace.columns import Array

OUTSIDE = 0
"""The chain of no line."""
MAX_ROWS = 1_000_000
MAX_CHAINS = 100_000
_CHUNK = 1 << 14
_BITS = 40  # of a position: a file's number and a line
_LOW = (1 << _BITS) - 1
_STEP = np.zeros(4, np.int64)
_STEP[[ENTER, LEAVE]] = 1, -1


@dataclass(frozen=True, slots=True)
class Rows:
    """From `time_ns[i]` on `chain[i]` is being executed; `begins[i]`: its innermost line begins there."""

    time_ns: Array
    chain: Array
    begins: Array

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """The rows of all parts, in order."""
        if not parts:
            return cls(np.empty(0, "i8"), np.empty(0, "i4"), np.empty(0, bool))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def at(self, selection: Array | slice) -> Rows:
        """The selected rows."""
        return Rows(self.time_ns[selection], self.chain[selection], self.begins[selection])


class Chains:
    """The chains met so far; number 0 is the empty one."""

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

    def inside(self, outer: int, position: int) -> int:
        """The chain in which a line runs inside of another chain; a line within itself adds nothing."""
        known = self._inside.get((outer, position))
        if known is None:
            around = self.positions[outer] if len(self.positions) < MAX_CHAINS else ()
            chain = around if around[:1] == (position,) else (position, *(one for one in around if one != position))
            known = self._inside[outer, position] = self.number(chain)
        return known

    def has(self, chain: Array, position: Array) -> Array:
        """Whether each of these chains contains the position beside it."""
        pairs, inverse = np.unique(_paired(chain, position), return_inverse=True)
        found = [one in self.positions[number] for number, one in _unpaired(pairs)]
        return np.array(found, bool)[inverse]

    def innermost(self, chain: Array) -> Array:
        """The innermost position of each of these chains, -1 for the empty one."""
        table = np.array([positions[0] if positions else -1 for positions in self.positions], np.int64)
        return table[chain]


def _paired(chain: Array, position: Array) -> Array:
    """A chain and a position as one number, which sorts fast."""
    return chain.astype(np.int64) << _BITS | position


def _unpaired(pairs: Array) -> list[tuple[int, int]]:
    return [(pair >> _BITS, pair & _LOW) for pair in pairs.tolist()]


class LineLog:
    """Takes what a tracer tells. `executions` counts how often each line began."""

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
        self._parts: list[Rows] = []
        self._count = 0
        self._stack = [OUTSIDE]
        self.tell, self._take, self.last_told = self._new_writer(clock, moment or clock)

    def _new_writer(
        self, clock: Callable[[], int], moment: Callable[[], int]
    ) -> tuple[Tell, Callable[[], None], Callable[[], int | None]]:
        """The function that is called for every line of the user's, and writes two numbers; and two that read them.

        Nothing happens between the beginning of a frame and its first line: there the cheaper clock will do.
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
                self._add(np.array(told[:count], np.int64), np.array(times[:count], np.int64))
            except Exception as error:  # it must not fail the user's line
                self.failure = f"{type(error).__name__}: {error}"
            count = 0

        def last() -> int | None:
            return told[count - 1] if count else None

        return tell, take, last

    def rows(self) -> Rows:
        """Everything so far."""
        self._take()
        self._parts = [Rows.joined(self._parts)]
        return self._parts[0]

    def _add(self, told: Array, time_ns: Array) -> None:
        if not len(told):
            return
        position, what = told >> 2, told & 3
        chain, pairs, pair = self._followed(position, what)
        table = np.array([self._kind_of(outer, one) for outer, one in _unpaired(pairs)], bool).reshape(-1, 2)
        is_line = what == LINE
        begins, counts = table[pair, 0] & is_line, table[pair, 1] & is_line
        for one, times in enumerate(np.bincount(pair[counts], minlength=len(pairs)).tolist()):
            if times:
                self.executions[int(pairs[one]) & _LOW] += times
        self._parts.append(Rows(time_ns, chain, begins))
        self._count += len(told)
        if self._count > self._max_rows:
            self._bound()

    def _kind_of(self, outer: int, position: int) -> tuple[bool, bool]:
        """Whether a line that begins inside of this chain is new there, and whether it counts as an execution."""
        around = self.chains.positions[outer]
        return position not in around, around[:1] != (position,)

    def _followed(self, position: Array, what: Array) -> tuple[Array, Array, Array]:
        """The chain after each thing told; the (chain around, line) pairs, and the pair of each."""
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
            above, above_chain = sets, self._inside(outer[sets], position[sets])
            chain[sets] = above_chain
            chain[back] = self._latest(above, above_chain, back, level)
            if level <= depth[-1] and len(sets):
                stack[level:] = [int(above_chain[-1])]
        self._stack = stack
        return chain, *np.unique(_paired(outer, position), return_inverse=True)

    def _latest(self, at: Array, chain: Array, when: Array, level: int) -> Array:
        """The last of these chains before each of these rows; before the first, what was there at that depth."""
        before = self._stack[level] if level < len(self._stack) else OUTSIDE
        index = np.searchsorted(at, when) - 1
        return np.where(index >= 0, chain[np.maximum(index, 0)], before) if len(at) else np.full(len(when), before)

    def _inside(self, outer: Array, position: Array) -> Array:
        pairs, inverse = np.unique(_paired(outer, position), return_inverse=True)
        return np.array([self.chains.inside(*pair) for pair in _unpaired(pairs)], "i4")[inverse]

    def _bound(self) -> None:
        """Let rows go between which nothing happened; if that is not enough, the oldest half."""
        rows = with_events(Rows.joined(self._parts), np.sort(self._event_times()), self.chains)
        if len(rows.time_ns) > self._max_rows // 2:
            half = len(rows.time_ns) // 2
            rows = rows.at(slice(half, None))
            self.dropped_until_ns = int(rows.time_ns[0])
        self._parts, self._count = [rows], len(rows.time_ns)


def with_events(rows: Rows, event_times: Array, chains: Chains) -> Rows:
    """The rows after which something happened before the next, and those that others need to be understood.

    The beginning of a line is needed while the rows after it still belong to that line.
    """
    while len(rows.time_ns):
        happened = np.diff(np.searchsorted(event_times, rows.time_ns, side="right"), append=len(event_times)) > 0
        following = np.append(rows.chain[1:], OUTSIDE)
        innermost = chains.innermost(rows.chain)
        restarts = np.append(rows.begins[1:], False) & (chains.innermost(following) == innermost)
        needed = rows.begins & chains.has(following, innermost) & ~restarts
        keep = happened | needed
        if keep.all():
            break
        rows = rows.at(keep)
    return rows
