"""`memlab.max_batch`: the largest batch that fits on a card, by a handful of predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab.errors import PredictionError
from memlab.predictor.cards import Card, find
from memlab.predictor.forecast import Fits, Interval
from memlab.session.predict import Prediction, asks_for_nothing, configured, foretold, interval, verdict


@dataclass(frozen=True, slots=True)
class Tried:
    """One batch size that was predicted."""

    batch: int
    fits: Fits
    device_bytes: Interval


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch that fits on a card: for certain, and perhaps; 0 where none does. `tried` has the predictions."""

    card: Card
    batch: int
    perhaps: int
    tried: tuple[Tried, ...]
    at_most: int = 0

    def __int__(self) -> int:
        return self.batch

    __index__ = __int__

    def __str__(self) -> str:
        rest = f"; {self.batch + 1} to {self.perhaps} are too close to call" if self.perhaps > self.batch else ""
        if self.at_most and self.perhaps == self.at_most:
            rest += f" (no more were tried: at_most is {self.at_most})"
        lines = [f"largest batch on {self.card.name}: {self.batch}{rest}"]
        lines += [f"  {one.batch:>8}  {one.fits:<5}  {interval(one.device_bytes)}" for one in self.tried]
        return "\n".join(lines)

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """A row for each batch that was predicted, sizes in bytes."""
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
) -> MaxBatch:
    """The largest batch that fits on `card`, up to `at_most`: `make_step(batch)` gives the step to predict.

    A handful of predictions, each of a child process: batches are doubled, and what lies between is halved.
    """
    if not callable(make_step):
        raise PredictionError(f"max_batch needs a function of the batch, got {type(make_step).__name__}.")
    if type(at_most) is not int or at_most < 1:
        raise PredictionError(f"at_most is a number of 1 or more, got {at_most!r:.80}.")
    where, tried = find(card), dict[int, Tried]()

    def fits(batch: int) -> Fits:
        if batch not in tried:
            found = _predicted_batch(make_step, batch, where, conf, limit_s)
            tried[batch] = Tried(batch, found.fits, found.peak_device_bytes)
        return tried[batch].fits

    batch = _largest(lambda one: fits(one) == "yes", 0, at_most)
    perhaps = _largest(lambda one: fits(one) != "no", batch, at_most)
    return MaxBatch(where, batch, perhaps, tuple(tried[one] for one in sorted(tried)), at_most)


def _predicted_batch(
    make_step: Callable[[int], Callable[[], object]], batch: int, card: Card, conf: str | None, limit_s: float | None
) -> Prediction:
    """The prediction of one batch; what went wrong says of which."""
    try:
        found = foretold(_step_of(make_step, batch), card, f"batch {batch}", configured(conf), limit_s)
    except PredictionError as error:
        error.args = (f"with a batch of {batch} {error}",)
        raise
    if asks_for_nothing(found.forecast):
        raise PredictionError(f"with a batch of {batch} the step {verdict(found.forecast)}.")
    return found


def _step_of(make_step: Callable[[int], Callable[[], object]], batch: int) -> Callable[[], object]:
    def step() -> object:
        made = make_step(batch)
        if not callable(made):
            raise PredictionError(f"make_step({batch}) must give a function to predict, got {type(made).__name__}")
        return made()

    return step


def _largest(holds: Callable[[int], bool], known: int, at_most: int) -> int:
    """The largest number up to `at_most` for which it holds, where it holds for `known` and all below."""
    low, high = known, known + 1
    while high <= at_most and holds(high):
        low, high = high, min(2 * high, at_most) if high < at_most else at_most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
