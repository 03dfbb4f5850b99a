"""`memlab.max_batch`: the largest batch that fits on a GPU, by a few predictions: what is needed is nearly a line in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.api.display import Progress
from memlab.api.predict import StepToPredict, TimeLimit, configured, first_rank, mesh_of, predict_ranks, predict_step
from memlab.api.prediction import Prediction, asks_for_nothing, verdict
from memlab.errors import PredictionError
from memlab.prediction.assumptions import length_condition
from memlab.prediction.cards import Card, find
from memlab.prediction.forecast import ANSWERS, Fits
from memlab.prediction.torch_versions import checked_version
from memlab.units import ByteRange
from memlab.views import theme
from memlab.views.page import Page
from memlab.views.scene import Axis, Item, Label, Line, Mark, Panel, Rule, Scene, Shade, round_ticks
from memlab.views.shown import ShownWithFigure
from memlab.views.table import Column, Table

_LEAP = 16
"""While nothing is too large, the next number is at most so many times the largest that fits: a line through two small
numbers may point far too high, and data that a trial makes on the host are real."""
_EXACT_TO = 0.01
"""Above 100, `low` is exact to this share: in the allocator's steps, the last numbers would take most of the trials."""


class Bracket:
    """`low` is the largest number that fits, `high` the smallest that does not; `next_number` is what to try between them.

    0 fits, and a number above `at_most` counts as too large. `known` (number -> whether it fits, bytes needed) was tried before.
    """

    def __init__(
        self, limit_bytes: int, at_most: int, known: Mapping[int, tuple[bool, int]], exact_to: float = _EXACT_TO
    ) -> None:
        self.low, self.high = 0, at_most + 1
        self._limit_bytes, self._exact_to, self._needs = limit_bytes, exact_to, dict[int, int]()
        self._were: list[tuple[int, int]] = []
        for number, (fits, needs_bytes) in known.items():
            self.add(number, fits, needs_bytes)
        self._were = [(self.low, self.high)]

    def add(self, number: int, fits: bool, needs_bytes: int) -> None:
        """Note a trial."""
        self._needs[number] = needs_bytes
        if fits:
            self.low = max(self.low, number)
        else:
            self.high = min(self.high, number)
        self._were.append((self.low, self.high))

    @property
    def next_number(self) -> int | None:
        """Where the line through the two trials nearest to the limit meets it; None if the largest is found, to `exact_to`."""
        low, high = self.low, self.high
        if high - low <= max(low * self._exact_to, 1):
            return None
        is_open = high not in self._needs
        most = min(high - 1, _LEAP * low or 1) if is_open else high - 1
        at = most if is_open else (low + high) // 2
        # Needs rise in steps, so a line through neighbors says little: the second trial is a tenth away.
        ranked = sorted(self._needs, key=lambda number: abs(self._needs[number] - self._limit_bytes))
        nearest = [number for number in ranked if number == ranked[0] or 10 * abs(number - ranked[0]) >= ranked[0]][:2]
        for pair in (nearest, [low, high]):  # the second where the first leads to what is known to be wrong
            if len(pair) == 2 and all(number in self._needs for number in pair):
                (first, a), (second, b) = ((number, self._needs[number]) for number in pair)
                rise = (b - a) / (second - first)
                meets = first + (self._limit_bytes - a) / rise if rise > 0 else -1.0
                if rise > 0 if is_open else low <= meets < high:
                    at = int(meets)
                    break
        # Without progress the middle is tried.
        some = 4 if is_open else 3
        if len(self._were) >= some:
            low_then, high_then = self._were[-some]
            if 2 * (high - low) > high_then - low_then and low <= 2 * low_then:
                at = 2 * low if is_open else (low + high) // 2
        return min(max(at, low + 1), most)


_MARKS = {"yes": ("dot", theme.SERIES["used"]), "close": ("ring", theme.WARNING), "no": ("cross", theme.CAPACITY)}
_COLUMNS = (Column("batch", "count"), Column(""), Column("needs of the device", "bytes"))


