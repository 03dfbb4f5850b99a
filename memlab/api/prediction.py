"""A prediction: a run on a card, whose peaks are ranges, with what it assumed and whether it fits; the smallest card that does."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence

from memlab.analysis.summary import has_raised
from memlab.api.run import Run
from memlab.errors import DoesNotApply, MemlabError, PredictionError
from memlab.fake_cuda.devices import ASKED_FREE
from memlab.fake_cuda.process_groups import HOW, ThisRank
from memlab.prediction.assumptions import Assumptions, length_condition
from memlab.prediction.cards import KERNELS_CHANGE, Card, cards, find
from memlab.prediction.child import ChildOutcome
from memlab.prediction.forecast import ANSWERS, DeviceForecast, Fits, Forecast, fits_for_certain, forecast, forecast_of
from memlab.prediction.probe import NOTES
from memlab.prediction.torch_versions import other_version
from memlab.prediction.workspaces import WorkspacePart
from memlab.torch_internals.traceback import running_shell
from memlab.trace.trace import Trace
from memlab.units import ByteRange, format_bytes, number_of, one_line


class Prediction(Run):
    """A predicted run: the attributes of a Run, with peaks as ranges, `fits` and `assumptions`.

    `trace` is the run on the card, up to the point where memory runs out. `asked` has the requests, from which another card can be
    predicted (`for_card`), and `others` those for other plausible numbers of multiprocessors; a prediction read from a
    file has none. Of a distributed job it is the rank that needs most; `ranks` has all that were predicted, by their numbers. Of
    several GPUs the figures are those of the one that needs most; `by_device` has all that were used.
    """

    def __init__(
        self, name: str, trace: Trace, asked: Trace | None = None, conf: str = "", others: Sequence[Trace] = ()
    ) -> None:
        super().__init__(name, trace)
        self.asked, self.conf, self.others = asked, conf, tuple(others)
        self.ranks: Mapping[int, Prediction] = {}

    @property
    def forecast(self) -> Forecast:
        """The whole prediction as a value."""
        found = forecast_of(self.trace)
        assert found is not None
        return found

    @property
    def card(self) -> Card:
        """The card it was predicted for."""
        return self.forecast.card

    @property
    def fits(self) -> Fits:
        """Whether it fits on the card: "yes", "no", or "close" if the interval includes the limit or assumed values decide it."""
        return "close" if with_fewest(self.trace) and self.forecast.fits == "no" else self.forecast.fits

    @property
    def allocated_bytes(self) -> ByteRange:
        """Peak of *allocated* that the run needs: lower and upper bound."""
        return self.forecast.allocated_bytes

    @property
    def reserved_bytes(self) -> ByteRange:
        """Peak of *reserved* that the run needs: lower and upper bound."""
        return self.forecast.reserved_bytes

    @property
    def peak_device_bytes(self) -> ByteRange:  # type: ignore[override]  # a prediction is a range
        """Peak of device memory that the driver would report as used: lower and upper bound."""
        return self.forecast.device_bytes

    @property
    def margin_bytes(self) -> ByteRange:
        """What would be left on the card at the peak: lower and upper bound; negative: missing."""
        return self.forecast.margin_bytes

    @property
    def by_device(self) -> Mapping[int, DeviceForecast]:
        """Every GPU that was used, by its number: the ranges of its peaks, and whether they fit; the one that needs most first."""
        return {one.index: one for one in self.forecast.devices}

    @property
    def verdict(self) -> str:
        """Whether it fits on the card, what would be left or is missing, and what decides it, in a few words."""
        return f"{self._verdict}{with_fewest(self.trace)}{length_condition(self.trace)}"

    @property
    def _verdict(self) -> str:
        found, (low, high) = self.forecast, self.margin_bytes
        card, on = _cards(found), f" on {found.device.label}" if _has_several(found) else ""
        if asks_for_nothing(self.forecast):
            failed = "ended with an error before anything was allocated"
            return failed if has_raised(self.trace) else f"allocates nothing on {card}"
        if self.forecast.fits == "no":
            missing = ByteRange(max(-high, 0), max(-low, 0))
            return f"does not fit {card}" + (f": {missing} missing{on}" if missing.low else "")
        if has_raised(self.trace):
            needs = f"{format_bytes(self.peak_device_bytes.low)} of the {self.card.usable_range} of {self.card.name}"
            return f"ended with an error: needs at least {needs}{on}"
        if self.fits == "yes":
            return f"fits {card} with {ByteRange(max(low, 0), max(high, 0))} to spare{on}"
        between = f": {format_bytes(-low)} missing to {format_bytes(high)} left{on}" if low < 0 < high else ""
        return f"too close to call on {card}{between}"

    @property
    def fills_what_is_free(self) -> bool:
        """Whether it asked for free memory, and took more where more was free: on another card it takes something else."""
        is_asking = any(text.startswith(ASKED_FREE) for text in self.forecast.assumptions)
        return is_asking and self.allocated_bytes.low < self.allocated_bytes.high

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions in words; `.values` has the values that were assumed, as data, and `.to_pandas()` their table."""
        return Assumptions.of(self.forecast.assumptions, self.trace)

    @property
    def job(self) -> ThisRank | None:
        """Which rank of how many it is; None if the program is not distributed."""
        numbers = self.trace.notes.get(NOTES, {}).get("job")
        return None if numbers is None else ThisRank(*numbers)

    @property
    def parts(self) -> tuple[WorkspacePart, ...]:
        """Memory other than the program's tensors: context, workspaces."""
        return self.forecast.parts

    @property
    def out_of_memory(self) -> str:
        """The error it would raise on the card, "" if it is certain to fit."""
        return self.forecast.out_of_memory

    @property
    def torch_version(self) -> str:
        """The version of PyTorch that it is for."""
        return self.trace.made_by.versions.get("torch", "")

    def for_card(self, card: str | Card) -> Prediction:
        """The same requests on another card: immediate, with the kernels of the first one."""
        there = {rank: one for rank, one in self.ranks.items() if one is not self}
        mine = predicted(self.name, [self.requests(), *self.others], find(card), self.conf)
        if not there or self.job is None:
            return mine
        return worst_of({self.job.rank: mine, **{rank: one.for_card(card) for rank, one in there.items()}})

    def requests(self) -> Trace:
        """Its requests; PredictionError if they were not saved."""
        if self.asked is None:
            why = f"prediction {self.name!r} was read from a file without its requests"
            raise PredictionError(f"{why}: predict it again, for the cards that you want.")
        return self.asked

    def __repr__(self) -> str:
        return f"<Prediction {self.name!r}: {verdict(self.forecast)}>"


