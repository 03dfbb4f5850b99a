"""How high memory rose, when, in which phase; exact where events or counters prove it, else a range with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.analysis.timeline import Timeline, timeline
from memlab.trace.columns import Kind
from memlab.trace.trace import CPU, Bounded, Device, Trace

UNKNOWN_BYTES = 1 << 62
"""The upper end of a range that nothing bounds."""
FORETOLD = "the simulated allocator of a card"
"""What proves a predicted peak."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest level of one quantity: between `low_bytes` and `high_bytes`, equal where it is exact.

    `time_ns` and `row` tell the first moment it was reached (-1: not known); `source` says what proves it.
    """

    low_bytes: int
    high_bytes: int
    time_ns: int
    row: int
    source: str

    @property
    def is_exact(self) -> bool:
        """Whether the figure is known to the byte."""
        return self.low_bytes == self.high_bytes


def peak(trace: Trace, device: int, of: str = "allocated", line: Timeline | None = None) -> Peak:
    """The peak of "allocated" or "reserved" on one device."""
    line = line or timeline(trace, device, of)
    facts = trace.made_by.device(device)
    known = _highest_known(line, _stretches(trace, device), of, device)
    foretold = _foretold(trace, device, of)
    if foretold is not None:  # what a card gives that is too small is less than what the run needs
        return Peak(known.low_bytes, max(known.low_bytes, foretold[1]), known.time_ns, known.row, FORETOLD)
    seen = max(known.low_bytes, _highest_sample(trace, device, of))
    counter = _counter_peak(facts, of, seen)
    if counter is not None and counter != known.low_bytes:
        return Peak(counter, counter, -1, -1, "PyTorch's counter, which rose above its earlier maximum")
    lost = [stretch for stretch in _stretches(trace, device) if not stretch.is_exact]
    if not lost or counter is not None:
        return known
    high = max(_ceiling(facts, of, seen), seen)
    return Peak(seen, high, -1, -1, "read events, samples and PyTorch's counter around lost ones")


def _foretold(trace: Trace, device: int, of: str) -> tuple[int, int] | None:
    """Between what and what a prediction says that the peak lies; None where the trace was measured."""
    facts = trace.notes.get("prediction")
    if device == CPU or not isinstance(facts, dict):
        return None
    low, high = facts["peaks"][of]
    return int(low), int(high)


def _stretches(trace: Trace, device: int) -> list[Bounded]:
    return [stretch for stretch in trace.made_by.bounded if stretch.device == device]


def _highest_known(line: Timeline, stretches: list[Bounded], of: str, device: int) -> Peak:
    at = int(line.bytes.argmax())
    best = int(line.bytes[at])
    let_go = max((getattr(stretch, f"peak_{of}_bytes") for stretch in stretches), default=-1)
    if let_go > best:
        return Peak(let_go, let_go, -1, -1, "events that were let go later")
    source = "every storage that this thread's operators made" if device == CPU else "every event of the allocator"
    return Peak(best, best, int(line.time_ns[at]), int(line.row[at]), source)


def _counter_peak(facts: Device, of: str, seen: int) -> int | None:
    """The counter's peak, where this run set a new one: then it is exactly the peak of the run.

    Where the user reset the counter inside the run it can be lower than before, or than what was seen, and proves
    nothing.
    """
    start, end = (getattr(facts, f"{when}_peak_{of}_bytes") for when in ("start", "end"))
    return end if end > start >= 0 and end >= seen else None


def _highest_sample(trace: Trace, device: int, of: str) -> int:
    mine = trace.samples.device == device
    return int(getattr(trace.samples, f"{of}_bytes")[mine].max(initial=0))


def _ceiling(facts: Device, of: str, seen: int) -> int:
    """What the peak of the run cannot have passed: the counter did not rise, so not its earlier maximum."""
    start, end = (getattr(facts, f"{when}_peak_{of}_bytes") for when in ("start", "end"))
    if end == start >= seen and start > 0:
        return start
    return facts.capacity_bytes if facts.capacity_bytes > 0 else UNKNOWN_BYTES


def device_peak(trace: Trace, device: int) -> Peak | None:
    """The peak of what the driver reports as used on the device; None where it was never read.

    A lower bound, as samples are: what was seen, or the peak of *reserved* plus the least that others ever held beside it.
    """
    foretold = _foretold(trace, device, "device used")
    if foretold is not None:
        return Peak(*foretold, -1, -1, FORETOLD)
    mine = trace.samples.rows((trace.samples.device == device) & (trace.samples.used_bytes >= 0))
    if not len(mine):
        return None
    seen, at = int(mine.used_bytes.max()), int(mine.used_bytes.argmax())
    both = mine.rows(mine.reserved_bytes >= 0)
    if not len(both):
        return Peak(seen, UNKNOWN_BYTES, int(mine.time_ns[at]), -1, "samples")
    beside = both.used_bytes - both.reserved_bytes
    low = max(seen, peak(trace, device, "reserved").low_bytes + int(beside.min()))
    return Peak(low, UNKNOWN_BYTES, int(mine.time_ns[at]), -1, "samples and reserved")


def alive_at(trace: Trace, device: int, row: int) -> np.ndarray:
    """The rows (ADOPT or ALLOC) of the blocks of a device that are allocated after event `row` (-1: at the start)."""
    until = max(row, trace.first_row - 1) + 1
    events = trace.events
    kind, block = events.kind[:until], events.block[:until]
    mine = events.device[:until] == device
    gone = np.zeros(len(trace.blocks), bool)
    gone[block[mine & ((kind == Kind.FREE) | (kind == Kind.FREE_PENDING))]] = True
    comes = np.flatnonzero(mine & ((kind == Kind.ADOPT) | (kind == Kind.ALLOC)) & (events.allocated_bytes[:until] > 0))
    return comes[~gone[block[comes]]]
