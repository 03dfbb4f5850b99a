"""Two runs side by side: whose peak is how much higher, and by category, module or line who makes the difference.

The differences of the shares sum to the difference of the peaks exactly: what nobody saw is a share of its own.

Limits: of each run the device with the largest peak counts. Modules and lines are matched by name, lines of a cell that
was changed by their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.analysis.areas import LAYERS
from memlab.analysis.breakdown import BY, breakdown
from memlab.analysis.curves import moments
from memlab.analysis.lines import sources_of
from memlab.analysis.matching import Matched, matched
from memlab.analysis.peak import UNKNOWN_BYTES
from memlab.analysis.timeline import timeline
from memlab.errors import MemlabError
from memlab.trace.columns import Array
from memlab.trace.trace import Device, Trace
from memlab.units import format_bytes, plain

UNTOLD = "not told apart"
"""What a peak has above what events tell of it: they were lost, or a predicted card is too small for the run."""
_BINS = 140
_BY_COLUMN = ("module", "line")

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two runs, with the peak of *allocated* on one of its devices: at least and at most."""

    name: str
    trace: Trace
    device: Device
    low_bytes: int
    high_bytes: int

    @property
    def is_predicted(self) -> bool:
        """Whether nothing of it was measured."""
        return "prediction" in self.trace.notes

    @property
    def duration_s(self) -> float:
        """How long it took; of a prediction, its rehearsal."""
        return self.trace.made_by.duration_ns / 1e9

    def shares(self, by: str) -> dict[str, int]:
        """Who held the peak, by name; together exactly `low_bytes`."""
        try:
            shares = dict(breakdown(self.trace, self.device.index, by))
        except MemlabError:
            if by not in BY:
                raise
            shares = {}
        untold = self.low_bytes - sum(shares.values())
        return {**shares, UNTOLD: untold} if untold else shares

    def curve(self) -> tuple[Array, Array]:
        """Seconds and bytes of a stair with few steps, the peak among them."""
        line = timeline(self.trace, self.device.index)
        time_ns, shown = moments(line, _BINS)
        return time_ns / 1e9, line.bytes[shown]


@dataclass(frozen=True, slots=True)
class Difference:
    """What one name held at the peak of `a` and at that of `b`."""

    a_bytes: int
    b_bytes: int

    @property
    def difference_bytes(self) -> int:
        """How much more `b` has; below zero: how much less."""
        return self.b_bytes - self.a_bytes


@dataclass(frozen=True, slots=True)
class Differences(Mapping[str, Difference]):
    """Name -> Difference, the largest first. `texts` has the code of lines by their name, where it is known."""

    by: str
    rows: Mapping[str, Difference]
    texts: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Difference:
        return self.rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> Difference:
        """The peaks themselves."""
        return Difference(sum(one.a_bytes for one in self.values()), sum(one.b_bytes for one in self.values()))

    def __str__(self) -> str:
        rows = [*self.items(), ("peak allocated", self.total)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            f"{plain(name):<{width}}  {format_bytes(one.a_bytes):>10}  {format_bytes(one.b_bytes):>10}"
            f"  {signed(one.difference_bytes):>11}"
            for name, one in rows
        )

    def to_pandas(self) -> Any:
        """A row for each name, sizes in bytes."""
        import pandas

        rows = [(name, one.a_bytes, one.b_bytes, one.difference_bytes) for name, one in self.items()]
        return pandas.DataFrame(rows, columns=[self.by, "a_bytes", "b_bytes", "difference_bytes"]).set_index(self.by)


def signed(count: int) -> str:
    """A difference as text.

    >>> signed(-2048), signed(5), signed(0)
    ('−2.00 KiB', '+5 B', '0 B')
    """
    return "0 B" if not count else ("+" if count > 0 else "−") + format_bytes(abs(count))


def saved(a: Side, b: Side) -> Interval:
    """By how much the peak of `b` is below that of `a`, at least and at most."""
    return (
        max(a.low_bytes - b.high_bytes, -UNKNOWN_BYTES),
        min(a.high_bytes - b.low_bytes, UNKNOWN_BYTES),
    )


