"""Whether the peak of any rank of a job grew beyond that of the same rank in a baseline, and on which rank what grew.

The highest peak alone would hide what grows on another rank. Ranks are compared one by one only in jobs of as many ranks: with
another number each holds a different share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.analysis.comparison import known_by
from memlab.analysis.job_ranks import ranks_text
from memlab.api.compare import compare
from memlab.api.regression import BY, Regression, grown_line, regression_of
from memlab.api.run import Run
from memlab.units import number_of


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
        worst = {
            by: {
                name: {
                    "before_bytes": one.before_bytes, "before_rank": one.before_rank,
                    "after_bytes": one.after_bytes, "after_rank": one.after_rank,
                }
                for name, one in rows.items()
            }
            for by, rows in self.worst.items()
        }  # fmt: skip
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
