"""What was tried to save memory, as values, and the order in which it is worth its price. Nothing is run here.

A saving is the peak before less the peak with the change. Of predictions both are intervals, taken under the same assumptions:
the low end of one belongs to the low end of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab.units import format_bytes

Interval = tuple[int, int]
TIME_FLOOR = 0.1
"""Extra time below a tenth of a step is not told apart by the few steps that are timed."""
LEAST_SHARE = 0.01
"""Of the peak before: what saves less is not worth a line of code."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Techniques that were switched on together, and what came of it; `failed` says why there are no figures.

    `ratio` is the seconds of a step to those before (None: not measured), `results` a verdict of `memlab.compare`, and
    `is_wrong` whether results are further off than the techniques allow. `costs` is whether a step is known to take longer.
    """

    names: tuple[str, ...]
    peak_bytes: Interval = (0, 0)
    saved_bytes: Interval = (0, 0)
    ratio: float | None = None
    results: str = "not checked"
    results_why: str = ""
    is_wrong: bool = False
    costs: bool = True
    changes: bool = False
    prices: tuple[str, ...] = ()
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            return f"{self.name}: {self.failed}"
        time = f", a step takes {self.ratio:.2f} times as long" if self.ratio is not None else ""
        return f"{self.name}: saves {interval_text(self.saved_bytes)}{time}, results {self.results}"

    @property
    def name(self) -> str:
        """The names in one."""
        return " + ".join(self.names)

    @property
    def least_bytes(self) -> int:
        """What it saves for certain."""
        return min(self.saved_bytes)


def saved(before: Interval, after: Interval) -> Interval:
    """The smaller and the larger of the differences of the ends."""
    low, high = sorted((before[0] - after[0], before[1] - after[1]))
    return low, high


def interval_text(of: Interval) -> str:
    """Two sizes as a text; one where they are the same."""
    low, high = (f"{'−' if one < 0 else ''}{format_bytes(abs(one))}" for one in of)
    return low if low == high else f"{low} to {high}"


def ranked(tried: Iterable[Tried], before: Interval) -> list[Tried]:
    """Those that save something and keep the results, most bytes for their price first.

    Where time was measured the price is the extra time; else what is declared to cost none comes first, and what changes
    training last.
    """
    least = LEAST_SHARE * max(before)
    useful = [one for one in tried if not one.failed and not one.is_wrong and one.least_bytes > least]
    return sorted(useful, key=lambda one: (one.changes, one.ratio is None and one.costs, -per_cost(one)))


def per_cost(one: Tried) -> float:
    """Bytes saved for each unit of extra time; bytes alone where time was not measured."""
    if one.ratio is None:
        return float(one.least_bytes)
    return one.least_bytes / (max(one.ratio - 1.0, 0.0) + TIME_FLOOR)


def cheapest(tried: Iterable[Tried], target_bytes: int) -> Tried | None:
    """Of all that reach the target for certain the one with the least price; None where none does."""
    there = [one for one in tried if not one.failed and not one.is_wrong and max(one.peak_bytes) <= target_bytes]
    return min(there, key=_price, default=None)


def _price(one: Tried) -> tuple[bool, float, bool, int, int]:
    slower = max((one.ratio or 1.0) - 1.0, 0.0)
    return one.changes, round(slower / TIME_FLOOR), one.ratio is None and one.costs, len(one.names), max(one.peak_bytes)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found, as plain values: what is shown of an advice.

    `of` is the peak that is looked at ("allocated" or "device"), `shares` who held it before by category. `tried` are single
    techniques, `combined` several at once, `left_out` has the name of each that was not tried, and why. `stopped` says why
    the search ended early.
    """

    name: str
    on: str
    of: str
    before_bytes: Interval
    target_bytes: int | None = None
    shares: Mapping[str, int] = field(default_factory=dict)
    tried: tuple[Tried, ...] = ()
    combined: tuple[Tried, ...] = ()
    recommended: Tried | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    stopped: str = ""
    is_predicted: bool = False
    duration_s: float = 0.0

    @property
    def reaches(self) -> bool | None:
        """Whether what is recommended reaches the target for certain; None where none was named."""
        if self.target_bytes is None:
            return None
        return max(self.after_bytes) <= self.target_bytes

    @property
    def after_bytes(self) -> Interval:
        """The peak with what is recommended."""
        return self.recommended.peak_bytes if self.recommended is not None else self.before_bytes

    @property
    def missed_bytes(self) -> int:
        """By how much the target is missed, 0 where it is reached or none was named."""
        return max(max(self.after_bytes) - self.target_bytes, 0) if self.target_bytes is not None else 0

    def ranking(self) -> list[Tried]:
        """What was tried alone: what helps first, then what does not, then what failed."""
        best = ranked(self.tried, self.before_bytes)
        others = (one for one in self.tried if one not in best)
        rest = sorted(others, key=lambda one: (bool(one.failed), -one.least_bytes))
        return [*best, *rest]

    def to_pandas(self) -> Any:
        """A row for each run that was tried, sizes in bytes."""
        import pandas

        columns = ["techniques", "peak_low_bytes", "peak_high_bytes", "saved_low_bytes", "saved_high_bytes"]
        columns += ["time_ratio", "results", "recommended", "failed"]
        rows = [
            (*_figures(one), one.ratio, "" if one.failed else one.results, one == self.recommended, one.failed)
            for one in (*self.ranking(), *self.combined)
        ]
        return pandas.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[1:5], "Int64"))


def _figures(one: Tried) -> tuple[str, int | None, int | None, int | None, int | None]:
    """The name, and the figures where there are some."""
    return (one.name, None, None, None, None) if one.failed else (one.name, *one.peak_bytes, *one.saved_bytes)