def known_by(a: Side, b: Side) -> tuple[str, ...]:
    """By what the bytes of either can be told apart: "category", "module", "line"."""
    found = [
        any(side.trace.blocks.category.any() or len(side.trace.recategorised) for side in (a, b)),
        *(any((getattr(side.trace.blocks, by) >= 0).any() for side in (a, b)) for by in _BY_COLUMN),
    ]
    return tuple(by for by, is_known in zip(("category", *_BY_COLUMN), found, strict=True) if is_known)


def differences(a: Side, b: Side, by: str = "category") -> Differences:
    """Who makes the difference of the peaks; `by` is as for `breakdown`."""
    if by not in BY:
        raise MemlabError(f"cannot compare by {by!r:.80}. Choose one of {', '.join(BY)}.")
    if by == "line" and by not in known_by(a, b):
        raise MemlabError("neither run knows its lines: measure with %%memtrack --lines, or memlab.track(lines=True).")
    names = matched(sources_of(a.trace), sources_of(b.trace)) if by == "line" else Matched()
    first = _renamed(a.shares(by), names.of_a)
    second = _renamed(b.shares(by), names.of_b)
    rows = {name: Difference(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}
    largest = sorted(rows.items(), key=lambda item: (-abs(item[1].difference_bytes), -item[1].a_bytes, item[0]))
    return Differences(by, dict(largest), names.texts)


def _renamed(shares: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in shares.items():
        new = names.get(name, name)
        found[new] = found.get(new, 0) + count
    return found


# --- what a picture shows ----------------------------------------------------------------------------------------------

_FAR_APART = 4
"""From so many times the other's duration on, the shorter run would be hard to read on one axis of seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One run as it is drawn: a stair, and the stacked shares of its peak from the lowest up."""

    name: str
    time_s: Array
    bytes: Array
    duration_s: float
    low_bytes: int
    high_bytes: int
    shares: tuple[tuple[str, int], ...]

    @property
    def top_bytes(self) -> int:
        """The highest value that is drawn."""
        known = self.high_bytes if self.high_bytes < UNKNOWN_BYTES else self.low_bytes
        return max(int(self.bytes.max(initial=0)), self.low_bytes, known)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Two runs on one axis, each from 0. `by_share` is the axis that it opens with: seconds, or the share of each run."""

    a: Drawn
    b: Drawn
    by_share: bool
    why: str

    @property
    def sides(self) -> tuple[Drawn, Drawn]:
        """Both."""
        return self.a, self.b

    @property
    def top_bytes(self) -> int:
        """The highest value of both."""
        return max(self.a.top_bytes, self.b.top_bytes, 1)

    @property
    def duration_s(self) -> float:
        """How long the longer one is."""
        return max(self.a.duration_s, self.b.duration_s, 1e-9)


def picture(a: Side, b: Side, has_time: bool = True) -> Picture:
    """What the picture of two runs shows; without `has_time` seconds of either mean nothing."""
    by = "category" if "category" in known_by(a, b) else ""
    first, second = _drawn(a, by), _drawn(b, by)
    longer, shorter = max(a.duration_s, b.duration_s), max(min(a.duration_s, b.duration_s), 1e-9)
    why = "" if has_time else "seconds mean nothing here"
    if has_time and longer > _FAR_APART * shorter:
        why = f"one took {longer / shorter:,.0f} times as long"
    return Picture(first, second, bool(why), why)


def _drawn(side: Side, by: str) -> Drawn:
    time_s, level = side.curve()
    shares = side.shares(by) if by else {"allocated": side.low_bytes}
    order = [*LAYERS, *sorted(set(shares) - set(LAYERS))]
    stacked = tuple((name, shares[name]) for name in order if shares.get(name, 0) > 0)
    return Drawn(
        side.name, time_s, level, max(side.duration_s, float(time_s[-1])), side.low_bytes, side.high_bytes, stacked
    )


def peak_place(drawn: Drawn) -> int:
    """The step at which the drawn stair is highest."""
    return int(np.argmax(drawn.bytes))