def verdict(predicted: Forecast, raised: bool = False) -> str:
    """One sentence: the card, whether it fits, what it needs, what the card has; `raised`: the code ended with an error."""
    card, cards = predicted.card, _cards(predicted)
    if asks_for_nothing(predicted):
        return f'allocated nothing on {cards}: is it written for "cuda"? What was put on "cpu" before stays there'
    ended = raised or has_raised(predicted.trace)
    caught = 0 if ended else sum(device.num_ooms for device in predicted.trace.made_by.devices)
    catches = f", as it catches {number_of(caught, 'out-of-memory error')}" if caught and predicted.fits != "no" else ""
    needs = f"needs {predicted.device_bytes} of {card.usable_range}"
    if _has_several(predicted):
        others = (f", {one.label} {one.device_bytes}" for one in predicted.devices[1:])
        needs = f"{predicted.device.label} {needs}{''.join(others)}"
    return f"{ANSWERS[predicted.fits]} on {cards}{catches}: {needs}{length_condition(predicted.trace)}"


def _has_several(predicted: Forecast) -> bool:
    """Whether there were several GPUs, used or not."""
    return len(predicted.trace.made_by.devices) > 1


def _cards(predicted: Forecast) -> str:
    """What it was predicted for: "T4", "2 x T4"."""
    count = f"{len(predicted.trace.made_by.devices)} x " if _has_several(predicted) else ""
    return f"{count}{predicted.card.name}"


def asks_for_nothing(predicted: Forecast) -> bool:
    """Whether nothing ran on the card: then the answer means nothing."""
    return predicted.allocated_bytes.high == 0 and predicted.fits == "yes"


def with_fewest(trace: Trace) -> str:
    """What to add to an answer that is another one if fewer elements are selected than was assumed; "" if it is the same."""
    facts = trace.noted("fewest")
    if not facts or facts.get("fits") == "no":
        return ""
    return f" with the most of {one_line(', '.join(map(str, facts['keys'])), 120)} ({ANSWERS[facts['fits']]} with the fewest)"


def prediction_from(outcome: ChildOutcome, traces: Sequence[Trace], name: str, card: Card, conf: str) -> Prediction:
    """The prediction from a child that has ended; PredictionError if there is none."""
    if not traces:
        raise failure(outcome)
    return predicted(name, traces, card, conf, outcome)


def failure(
    outcome: ChildOutcome,
    raised: str = "the step raised in the dry run",
    nothing: str = "there is no prediction: ",
    kind: type[MemlabError] = PredictionError,
) -> MemlabError:
    """The error of a child in one line, with its traceback as a note."""
    if outcome.error is None:
        ended = outcome.ended or "the child process ended without a result"
        return kind(f"{nothing}{ended}{'.' if nothing else ''}")
    if outcome.error.name == DoesNotApply.__name__:
        return DoesNotApply(outcome.error.text)
    said = str(outcome.error)  # PyTorch's text of an out-of-memory error is longer than a table row
    if outcome.error.name == "KeyError" and outcome.error.text.strip("'") in ThisRank(0, 1, 1).environment:
        said += f", which torchrun sets: {HOW}"
    error = kind(f"{raised}: {said if kind is PredictionError else one_line(said, 500)}")
    error.add_note("\n".join(outcome.error.traceback))
    return error


