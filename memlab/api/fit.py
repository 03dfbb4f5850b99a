"""`memlab.fit`: does a run fit on each GPU: yes, no, too close to call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memlab.analysis.summary import has_raised
from memlab.api.predict import configured
from memlab.api.prediction import Prediction
from memlab.api.run import Run
from memlab.api.runs import last_run, runs
from memlab.errors import PredictionError
from memlab.prediction.assumptions import length_condition
from memlab.prediction.cards import KERNELS_CHANGE, Card, cards, find, name_of
from memlab.prediction.forecast import ANSWERS, DeviceForecast, Known, on_devices
from memlab.torch_internals.traceback import running_shell
from memlab.trace.trace import CPU, Trace
from memlab.units import UNBOUNDED, ByteRange, format_bytes, number_of
from memlab.views.page import Folded, Page, PageLines, Part
from memlab.views.scene import short_bytes
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

Verdict = Literal["yes", "no", "close", "unknown"]
_COLUMNS = (Column("GPU"), Column(""), Column("needs", "bytes"), Column("usable", "bytes"), Column("margin"))
_NEIGHBORS = 2
"""So many smaller and so many larger GPUs stand next to the smallest that fits; all are in the folded table."""


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
    own: str = ""
    """The GPU that the run was measured on, or predicted for."""
    capability: tuple[int, int] | None = None
    """Its compute capability, None if that is not known."""
    advice: str = ""
    """What to do where a run that raised, or that fills what is free on its GPU, is not known to fit on others."""
    condition: str = ""
    """The assumed values on which the length of a predicted run depends, and how many GPUs it takes if several."""

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
        """The smallest GPU that it fits on, its neighbors, and the table of all, folded."""
        rows, count = self.rows, len(self.rows)
        numbers = {answer: sum(row.fits == answer for row in rows) for answer in ("yes", "close", "unknown")}
        smallest = next((place for place, row in enumerate(rows) if self._is_answer(row)), None)
        # The border between what is too small and the others: where nothing fits for certain, the first that may.
        middle = next((place for place, row in enumerate(rows) if row.fits != "no"), count - 1)
        if smallest is not None:
            middle, card = smallest, rows[smallest].card
            size = "" if "iB" in card.name else f", {short_bytes(card.total_bytes)}"
            found = f"smallest GPU: {card.name}{size}; {numbers['yes']} of {count} fit"
        elif numbers["yes"] and self.advice:
            found = f"{numbers['yes']} of {count} fit what it takes on {self.own}"
        elif numbers["yes"]:
            found = (
                f"fits only GPUs that are older than {self.own}, whose kernels may need more: predict for one of them"
            )
        elif numbers["unknown"]:
            found = f"the run raised: too small are {count - numbers['unknown']} of {number_of(count, 'GPU')}, unknown the others"
        else:
            found = f"fits for certain on none of {number_of(count, 'GPU')}"
        found += f", {numbers['close']} too close to call" if numbers["close"] else ""
        near = range(middle - _NEIGHBORS, middle + _NEIGHBORS + 1)
        shown = [row for place, row in enumerate(rows) if place in near or row.card.name == self.own]
        parts: list[Part] = [self.advice, self._table(shown)] if self.advice else [self._table(shown)]
        parts += [Folded(f"All {count} GPUs", self._table(rows))] if len(shown) < count else []
        parts += [Folded("Assumed", PageLines(self.assumptions))] if self.assumptions else []
        return Page(f"{self.name} · {found}{self.condition}", tuple(parts)).remarked(self.remark)

    def _is_answer(self, row: Fit) -> bool:
        """Whether it fits, also with the kernels of that card."""
        return row.fits == "yes" and not self._is_older(row) and not self.advice

    def _is_older(self, row: Fit) -> bool:
        """Whether a card has older kernels than that of the run, which may need more."""
        return _is_newer(self.capability or (0, 0)) and not _is_newer(row.card.compute_capability)

    def _table(self, shown: Sequence[Fit]) -> Table:
        rows = []
        for row in shown:
            low, high = row.margin_bytes
            margin = f"{format_bytes(-low)} missing to {format_bytes(high)} left"
            if low < 0 and row.fits == "yes":  # with less memory it needs less, as it releases its cache
                margin = f"at most {format_bytes(max(high, 0))} left"
            elif low == -UNBOUNDED and high >= 0:
                margin = f"at most {format_bytes(high)} left"
            elif low == high or (low < 0) == (high < 0):
                nearer = low if low >= 0 else high
                margin = f"{format_bytes(abs(nearer))} {'left' if nearer >= 0 else 'missing'}"
            name = f"{row.card.name} (of this run)" if row.card.name == self.own else row.card.name
            answer = ANSWERS.get(row.fits, row.fits)
            if row.fits == "yes" and self._is_older(row):
                answer += ", if its older kernels need no more"
            rows.append((name, answer, row.needs_bytes, row.usable_bytes, margin))
        smallest = [place for place, row in enumerate(shown) if self._is_answer(row)][:1]
        return Table("", _COLUMNS, tuple(rows), strong=frozenset(smallest))

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

    A measured run must be of CUDA: its requests are replayed on the allocator of each card; of a run on several GPUs the
    figures are those of the one that needs most. A prediction's are those of its dry run; kernels are those of the card that
    it was predicted for. A run that raised did not request all that it needs: in its notebook its cell is predicted to the
    end, and where that cannot be done it needs "at least" what it had.
    """
    chosen = last_run() if run is None else run
    if not isinstance(chosen, Run):
        raise PredictionError(
            f"fit needs a run, got {type(chosen).__name__}: pass memlab.runs[name] or memlab.last_run()."
        )
    if has_raised(chosen.trace):
        from memlab.api.ways_out import whole_cell_of  # late: it needs the techniques

        chosen = whole_cell_of(chosen) or chosen
    settings, others = configured(conf), tuple[Trace, ...]()
    made = chosen.trace.provenance
    assumed: tuple[str, ...] = (
        f"the requests are those that were {made}, with the kernels and workspaces of that card",
    )
    if isinstance(chosen, Prediction):
        asked, others, first = chosen.requests(), chosen.others, chosen.card
        capability: tuple[int, int] | None = first.compute_capability
        of_the_run = (text for text in chosen.assumptions if text not in first.assumptions)
        assumed, own = (f"kernels are those of {first.name}, for which it was predicted", *of_the_run), first.name
    else:
        asked = _measured(chosen)
        own = name_of(asked.made_by.device(asked.device_indices[0]).name)
        capability = cards[own].compute_capability if own else None
    raised, several = has_raised(chosen.trace), 1
    rows, known = [], Known()
    wanted = [cards[name] for name in cards] if on is None else [find(one) for one in on]
    for card in sorted(wanted, key=lambda card: card.usable_bytes):  # what fits on one fits alike on larger ones
        found = on_devices(asked, card, settings, others, known)
        several = len(found)
        rows.append(_row(card, found[0], raised))
    rows.sort(key=lambda row: (row.usable_bytes, row.card.name))
    if capability is not None:
        border = ".".join(map(str, KERNELS_CHANGE))
        which, need = f"of compute capability {border} and above", "less"
        if _is_newer(capability):
            which, need = f"below compute capability {border}", "more"
        assumed += (f"kernels of GPUs {which} may need {need}: predict for one of them",)
    condition = length_condition(chosen.trace) + (f", with {several} of each" if several > 1 else "")
    name, remark, advice = chosen.name or "the run", chosen.trace.remark, _advice(chosen, own) if raised else ""
    if not raised and isinstance(chosen, Prediction) and chosen.fills_what_is_free:
        advice = f"Its code sizes itself by what is free on {own}: for another GPU predict it there."
    return FitTable(name, tuple(rows), assumed, remark, own, capability, advice, condition)