@dataclass(frozen=True, slots=True)
class TriedBatch:
    """The prediction of one batch size."""

    batch: int
    fits: Fits
    device_bytes: ByteRange


@dataclass(frozen=True, slots=True, repr=False)
class MaxBatch(ShownWithFigure):
    """The largest batch that fits on a card, certainly and possibly; `tried` has the predictions.

    Above 100 both are exact to 1 %: `tried` has the next larger batch that was predicted.
    """

    card: Card
    batch: int
    perhaps: int
    tried: tuple[TriedBatch, ...]
    at_most: int = 0
    condition: str = ""
    """What to add if how long the step runs depends on assumed values."""

    def __int__(self) -> int:
        return self.batch

    __index__ = __int__

    @property
    def title(self) -> str:
        """The answer in one line."""
        card, batch = self.card.name, self.batch
        title = f"Largest batch on {card}: {batch:,}" if batch else f"No batch fits on {card}"
        above = [one for one in self.tried if one.batch > batch]
        if above and above[0].batch > batch + 1:
            title += f" (to {(above[0].batch - batch) / batch:.1%})"
        if close := [one.batch for one in above if one.fits == "close"]:
            between = f"{close[0]:,} to {close[-1]:,} are" if len(close) > 1 else f"{close[0]:,} is"
            title += f"{'' if batch else ' for certain'}; {between} too close to call"
        if self.at_most and self.perhaps == self.at_most:
            title += f" (no larger batch was tried: at_most is {self.at_most:,})"
        return title + self.condition

    @property
    def page(self) -> Page:
        """The answer and the table of predictions."""
        rows = tuple((one.batch, ANSWERS[one.fits], one.device_bytes) for one in self.tried)
        largest = (place for place, one in enumerate(self.tried) if one.batch == self.batch)
        return Page(self.title, (Table("", _COLUMNS, rows, strong=frozenset(largest)),))

    def scene(self) -> Scene:
        """The picture: what the device needs against the batch, up to about twice the largest, with the GPU's memory across."""
        batch, perhaps, usable = self.batch, self.perhaps, self.card.usable_range
        shown = [one for one in self.tried if one.batch <= 2 * (perhaps + 1)]
        right = 1.04 * max([*(one.batch for one in shown), perhaps + 1])
        top = 1.18 * max([usable.high, *(one.device_bytes.high for one in shown)])
        items: list[Item] = [Shade(0, batch, theme.SERIES["used"], 0.1, "fits")] if batch else []
        if perhaps > batch:
            items.append(Shade(batch, perhaps, theme.WARNING, 0.12, "too close to call"))
        items += _bounds(shown)
        items += [Rule(level, theme.CAPACITY, "") for level in sorted(set(usable))]
        items.append(Label(0.25 * right, usable.high, f"{self.card.name}: {usable} usable", theme.CAPACITY))
        for one in shown:
            kind, colour = _MARKS[one.fits]
            text = f"batch {one.batch:,} {ANSWERS[one.fits]}: needs {one.device_bytes}"
            items.append(Mark(one.batch, one.device_bytes.high, kind, colour, text))
        if batch:
            items.append(Label(batch, 0, f"largest: {batch:,}", is_bold=True))
        ticks = tuple((at, f"{at:,}") for at in round_ticks(0, int(right)))
        panel = Panel(Axis.of_bytes(top), {"": (Axis(0.0, right, ticks, "batch"),)}, tuple(items))
        return Scene(self.title, self.text, (panel,), self.title, height=280, bottom=44)

    def to_pandas(self) -> Any:
        """One row per predicted batch, sizes in bytes."""
        import pandas

        rows = [(one.batch, one.fits, *one.device_bytes) for one in self.tried]
        return pandas.DataFrame(rows, columns=["batch", "fits", "device_low_bytes", "device_high_bytes"])


