"""The moment at which memory ran out, from a trace: what was requested, free and held, and what the step would have needed.

What grows with the batch is inferred from when blocks were made, their categories and sizes; no trace says which dimension
of a tensor is the batch. So it is an interval: doubtful blocks (perhaps a copy of a weight, or of an earlier call) count
in its upper end only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from memlab.allocator.rules import MIN_BLOCK, SMALL_SIZE
from memlab.analysis.breakdown import BEFORE, ROUNDING, Breakdown, breakdown, categories_at, workspaces
from memlab.analysis.peak import Peak, alive_at
from memlab.analysis.timeline import Timeline, timeline
from memlab.trace.columns import MODULE_BEGINS, Array, Category, Kind, MarkKind, Phase
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE, phases
from memlab.trace.trace import Trace
from memlab.units import ByteRange

MANY = 3
"""A list with at least this many entries collects over iterations; two may be the two views of one step."""
_LASTING = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER)
_FOR_THE_BATCH = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)
_UNKNOWN = ("other", "elsewhere", BEFORE, ROUNDING)
_STEP_ENDS = (BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE)
_ENTRY = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class PeakShare:
    """What half of the batch would save at a moment: lower and upper bound.

    `earlier` are blocks of earlier passes since the last step ended, by address, with their saving if they belong to this
    one. `is_in_step`: a forward has run since the last step ended.
    """

    surely_bytes: int = 0
    at_most_bytes: int = 0
    earlier: tuple[tuple[int, int], ...] = ()
    is_in_step: bool = False

    def saving(self, kept: Collection[int]) -> ByteRange:
        """The saving, if blocks at the `kept` addresses are held over iterations."""
        doubtful = sum(size for address, size in self.earlier if address not in kept)
        return ByteRange(self.surely_bytes, self.at_most_bytes + doubtful)


@dataclass(frozen=True, slots=True)
class Moment:
    """One row OOM of a trace. `asked_bytes` is the tensor's size as the allocator rounds it, `free_bytes` the driver's.

    `step_bytes` are the temporaries of the optimizer's step; `has_backward` whether a backward came before;
    `batch` is what half of the batch would have saved, `step` what the whole step would have needed. Of blocks by address,
    `preexisting` are older than the cell, `before_step` than the step that failed, `before_pass` than its last pass.
    """

    device: int
    row: int
    time_ns: int
    asked_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    phase: Phase
    step_bytes: int
    has_backward: bool
    shares: tuple[Breakdown, ...]
    batch: PeakShare = PeakShare()
    preexisting: frozenset[int] = frozenset()
    before_step: frozenset[int] = frozenset()
    before_pass: frozenset[int] = frozenset()
    step: StepNeed | None = None

    @property
    def cached_bytes(self) -> int:
        """Reserved but not allocated."""
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    def share(self, by: str) -> Breakdown | None:
        """Shares of the allocated bytes by "category", "line", "module" or "phase"; None if unknown."""
        return next((share for share in self.shares if share.by == by), None)


def last_moment(trace: Trace) -> Moment | None:
    """The last moment at which a tracked cell ran out of memory; None if it did not."""
    events = trace.events
    rows = np.flatnonzero(events.kind == Kind.OOM)
    if not (rows >= trace.first_row).any():
        return None
    row = int(rows[-1])
    device, time_ns = int(events.device[row]), int(events.time_ns[row])
    allocated, reserved = (timeline(trace, device, of).at_row(row) for of in ("allocated", "reserved"))
    is_before = trace.marks.time_ns <= time_ns
    phase = phases(trace.marks.rows(is_before), trace.texts["mark"])
    begun = is_before & (trace.marks.kind == MarkKind.PHASE_BEGIN)
    alive = alive_at(trace, device, row)
    block = events.block[alive]
    in_step = trace.blocks.phase[block] == Phase.OPTIMIZER
    lasting = np.isin(trace.blocks.category[block], _LASTING)
    begun_step, begun_pass, _ = _begins(trace, row)
    at = Peak(ByteRange.exact(allocated), time_ns, row, "the moment memory ran out")
    shares = (breakdown(trace, device, by, "allocated", at) for by in ("category", "line", "module"))
    return Moment(
        device,
        row,
        time_ns,
        asked_bytes=int(events.requested_bytes[row]),
        free_bytes=int(events.allocated_bytes[row]),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        phase=Phase(int(phase.at(np.array([time_ns]))[0])),
        step_bytes=int(events.allocated_bytes[alive][in_step & ~lasting].sum()),
        has_backward=bool((begun & trace.marks_named(BACKWARD)).any()),
        shares=tuple(share for share in shares if any(name not in _UNKNOWN for name in share)),
        batch=share(trace, device, row),
        preexisting=frozenset(events.address[alive[events.kind[alive] == Kind.PREEXISTING]].tolist()),
        before_step=frozenset(events.address[alive[alive < begun_step]].tolist()),
        before_pass=frozenset(events.address[alive[alive < begun_pass]].tolist()),
        step=step_need(trace, device, row),
    )


# --- the batch ------------------------------------------------------------------------------------------------------------


def share(trace: Trace, device: int, row: int) -> PeakShare:
    """What half the batch saves at the event `row`, an OOM."""
    step, last_pass, is_in_step = _begins(trace, row)
    alive = alive_at(trace, device, row)
    block = trace.events.block[alive]
    category = categories_at(trace, row)[block]
    requested, allocated = trace.events.requested_bytes[alive], trace.events.allocated_bytes[alive]
    born = np.where(trace.events.kind[alive] == Kind.PREEXISTING, -1, alive)
    half = -(-requested // 2)
    low, high = np.maximum(allocated - half - MIN_BLOCK - _left_whole(half), 0), allocated - half
    for_batch = np.isin(category, _FOR_THE_BATCH)
    mine, before = for_batch & (born >= last_pass), for_batch & (born >= step) & (born < last_pass)
    others = (category == Category.OTHER) & (born >= step) & ~workspaces(trace)[block]  # of the loss, or the user's own
    older = (category == Category.INPUT) & (born < step)  # the batch itself, or a data set that it is a slice of
    weights = requested[category == Category.PARAMETER]
    # Copies of weights (autocast makes one of each) are made in the step and do not grow with the batch.
    copies, found = Counter([*weights.tolist(), *(weights // 2).tolist()]), Counter(requested[mine].tolist())
    surely = int(low[mine].sum()) - sum(min(count, found[size]) * (size // 2) for size, count in copies.items())
    asked = trace.events.requested_bytes[row]
    if not np.isin(asked, -(-weights // MIN_BLOCK) * MIN_BLOCK):  # else it may be the gradient of a weight
        surely += int(asked // 2 - _left_whole(asked // 2))
    at_most = int(high[mine | others | older].sum()) + int(asked - asked // 2)
    earlier = zip(trace.events.address[alive[before]].tolist(), high[before].tolist(), strict=True)
    return PeakShare(max(surely, 0), at_most, tuple(earlier), is_in_step)


def _left_whole(half: Array) -> Array:
    """What the allocator may add to halves: up to `SMALL_SIZE` of a segment stays with its last block, unsplit."""
    return np.where(half > SMALL_SIZE, np.minimum(half // 10, SMALL_SIZE), 0)


def _begins(trace: Trace, row: int) -> tuple[int, int, bool]:
    """The event rows at which the step and its last pass through outermost modules begin; whether there was one.

    A step begins where the one before ended: with its optimizer's step, or its backward. Without either, a module that is
    called again may begin a new step, from the end of the call before.
    """
    marks = trace.marks.rows(trace.marks.row <= row)
    step = last_pass = ended = trace.first_row
    running: list[int] = []
    called: set[int] = set()
    for kind, name, at in zip(marks.kind.tolist(), marks.name.tolist(), marks.row.tolist(), strict=True):
        if kind in MODULE_BEGINS:
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


def gathered(paths: Iterable[str]) -> set[str]:
    """The paths through an entry of a list with many of them.

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


