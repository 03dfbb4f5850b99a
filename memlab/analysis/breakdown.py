"""Who held the bytes of a peak: by category, module, line, tensor or phase. The shares sum to the peak exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from memlab.analysis.peak import Peak, alive_at, device_peak, peak
from memlab.analysis.timeline import timeline
from memlab.by_name import ByName
from memlab.errors import MemlabError
from memlab.trace.columns import WORKSPACE_OF, Array, Category, Kind, Phase
from memlab.trace.trace import CPU, Trace
from memlab.units import UNBOUNDED, format_bytes, plain

BEFORE, ELSEWHERE = "before the run", "elsewhere"
ROUNDING, CACHED = "rounding", "cached"
CONTEXT, OTHER_PROCESSES, UNKNOWN = "context", "other processes", "unknown"
BY = ("category", "module", "line", "tensor", "phase")
OF = ("allocated", "reserved", "device")

_CATEGORIES = np.array([code.name.lower() for code in Category], dtype=object)
_PHASES = np.array([code.name.lower() for code in Phase], dtype=object)


@dataclass(frozen=True, slots=True)
class Breakdown(ByName[int]):
    """Name -> bytes, largest first, as a mapping; `total_bytes` is what they sum to, `remark` is the trace's."""

    by: str
    of: str
    shares: Mapping[str, int]
    remark: str = ""
    _known = property(attrgetter("shares"))

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        rows = []
        for name, count in self.items():
            rows.append(f"{plain(name):<{width}}  {format_bytes(count):>10}  {self.percent(name):>4}")
        rows.append(f"{'peak of ' + self.of:<{width}}  {format_bytes(self.total_bytes):>10}")
        return "\n".join([*rows, *filter(None, (self.remark,))])

    @property
    def total_bytes(self) -> int:
        """The sum of all shares: the peak they were taken at."""
        return sum(self.shares.values())

    def percent(self, name: str) -> str:
        """One share of the whole, as text."""
        return f"{100 * self.shares[name] / max(self.total_bytes, 1):.0f} %"

    def to_pandas(self) -> Any:
        """The shares as a pandas Series of bytes."""
        import pandas

        return pandas.Series(dict(self.shares), name=f"{self.of}_bytes", dtype="int64").rename_axis(self.by)


def breakdown(
    trace: Trace, device: int, by: str = "category", of: str = "allocated", at: Peak | None = None
) -> Breakdown:
    """The bytes at the peak of `of` ("allocated", "reserved" or "device") on one device, by `by`.

    Requested bytes are attributed; `rounding` is what the allocator added. For "reserved", `cached` is free memory it
    held; for "device", `context` is what else this process used, then `other processes`, or `unknown` for both where
    the driver does not distinguish processes.
    """
    if by not in BY:
        raise MemlabError(f"cannot break down by {by!r}. Choose one of {', '.join(BY)}.")
    if of not in OF:
        raise MemlabError(f"there is no peak of {of!r} to break down. Choose one of {', '.join(OF)}.")
    if of != "allocated" and device == CPU:
        raise MemlabError(f"the CPU reserves nothing: its memory can only be broken down of allocated, not of {of}.")
    if of == "device":
        shares = _of_device(trace, device, by)
    else:
        at = _seen(at or peak(trace, device, of), of)
        shares = _shares(trace, device, by, at.row, at.low_bytes if of == "reserved" else -1)
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return Breakdown(by, of, {name: n for name, n in largest_first if n}, trace.remark)


def _seen(at: Peak, of: str) -> Peak:
    if at.row < 0 and at.time_ns != 0:  # the start has no row and time 0
        raise MemlabError(f"what held the peak of {of} is unknown: its events were lost ({at.source}).")
    return at


def _shares(trace: Trace, device: int, by: str, row: int, reserved_bytes: int = -1) -> dict[str, int]:
    """Requested bytes by name after event `row`, then rounding and, where *reserved* is given, cached."""
    rows = alive_at(trace, device, row)
    requested, allocated = trace.events.requested_bytes[rows], trace.events.allocated_bytes[rows]
    names, number = np.unique(names_of(trace, rows, by, row).astype(str), return_inverse=True)
    sums = np.zeros(len(names), np.int64)
    np.add.at(sums, number, requested)
    shares = dict(zip(names.tolist(), sums.tolist(), strict=True))
    shares[ROUNDING] = int(allocated.sum() - requested.sum())
    if reserved_bytes >= 0:
        shares[CACHED] = reserved_bytes - int(allocated.sum())
    return shares


