"""`memlab.fit`: does a run fit on each GPU: yes, no, too close to call. `memlab.max_batch`: the largest batch that fits."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from memlab.analysis.summary import has_raised
from memlab.api.predict import (
    Prediction,
    asks_for_nothing,
    configured,
    first_rank,
    mesh_of,
    predict_ranks,
    predict_step,
    verdict,
)
from memlab.api.run import Run
from memlab.api.runs import last_run, runs
from memlab.errors import PredictionError
from memlab.prediction.cards import Card, cards, find
from memlab.prediction.forecast import ANSWERS, Fits, forecast
from memlab.trace.trace import CPU, Trace
from memlab.units import UNBOUNDED, ByteRange, format_bytes
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

Verdict = Literal["yes", "no", "close", "unknown"]
_RAISED = "unknown: the run raised, its whole step needs more"
_COLUMNS = (Column("card"), Column(""), Column("needs", "bytes"), Column("usable", "bytes"), Column("margin"))
_BATCHES = (Column("batch", "count"), Column("fits"), Column("needs of the device", "bytes"))


@dataclass(frozen=True, slots=True)
class Fit:
    """A run on one card: what it needs, what the card has, and what would be left (negative: missing).

    For a run that raised only a lower bound is known: if that is too much it does not fit, else `fits` is "unknown".
    """

    card: Card
    fits: Verdict
    needs_bytes: ByteRange
    margin_bytes: ByteRange

    @property
    def usable_bytes(self) -> ByteRange:
        """The memory that PyTorch sees on the card."""
        return self.card.usable_range


@dataclass(frozen=True, slots=True, repr=False)
class FitTable(Shown):
    """A run against cards, the smallest first: as text, in a notebook, `rows` or `to_pandas()`."""

    name: str
    rows: tuple[Fit, ...]
    assumptions: tuple[str, ...] = ()
    remark: str = ""

    def __getitem__(self, card: str) -> Fit:
        name = find(card).name
        for row in self.rows:
            if row.card.name == name:
                return row
        how = f"%memfit {self.name} {name}" if self.name in runs else f"memlab.fit(run, on=[{name!r}])"
        raise PredictionError(f"{name} is not among the cards of this table: ask for it, {how}.")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def page(self) -> Page:
        """The smallest card that it fits on, and the table of all."""
        title = f"{self.name} on {len(self.rows)} card{'s' if len(self.rows) != 1 else ''}"
        if smallest := next((row.card for row in self.rows if row.fits == "yes"), None):
            title += f", the smallest that fits: {smallest.name}"
        elif any(row.fits == "unknown" for row in self.rows):
            title += ": the run raised, so only 'does not fit' is certain"
        rows = []
        for row in self.rows:
            low, high = row.margin_bytes
            margin = f"{format_bytes(-low)} missing to {format_bytes(high)} left"
            if low == -UNBOUNDED and high >= 0:
                margin = f"at most {format_bytes(high)} left"
            elif low == high or (low < 0) == (high < 0):
                nearer = low if low >= 0 else high
                margin = f"{format_bytes(abs(nearer))} {'left' if nearer >= 0 else 'missing'}"
            rows.append((row.card.name, ANSWERS.get(row.fits, _RAISED), row.needs_bytes, row.usable_bytes, margin))
        notes = tuple(f"Assumed: {text}." for text in self.assumptions)
        return Page(title, (Table("", _COLUMNS, tuple(rows), notes),)).remarked(self.remark)

    def to_pandas(self) -> Any:
        """One row per card, sizes in bytes; NaN if unbounded."""
        import pandas

        columns = ("needs", "usable", "margin")
        names = ["card", "fits", *(f"{one}_{end}_bytes" for one in columns for end in ("low", "high"))]
        rows = [(one.card.name, one.fits, *one.needs_bytes, *one.usable_bytes, *one.margin_bytes) for one in self.rows]
        frame = pandas.DataFrame(rows, columns=names)
        return frame.replace({"needs_high_bytes": UNBOUNDED, "margin_low_bytes": -UNBOUNDED}, float("nan"))


def fit(run: Run | None = None, on: Iterable[str | Card] | None = None, conf: str | None = None) -> FitTable:
    """Does a run (the last one) fit on these cards (all known ones), and how much would be left?

    A measured run must be of CUDA: its requests are replayed on the allocator of each card. A prediction's are those of its
    dry run; kernels are those of the card that it was predicted for. A run that raised did not request all that it needs.
    """
    chosen = last_run() if run is None else run
    if not isinstance(chosen, Run):
        raise PredictionError(
            f"fit needs a run, got {type(chosen).__name__}: pass memlab.runs[name] or memlab.last_run()."
        )
    settings, others = configured(conf), tuple[Trace, ...]()
    assumed: tuple[str, ...] = (
        f"the requests are those that were {chosen.trace.provenance}, with the kernels and workspaces of that card",
    )
    if isinstance(chosen, Prediction):
        asked, others, first = chosen.requests(), chosen.others, chosen.card
        of_the_run = (text for text in chosen.assumptions if text not in first.assumptions)
        assumed = (f"kernels are those of {first.name}, for which it was predicted", *of_the_run)
    else:
        asked = _measured(chosen)
    raised = has_raised(chosen.trace)
    rows = []
    for card in [cards[name] for name in cards] if on is None else [find(one) for one in on]:
        found = forecast(asked, card, settings, others=others)
        needs, margin, fits = found.device_bytes, found.margin_bytes, found.fits
        row = Fit(card, fits, needs, margin)
        if raised:
            at_least, at_most = ByteRange(needs.low, UNBOUNDED), ByteRange(-UNBOUNDED, margin.high)
            row = Fit(card, "no" if fits == "no" else "unknown", at_least, at_most)
        rows.append(row)
    rows.sort(key=lambda row: (row.usable_bytes, row.card.name))
    return FitTable(chosen.name or "the run", tuple(rows), assumed, chosen.trace.remark)


def _measured(run: Run) -> Trace:
    trace = run.trace
    if trace.device_indices[:1] in ((), (CPU,)):
        how = 'predict it for a card: %%memtrack --predict "RTX 4060" on its cell, or memlab predict SCRIPT'
        raise PredictionError(f"run {run.name!r} was measured on the CPU: {how}.")
    if any(stretch.device == 0 for stretch in trace.made_by.bounded):
        raise PredictionError(f"run {run.name!r} has lost events, so its requests are not all known.")
    return trace


# --- the largest batch ---


@dataclass(frozen=True, slots=True)
class TriedBatch:
    """The prediction of one batch size."""

    batch: int
    fits: Fits
    device_bytes: ByteRange


@dataclass(frozen=True, slots=True, repr=False)
class MaxBatch(Shown):
    """The largest batch that fits on a card, certainly and possibly; `tried` has the predictions."""

    card: Card
    batch: int
    perhaps: int
    tried: tuple[TriedBatch, ...]
    at_most: int = 0

    def __int__(self) -> int:
        return self.batch

    __index__ = __int__

    @property
    def page(self) -> Page:
        """The answer and the table of predictions."""
        card, batch, perhaps = self.card.name, self.batch, self.perhaps
        title = f"Largest batch on {card}: {batch}" if batch else f"No batch fits on {card}"
        if perhaps > batch:
            close = f"{batch + 1} to {perhaps} are" if perhaps > batch + 1 else f"{perhaps} is"
            title += f"{'' if batch else ' for certain'}; {close} too close to call"
        if self.at_most and perhaps == self.at_most:
            title += f" (no larger batch was tried: at_most is {self.at_most})"
        rows = tuple((one.batch, one.fits, ByteRange(*one.device_bytes)) for one in self.tried)
        return Page(title, (Table("", _BATCHES, rows),))

    def to_pandas(self) -> Any:
        """One row per predicted batch, sizes in bytes."""
        import pandas

        rows = [(one.batch, one.fits, *one.device_bytes) for one in self.tried]
        return pandas.DataFrame(rows, columns=["batch", "fits", "device_low_bytes", "device_high_bytes"])


def max_batch(
    make_step: Callable[[int], Callable[[], object]],
    card: str | Card,
    *,
    at_most: int = 1 << 16,
    conf: str | None = None,
    limit_s: float | None = None,
    world_size: int | tuple[int, ...] | None = None,
    local_world_size: int | None = None,
) -> MaxBatch:
    """The largest batch that fits on `card`, up to `at_most`: `make_step(batch)` gives the step to predict.

    Takes a handful of predictions, each in a child process: the batch is doubled, then bisected. No batch is predicted that
    is larger than one that does not fit. All of them together take at most `limit_s`. With `world_size` it is the batch of each
    rank of a job, as in `memlab.predict`.
    """
    if not callable(make_step):
        raise PredictionError(f"max_batch needs a function of the batch, got {type(make_step).__name__}.")
    if type(at_most) is not int or at_most < 1:
        raise PredictionError(f"at_most is a number of 1 or more, got {at_most!r:.80}.")
    predicting: Callable[..., Prediction] = predict_step
    if world_size is not None:
        mesh = mesh_of(world_size)
        predicting = functools.partial(predict_ranks, job=first_rank(math.prod(mesh), local_world_size), mesh=mesh)
    where, tried, began = find(card), dict[int, TriedBatch](), time.monotonic()

    def fits(batch: int) -> Fits:
        if any(one.fits == "no" and one.batch < batch for one in tried.values()):
            return "no"
        if batch not in tried:
            left_s = limit_s
            if limit_s is not None and tried and (left_s := began + limit_s - time.monotonic()) <= 0:
                what = f"limit_s of {limit_s:.3g} s was over before a batch of {batch} was predicted"
                raise PredictionError(f"{what}: allow more.")
            found = _predicted_batch(make_step, batch, where, conf, left_s, predicting)
            tried[batch] = TriedBatch(batch, found.fits, found.peak_device_bytes)
        return tried[batch].fits

    batch = _largest(lambda one: fits(one) == "yes", 0, at_most)
    perhaps = _largest(lambda one: fits(one) != "no", batch, at_most)
    return MaxBatch(where, batch, perhaps, tuple(tried[one] for one in sorted(tried)), at_most)


def _predicted_batch(
    make_step: Callable[[int], Callable[[], object]],
    batch: int,
    card: Card,
    conf: str | None,
    limit_s: float | None,
    predicting: Callable[..., Prediction],
) -> Prediction:
    """Predict one batch; errors name it."""

    def step() -> object:
        made = make_step(batch)
        if not callable(made):
            raise PredictionError(f"make_step({batch}) must give a function to predict, got {type(made).__name__}")
        return made()

    try:
        found = predicting(step, card, f"batch {batch}", configured(conf), limit_s=limit_s)
    except PredictionError as error:
        error.args = (f"with a batch of {batch} {error}",)
        raise
    if asks_for_nothing(found.forecast):
        raise PredictionError(f"with a batch of {batch} the step {verdict(found.forecast)}.")
    return found


def _largest(holds: Callable[[int], bool], known: int, at_most: int) -> int:
    """The largest number up to `at_most` for which the condition holds, given that it holds for `known`."""
    low, high = known, known + 1
    while high <= at_most and holds(high):
        low, high = high, min(2 * high, at_most) if high < at_most else at_most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
