"""`%memfit`: one run against every card: fits, does not fit, too close to call, with the margin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memlab.errors import PredictionError
from memlab.predictor.cards import Card, cards, find
from memlab.predictor.forecast import Fits, Forecast, Interval, forecast
from memlab.session.predict import Prediction, configured, interval
from memlab.session.run import Run
from memlab.session.runs import last_run
from memlab.trace.trace import CPU, Trace
from memlab.units import format_bytes
from memlab.views.who import Listing

ANSWERS = {"yes": "fits", "no": "does not fit", "close": "too close to call"}


@dataclass(frozen=True, slots=True)
class Fit:
    """A run on one card: what it needs of the device, what the card has, and what would be left (below zero: missing)."""

    card: Card
    fits: Fits
    needs_bytes: Interval
    margin_bytes: Interval

    @property
    def usable_bytes(self) -> Interval:
        """What PyTorch sees of the card's memory."""
        return self.card.usable_bytes, self.card.usable_high_bytes


@dataclass(frozen=True, slots=True)
class FitTable:
    """A run against cards, the smallest first: `print` it, let a notebook show it, or take `rows` and `to_pandas()`."""

    name: str
    rows: tuple[Fit, ...]
    assumptions: tuple[str, ...] = ()

    def __getitem__(self, card: str) -> Fit:
        name = find(card).name
        for row in self.rows:
            if row.card.name == name:
                return row
        raise PredictionError(f"{name} is not among the cards of this table: ask for it, %memfit RUN {name}.")

    def __len__(self) -> int:
        return len(self.rows)

    def _listing(self) -> Listing:
        rows = tuple(
            (row.card.name, ANSWERS[row.fits], interval(row.needs_bytes), interval(row.usable_bytes), _margin(row))
            for row in self.rows
        )
        notes = tuple(f"Assumed: {text}." for text in self.assumptions)
        return Listing(f"{self.name} on {len(rows)} cards", ("card", "", "needs", "usable", "margin"), rows, notes, 0)

    def __str__(self) -> str:
        return self._listing().text()

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        listing = self._listing()
        return {"text/html": listing.html(), "text/plain": listing.text()}

    def to_pandas(self) -> Any:
        """A row for each card, sizes in bytes."""
        import pandas

        columns = ("needs", "usable", "margin")
        names = ["card", "fits", *(f"{one}_{end}_bytes" for one in columns for end in ("low", "high"))]
        rows = [(one.card.name, one.fits, *one.needs_bytes, *one.usable_bytes, *one.margin_bytes) for one in self.rows]
        return pandas.DataFrame(rows, columns=names)


def _margin(row: Fit) -> str:
    low, high = row.margin_bytes
    if low == high or (low < 0) == (high < 0):
        nearer = low if low >= 0 else high
        return f"{format_bytes(abs(nearer))} {'left' if nearer >= 0 else 'missing'}"
    return f"{format_bytes(-low)} missing to {format_bytes(high)} left"


def fit(run: Run | None = None, on: Iterable[str | Card] | None = None, conf: str | None = None) -> FitTable:
    """A run (the last one) against cards (all that are known): does it fit, and what would be left.

    A measured run must be of CUDA: its requests are asked again of the allocator of each card. A prediction's are those of its
    rehearsal; kernels are those of the card that it was rehearsed for.
    """
    chosen = last_run() if run is None else run
    if not isinstance(chosen, Run):
        raise PredictionError(
            f"fit needs a run, got {type(chosen).__name__}: pass memlab.runs[name] or memlab.last_run()."
        )
    asked, settings = _asked(chosen), configured(conf)
    wanted = [cards[name] for name in cards] if on is None else [find(one) for one in on]
    rows = [_row(forecast(asked, card, settings)) for card in wanted]
    rows.sort(key=lambda row: (row.usable_bytes, row.card.name))
    return FitTable(chosen.name or "the run", tuple(rows), _assumed(chosen))


def _asked(run: Run) -> Trace:
    if isinstance(run, Prediction):
        if run.asked is None:
            raise PredictionError(
                f"prediction {run.name!r} was read from a file without its requests: predict it again."
            )
        return run.asked
    trace = run.trace
    if trace.device_indices[:1] in ((), (CPU,)):
        raise PredictionError(
            f"run {run.name!r} was measured on the CPU: what it takes on a card is predicted, %%memtrack --predict CARD."
        )
    if any(True for stretch in trace.made_by.bounded if stretch.device == 0):
        raise PredictionError(f"run {run.name!r} has lost events, so what it asked for is not known as a whole.")
    return trace


def _assumed(run: Run) -> tuple[str, ...]:
    if not isinstance(run, Prediction):
        return ("the requests are those that were measured, with the kernels and workspaces of that card",)
    of_the_card = run.card.assumptions
    rehearsed = (text for text in run.assumptions if text not in of_the_card)
    return (f"kernels are those of {run.card.name}, on which it was rehearsed", *rehearsed)


def _row(found: Forecast) -> Fit:
    return Fit(found.card, found.fits, found.device_bytes, found.margin_bytes)
