"""Who held the bytes of a peak: by phase, category, module or line. The shares sum to the peak exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.analysis.peak import Peak, alive_at, peak
from memlab.errors import MemlabError
from memlab.trace.columns import Category, Kind, Phase
from memlab.trace.trace import CPU, Trace
from memlab.units import format_bytes

BEFORE = "before the cell"
ROUNDING = "rounding"
CACHED = "cached"
BY = ("phase", "category", "module", "line")


@dataclass(frozen=True, slots=True)
class Breakdown(Mapping[str, int]):
    """Name -> bytes, largest first, as a mapping; `total_bytes` is what they sum to."""

    by: str
    of: str
    shares: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.shares[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shares)

    def __len__(self) -> int:
        return len(self.shares)

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        rows = [
            f"{_plain(name):<{width}}  {format_bytes(count):>10}  {self.percent(name):>4}"
            for name, count in self.items()
        ]
        return "\n".join([*rows, f"{'peak of ' + self.of:<{width}}  {format_bytes(self.total_bytes):>10}"])

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


def _plain(name: str) -> str:
    """A name that cannot steer a terminal; it may come from a file."""
    return "".join(c if c.isprintable() else " " for c in name)


def breakdown(
    trace: Trace, device: int, by: str = "category", of: str = "allocated", at: Peak | None = None
) -> Breakdown:
    """The bytes at the peak of `of` ("allocated" or "reserved") on one device, by `by`.

    What is requested is shared out; `rounding` is what the allocator added to it, and of "reserved" `cached` is what it
    held without use.
    """
    if by not in BY:
        raise MemlabError(f"cannot break down by {by!r}. Choose one of {', '.join(BY)}.")
    if of == "reserved" and device == CPU:
        raise MemlabError("the CPU reserves nothing: its memory can only be broken down of allocated.")
    at = at or peak(trace, device, of)
    if at.row < 0 and at.time_ns != 0:  # the start has no row, and time 0
        raise MemlabError(f"nobody saw who held the peak of {of}: its events were lost ({at.source}).")
    rows = alive_at(trace, device, at.row)
    requested, allocated = trace.events.requested_bytes[rows], trace.events.allocated_bytes[rows]
    names = _names(trace, rows, by)
    shares = {str(name): int(requested[names == name].sum()) for name in np.unique(names)}
    shares[ROUNDING] = int(allocated.sum() - requested.sum())
    if of == "reserved":
        shares[CACHED] = at.low_bytes - int(allocated.sum())
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return Breakdown(by, of, {name: count for name, count in ordered if count})


def _names(trace: Trace, rows: np.ndarray, by: str) -> np.ndarray:
    """The name of each of these blocks' rows."""
    block = trace.events.block[rows]
    if by in ("phase", "category"):
        codes = Phase if by == "phase" else Category
        table = np.array([code.name.lower() for code in codes], dtype=object)
        names = table[getattr(trace.blocks, by)[block]]
    else:
        table = np.array([*trace.texts[by], "elsewhere"], dtype=object)
        names = table[getattr(trace.blocks, by)[block]]
    known = getattr(trace.blocks, by)[block] > 0 if by == "category" else np.zeros(len(rows), bool)
    adopted = trace.events.kind[rows] == Kind.ADOPT
    return np.where(adopted & ~known, BEFORE, names)
