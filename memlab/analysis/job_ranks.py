"""The ranks of one distributed job side by side, from one trace each: peaks, steps, what failed first, and what grows.

Ranks are aligned on optimizer steps. A rank that was killed left samples: its figures are lower bounds, and count for the worst
rank alone. Times of several machines are compared as their clocks have them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.analysis.host_at_end import HostAtEnd
from memlab.analysis.leak import Leak, Leaks
from memlab.errors import MemlabError
from memlab.trace.columns import Array
from memlab.trace.trace import Device
from memlab.units import ByteRange, KiB, format_bytes, number_of, one_line

ENDED, RAISED, TERMINATED, CUT_OFF = "ended", "raised", "terminated", "cut off"
SHARES = ("category", "module")
_LOST_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|\bpeer\b|\bnccl|processgroup|tcpstore|timed? ?out|DistBackend"
    r"|DistNetwork|DistStore|rendezvous|got signal: 15",
    re.IGNORECASE,
)
"""What the ranks say that wait for one that has failed."""
_FEWEST_STEPS, _MIN_RISE, _MIN_RISE_BYTES = 9, 0.1, 64 * KiB


@dataclass(frozen=True, slots=True, eq=False)
class RankSteps:
    """The optimizer steps of a rank, counted from 1: the highest level of *allocated* in each, and that at its end.

    Where `is_seen` is False the levels come from samples, and may have been higher.
    A rank that failed has the step that it did not finish as its last.
    """

    number: Array
    peak_bytes: Array
    end_bytes: Array
    is_seen: Array
    finished: int = 0

    @classmethod
    def joined(cls, parts: Sequence[RankSteps]) -> RankSteps:
        """The steps of consecutive measurements."""
        names = ("number", "peak_bytes", "end_bytes", "is_seen")
        columns: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in parts]) for name in names}
        return cls(**columns, finished=max(one.finished for one in parts))


@dataclass(frozen=True, slots=True)
class HeldAtFailure:
    """What a rank held when it failed: bytes of *allocated*, by category and by module, and by name where names were searched.

    Empty shares mean that it is unknown.
    """

    allocated_bytes: int
    shares: Mapping[str, Mapping[str, int]]
    named: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """One rank: where it ran, its peaks, what held the peak by category and module, its steps, and how it ended.

    `began_s` and `ended_s` are seconds of the Unix clock; a rank whose `ending` is "cut off" lived until some time between
    `ended_s` and `ended_by_s`. `holders` are names of what grows, `host` is the host at the last sample of one that was cut off.
    """

    rank: int
    world_size: int
    name: str
    files: tuple[str, ...]
    device: Device | None
    provenance: str
    peak: ByteRange
    reserved: ByteRange | None
    shares: Mapping[str, Mapping[str, int]]
    steps: RankSteps
    began_s: float
    ended_s: float
    ended_by_s: float
    ending: str
    error: str = ""
    ran_out: bool = False
    held: HeldAtFailure | None = None
    leaks: Leaks = field(default_factory=Leaks)
    holders: tuple[tuple[str, int], ...] = ()
    gaps: tuple[str, ...] = ()
    host: HostAtEnd | None = None

    @property
    def is_partial(self) -> bool:
        """Whether its file ends before the rank did."""
        return self.ending == CUT_OFF

    @property
    def is_failed(self) -> bool:
        """Whether it raised, or was ended by a signal."""
        return self.ending != ENDED

    @property
    def has_times(self) -> bool:
        """Whether its seconds mean anything: only where they were measured."""
        return self.provenance == "measured"


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity over the ranks: the worst, the median and the lowest.

    `is_bound`: the worst is that of a rank that was cut off, and may have been higher.
    """

    name: str
    worst_bytes: int
    worst_rank: int
    median_bytes: int
    lowest_bytes: int
    lowest_rank: int
    is_bound: bool = False

    @property
    def spread_bytes(self) -> int:
        """The worst minus the lowest."""
        return self.worst_bytes - self.lowest_bytes


@dataclass(frozen=True, slots=True)
class RankGrowth:
    """Memory that grows over the steps of some ranks; `steady` is how many others were seen not to grow, `unknown` the rest."""

    ranks: tuple[int, ...]
    steady: int
    unknown: int
    bytes_per_step: int
    text: str
    holders: tuple[tuple[str, int], ...] = ()

    @property
    def sentence(self) -> str:
        """Which ranks grow, by what and where, and what the others do."""
        steady, unknown = number_of(self.steady, "other"), self.unknown
        rest = [f"not on {steady}"] if self.steady and unknown else []
        rest += [f"unknown of {unknown}"] if unknown else []
        only = "Only on" if self.steady and not unknown else "On"
        who = f"{only} {ranks_text(self.ranks)}" if rest or self.steady else "On all ranks"
        held = ", ".join(f"{one_line(path, 60)} ({format_bytes(count)})" for path, count in self.holders[:3])
        where = f" At the end it was held by {held}." if held else ""
        return f"{', '.join([who, *rest])}: {self.text[:1].lower()}{self.text[1:]}{where}"


