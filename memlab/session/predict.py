"""`memlab.predict`: what a step would take on a card, without a GPU."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from memlab.allocator import ConfError, parse_conf
from memlab.errors import DoesNotApply, MemlabError, PredictionError
from memlab.predictor import child, rehearsal
from memlab.predictor.cards import Card, find
from memlab.predictor.child import Outcome
from memlab.predictor.child.step import OnFrame
from memlab.predictor.forecast import DEVICE, Fits, Forecast, Interval, Part, forecast, forecast_of
from memlab.session.progress import Progress
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.trace.file import loads
from memlab.trace.trace import Trace
from memlab.units import format_bytes

CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where both are set the first one counts: so did PyTorch 2.12.1 on CUDA, whatever c10/core/AllocatorConfig.h says."""


class Prediction(Run):
    """A run that was foretold: the face of a Run, with peaks as intervals, `fits` and `assumptions`.

    `trace` is the run on the card, up to where its memory runs out. `asked` has the requests, from which another card can be
    foretold (`for_card`); a prediction that was read from a file has none.
    """

    def __init__(self, name: str, trace: Trace, asked: Trace | None = None, conf: str = "") -> None:
        super().__init__(name, trace)
        self.asked, self.conf = asked, conf

    @property
    def forecast(self) -> Forecast:
        """Everything foretold, as a value."""
        found = forecast_of(self.trace)
        assert found is not None
        return found

    @property
    def card(self) -> Card:
        """The card it was predicted for."""
        return self.forecast.card

    @property
    def fits(self) -> Fits:
        """Whether it fits on the card: "yes", "no", or "close" where the interval crosses what the card has."""
        return self.forecast.fits

    @property
    def allocated_bytes(self) -> Interval:
        """Peak of *allocated* that the run needs, at least and at most."""
        return self.forecast.allocated_bytes

    @property
    def reserved_bytes(self) -> Interval:
        """Peak of *reserved* that the run needs, at least and at most."""
        return self.forecast.reserved_bytes

    @property
    def peak_device_bytes(self) -> Interval:  # type: ignore[override]  # a prediction is an interval
        """Peak of what the driver would report as used on the device, at least and at most."""
        return self.forecast.device_bytes

    @property
    def margin_bytes(self) -> Interval:
        """What would be left on the card at the peak, at least and at most; below zero: what is missing."""
        return self.forecast.margin_bytes

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What had to be assumed."""
        return self.forecast.assumptions

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is no tensor of the program: context, workspaces."""
        return self.forecast.parts

    @property
    def out_of_memory(self) -> str:
        """The error it would raise on the card, "" where it fits for certain."""
        return self.forecast.out_of_memory

    def for_card(self, card: str | Card) -> Prediction:
        """The same requests on another card: at once, with the kernels of the first one."""
        if self.asked is None:
            raise PredictionError(
                f"prediction {self.name!r} was read from a file without its requests: predict it again."
            )
        return predicted(self.name, self.asked, find(card), self.conf)

    def __repr__(self) -> str:
        return f"<Prediction {self.name!r}: {verdict(self.forecast)}>"


def verdict(found: Forecast) -> str:
    """One sentence: the card, whether it fits, what it needs, what the card has."""
    card = found.card
    if asks_for_nothing(found):
        return f'asked nothing of {card.name}: is it written for "cuda"? What an earlier cell put on "cpu" stays there'
    answer = {"yes": "fits", "no": "does not fit", "close": "too close to call"}[found.fits]
    usable, caught = interval((card.usable_bytes, card.usable_high_bytes)), found.trace.made_by.device(DEVICE).num_ooms
    if caught and found.fits != "no":
        often = f"{caught} out-of-memory {'error' if caught == 1 else 'errors'}"
        return f"{answer} on {card.name}, as it catches {often}: needs {interval(found.device_bytes)} of {usable}"
    return f"{answer} on {card.name}: needs {interval(found.device_bytes)} of {usable}"


def asks_for_nothing(found: Forecast) -> bool:
    """Whether nothing of the program ran on the card: then its answer means nothing."""
    return found.allocated_bytes[1] == 0 and found.fits == "yes"


def interval(of: Interval) -> str:
    """Two sizes as a text; one where they are the same."""
    low, high = format_bytes(of[0]), format_bytes(of[1])
    return low if low == high else f"{low} to {high}"


