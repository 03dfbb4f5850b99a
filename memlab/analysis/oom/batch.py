"""What of an out-of-memory grows with the batch: what this step made for it and still held, as far as a trace tells.

Told by when blocks were made, by their categories and sizes; no trace says which side of a tensor is the batch. So it is an
interval: what is doubtful (may be a copy of a weight, or of an earlier call) is in its upper end alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from memlab.allocator.rules import MIN_BLOCK, SMALL_SIZE
from memlab.analysis.breakdown import categories_at, workspaces
from memlab.analysis.oom.text import Amount
from memlab.analysis.peak import alive_at
from memlab.trace.columns import Array, Category, Kind, MarkKind
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE
from memlab.trace.trace import Trace

MANY = 3
"""From so many entries on a list gathers over iterations; two may be the two views of one step."""

_FOR_THE_BATCH = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)
_STEP_ENDS = (BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE)
_MODULE_BEGINS = (MarkKind.MODULE_BEGIN, MarkKind.MODULE_BEGIN_NO_GRAD)
_ENTRY = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Share:
    """What would fall away with half of the batch, at a moment: surely, and at most.

    `earlier` are blocks of earlier passes since the last step ended, by address, with what falls away if they belong to this
    one. `is_in_step`: a forward has run since the last step ended.
    """

    surely_bytes: int = 0
    at_most_bytes: int = 0
    earlier: tuple[tuple[int, int], ...] = ()
    is_in_step: bool = False

    def saving(self, kept: Collection[int]) -> Amount:
        """The saving, where blocks at the `kept` addresses are held over iterations."""
        doubtful = sum(size for address, size in self.earlier if address not in kept)
        return Amount(self.surely_bytes, self.at_most_bytes + doubtful)


NOTHING = Share()


def share(trace: Trace, device: int, row: int) -> Share:
    """What half the batch saves at the event `row`, an OOM."""
    step, last_pass, is_in_step = _begins(trace, row)
    alive = alive_at(trace, device, row)
    block, category = trace.events.block[alive], categories_at(trace, row)
    is_input = category[block] == Category.INPUT
    for_batch = np.isin(category[block], _FOR_THE_BATCH)
    requested, allocated = trace.events.requested_bytes[alive], trace.events.allocated_bytes[alive]
    born = np.where(trace.events.kind[alive] == Kind.ADOPT, -1, alive)
    half = -(-requested // 2)
    low, high = np.maximum(allocated - half - MIN_BLOCK - _left_whole(half), 0), allocated - half
    weights = requested[category[block] == Category.PARAMETER]
    mine, before = for_batch & (born >= last_pass), for_batch & (born >= step) & (born < last_pass)
    others = (
        (category[block] == Category.OTHER) & (born >= step) & ~workspaces(trace)[block]
    )  # of the loss, or the user's own
    older = is_input & (born < step)  # the batch itself, or a data set of which it is a slice
    asked, half = trace.events.requested_bytes[row : row + 1], trace.events.requested_bytes[row : row + 1] // 2
    surely = int(low[mine].sum()) - _like_weights(requested[mine], weights)
    surely += 0 if _is_like_weight(asked, weights) else int((half - _left_whole(half)).sum())
    at_most = int(high[mine | others | older].sum() + (asked - half).sum())
    earlier = zip(trace.events.address[alive[before]].tolist(), high[before].tolist(), strict=True)
    return Share(max(surely, 0), at_most, tuple(earlier), is_in_step)


def _begins(trace: Trace, row: int) -> tuple[int, int, bool]:
    """The event rows from which on the step goes, and its last pass through outermost modules; whether there was one.

    A step begins where the one before ended: with its optimizer's step, or its backward. As long as neither comes, a module
    that is called again may begin a step of its own, which goes from where the call before it ended.
    """
    marks = trace.marks.rows(trace.marks.row <= row)
    step = last_pass = ended = trace.first_row
    running: list[int] = []
    called: set[int] = set()
    for kind, name, at in zip(marks.kind.tolist(), marks.name.tolist(), marks.row.tolist(), strict=True):
        if kind in _MODULE_BEGINS:
            if not running and name in called:
                last_pass, called = ended, set()
            called |= set() if running else {name}
            running.append(name)
        elif kind == MarkKind.MODULE_END and name in running:
            del running[len(running) - 1 - running[::-1].index(name) :]
            ended = ended if running else at
        elif kind == MarkKind.PHASE_END and trace.texts["mark"][name] in _STEP_ENDS:
            step = last_pass = ended = at
            called.clear()
    return step, last_pass, bool(called)


def _left_whole(half: Array) -> Array:
    """What the allocator may add to halves: up to `SMALL_SIZE` of a segment is left, unsplit, to the last of its blocks."""
    return np.where(half > SMALL_SIZE, np.minimum(half // 10, SMALL_SIZE), 0)


def _like_weights(requested: Array, weights: Array) -> int:
    """What may be copies of weights (as autocast makes them, once each) and not grow with the batch: half their bytes."""
    copies = Counter(weights.tolist()) + Counter((weights // 2).tolist())
    found = Counter(requested.tolist())
    return sum(min(count, found[size]) * (size // 2) for size, count in copies.items())


def _is_like_weight(asked: Array, weights: Array) -> bool:
    rounded = -(-weights // MIN_BLOCK) * MIN_BLOCK
    return bool(np.isin(asked, rounded).any())


def gathered(paths: Iterable[str]) -> set[str]:
    """The paths that lead through one of many entries of the same list.

    >>> sorted(gathered(["losses[0].grad_fn -> saved x", "losses[1]", "losses[7]", "pair[0]", "pair[1]", "x"]))
    ['losses[0].grad_fn -> saved x', 'losses[1]', 'losses[7]']
    """
    lists: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        found = _ENTRY.search(path.partition(".grad_fn")[0])
        if found is not None:
            lists.setdefault(path[: found.start()], {}).setdefault(found[0], []).append(path)
    many = (entries.values() for entries in lists.values() if len(entries) >= MANY)
    return {path for entries in many for paths in entries for path in paths}