@dataclass(frozen=True, slots=True)
class JobRanks:
    """All ranks of a job that left something, in order; and the numbers of those that are missing."""

    ranks: tuple[RankRun, ...]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.ranks[0].name

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self.ranks[0].world_size

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that left no file."""
        there = {one.rank for one in self.ranks}
        return tuple(number for number in range(self.world_size) if number not in there)

    @property
    def provenance(self) -> str:
        """Whether the figures are "measured", "simulated" or "predicted"."""
        found = {one.provenance for one in self.ranks}
        return next(one for one in ("simulated", "predicted", "measured") if one in found)

    def __getitem__(self, rank: int) -> RankRun:
        for one in self.ranks:
            if one.rank == rank:
                return one
        raise MemlabError(f"rank {rank!r:.20} left no file; there are {ranks_text([one.rank for one in self.ranks])}.")

    @property
    def peak(self) -> Spread:
        """The peak of *allocated* over the ranks."""
        return self._spread("peak allocated", {one.rank: one.peak.low for one in self.ranks})

    @property
    def reserved(self) -> Spread | None:
        """The peak of *reserved* over the ranks; None on the CPU."""
        known = {one.rank: one.reserved.low for one in self.ranks if one.reserved is not None}
        return self._spread("peak reserved", known) if known else None

    def by(self, by: str = "category") -> tuple[Spread, ...]:
        """What held the peaks, by "category" or "module": the largest difference between ranks first, then the largest.

        Each rank counts at its own peak; ranks whose holders are unknown are left out.
        """
        if by not in SHARES:
            raise MemlabError(f"ranks are compared by {' or '.join(SHARES)}, got {by!r:.40}.")
        known = [one for one in self.ranks if one.shares.get(by)]
        names = dict.fromkeys(name for one in known for name in one.shares[by])
        spreads = [self._spread(name, {one.rank: one.shares[by].get(name, 0) for one in known}) for name in names]
        return tuple(sorted(spreads, key=lambda one: (-one.spread_bytes, -one.worst_bytes)))

    def _spread(self, name: str, values: Mapping[int, int]) -> Spread:
        """Those of ranks that were cut off count for the worst alone, unless there are no others."""
        partial = {one.rank for one in self.ranks if one.is_partial}
        whole = {rank: count for rank, count in values.items() if rank not in partial} or values
        worst, lowest = max(values, key=values.__getitem__), min(whole, key=whole.__getitem__)
        median = round(statistics.median(whole.values()))
        return Spread(name, values[worst], worst, median, whole[lowest], lowest, worst in partial)

    @property
    def first_failed(self) -> RankRun | None:
        """The rank that failed first, by absolute time; of those that cannot be ordered, the one with an error of its own."""
        failed = [one for one in self.ranks if one.is_failed]
        if not failed:
            return None
        if len(failed) == len(self.ranks) and all(one.ending == TERMINATED for one in failed):
            return None
        until_s = min(one.ended_by_s for one in failed)
        if len(failed) == len(self.ranks) and all(one.is_partial and one.ended_s <= until_s for one in failed):
            return None  # all files end at the same time: the job still runs, or was killed as a whole

        def order(one: RankRun) -> tuple[int, float]:
            """Of about the same time: an error of its own comes first, then a kill, then an error that follows from another."""
            if one.ending in (CUT_OFF, TERMINATED):
                return 2, one.ended_s
            return 0 if one.ran_out else 3 if _LOST_A_PEER.search(one.error) else 1, one.ended_s

        return min((one for one in failed if one.ended_s <= until_s), key=order)

    @property
    def growth(self) -> tuple[RankGrowth, ...]:
        """What grows over the steps, on which ranks, that of the fewest ranks first."""
        return tuple(sorted(_growth(self.ranks), key=lambda one: (len(one.ranks), -one.bytes_per_step)))

    def by_step(self, most: int = 240) -> tuple[Array, Array]:
        """Numbers of optimizer steps, at most so many, and per rank the highest *allocated* up to the next; NaN for no step."""
        stepped = [one.steps.number for one in self.ranks if len(one.steps.number)]
        if not stepped:
            return np.zeros(0, np.int64), np.zeros((len(self.ranks), 0))
        first, last = min(int(one[0]) for one in stepped), max(int(one[-1]) for one in stepped)
        stride = -(-(last - first + 1) // most)
        numbers = np.arange(first, last + 1, stride)
        levels = np.full((len(self.ranks), len(numbers)), -np.inf)
        for row, one in zip(levels, self.ranks, strict=True):
            np.maximum.at(row, (one.steps.number - first) // stride, one.steps.peak_bytes)
        return numbers, np.where(np.isinf(levels), np.nan, levels)

    def to_pandas(self) -> Any:
        """One row per rank: bytes, seconds (NaN on a simulated GPU), how it ended, and what held its peak by category."""
        import pandas

        began_s = min(one.began_s for one in self.ranks)
        categories = list(dict.fromkeys(name for one in self.ranks for name in one.shares.get("category", ())))
        rows = []
        for one in self.ranks:
            low, high = one.peak.numbers()
            row: dict[str, Any] = {"rank": one.rank, "device": one.device.label if one.device is not None else None}
            row |= {"peak_low_bytes": low, "peak_high_bytes": high, "steps": one.steps.finished, "ending": one.ending}
            row |= {"reserved_bytes": one.reserved.low if one.reserved is not None else None}
            times_s = (one.began_s - began_s, one.ended_s - began_s) if one.has_times else (np.nan, np.nan)
            row |= {"began_s": times_s[0], "ended_s": times_s[1], "error": one.error}
            row |= {f"{name}_bytes": one.shares["category"].get(name, 0) if one.shares else None for name in categories}
            rows.append(row | {"provenance": one.provenance, "files": ", ".join(one.files)})
        return pandas.DataFrame(rows).set_index("rank")


# --- what grows -----------------------------------------------------------------------------------------------------------


def _growth(ranks: Sequence[RankRun]) -> Iterator[RankGrowth]:
    """Each place that grows, with the ranks on which it does."""
    growing: dict[tuple[str, str], list[tuple[RankRun, Leak]]] = {}
    for one in ranks:
        for leak in one.leaks:
            growing.setdefault((leak.kind, leak.places[0].text), []).append((one, leak))
    for found in growing.values():
        there = {one.rank for one, _ in found}
        steady = sum(one.rank not in there and bool(one.leaks.looked_at) for one in ranks)
        largest, leak = max(found, key=lambda pair: pair[1].total_bytes)
        numbers = tuple(sorted(there))
        unknown = len(ranks) - steady - len(numbers)
        yield RankGrowth(numbers, steady, unknown, leak.bytes_per_iteration, leak.text, largest.holders)
    for one in ranks:
        rise = _risen(one.steps) if one.is_partial else None
        if rise is not None:
            steady = sum(other is not one and bool(other.leaks.looked_at) and not other.leaks for other in ranks)
            partial = [other.steps for other in ranks if other is not one and other.is_partial]
            steady += sum(len(steps.number) > _FEWEST_STEPS + 1 and _risen(steps) is None for steps in partial)
            (first, last), (low, high) = rise
            text = f"Rose from {format_bytes(low)} after step {first} to {format_bytes(high)} after step {last}, as samples saw it."
            text += " What holds it is unknown, as its file was cut off."
            each = (high - low) // (last - first)
            yield RankGrowth((one.rank,), steady, len(ranks) - 1 - steady, each, text)


def _risen(steps: RankSteps) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The steps and levels between which a rank rose, if the lowest level of each third of its steps is above that before."""
    ends = steps.end_bytes[: len(steps.number) - 1][1:]  # without warm-up and the step that was cut off
    if len(ends) < _FEWEST_STEPS:
        return None
    thirds = np.array_split(np.arange(len(ends)), 3)
    lowest = [third[int(ends[third].argmin())] for third in thirds]
    low, middle, high = (int(ends[at]) for at in lowest)
    if not low < middle < high or high - low < max(_MIN_RISE * int(steps.peak_bytes.max()), _MIN_RISE_BYTES):
        return None
    first, last = (int(steps.number[1 + at]) for at in (lowest[0], lowest[2]))
    return (first, last), (low, high)


def ranks_text(numbers: Iterable[int], limit: int = 6) -> str:
    """Ranks in words.

    >>> ranks_text([1]), ranks_text([0, 1, 2, 3, 7]), ranks_text(range(0, 512, 2))
    ('rank 1', 'ranks 0–3, 7', 'ranks 0, 2, 4, 6, 8, 10 and 250 more')
    """
    stretches = consecutive(numbers)
    texts, rest = [], sum(map(len, stretches[limit:]))
    for one in stretches[:limit]:
        texts.append(f"{one[0]}–{one[-1]}" if len(one) > 2 else ", ".join(map(str, one)))
    more = f" and {rest} more" if rest else ""
    return f"rank{'' if sum(map(len, stretches)) == 1 else 's'} {', '.join(texts)}{more}"


def consecutive(numbers: Iterable[int]) -> list[range]:
    """Numbers as stretches without holes."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