def _of_device(trace: Trace, device: int, by: str) -> dict[str, int]:
    """The shares of what the driver reported: those of *reserved* at that time, and the rest of the device."""
    top = device_peak(trace, device)
    if top is None:
        raise MemlabError("the driver was never queried in this run, so the use of the whole device is unknown.")
    at = peak(trace, device, "reserved")
    mine = trace.samples.of(device, "used_bytes")
    if not len(mine):  # a prediction: there is no driver
        reserved = min(_seen(at, "device").low_bytes, top.low_bytes)
        return _shares(trace, device, by, at.row, reserved) | {CONTEXT: top.low_bytes - reserved}
    if top.low_bytes == int(mine.used_bytes.max()):
        sample, level = int(mine.used_bytes.argmax()), timeline(trace, device, "reserved")
        time_ns = mine.time_ns[sample]
        reserved = int(level.bytes[max(int(np.searchsorted(level.time_ns, time_ns, side="right")) - 1, 0)])
        row = int(np.searchsorted(trace.events.time_ns, time_ns, "right")) - 1
    else:
        both = np.where(mine.reserved_bytes >= 0, mine.used_bytes - mine.reserved_bytes, UNBOUNDED)
        sample, reserved, row = int(both.argmin()), _seen(at, "device").low_bytes, at.row
    reserved = min(reserved, top.low_bytes)  # the driver was read a moment before or after
    shares, others = _shares(trace, device, by, row, reserved), top.low_bytes - reserved
    own, its_reserved = int(mine.own_bytes[sample]), int(mine.reserved_bytes[sample])
    if own < 0 or its_reserved < 0:  # the driver does not distinguish processes
        return shares | {UNKNOWN: others}
    context = min(max(own - its_reserved, 0), others)
    return shares | {CONTEXT: context, OTHER_PROCESSES: others - context}


def names_of(trace: Trace, rows: Array, by: str, row: int) -> Array:
    """The name of each block, as of event `row`."""
    block = trace.events.block[rows]
    category = _CATEGORIES[categories_at(trace, row)[block]]
    if by == "category":
        return category
    preexisting = trace.events.kind[rows] == Kind.PREEXISTING
    if by == "phase":
        return np.where(preexisting, BEFORE, _PHASES[trace.blocks.phase[block]])

    def text(column: str, unknown: str) -> Array:
        texts: Array = np.array([*trace.texts[column], unknown], dtype=object)
        index: Array = getattr(trace.blocks, column)[block]
        return texts[index]

    own = text("name", "")
    if by == "tensor":  # unnamed blocks are called after their category and where they were made
        module, line = trace.blocks.module[block], trace.blocks.line[block]
        place = np.where(module >= 0, text("module", ""), text("line", ""))
        known = (module >= 0) | (line >= 0)
        made = np.where(known, " of " + place, np.where(preexisting, f", {BEFORE}", f" of {ELSEWHERE}"))
        return np.where(own == "", category + made, own)
    is_unknown = getattr(trace.blocks, by)[block] < 0
    names = np.where(preexisting & is_unknown, BEFORE, text(by, ELSEWHERE))
    return np.where(workspaces(trace)[block], own, names)


def workspaces(trace: Trace) -> Array:
    """For each block whether it is a workspace that a math library keeps; the last entry, False, is for block -1.

    It belongs to no line and no module: the first call that needs it triggers the allocation for all.
    """
    is_one = np.array([text.startswith(WORKSPACE_OF) for text in trace.texts["name"]] + [False])
    return np.append(is_one[trace.blocks.name], False)


def categories_at(trace: Trace, row: int) -> Array:
    """The category of every block after event `row`."""
    changes = trace.recategorised
    so_far = np.flatnonzero(changes.row <= max(row, trace.first_row - 1))
    so_far = so_far[np.argsort(changes.row[so_far], kind="stable")]
    category = trace.blocks.category.copy()
    category[changes.block[so_far]] = changes.category[so_far]
    return category
