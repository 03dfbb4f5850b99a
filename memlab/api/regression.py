"""Whether the peak of a run, or of any rank of a job, grew beyond that of a baseline, and what grew.

The highest peak of a job alone would hide what grows on another rank. Ranks are compared one by one only in jobs of as many
ranks: with another number each holds a different share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memlab.analysis.breakdown import BEFORE, ELSEWHERE, ROUNDING
from memlab.analysis.comparison import UNTOLD, Difference, Side, known_by
from memlab.analysis.job_ranks import ranks_text
from memlab.api.compare import Comparison, compare
from memlab.api.run import Run
from memlab.trace.trace import CPU, RANK, SIMULATED_GPU, Trace
from memlab.units import UNBOUNDED, ByteRange, format_bytes, number_of, one_line

BY = ("module", "line", "category")
_NAMELESS = (BEFORE, ELSEWHERE, ROUNDING, UNTOLD)


@dataclass(frozen=True, slots=True)
class Regression:
    """A run against its baseline, `sides[1]` and `sides[0]`: the peak of *allocated*, and what grew most by module, line, category.

    `before` and `after` are the peaks of their jobs; `unknown` says why there is no answer for some of the three.
    """

    sides: tuple[Side, Side]
    before: ByteRange
    after: ByteRange
    tolerance: float
    culprits: dict[str, tuple[str, Difference]]
    unknown: dict[str, str]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know of both runs, in a sentence each: GPUs, versions of PyTorch and sources that differ, a simulated GPU."""
        found, (traces, devices) = [], zip(*((one.trace, one.device) for one in self.sides), strict=True)
        names = [one_line(one.name, 80) for one in devices]
        sizes = [one.noted(RANK).get("world_size") for one in traces]
        ranks = [size if type(size) is int else 1 for size in sizes]  # files may say anything
        sources = [one.provenance for one in traces]
        if CPU not in (one.index for one in devices) and names[0] != names[1]:
            kernels = "kernels and workspaces differ between GPUs"
            found.append(f"the baseline is of {names[0]}, the run of {names[1]}: {kernels}")
        found += filter(None, [other_torch(*map(torch_version, traces))])
        if ranks[0] != ranks[1]:
            jobs = [number_of(count, "rank") for count in ranks]
            share = "each rank holds a different share"
            found.append(f"the baseline is of a job of {jobs[0]}, the run of one of {jobs[1]}: {share}")
        if sources[0] != sources[1]:
            found.append(f"the baseline is {sources[0]}, the run {sources[1]}")
        return (*found, *([SIMULATED_GPU] if "simulated" in sources else []))

    @property
    def share(self) -> float:
        """By how much the peak grew, as a share of the baseline's; negative if it fell. Of the lower ends of intervals."""
        return (self.after.low - self.before.low) / max(self.before.low, 1)

    @property
    def is_regression(self) -> bool | None:
        """Whether it grew beyond the tolerance; None if one end of an interval did and the other did not.

        Memory of a GPU says nothing about that of the host, and what did not end may have grown in any case.
        """
        before, after = self._kinds
        if before != after:
            return None
        if self.after.high >= UNBOUNDED and self.before.high >= UNBOUNDED:
            return None
        grew_high = self.after.high > self.before.high * (1 + self.tolerance)
        return grew_high if grew_high == (self.share > self.tolerance) else None

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Whether each is of the CPU or of a GPU."""
        return tuple(one.device.label.partition(":")[0] for one in self.sides)

    @property
    def text(self) -> str:
        """One sentence, if it grew beyond the tolerance one line for what grew, and the warnings."""
        return "\n".join([self.answer, *(f"  note     {one}" for one in self.warnings)])

    @property
    def sizes(self) -> str:
        """Both peaks, and by how much the second is higher."""
        return f"{self.before} -> {self.after} allocated ({self.share:+.1%})"

    @property
    def answer(self) -> str:
        """The same without the warnings."""
        if self.is_regression is None:
            why = "a run or rank that did not end, or whose events were lost, may have been higher"
            before, after = self._kinds
            if before != after:
                why = f"the baseline is of {before}, the run of {after}: name two runs of one kind of device"
            return f"not known: {self.before} -> {self.after} allocated, and {why}"
        if not self.is_regression:
            return f"ok: the peak is within {self.tolerance:.1%} of the baseline: {self.sizes}"
        lines = [f"the peak grew by more than {self.tolerance:.1%}: {self.sizes}"]
        for by, (name, one) in self.culprits.items():
            lines.append(grown_line(by, name, one.a_bytes, one.b_bytes))
        lines += [f"  {by:8} not known: {why}" for by, why in self.unknown.items()]
        return "\n".join(lines)

    @property
    def facts(self) -> dict[str, Any]:
        """The same as plain values; sizes in bytes, of lower ends, and the upper end of the run if it has one."""
        grown = {
            by: {"name": name, "before_bytes": one.a_bytes, "after_bytes": one.b_bytes}
            for by, (name, one) in self.culprits.items()
        }
        sizes = {"before_bytes": self.before.low, "after_bytes": self.after.low, "tolerance": self.tolerance}
        high = {"after_high_bytes": self.after.high if self.after.high < UNBOUNDED else None}
        sides = []
        for one in self.sides:
            where = {"device": one.device.label, "name": one.device.name}
            sides.append(where | {"provenance": one.trace.provenance, "torch": torch_version(one.trace)})
        sources = {"baseline": sides[0], "run": sides[1], "notes": list(self.warnings)}
        grew = {"grew_most": grown, "not_known": self.unknown}
        return {"is_regression": self.is_regression, **sizes, **high, **grew, **sources}


def grown_line(by: str, name: str, before_bytes: int, after_bytes: int, where: str = "") -> str:
    """What a module, line or category held before and after."""
    sizes = f"{format_bytes(before_bytes)} -> {format_bytes(after_bytes)}"
    return f"  {by:8} {name}: {sizes} (+{format_bytes(after_bytes - before_bytes)}){where}"


def regression_of(compared: Comparison, tolerance: float, are_worst: tuple[bool, bool] = (True, True)) -> Regression:
    """Of a comparison of a run (`b`) with its baseline (`a`); `are_worst`: whether no other rank of their jobs can be higher."""
    sides = compared.side_a, compared.side_b
    before, after = (
        one.peak if is_worst else ByteRange(one.peak.low, UNBOUNDED)
        for one, is_worst in zip(sides, are_worst, strict=True)
    )
    culprits, known = {}, known_by(*sides)
    for by in BY:
        if by in known:
            rows = compared.by(by)
            name = most_grown({name: one.difference_bytes for name, one in rows.items()})
            if name:
                culprits[by] = name, rows[name]
    is_predicted = any(one.is_predicted for one in sides)
    unknown = {by: why_unknown(by, is_predicted) for by in BY if by not in known}
    return Regression(sides, before, after, tolerance, culprits, unknown)


def torch_version(trace: Trace) -> str:
    """The PyTorch that a trace is of, without its build, whose kernels are those of the device; "" if it does not say."""
    return one_line(trace.made_by.versions.get("torch", "").partition("+")[0], 40)


def other_torch(before: str, now: str) -> str:
    """What to know of a baseline of another version of PyTorch; "" if it is of the same, or does not say."""
    if not before or not now or before == now:
        return ""
    return f"the baseline is of PyTorch {before}, the run of {now}: what operators allocate differs between versions"


def why_unknown(by: str, is_predicted: bool) -> str:
    """Why a run does not say what held its peak by module, line or category."""
    if by == "line":
        return f"{'predicted' if is_predicted else 'measured'} without lines"
    return "no module was called" if by == "module" else "it was not seen"


def most_grown(growth: Mapping[str, int]) -> str:
    """The name that grew by most bytes, "" for none; what has no name of its own only where nothing else grew."""
    grown = {name: count for name, count in growth.items() if count > 0}
    named = {name: count for name, count in grown.items() if name not in _NAMELESS}
    return max(named or grown, key=lambda name: grown[name], default="")


@dataclass(frozen=True, slots=True)
class Worst:
    """The most that one name held on any rank, before and after, and on which; the lowest rank of those with as much."""

    before_bytes: int
    before_rank: int
    after_bytes: int
    after_rank: int

    def joined(self, other: Worst) -> Worst:
        """That of both, `other` being of a higher rank."""
        before = max((self.before_bytes, -self.before_rank), (other.before_bytes, -other.before_rank))
        after = max((self.after_bytes, -self.after_rank), (other.after_bytes, -other.after_rank))
        return Worst(before[0], -before[1], after[0], -after[1])


@dataclass(frozen=True, slots=True)
class JobRegression:
    """The highest peaks of two jobs, each rank against the same rank of the baseline, and the worst of each name over the ranks.

    `highest_rank` is the rank of the run that has the highest peak, `worst` has "module", "line" and "category".
    """

    highest: Regression
    highest_rank: int
    by_rank: Mapping[int, Regression]
    worst: Mapping[str, Mapping[str, Worst]]

    @property
    def grown(self) -> tuple[int, ...]:
        """The ranks whose own peak grew beyond the tolerance, that which grew by most bytes first."""
        found = [(one.before.low - one.after.low, rank) for rank, one in self.by_rank.items() if one.is_regression]
        return tuple(rank for _, rank in sorted(found))

    @property
    def is_regression(self) -> bool | None:
        """Whether the highest peak or that of any rank grew beyond the tolerance; None if that is not known of one of them."""
        answers = [self.highest.is_regression, *(one.is_regression for one in self.by_rank.values())]
        return True if True in answers else None if None in answers else False

    @property
    def culprits(self) -> dict[str, tuple[int, str, int, int]]:
        """By module, line and category the rank on which a name grew most, the name, and its bytes before and after.

        Of the ranks whose peak grew; where none did by itself, of the two ranks with the highest peaks.
        """
        ranks = {rank: self.by_rank[rank] for rank in self.grown} or {self.highest_rank: self.highest}
        found: dict[str, tuple[int, str, int, int]] = {}
        for by in BY:
            known = [(rank, *one.culprits[by]) for rank, one in ranks.items() if by in one.culprits]
            if known:
                rank, name, one = max(known, key=lambda found: (found[2].difference_bytes, -found[0]))
                found[by] = rank, name, one.a_bytes, one.b_bytes
        return found

    @property
    def text(self) -> str:
        """One sentence, if a peak grew one line for what grew with its rank and one for the ranks, and the warnings."""
        return "\n".join([self._answer, *(f"  note     {one}" for one in self.highest.warnings)])

    @property
    def _answer(self) -> str:
        if not self.is_regression:
            return self._no_growth
        one, rank = (self.highest, self.highest_rank) if self.highest.is_regression else (None, self.grown[0])
        first = one or self.by_rank[rank]
        whose = "the peak" if one else f"the peak of rank {rank}"
        where = f", on rank {rank}" if one else ""
        lines = [f"{whose} grew by more than {first.tolerance:.1%}: {first.sizes}{where}"]
        for by, (at, name, before, after) in self.culprits.items():
            lines.append(grown_line(by, name, before, after, f" on rank {at}"))
        lines += [f"  {by:8} not known: {why}" for by, why in first.unknown.items()]
        if self.grown:
            most = self.by_rank[self.grown[0]]
            lines.append(f"  ranks    beyond it: {ranks_text(self.grown)}; most rank {self.grown[0]}: {most.sizes}")
        if one is None:
            lines.append(f"  highest  that of rank {self.highest_rank} is not beyond it: {self.highest.sizes}")
        return "\n".join(lines)

    @property
    def _no_growth(self) -> str:
        unknown = [rank for rank, one in self.by_rank.items() if one.is_regression is None]
        if self.highest.is_regression is None or not self.by_rank:
            return self.highest.answer
        if unknown:
            why = "what was cut off, or has lost events, may have been higher"
            return f"not known: the highest peak is {self.highest.sizes}, but of {ranks_text(unknown)} {why}"
        return f"{self.highest.answer}, and so is that of each of {number_of(len(self.by_rank), 'rank')}"

    @property
    def facts(self) -> dict[str, Any]:
        """Those of the highest peaks as plain values, culprits with their ranks, and all ranks; sizes in bytes, of lower ends."""
        grew = {
            by: {"name": name, "before_bytes": before, "after_bytes": after, "rank": rank}
            for by, (rank, name, before, after) in self.culprits.items()
        }
        ranks = {
            str(rank): {
                "before_bytes": one.before.low,
                "after_bytes": one.after.low,
                "is_regression": one.is_regression,
            }
            for rank, one in self.by_rank.items()
        }
        worst = {by: {name: asdict(one) for name, one in rows.items()} for by, rows in self.worst.items()}
        of_job = {"highest_rank": self.highest_rank, "grown_ranks": sorted(self.grown), "ranks": ranks, "worst": worst}
        return self.highest.facts | {"is_regression": self.is_regression, "grew_most": grew} | of_job


def job_regression_of(highest: Regression, highest_rank: int, pairs: Iterable[tuple[int, Run, Run]]) -> JobRegression:
    """Of the highest peaks, and of (rank, its run in the baseline, its run) of each rank in order; one pair at a time is kept."""
    by_rank: dict[int, Regression] = {}
    worst: dict[str, dict[str, Worst]] = {by: {} for by in BY}
    for rank, before, after in pairs:
        compared = compare(before, after)
        by_rank[rank] = regression_of(compared, highest.tolerance)
        for by in known_by(compared.side_a, compared.side_b):
            for name, one in compared.by(by).items():
                held = Worst(one.a_bytes, rank, one.b_bytes, rank)
                worst[by][name] = worst[by][name].joined(held) if name in worst[by] else held
    return JobRegression(highest, highest_rank, by_rank, worst)
