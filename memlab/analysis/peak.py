"""The peak of a run: how high, when, in which phase; exact where events or counters prove it, else a range and the reason."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from memlab.analysis.timeline import Timeline, lives, timeline
from memlab.trace.columns import Array
from memlab.trace.trace import CPU, WORK_IN_CHILDREN, Trace
from memlab.units import UNBOUNDED, ByteRange

SIMULATED = "the simulated allocator of a GPU"
"""What a predicted peak is based on."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest level of one quantity, when it was first reached (`time_ns`, `row`; -1: unknown), and its source."""

    bytes: ByteRange
    time_ns: int
    row: int
    source: str

    @property
    def low_bytes(self) -> int:
        """The lower bound, equal to the upper one where the peak is exact."""
        return self.bytes.low

    @property
    def high_bytes(self) -> int:
        """The upper bound, `units.UNBOUNDED` where nothing bounds it."""
        return self.bytes.high

    @property
    def is_exact(self) -> bool:
        """Whether the figure is known to the byte."""
        return self.bytes.is_exact


def peak(trace: Trace, device: int, of: str = "allocated", line: Timeline | None = None) -> Peak:
    """The peak of "allocated" or "reserved" on one device."""
    line = line or timeline(trace, device, of)
    bounded = [stretch for stretch in trace.made_by.bounded if stretch.device == device]
    if any(gap.name == WORK_IN_CHILDREN for gap in trace.gaps):
        alone = peak(dataclasses.replace(trace, made_by=dataclasses.replace(trace.made_by, gaps=())), device, of, line)
        source = f"{alone.source}, of this process alone: what its child processes allocated is not known"
        return Peak(ByteRange(alone.low_bytes, UNBOUNDED), alone.time_ns, alone.row, source)
    at = int(line.bytes.argmax())
    best, time_ns, row = int(line.bytes[at]), int(line.time_ns[at]), int(line.row[at])
    source = "every storage that this thread's operators made" if device == CPU else "every event of the allocator"
    dropped = max((getattr(one, f"peak_{of}_bytes") for one in bounded), default=-1)
    if dropped > best:
        best, time_ns, row, source = dropped, -1, -1, "events that were dropped later"
    predicted = predicted_peak(trace, device, of)
    if predicted is not None:  # a GPU that is too small shows less than what the run needs
        condition = ", for the values that were assumed" if trace.notes["prediction"].get("has_assumed_sizes") else ""
        return Peak(ByteRange(best, max(best, predicted.high)), time_ns, row, f"{SIMULATED}{condition}")
    sampled = getattr(trace.samples, f"{of}_bytes")[trace.samples.device == device]
    seen = max(best, int(sampled.max(initial=0)))
    facts = trace.made_by.device(device)
    start, end = (getattr(facts, f"{when}_peak_{of}_bytes") for when in ("start", "end"))
    # If this run raised the counter's peak, that is the peak of the run. If the user reset the counter inside the run
    # it can be lower than before, or than what was seen, and proves nothing.
    has_new_peak = end > start >= 0 and end >= seen
    if has_new_peak and end != best:
        return Peak(ByteRange.exact(end), -1, -1, "PyTorch's counter, which rose above its earlier maximum")
    if has_new_peak or all(stretch.is_exact for stretch in bounded):
        return Peak(ByteRange.exact(best), time_ns, row, source)
    high = UNBOUNDED
    if end == start >= seen and start > 0:  # if the counter did not rise, its earlier maximum bounds the peak
        high = start
    elif facts.capacity_bytes > 0:
        high = facts.capacity_bytes
    if device == CPU and best == seen:  # only sizes were lost: the highest known moment can be shown
        source = "what was seen: storages were resized without an operator, or the file was cut off"
    elif best == max(high, seen):  # nothing that was lost can have been higher, as when a cell is run again
        source = "PyTorch's counter, whose earlier maximum was reached again"
    else:
        time_ns, row, source = -1, -1, "read events, samples and PyTorch's counter around lost ones"
    return Peak(ByteRange(seen, max(high, seen)), time_ns, row, source)


def predicted_peak(trace: Trace, device: int, of: str) -> ByteRange | None:
    """The peak that a predicted run needs of "allocated", "reserved" or "device used"; None for a measured one."""
    facts = trace.notes.get("prediction")
    if device == CPU or not isinstance(facts, dict):  # an empty one is damaged
        return None
    peaks = {one["index"]: one["peaks"] for one in facts.get("devices", ())} or {device: facts["peaks"]}
    low, high = peaks[device][of] if device in peaks else (0, 0)
    return ByteRange(int(low), int(high))


def device_peak(trace: Trace, device: int) -> Peak | None:
    """The peak of device memory in use, as the driver reports it; None if it was never read.

    A lower bound, as it is sampled: the highest sample, or the peak of *reserved* plus the least that others ever held.
    """
    predicted = predicted_peak(trace, device, "device used")
    if predicted is not None:
        return Peak(predicted, -1, -1, SIMULATED)
    mine = trace.samples.of(device, "used_bytes")
    if not len(mine):
        return None
    low, time_ns = int(mine.used_bytes.max()), int(mine.time_ns[mine.used_bytes.argmax()])
    source, both = "samples", mine.rows(mine.reserved_bytes >= 0)
    if len(both):
        others = int((both.used_bytes - both.reserved_bytes).min())
        low = max(low, peak(trace, device, "reserved").low_bytes + others)
        source = "samples and reserved"
    return Peak(ByteRange(low, UNBOUNDED), time_ns, -1, source)


def alive_at(trace: Trace, device: int, row: int) -> Array:
    """The rows (PREEXISTING or ALLOC) of the blocks of a device that are allocated after event `row` (-1: at the start)."""
    begin, end = lives(trace, device)
    last = max(row, trace.first_row - 1)
    return np.sort(begin[(begin >= 0) & (begin <= last) & (end > last)])
