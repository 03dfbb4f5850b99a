"""`memlab.scaling`: what a rank of a distributed job would need, by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memlab.api.predict import StepToPredict, TimeLimit, configured, first_rank, predict_ranks
from memlab.errors import PredictionError
from memlab.prediction.assumptions import length_condition
from memlab.prediction.cards import Card, find
from memlab.prediction.forecast import ANSWERS, Fits
from memlab.prediction.torch_versions import checked_version
from memlab.units import ByteRange, number_of
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_COLUMNS = (
    Column("ranks", "count"), Column("fits"), Column("allocated per rank", "bytes"), Column("needs of the device", "bytes"),
    Column("worst rank", "count"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScaledJob:
    """A job of so many ranks: what the rank needs that needs most, and which one that is."""

    world_size: int
    rank: int
    fits: Fits
    allocated_bytes: ByteRange
    device_bytes: ByteRange


@dataclass(frozen=True, slots=True, repr=False)
class Scaling(Shown):
    """Jobs of several sizes on a card: as text, in a notebook, `rows` or `to_pandas()`."""

    name: str
    card: Card
    rows: tuple[ScaledJob, ...]
    condition: str = ""
    """What to add if how long the step runs depends on assumed values."""

    @property
    def page(self) -> Page:
        """The smallest job that fits, and the table of all."""
        fewest = next((row.world_size for row in self.rows if row.fits == "yes"), None)
        found = f"fits on {number_of(fewest, 'GPU')}" if fewest is not None else "fits on none of these for certain"
        rows = []
        for row in self.rows:
            rows.append((row.world_size, ANSWERS[row.fits], row.allocated_bytes, row.device_bytes, row.rank))
        return Page(f"{self.name} on {self.card.name}: {found}{self.condition}", (Table("", _COLUMNS, tuple(rows)),))

    def to_pandas(self) -> Any:
        """One row for each size, sizes in bytes."""
        import pandas

        ends = [f"{name}_{end}_bytes" for name in ("allocated", "device") for end in ("low", "high")]
        rows = [(row.world_size, row.rank, row.fits, *row.allocated_bytes, *row.device_bytes) for row in self.rows]
        return pandas.DataFrame(rows, columns=["world_size", "rank", "fits", *ends])


def scaling(
    step: Callable[[], object],
    card: str | Card,
    *,
    world_sizes: Iterable[int] = WORLD_SIZES,
    local_world_size: int | None = None,
    name: str = "the step",
    conf: str | None = None,
    limit_s: float | None = None,
    torch_version: str | None = None,
) -> Scaling:
    """Predict `step` as a rank of jobs of these sizes, each as `memlab.predict(step, card, world_size=...)` does.

    `local_world_size` ranks (8, or all of a smaller job) share a machine. All of it takes at most `limit_s`.
    `torch_version` is that of `memlab.predict`.
    """
    where, version = find(card), checked_version(torch_version)
    jobs = [
        first_rank(size, None if local_world_size is None else min(local_world_size, size))
        for size in sorted(set(world_sizes))
    ]
    if not jobs:
        raise PredictionError("world_sizes has no number of ranks: pass for example (8, 16, 32).")
    what = StepToPredict(step, where, name, configured(conf, version), torch_version=version)
    limit, rows = TimeLimit(limit_s), []
    for job in jobs:
        found = predict_ranks(what, job, limit.left_s)
        rank = found.job.rank if found.job is not None else 0
        rows.append(ScaledJob(job.world_size, rank, found.fits, found.allocated_bytes, found.peak_device_bytes))
    return Scaling(name, where, tuple(rows), length_condition(found.trace))