def _row(card: Card, found: DeviceForecast, raised: bool) -> Fit:
    """What was found on a card; of a run that raised only that it needs at least so much."""
    needs, fits = found.device_bytes, found.fits
    margin = card.usable_range - needs
    if not raised:
        return Fit(card, fits, needs, margin)
    at_least, at_most = ByteRange(needs.low, UNBOUNDED), ByteRange(-UNBOUNDED, margin.high)
    return Fit(card, "no" if fits == "no" else "unknown", at_least, at_most)


def _advice(chosen: Run, own: str) -> str:
    """How to know what a run that raised needs."""
    where, is_notebook = own or "RTX 4060", running_shell() is not None
    how = f'memlab predict --card "{where}" SCRIPT'
    how = f'%%memtrack --predict "{where}" on the first line of its cell, then %memfit' if is_notebook else how
    if isinstance(chosen, Prediction):
        how = f"correct the error, predict it again, then {'%memfit' if is_notebook else 'memlab fit'}"
    return f"Its whole step needs at least what is shown, and may fit on none. To know: {how}."


def _is_newer(capability: tuple[int, int]) -> bool:
    return capability >= KERNELS_CHANGE


def _measured(run: Run) -> Trace:
    trace = run.trace
    if trace.device_indices[:1] in ((), (CPU,)):
        how = 'predict it for a card: %%memtrack --predict "RTX 4060" on its cell, or memlab predict SCRIPT'
        raise PredictionError(f"run {run.name!r} was measured on the CPU: {how}.")
    if any(stretch.device != CPU for stretch in trace.made_by.bounded):
        raise PredictionError(f"run {run.name!r} has lost events, so its requests are not all known.")
    return trace
