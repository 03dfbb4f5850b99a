"""`memlab.predict`: the memory of a step on a card, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memlab.allocator import ConfError, parse_conf
from memlab.analysis.summary import has_raised
from memlab.api.display import Progress
from memlab.api.run import Run
from memlab.api.runs import runs
from memlab.errors import DoesNotApply, MemlabError, PredictionError
from memlab.fake_cuda.process_groups import HOW, ThisRank
from memlab.prediction import dry_run
from memlab.prediction.cards import Card, find
from memlab.prediction.child import Channel, Child, ChildOutcome
from memlab.prediction.child.runner import OnNews
from memlab.prediction.forecast import ANSWERS, DEVICE, Fits, Forecast, forecast, forecast_of
from memlab.prediction.probe import NOTES
from memlab.prediction.workspaces import WorkspacePart
from memlab.trace.trace import Trace
from memlab.units import ByteRange, format_bytes, number_of, one_line

CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""If both are set the first one counts: measured with PyTorch 2.12.1 on CUDA, unlike c10/core/AllocatorConfig.h says."""


MOST_RANKS = 16
"""So many stages of a pipeline are predicted at most, and corners of a mesh; of more every second or third, and so on."""


_MOST_WORLD_SIZE = 1 << 20


class Prediction(Run):
    """A predicted run: the attributes of a Run, with peaks as ranges, `fits` and `assumptions`.

    `trace` is the run on the card, up to the point where memory runs out. `asked` has the requests, from which another card can be
    predicted (`for_card`), and `others` those for other plausible numbers of multiprocessors; a prediction read from a
    file has none. Of a distributed job it is the rank that needs most; `ranks` has all that were predicted, by their numbers.
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
        """Whether it fits on the card: "yes", "no", or "close" if the interval includes the limit."""
        return self.forecast.fits

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
    def verdict(self) -> str:
        """Whether it fits on the card, and what would be left or is missing, in a few words."""
        card, (low, high) = self.card.name, self.margin_bytes
        if asks_for_nothing(self.forecast):
            return f"allocates nothing on {card}"
        if self.fits == "no":
            missing = ByteRange(max(-high, 0), max(-low, 0))
            return f"does not fit {card}" + (f": {missing} missing" if missing.low else "")
        if has_raised(self.trace):
            needs = format_bytes(self.peak_device_bytes.low)
            return f"ended with an error: needs at least {needs} of the {self.card.usable_range} of {card}"
        if self.fits == "yes":
            return f"fits {card} with {ByteRange(max(low, 0), max(high, 0))} to spare"
        between = f": {format_bytes(-low)} missing to {format_bytes(high)} left" if low < 0 < high else ""
        return f"too close to call on {card}{between}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions."""
        return self.forecast.assumptions

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


def verdict(predicted: Forecast) -> str:
    """One sentence: the card, whether it fits, what it needs, what the card has."""
    card = predicted.card
    if asks_for_nothing(predicted):
        return (
            f'allocated nothing on {card.name}: is it written for "cuda"? What an earlier cell put on "cpu" stays there'
        )
    caught = predicted.trace.made_by.device(DEVICE).num_ooms
    catches = f", as it catches {number_of(caught, 'out-of-memory error')}" if caught and predicted.fits != "no" else ""
    return f"{ANSWERS[predicted.fits]} on {card.name}{catches}: needs {predicted.device_bytes} of {card.usable_range}"


def asks_for_nothing(predicted: Forecast) -> bool:
    """Whether nothing ran on the card: then the answer means nothing."""
    return predicted.allocated_bytes.high == 0 and predicted.fits == "yes"


def predict(
    step: Callable[[], object],
    card: str | Card,
    *,
    name: str | None = None,
    conf: str | None = None,
    limit_s: float | None = None,
    raises_oom: bool = False,
    world_size: int | tuple[int, ...] | None = None,
    local_world_size: int | None = None,
) -> Prediction:
    """Predict the memory of `step` on `card`, on any machine: `step` is called without arguments and works on "cuda".

    It runs on tensors without data in a child process: nothing that it changes or writes comes back. `card` is a name
    (`memlab.cards`), a size ("8GiB") or a Card; `conf` the value of PYTORCH_CUDA_ALLOC_CONF on the card, by default its value
    here. It continues when the card is full, to find what it needs; with `raises_oom` it gets the error that it would get
    there, and may catch it. Raises PredictionError if the step fails or cannot be predicted.

    With `world_size` the step is one rank of that many, `local_world_size` of them (8) on each machine: it finds RANK,
    WORLD_SIZE and LOCAL_RANK as torchrun sets them, and forms process groups as it would. The first rank and the last are
    predicted, and those with which the first exchanges tensors, as the stages of a pipeline do; the prediction is that of
    the rank that needs most. `world_size` may be the shape of a mesh, such as (4, 2), as the step gives it to
    `init_device_mesh`: then all corners of the mesh are predicted, which differ where shards are uneven.
    """
    if not callable(step):
        raise PredictionError(
            f"predict needs a function without arguments, got {type(step).__name__}: pass lambda: ..."
        )
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step) or inspect.isasyncgenfunction(step):
        why = "predict calls the step once, which does nothing for `async` functions and generators"
        raise PredictionError(f"{why}: wrap it.")
    where, settings = find(card), configured(conf)
    if world_size is None:
        prediction = predict_step(step, where, name, settings, limit_s, raises_oom)
    else:
        mesh = mesh_of(world_size)
        job = first_rank(math.prod(mesh), local_world_size)
        prediction = predict_ranks(step, where, name, settings, job, limit_s, raises_oom, mesh=mesh)
    runs.add(prediction)
    return prediction