def predicted(
    name: str, traces: Sequence[Trace], card: Card, conf: str, outcome: ChildOutcome | None = None
) -> Prediction:
    """The prediction from requests; further traces are for other plausible numbers of multiprocessors."""
    found = forecast(traces[0], card, conf, others=traces[1:])
    run = Prediction(name, found.trace, traces[0], conf, traces[1:])
    error = outcome.error if outcome is not None else None
    raised = error is not None
    who = "the cell" if running_shell() is not None else "it"
    until = f"Predicted for PyTorch {version}" if (version := other_version(found.trace)) else "Predicted"
    until += f" up to where {who} ended with an error" if raised else ""
    lines = [] if run.job is None else [f"Rank {run.job.rank} of {run.job.world_size:,}."]
    answer = "nothing was allocated before it" if raised and asks_for_nothing(found) else verdict(found, raised)
    lines.append(f"{until}, nothing ran on a card: {answer}.")
    if found.out_of_memory and (error is None or error.name != "OutOfMemoryError"):  # which is said below
        may = "It would raise" if found.fits == "no" else "It may raise"
        lines.append(f"{may}: {found.out_of_memory.splitlines()[0]}")
    if outcome is not None:
        lines += outcome.notes
        lines += [f"{who[0].upper()}{who[1:]} raised {str(error).rstrip('.')}."] if raised else []
        if outcome.refused:
            lines.append(f"Blocked in the child process: {'; '.join(outcome.refused)}.")
        if outcome.started:
            lines.append(f"Programs that it really started: {'; '.join(outcome.started)}.")
    run.finish(found.trace, lines)
    run.note("raised", raised)
    return run


def worst_of(found: Mapping[int, Prediction]) -> Prediction:
    """The rank that needs most, with all that were predicted, and a note on how they spread."""
    worst = max(found.items(), key=lambda item: (*_needs(item[1]), -item[0]))[1]
    worst.ranks = dict(sorted(found.items()))
    worst.note("ranks", {str(one): list(its.peak_device_bytes) for one, its in worst.ranks.items()})
    if len(found) > 1:
        which, *others = worst.trace.notes["notes"]
        least = min(found.values(), key=_needs)
        text = f"needs most of those that were predicted ({', '.join(map(str, worst.ranks))})"
        worst.note("notes", [f"{which[:-1]}, which {text}; the least is {least.peak_device_bytes}.", *others])
    return worst


def _needs(one: Prediction) -> tuple[int, int]:
    """What ranks are compared by: the device's memory, which is in pages, then *allocated*."""
    return one.peak_device_bytes.high, one.allocated_bytes.high


def _fits(one: Prediction | None) -> bool:
    return one is not None and one.fits == "yes" and not has_raised(one.trace)


_NEWER = "RTX 4090"
"""A card with the kernels of compute capability 8.0 and above, which are most alike."""


def smallest_card(found: Prediction, predicted: Callable[[Card], Prediction | None]) -> Prediction | None:
    """The prediction for the smallest known card on which it fits for certain, None if there is none.

    The requests of one prediction are replayed on other cards, one of each size, from those that have what is allocated at the peak
    to those that have all that it needs on its own card: a full card releases its cache, and may need less. A card of another
    compute capability has other kernels (before 8.0 attention in bfloat16 is a matrix of all scores): the first one that would
    fit is predicted by itself, and so on until one does. What fills free memory is predicted on each card that is looked at.
    `predicted` gives None if the step fails there.
    """
    if found.fills_what_is_free:
        known = sorted(cards.values(), key=lambda card: (card.usable_bytes, card.name))
        there = functools.cache(lambda place: predicted(known[place]))
        place = bisect.bisect_left(range(len(known)), True, key=lambda place: _fits(there(place)))
        return there(place) if place < len(known) else None
    base: Prediction | None = found
    if found.card.compute_capability < KERNELS_CHANGE:  # newer cards need less: all of them would be missed
        base = predicted(find(_NEWER))
    if base is None:
        return None
    own: dict[tuple[int, int], Prediction | None] = {one.card.compute_capability: one for one in (base, found)}
    preferred = sorted(cards.values(), key=lambda card: (card.compute_capability not in own, card.name), reverse=True)
    known = [card for _, card in sorted({card.usable_range: card for card in preferred}.items())]
    fits = functools.cache(lambda place: fits_for_certain(base.requests(), known[place], base.conf, base.others))
    least, most = base.allocated_bytes.low, base.peak_device_bytes.high
    low = next((place for place, card in enumerate(known) if card.usable_high_bytes >= least), len(known))
    high = next((place for place, card in enumerate(known) if card.usable_bytes >= most), len(known))
    for card in known[bisect.bisect_left(range(len(known)), True, low, high, key=fits) :]:
        if card.compute_capability not in own:
            own[card.compute_capability] = predicted(card)
        one = own[card.compute_capability]
        if one is not None and fits_for_certain(one.requests(), card, one.conf, one.others):
            return one.for_card(card)
    return None
