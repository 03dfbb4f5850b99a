"""What a trace shows of the moment at which memory ran out: what was asked, free, allocated and cached, and who held it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memlab.analysis.breakdown import BEFORE, ROUNDING, Breakdown, breakdown
from memlab.analysis.oom.batch import NOTHING, Share, share
from memlab.analysis.peak import Peak, alive_at
from memlab.analysis.timeline import timeline
from memlab.trace.columns import Category, Kind, MarkKind, Phase
from memlab.trace.spans import BACKWARD, resolve
from memlab.trace.trace import Trace

_LASTING = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Moment:
    """One row OOM of a trace. `asked_bytes` is the tensor's size as the allocator rounds it, `free_bytes` the driver's.

    `step_bytes` is what the optimizer's step held beside lasting things; `has_backward` whether any was met up to then;
    `batch` is what half of the batch would have saved.
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
    batch: Share = NOTHING

    @property
    def cached_bytes(self) -> int:
        """What the allocator held without use."""
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    def share(self, by: str) -> Breakdown | None:
        """Who held the allocated bytes, by "category", "line", "module" or "phase"; None where that is not known."""
        return next((share for share in self.shares if share.by == by), None)


def last_moment(trace: Trace) -> Moment | None:
    """The last time that a tracked cell ran out of memory, None if it did not."""
    rows = np.flatnonzero(trace.events.kind == Kind.OOM)
    rows = rows[rows >= trace.first_row]
    return _moment(trace, int(rows[-1])) if len(rows) else None


def _moment(trace: Trace, row: int) -> Moment:
    events = trace.events
    device, time_ns = int(events.device[row]), int(events.time_ns[row])
    allocated, reserved = (_level(trace, device, of, row) for of in ("allocated", "reserved"))
    until = trace.marks.rows(trace.marks.time_ns <= time_ns)
    phases, _ = resolve(until.time_ns, until.kind.tolist(), until.name.tolist(), trace.texts["mark"])
    starts = until.name[until.kind == MarkKind.PHASE_BEGIN].tolist()
    return Moment(
        device,
        row,
        time_ns,
        asked_bytes=int(events.requested_bytes[row]),
        free_bytes=int(events.allocated_bytes[row]),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        phase=Phase(int(phases.at(np.array([time_ns]))[0])),
        step_bytes=_step_bytes(trace, device, row),
        has_backward=any(trace.texts["mark"][name] == BACKWARD for name in starts),
        shares=tuple(_shares(trace, device, Peak(allocated, allocated, time_ns, row, "the moment memory ran out"))),
        batch=share(trace, device, row),
    )


def _level(trace: Trace, device: int, of: str, row: int) -> int:
    line = timeline(trace, device, of)
    return int(line.bytes[int(np.searchsorted(line.row, row, side="right")) - 1])


def _step_bytes(trace: Trace, device: int, row: int) -> int:
    """What was allocated inside the optimizer's step and is neither a state nor any other lasting thing."""
    alive = alive_at(trace, device, row)
    block = trace.events.block[alive]
    in_step = trace.blocks.phase[block] == Phase.OPTIMIZER
    lasting = np.isin(trace.blocks.category[block], _LASTING)
    return int(trace.events.allocated_bytes[alive][in_step & ~lasting].sum())


def _shares(trace: Trace, device: int, at: Peak) -> Iterator[Breakdown]:
    """The breakdowns that say something: of which more than one name is known."""
    for by in ("category", "line", "module"):
        share = breakdown(trace, device, by, "allocated", at)
        if any(name not in _UNTOLD for name in share):
            yield share


_UNTOLD = ("other", "elsewhere", BEFORE, ROUNDING)
