"""Who held the bytes of a peak: by category, module, line, tensor or phase. The shares sum to the peak exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.analysis.peak import UNKNOWN_BYTES, Peak, alive_at, device_peak, peak
from memlab.analysis.timeline import timeline
from memlab.errors import MemlabError
from memlab.trace.columns import WORKSPACE_OF, Array, Category, Kind, Phase, Samples
from memlab.trace.trace import CPU, Trace
from memlab.units import format_bytes, plain

BEFORE = "before the cell"
ROUNDING = "rounding"
CACHED = "cached"
ELSEWHERE = "elsewhere"
CONTEXT, OTHER_PROCESSES, UNKNOWN = "context", "other processes", "unknown"
BY = ("category", "module", "line", "tensor", "phase")
OF = ("allocated", "reserved", "device")


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
            f"{plain(name):<{width}}  {format_bytes(count):>10}  {self.percent(name):>4}"
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


def breakdown(
    trace: Trace, device: int, by: str = "category", of: str = "allocated", at: Peak | None = None
) -> Breakdown:
    """The bytes at the peak of `of` ("allocated", "reserved" or "device") on one device, by `by`.

    What is requested is shared out; `rounding` is what the allocator added to it. Of "reserved", `cached` is what it held
    without use; of "device", `context` is what else this process took, then `other processes`, or `unknown` for both where
    the driver does not tell processes apart.
    """
    _check(by, of, device)
    if of == "device":
        return Breakdown(by, of, _largest_first(_of_device(trace, device, by)))
    at = at or peak(trace, device, of)
    _check_seen(at, of)
    return Breakdown(
        by, of, _largest_first(_shares(trace, device, by, at.row, at.low_bytes if of == "reserved" else -1))
    )


def _check(by: str, of: str, device: int) -> None:
    if by not in BY:
        raise MemlabError(f"cannot break down by {by!r}. Choose one of {', '.join(BY)}.")
    if of not in OF:
        raise MemlabError(f"there is no peak of {of!r} to break down. Choose one of {', '.join(OF)}.")
    if of != "allocated" and device == CPU:
        raise MemlabError(f"the CPU reserves nothing: its memory can only be broken down of allocated, not of {of}.")


def _check_seen(at: Peak, of: str) -> None:
    if at.row < 0 and at.time_ns != 0:  # the start has no row, and time 0
        raise MemlabError(f"nobody saw who held the peak of {of}: its events were lost ({at.source}).")


def _shares(trace: Trace, device: int, by: str, row: int, reserved_bytes: int = -1) -> dict[str, int]:
    """What was requested after event `row` by name, then rounding and, where *reserved* is given, what was cached."""
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


def _largest_first(shares: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(shares.items(), key=lambda item: -item[1]) if count}


def _of_device(trace: Trace, device: int, by: str) -> dict[str, int]:
    """The shares of what the driver reported: those of *reserved* then, and what was beside it."""
    top = device_peak(trace, device)
    if top is None:
        raise MemlabError("the driver's figure was never read in this run: nothing is known of the whole device.")
    at = peak(trace, device, "reserved")
    mine = trace.samples.rows((trace.samples.device == device) & (trace.samples.used_bytes >= 0))
    if not len(mine):  # a prediction: nobody read a driver
        _check_seen(at, "device")
        reserved = min(at.low_bytes, top.low_bytes)
        return _shares(trace, device, by, at.row, reserved) | {CONTEXT: top.low_bytes - reserved}
    level = timeline(trace, device, "reserved")
    if top.low_bytes == int(mine.used_bytes.max()):
        sample = int(mine.used_bytes.argmax())
        step = max(int(np.searchsorted(level.time_ns, mine.time_ns[sample], side="right")) - 1, 0)
        reserved, row = (
            int(level.bytes[step]),
            int(np.searchsorted(trace.events.time_ns, mine.time_ns[sample], "right")) - 1,
        )
    else:
        both = np.where(mine.reserved_bytes >= 0, mine.used_bytes - mine.reserved_bytes, UNKNOWN_BYTES)
        sample, reserved, row = int(both.argmin()), at.low_bytes, at.row
        _check_seen(at, "device")
    reserved = min(reserved, top.low_bytes)  # the driver was read a moment before or after
    return _shares(trace, device, by, row, reserved) | _beside(mine, sample, top.low_bytes - reserved)


def _beside(samples: Samples, index: int, beside_bytes: int) -> dict[str, int]:
    """What the device held besides *reserved*, told apart as far as the sample knows this process's part."""
    own, reserved = int(samples.own_bytes[index]), int(samples.reserved_bytes[index])
    if own < 0 or reserved < 0:
        return {UNKNOWN: beside_bytes}
    context = min(max(own - reserved, 0), beside_bytes)
    return {CONTEXT: context, OTHER_PROCESSES: beside_bytes - context}


def names_of(trace: Trace, rows: Array, by: str, row: int) -> Array:
    """The name of the block of each of these rows, as it is after event `row`."""
    block = trace.events.block[rows]
    if by == "category":
        return _lower(Category)[categories_at(trace, row)[block]]
    adopted = trace.events.kind[rows] == Kind.ADOPT
    if by == "phase":
        return np.where(adopted, BEFORE, _lower(Phase)[trace.blocks.phase[block]])
    if by == "tensor":
        return _tensor_names(trace, block, adopted, row)
    column = getattr(trace.blocks, by)[block]
    names = np.where(adopted & (column < 0), BEFORE, np.array([*trace.texts[by], ELSEWHERE], dtype=object)[column])
    own = np.array([*trace.texts["name"], ""], dtype=object)[trace.blocks.name[block]]
    return np.where(workspaces(trace)[block], own, names)


def workspaces(trace: Trace) -> Array:
    """Of each block whether it is a workspace that a math library took for itself and keeps.

    Wherever it was taken, it belongs to no line and no module: whoever comes first has the library take it for all.
    """
    is_one = np.array([text.startswith(WORKSPACE_OF) for text in trace.texts["name"]] + [False])
    found: Array = is_one[trace.blocks.name]
    return found


def _lower(codes: type[Category] | type[Phase]) -> Array:
    return np.array([code.name.lower() for code in codes], dtype=object)


def categories_at(trace: Trace, row: int) -> Array:
    """The category of every block after event `row`."""
    changes = trace.recategorised
    if not len(changes):
        return trace.blocks.category
    so_far = np.flatnonzero(changes.row <= max(row, trace.first_row - 1))
    so_far = so_far[np.argsort(changes.row[so_far], kind="stable")]
    category = trace.blocks.category.copy()
    category[changes.block[so_far]] = changes.category[so_far]
    return category


def _tensor_names(trace: Trace, block: Array, adopted: Array, row: int) -> Array:
    """The names of objects; what has none is called after its category and where it was made."""
    names = np.array([*trace.texts["name"], ""], dtype=object)[trace.blocks.name[block]]
    nameless = np.flatnonzero(names == "")
    kind = _lower(Category)[categories_at(trace, row)[block[nameless]]]
    place = np.full(len(nameless), ELSEWHERE, dtype=object)
    for column in ("line", "module"):
        index = getattr(trace.blocks, column)[block[nameless]]
        place = np.where(index >= 0, np.array([*trace.texts[column], ""], dtype=object)[index], place)
    place = np.where(adopted[nameless] & (place == ELSEWHERE), BEFORE, place)
    names[nameless] = [
        f"{one} of {where}" if where != BEFORE else f"{one}, {where}" for one, where in zip(kind, place, strict=True)
    ]
    return names
