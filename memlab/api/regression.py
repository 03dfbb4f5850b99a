"""Whether the peak of a run grew beyond that of a baseline, and what grew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memlab.analysis.breakdown import BEFORE, ELSEWHERE, ROUNDING
from memlab.analysis.comparison import UNTOLD, Difference, Side, known_by
from memlab.api.compare import Comparison
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
