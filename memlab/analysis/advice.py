"""Which techniques were tried, what they saved, and how they rank. Nothing is run here.

A saving is the peak before minus the peak with the change. For predictions both are intervals under the same assumptions:
the low end of one belongs to the low end of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab.units import UNBOUNDED, ByteRange, MiB, format_bytes, number_of

NOTHING = ByteRange(0, 0)
TIME_FLOOR = 0.1
"""Extra time below a tenth of a step is noise with the few steps that are timed."""
LEAST_SHARE = 0.01
"""A share of the peak before: savings below it are ignored."""
UNCHECKED = "not checked"
"""The results of a run that computes nothing, or that was not compared."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Techniques that were switched on together, and the result; `failed` says why there are no figures.

    `ratio` is the seconds of a step to those before (None: not measured), `results` a verdict of `memlab.compare`, and
    `is_wrong` whether results are further off than the techniques allow. `costs` is whether a step is known to take longer.
    """

    names: tuple[str, ...]
    peak_bytes: ByteRange = NOTHING
    saved_bytes: ByteRange = NOTHING
    ratio: float | None = None
    results: str = UNCHECKED
    results_why: str = ""
    is_wrong: bool = False
    costs: bool = True
    changes: bool = False
    prices: tuple[str, ...] = ()
    failed: str = ""
    world_size: int = 1
    """How many GPUs the work is sharded over; figures are those of one of them."""

    def __str__(self) -> str:
        if self.failed:
            return f"{self.name}: {self.failed}"
        time = f", a step takes {self.ratio:.2f} times as long" if self.ratio is not None else ""
        return f"{self.name}: saves {interval_text(self.saved_bytes)}{time}, results {self.results}"

    @property
    def name(self) -> str:
        """The names, joined."""
        return " + ".join(self.names) + (f" over {self.world_size} GPUs" if self.world_size > 1 else "")

    @property
    def least_bytes(self) -> int:
        """The lower bound of the saving."""
        return min(self.saved_bytes)


def saved(before: ByteRange, after: ByteRange) -> ByteRange:
    """The interval of the saving from two intervals of peaks, paired end by end."""
    if max(*before, *after) >= UNBOUNDED:
        return ByteRange(*before) - ByteRange(*after)
    return ByteRange(*sorted((before[0] - after[0], before[1] - after[1])))


def least_saving(before: ByteRange) -> float:
    """The smallest saving that counts, for a peak."""
    low, high = before
    return LEAST_SHARE * (high if high < UNBOUNDED else low)


def interval_text(of: ByteRange) -> str:
    """Two sizes as text; one if they are equal."""
    if max(map(abs, of)) >= UNBOUNDED:
        return str(of)
    low, high = (f"{'−' if one < 0 else ''}{format_bytes(abs(one))}" for one in of)
    return low if low == high else f"{low} to {high}"


def ranked(tried: Iterable[Tried], before: ByteRange) -> list[Tried]:
    """The trials that save memory and keep the results, most bytes for their price first.

    Where time was measured the price is the extra time; otherwise techniques declared free come first, those that change
    training after them, and those that need more GPUs last.
    """
    least = least_saving(before)
    useful = [one for one in tried if not one.failed and not one.is_wrong and one.least_bytes > least]

    def order(
        one: Tried,
    ) -> tuple[int, bool, bool, float]:  # bytes for each unit of extra time, where time was measured
        price = 1.0 if one.ratio is None else max(one.ratio - 1.0, 0.0) + TIME_FLOOR
        return one.world_size, one.changes, one.ratio is None and one.costs, -one.least_bytes / price

    return sorted(useful, key=order)


def cheapest(tried: Iterable[Tried], target_bytes: int) -> Tried | None:
    """The cheapest of those certain to reach the target; None if there is none."""
    there = [one for one in tried if not one.failed and not one.is_wrong and max(one.peak_bytes) <= target_bytes]

    def price(one: Tried) -> tuple[int, bool, float, bool, int, int]:
        slower = round(max((one.ratio or 1.0) - 1.0, 0.0) / TIME_FLOOR)
        return one.world_size, one.changes, slower, one.ratio is None and one.costs, len(one.names), max(one.peak_bytes)

    return min(there, key=price, default=None)


@dataclass(frozen=True, slots=True)
class Findings:
    """The outcome of a search as plain values.

    `of` is the peak to lower ("allocated" or "device"), `shares` who held it before by category. `tried` are single
    techniques, `combined` several at once, `left_out` maps each technique that was not tried to the reason. `stopped` says why
    the search ended early.
    """

    name: str
    on: str
    of: str
    before_bytes: ByteRange
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
    is_simulated: bool = False
    remarks: tuple[str, ...] = ()
    """Sentences for below that on the target."""

    @property
    def reaches(self) -> bool | None:
        """Whether the recommendation is certain to reach the target; None without a target."""
        if self.target_bytes is None:
            return None
        return max(self.after_bytes) <= self.target_bytes

    @property
    def after_bytes(self) -> ByteRange:
        """The peak with the recommendation."""
        return self.recommended.peak_bytes if self.recommended is not None else self.before_bytes

    @property
    def missed_bytes(self) -> int:
        """By how much the target is missed; 0 if it is reached or there is none."""
        return max(max(self.after_bytes) - self.target_bytes, 0) if self.target_bytes is not None else 0

    def ranking(self) -> list[Tried]:
        """Single techniques: first those that help, then the others, then those that failed."""
        best = ranked(self.tried, self.before_bytes)
        others = (one for one in self.tried if one not in best)
        rest = sorted(others, key=lambda one: (bool(one.failed), -one.least_bytes))
        return [*best, *rest]

    def to_pandas(self) -> Any:
        """One row per run, sizes in bytes."""
        import pandas

        sizes = ["peak_low_bytes", "peak_high_bytes", "saved_low_bytes", "saved_high_bytes"]
        rows = []
        for one in (*self.ranking(), *self.combined):  # failed runs have no figures
            figures = (*ByteRange(*one.peak_bytes).numbers(), *ByteRange(*one.saved_bytes).numbers())
            row = {"techniques": one.name, **dict(zip(sizes, figures, strict=True)), "time_ratio": one.ratio}
            row |= dict.fromkeys(sizes) if one.failed else {}
            results = "" if one.failed else one.results
            rows.append(row | {"results": results, "recommended": one == self.recommended, "failed": one.failed})
        columns = ["techniques", *sizes, "time_ratio", "results", "recommended", "failed"]
        return pandas.DataFrame(rows, columns=columns).astype(dict.fromkeys(sizes, "Int64"))


# --- the hint in a report: one line that names `advise`; it promises no saving ------------------------------------

LARGE = 0.5
"""The share of the peak that a category must hold for a hint."""
LEAST_BYTES = 32 * MiB
"""Below this peak there is no hint."""
PLURAL = {name: f"{name}s" for name in ("parameter", "buffer", "gradient", "activation", "input")}
PLURAL |= {"optimizer": "optimizer states", "temporary": "temporaries"}


def is_large(shares: Mapping[str, int]) -> bool:
    """Whether one category holds enough of a peak that is large enough."""
    total, name = sum(shares.values()), max(shares, key=lambda one: shares[one], default="")
    return name in PLURAL and total >= LEAST_BYTES and shares[name] >= LARGE * total


def pointer(shares: Mapping[str, int], known: Mapping[str, int], call: str, of: str = "the peak") -> str:
    """The line, "" where no category holds most of the peak or no technique is known for the one that does.

    `shares` has the bytes at the peak by category, `known` how many techniques can be tried on each, `call` what to call.

    >>> pointer({"activation": 80 * MiB, "parameter": 20 * MiB}, {"activation": 7}, "memlab.advise(run)")
    'Activations hold 80 % of the peak: memlab.advise(run) finds out which of 7 techniques, if any, would lower it.'
    """
    name = max(shares, key=lambda one: shares[one], default="")
    count = known.get(name, 0)
    if not is_large(shares) or not count:
        return ""
    share = f"{100 * shares[name] / sum(shares.values()):.0f} % of {of}"
    which = f"which of {number_of(count, 'technique')}, if any, would lower it"
    return f"{PLURAL[name].capitalize()} hold {share}: {call} finds out {which}."
