"""What the whole step would have needed in which memory ran out: at least what it had, and what the steps before it needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.analysis.timeline import Timeline, timeline
from memlab.trace.columns import MODULE_BEGINS, MarkKind
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE
from memlab.trace.trace import Trace
from memlab.units import ByteRange

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