MOST = 20
"""So many of the last complete steps are compared with the one that failed."""


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Bytes of *allocated* that a step needs at its peak.

    The step that failed began with `begin_bytes` and needs `at_least_bytes`: its peak so far, or what was held when memory ran out
    and the request. `earlier` complete steps rose by `rise` above where they began (None: there were none to compare with;
    `is_first`: no optimizer step had ended). `available_bytes` is what PyTorch had reserved, and what the driver had free.
    """

    at_least_bytes: int
    available_bytes: int
    is_first: bool
    begin_bytes: int = 0
    earlier: int = 0
    rise: ByteRange | None = None

    @property
    def as_before(self) -> ByteRange | None:
        """What it needs if it is like the steps before it; None if there are none, or if it had risen above all of them."""
        if self.rise is None or self.begin_bytes + self.rise.high < self.at_least_bytes:
            return None
        return (self.rise + ByteRange.exact(self.begin_bytes)).at_least(self.at_least_bytes)


def step_need(trace: Trace, device: int, row: int) -> StepNeed:
    """That of the step with the event `row`, an OOM. A step ends with a step of an optimizer."""
    allocated, reserved = (timeline(trace, device, of) for of in ("allocated", "reserved"))
    marks, known = trace.marks, trace.first_known_row(device)
    is_end = (marks.kind == MarkKind.PHASE_END) & trace.marks_named(OPTIMIZER, OPTIMIZER_WITH_CLOSURE)
    ends = marks.row[is_end & (marks.row <= row)]
    held, asked = allocated.at_row(row), int(trace.events.requested_bytes[row])
    available = reserved.at_row(row) + int(trace.events.allocated_bytes[row])
    at_least = held + asked
    if not len(ends) or ends[-1] < known:
        return StepNeed(at_least, available, is_first=not len(ends))
    begin = int(ends[-1])
    at_least = max(at_least, _highest(allocated, begin, row))
    # The first begins with its first forward: what made the model is no part of it.
    is_begin = np.isin(marks.kind, [int(kind) for kind in MODULE_BEGINS])
    is_begin |= (marks.kind == MarkKind.PHASE_BEGIN) & trace.marks_named(BACKWARD)
    starts = np.append(marks.row[is_begin & (marks.row <= ends[0])][:1], ends)
    starts = starts[starts >= known]
    pairs = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    pairs = pairs[1:] if len(pairs) > 1 and len(starts) > len(ends) else pairs  # the first makes what stays
    rises = [_highest(allocated, first, end) - allocated.at_row(first - 1) for first, end in pairs[-MOST:]]
    rise = ByteRange(min(rises), max(rises)) if rises else None
    return StepNeed(at_least, available, False, allocated.at_row(begin - 1), len(rises), rise)


def _highest(levels: Timeline, first: int, end: int) -> int:
    """The highest level from before event `first` to after the last one before `end`."""
    begin = int(np.searchsorted(levels.row, first - 1, side="right")) - 1
    stop = int(np.searchsorted(levels.row, end - 1, side="right"))
    return int(levels.bytes[begin : max(stop, begin + 1)].max())