def mesh_of(world_size: object) -> tuple[int, ...]:
    """The shape of the mesh that ranks form; a number of ranks is one of one dimension."""
    shape = world_size if isinstance(world_size, tuple) else (world_size,)
    whole = all(type(size) is int and size > 0 for size in shape)
    if not shape or not whole or math.prod(shape) > _MOST_WORLD_SIZE:
        what = f"world_size is a number of ranks, 1 to {_MOST_WORLD_SIZE:,}, or the shape of a mesh of them, as (4, 2)"
        raise PredictionError(f"{what}, got {world_size!r:.80}.")
    return shape


def first_rank(world_size: int, local_world_size: int | None) -> ThisRank:
    """The first rank of a job; the numbers are checked."""
    local = min(world_size, 8) if local_world_size is None and type(world_size) is int else local_world_size
    for name, number, most in (("world_size", world_size, _MOST_WORLD_SIZE), ("local_world_size", local, world_size)):
        if type(number) is not int or not 1 <= number <= most:
            raise PredictionError(f"{name} is a number of ranks, 1 to {most:,}, got {number!r:.80}.")
    assert local is not None
    return ThisRank(0, world_size, local)


def _corners(mesh: Sequence[int]) -> list[int]:
    """The ranks at the corners of a mesh, whose last dimension counts fastest; the first and the last are among them."""
    corners = [0]
    for size in mesh:
        corners = [corner * size + place for corner in corners for place in sorted({0, size - 1})]
    every = -(-len(corners) // MOST_RANKS) | 1  # odd, or all of them would be at the same end of the last dimension
    return [*corners[:-1][::every], corners[-1]]


def predict_ranks(
    step: Callable[[], object],
    card: Card,
    name: str | None,
    conf: str,
    job: ThisRank,
    limit_s: float | None = None,
    raises_oom: bool = False,
    mesh: Sequence[int] = (),
    on_news: OnNews | None = None,
    is_quiet: bool = False,
) -> Prediction:
    """Predict the ranks of a job that may differ; the prediction of the one that needs most, which has all of them.

    They are the corners of the mesh that the ranks form, by default of one dimension, and those to which the first one sends.
    """
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    name = name or runs.new_name()
    found, stages = dict[int, Prediction](), dict[int, Any]()
    todo = _corners(mesh or (job.world_size,))
    while todo:
        if (rank := todo.pop(0)) in found:
            continue
        left_s = None if limit_s is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise PredictionError(f"limit_s of {limit_s:.3g} s was over before rank {rank} was predicted: allow more.")
        try:
            this = dataclasses.replace(job, rank=rank, stages=stages)
            one = predict_step(step, card, name, conf, left_s, raises_oom, on_news, this, is_quiet)
        except PredictionError as error:
            error.args = (f"rank {rank} of {job.world_size}: {error}",)
            raise
        found[rank] = one
        stages.update(one.trace.notes.get(NOTES, {}).get("stages", ()))
        if not found.keys() - {0}:
            peers = one.trace.notes.get(NOTES, {}).get("peers", ())
            todo = [*peers[:: -(-len(peers) // MOST_RANKS)], *todo] if peers else todo
    return worst_of(found)


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


def predict_step(
    step: Callable[[], object],
    card: Card,
    name: str | None,
    conf: str,
    limit_s: float | None = None,
    raises_oom: bool = False,
    on_news: OnNews | None = None,
    job: ThisRank | None = None,
    is_quiet: bool = False,
) -> Prediction:
    """Predict a step, without listing it among the runs.

    `on_news` gets the child's messages; `job` is the rank of a job; `is_quiet` hides what the step prints.
    """
    dry_run.prepare()
    with Progress(card.name) as progress:

        def run(variant: Card, left_s: float | None, is_first: bool) -> ChildOutcome:
            child = Child(left_s, on_news or progress.show, is_quiet=is_quiet or not is_first)
            around = functools.partial(dry_run.dry_run, variant, conf, raises_oom, job)
            return child.run(functools.partial(_work, step, around))

        outcome, traces = dry_run.dry_runs(card, run, limit_s)
    return prediction_from(outcome, traces, name or runs.new_name(), card, conf)


def _work(step: Callable[[], object], around: Callable[[], Any], channel: Channel) -> bytes:
    with around() as finish:
        step()
    trace: bytes = finish()
    return trace


def configured(conf: str | None) -> str:
    """The value of PYTORCH_CUDA_ALLOC_CONF to simulate; invalid ones are refused before anything runs."""
    source, text = "conf", conf
    if conf is None:
        source = next((one for one in CONF if one in os.environ), CONF[0])
        text = os.environ.get(source, "")
    if not isinstance(text, str):
        raise PredictionError(f'conf is a text such as "expandable_segments:True", got {text!r:.80}.')
    try:
        parse_conf(text)
    except ConfError as error:
        raise PredictionError(f"{source}: {error}") from None
    return text


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
    until = "Predicted up to where the cell ended with an error" if raised else "Predicted"
    lines = [] if run.job is None else [f"Rank {run.job.rank} of {run.job.world_size:,}."]
    lines.append(f"{until}, nothing ran on a card: {verdict(found)}.")
    if found.out_of_memory and (error is None or error.name != "OutOfMemoryError"):  # which is said below
        may = "It would raise" if found.fits == "no" else "It may raise"
        lines.append(f"{may}: {found.out_of_memory.splitlines()[0]}")
    if outcome is not None:
        lines += outcome.notes
        lines += [f"The cell raised {error}."] if raised else []
        if outcome.refused:
            lines.append(f"Blocked in the child process: {'; '.join(outcome.refused)}.")
        if outcome.started:
            lines.append(f"Programs that it really started: {'; '.join(outcome.started)}.")
    run.finish(found.trace, lines)
    run.note("raised", raised)
    return run