def _bounds(shown: Sequence[TriedBatch]) -> list[Line]:
    """The upper bounds of what is needed, and the lower bounds where they differ."""
    if len(shown) < 2:
        return []
    x, colour = np.array([one.batch for one in shown], float), theme.SERIES["used"]
    low, high = np.array([one.device_bytes for one in shown], float).T
    lines = [Line("device memory needed, predicted: at most", x, high, colour, 1.8, shape="joined")]
    if (low < high).any():
        lines.append(Line("at least", x, low, colour, 0.9, shape="samples"))
    return lines


def max_batch(
    make_step: Callable[[int], Callable[[], object]],
    card: str | Card,
    *,
    at_most: int = 1 << 16,
    conf: str | None = None,
    limit_s: float | None = None,
    world_size: int | tuple[int, ...] | None = None,
    local_world_size: int | None = None,
    torch_version: str | None = None,
) -> MaxBatch:
    """The largest batch that fits on `card`, up to `at_most`: `make_step(batch)` gives the step to predict.

    Takes a handful of predictions, each in a child process: of small batches first, then where a line through them meets the
    memory of the card. The result is exact up to 100, above it to 1 %. No batch is predicted that is larger than one that does
    not fit. All of them together take at most `limit_s`. With `world_size` it is the batch of each rank of a job, and
    `torch_version` names the PyTorch that will run there, both as in `memlab.predict`.
    """
    if not callable(make_step):
        raise PredictionError(f"max_batch needs a function of the batch, got {type(make_step).__name__}.")
    if type(at_most) is not int or at_most < 1:
        raise PredictionError(f"at_most is a number of 1 or more, got {at_most!r:.80}.")
    where, version, tried = find(card), checked_version(torch_version), dict[int, TriedBatch]()
    settings, limit = configured(conf, version), TimeLimit(limit_s)
    mesh = () if world_size is None else mesh_of(world_size)
    job = first_rank(math.prod(mesh), local_world_size) if mesh else None
    conditions: dict[int, str] = {}
    with Progress(where.name) as progress:

        def predicting(step: Callable[[], object], left_s: float | None) -> Prediction:
            what = StepToPredict(step, where, "batch", settings, on_news=progress.show, torch_version=version)
            return predict_step(what, left_s) if job is None else predict_ranks(what, job, left_s, mesh)

        def largest(answers: tuple[Fits, ...], limit_bytes: int, end: int) -> int:
            """The largest batch with one of these answers; `end` of what it needs is compared with the limit."""
            known = {batch: (one.fits in answers, one.device_bytes[end]) for batch, one in tried.items()}
            bracket = Bracket(limit_bytes, at_most, known)
            while (batch := bracket.next_number) is not None:
                progress.what = f"{where.name} with a batch of {batch:,}"
                progress.write(f"predicting for {progress.what}: {progress.elapsed}")  # a short one sends no news
                found = predicted_batch(make_step, batch, limit.left_for(f"a batch of {batch}"), predicting)
                tried[batch] = one = TriedBatch(batch, found.fits, found.peak_device_bytes)
                conditions[batch] = length_condition(found.trace)
                bracket.add(batch, one.fits in answers, one.device_bytes[end])
            return bracket.low

        batch = largest(("yes",), where.usable_bytes, 1)
        perhaps = largest(("yes", "close"), where.usable_high_bytes, 0)
        progress.what = f"{where.name} with batches of {', '.join(map(str, tried))}"
    condition = conditions[max(batch, min(tried))]
    return MaxBatch(where, batch, perhaps, tuple(tried[one] for one in sorted(tried)), at_most, condition)


def predicted_batch(
    make_step: Callable[[int], Callable[[], object]],
    batch: int,
    limit_s: float | None,
    predicting: Callable[[Callable[[], object], float | None], Prediction],
) -> Prediction:
    """Predict one batch; errors name it."""

    def step() -> object:
        made = make_step(batch)
        if not callable(made):
            raise PredictionError(f"make_step({batch}) must give a function to predict, got {type(made).__name__}")
        return made()

    try:
        found = predicting(step, limit_s)
    except PredictionError as error:
        error.args = (f"with a batch of {batch} {error}",)
        raise
    if asks_for_nothing(found.forecast):
        raise PredictionError(f"with a batch of {batch} the step {verdict(found.forecast)}.")
    return found