def predict(
    step: Callable[[], object],
    card: str | Card,
    *,
    name: str | None = None,
    conf: str | None = None,
    limit_s: float | None = None,
    raises_oom: bool = False,
) -> Prediction:
    """What `step` would take on `card`, on any machine: `step` is called without arguments and works on "cuda".

    It runs on tensors without data in a child process: what it changes, binds and writes stays there. `card` is a name
    (`memlab.cards`), a size ("8GiB") or a Card; `conf` what PYTORCH_CUDA_ALLOC_CONF says on the card, by default what it says
    here. It goes on where the card is full, to tell what it needs; with `raises_oom` it gets the error that it would get
    there, and may catch it. Raises PredictionError where the step fails, or cannot be predicted.
    """
    if not callable(step):
        raise PredictionError(
            f"predict needs a function without arguments, got {type(step).__name__}: pass lambda: ..."
        )
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step) or inspect.isasyncgenfunction(step):
        raise PredictionError(
            "predict calls the step once, and what has `async` or `yield` does nothing then: wrap it."
        )
    found = foretold(step, find(card), name, configured(conf), limit_s, raises_oom)
    runs.add(found)
    return found


def foretold(
    step: Callable[[], object],
    card: Card,
    name: str | None,
    conf: str,
    limit_s: float | None = None,
    raises_oom: bool = False,
    on_news: OnFrame | None = None,
) -> Prediction:
    """The prediction of a step, which is not among the runs. `on_news` hears what the child says; else a line shows it."""
    work = functools.partial(_work, step, card, conf, raises_oom)
    rehearsal.prepare()
    with Progress(card.name) as progress:
        outcome = child.run(work, limit_s=limit_s, on_frame=on_news or progress.show)
    return come_of(outcome, name or runs.new_name(), card, conf)


def _work(step: Callable[[], object], card: Card, conf: str, raises_oom: bool, channel: Any) -> bytes:
    return rehearsal.rehearsed(step, card, conf, raises_oom)


def configured(conf: str | None) -> str:
    """What PYTORCH_CUDA_ALLOC_CONF says, or would say; what it cannot say is refused before anything is rehearsed."""
    source, said = "conf", conf
    if conf is None:
        source = next((one for one in CONF if one in os.environ), CONF[0])
        said = os.environ.get(source, "")
    if not isinstance(said, str):
        raise PredictionError(f'conf is a text such as "expandable_segments:True", got {said!r:.80}.')
    try:
        parse_conf(said)
    except ConfError as error:
        raise PredictionError(f"{source}: {error}") from None
    return said


def finished(outcome: Outcome, name: str, card: Card, conf: str) -> Prediction:
    """The prediction of a child that has ended, among the runs; an error where it has none to give."""
    found = come_of(outcome, name, card, conf)
    runs.add(found)
    return found


def come_of(outcome: Outcome, name: str, card: Card, conf: str) -> Prediction:
    """The prediction of a child that has ended; an error where it has none to give."""
    if outcome.result is None:
        raise failure(outcome)
    return predicted(name, loads(outcome.result), card, conf, outcome)


def failure(outcome: Outcome) -> MemlabError:
    """Why there is no prediction, in one line, with the traceback of the child as a note."""
    if outcome.error is None:
        return PredictionError(
            f"there is no prediction: {outcome.ended or 'the child process ended without a result'}."
        )
    if outcome.error.name == DoesNotApply.__name__:
        return DoesNotApply(outcome.error.text)
    error = PredictionError(f"the step failed where it was rehearsed: {outcome.error}")
    error.add_note("\n".join(outcome.error.traceback))
    return error


def predicted(name: str, asked: Trace, card: Card, conf: str, outcome: Outcome | None = None) -> Prediction:
    """The prediction of requests for a card."""
    found = forecast(asked, card, conf)
    run = Prediction(name, found.trace, asked, conf)
    is_whole = outcome is None or outcome.error is None
    run.finish(found.trace, [*_said(found, is_whole), *(_told(outcome) if outcome is not None else ())])
    return run


def _said(found: Forecast, is_whole: bool) -> list[str]:
    until = "Predicted" if is_whole else "Predicted up to where the cell ended with an error"
    lines = [f"{until}, nothing ran on a card: {verdict(found)}."]
    if found.out_of_memory:
        may = "It would raise" if found.fits == "no" else "It may raise"
        lines.append(f"{may}: {found.out_of_memory.splitlines()[0]}")
    return lines


def _told(outcome: Outcome) -> list[str]:
    """What is to be known of the child."""
    lines = list(outcome.notes)
    if outcome.error is not None:
        lines.append(f"The cell raised {outcome.error}.")
    if outcome.refused:
        lines.append(f"Held off in the child process: {'; '.join(outcome.refused)}.")
    if outcome.started:
        lines.append(f"Programs that it started for real: {'; '.join(outcome.started)}.")
    return lines
