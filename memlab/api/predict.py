"""`memlab.predict`: the memory of a step on a card, without a GPU; of a job, that of the ranks that may differ."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from memlab.allocator import ConfError, parse_conf
from memlab.analysis.summary import has_raised
from memlab.api.display import Progress
from memlab.api.prediction import Prediction, prediction_from, worst_of
from memlab.api.runs import runs
from memlab.api.watched_code import lines_at
from memlab.errors import PredictionError
from memlab.fake_cuda.gpus import MOST as MOST_DEVICES
from memlab.fake_cuda.process_groups import ThisRank as ThisRank
from memlab.prediction import dry_run
from memlab.prediction.assumptions import assumed_in, check_given, checked, fewest
from memlab.prediction.cards import Card, find
from memlab.prediction.child import Channel, Child, ChildOutcome
from memlab.prediction.child.runner import OnNews
from memlab.prediction.probe import NOTES
from memlab.prediction.torch_versions import checked_version
from memlab.units import format_bytes, one_line

CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""If both are set the first one counts: measured with PyTorch 2.12.1 on CUDA, unlike c10/core/AllocatorConfig.h says."""


@dataclass(frozen=True, slots=True)
class StepToPredict:
    """A step, the card that it is predicted for, and what is set there; `name` is that of the prediction, None for the next free.

    `on_news` gets the child's messages; `is_quiet` hides what the step prints. With `functions` the lines of these, of the
    script and of the notebook's cells are followed, which is slower. `given` has the values of `assume`; there are `devices` of
    the card. `torch_version` is one that was checked, "" that of this PyTorch. A step that `makes_all` that it uses finds the
    card empty, else what is on this machine's GPU is on it, too.
    """

    step: Callable[[], object]
    card: Card
    name: str | None
    conf: str
    _: KW_ONLY
    raises_oom: bool = False
    on_news: OnNews | None = None
    is_quiet: bool = False
    functions: Sequence[Callable[..., Any]] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    torch_version: str = ""
    devices: int = 1
    makes_all: bool = False


class TimeLimit:
    """What is left of a number of seconds, None for no limit."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._began = limit_s, time.monotonic()

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, perhaps negative; None without a limit."""
        return None if self._limit_s is None else self._limit_s - (time.monotonic() - self._began)

    def left_for(self, what: str) -> float | None:
        """The same; PredictionError if it was over before this was predicted."""
        left_s = self.left_s
        if left_s is not None and left_s <= 0:
            raise PredictionError(f"limit_s of {self._limit_s:.3g} s was over before {what} was predicted: allow more.")
        return left_s


def predict_step(what: StepToPredict, limit_s: float | None = None, job: ThisRank | None = None) -> Prediction:
    """Predict a step, without listing it among the runs; `job` is the rank of a job that it is."""
    step, card, conf, functions = what.step, what.card, what.conf, what.functions
    make_lines = None if functions is None else lambda: lines_at(sys._getframe(), functions)
    dry_run.prepare()
    with Progress(card.name) as progress:

        def run(variant: Card, left_s: float | None, is_first: bool) -> ChildOutcome:
            child = Child(left_s, what.on_news or progress.show, is_quiet=what.is_quiet or not is_first)
            how: dict[str, Any] = {"torch_version": what.torch_version, "devices": what.devices, "given": what.given}
            how |= {"raises_oom": what.raises_oom, "job": job, "make_lines": make_lines if is_first else None}
            how["makes_all"] = what.makes_all

            def work(channel: Channel) -> bytes:  # it is sent to the child, with all that it names
                with dry_run.dry_run(variant, conf, **how) as finish:
                    step()
                return finish()

            return child.run(work)

        outcome, traces = dry_run.dry_runs(card, run, limit_s)
    found = prediction_from(outcome, traces, what.name or runs.new_name(), card, conf)
    check_given(what.given, assumed_in(found.trace))
    return found


def predict_both_ends(what: StepToPredict, limit_s: float | None = None) -> Prediction:
    """Predict a step; if it may not fit, and sizes in it depend on values, also with the fewest elements.

    What fits with the largest sizes, which are assumed, fits with all, and is predicted once.
    """
    limit = TimeLimit(limit_s)
    found = predict_step(what, limit_s)
    least = fewest(found.trace) if found.fits != "yes" else {}
    left_s = limit.left_s
    if least and (left_s is None or left_s > 0):
        other = None
        fewer = replace(what, raises_oom=False, functions=None, is_quiet=True, given={**what.given, **least})
        with contextlib.suppress(PredictionError):  # without any element a program may fail
            other = predict_step(fewer, left_s)
        note_fewest(found, least, other)
    return found


def note_fewest(found: Prediction, least: Mapping[str, Any], other: Prediction | None) -> None:
    """Record what it would need with the fewest elements; None if it could not be predicted with them."""
    if other is None or has_raised(other.trace):
        return
    low, high = other.allocated_bytes.low, found.allocated_bytes.high
    keys = ", ".join(one_line(key, 80) for key in least)
    between = f"between {format_bytes(low)} (fewest) and {format_bytes(high)} (most) allocated"
    text = f"Sizes depend on assumed values ({keys}): {between}."
    found.note("notes", [*found.trace.notes.get("notes", ()), text])
    found.note("fewest", {"fits": other.fits, "allocated_bytes": list(other.allocated_bytes), "keys": list(least)})


def configured(conf: str | None, torch_version: str = "") -> str:
    """The value of PYTORCH_CUDA_ALLOC_CONF to simulate; what this version of PyTorch refuses is refused before anything runs."""
    source, text = "conf", conf
    if conf is None:
        source = next((one for one in CONF if one in os.environ), CONF[0])
        text = os.environ.get(source, "")
    if not isinstance(text, str):
        raise PredictionError(f'conf is a text such as "expandable_segments:True", got {text!r:.80}.')
    try:
        parse_conf(text, torch_version)
    except ConfError as error:
        raise PredictionError(f"{source}: {error}") from None
    return text


MOST_RANKS = 16
"""So many stages of a pipeline are predicted at most, and corners of a mesh; of more every second or third, and so on."""

_MOST_WORLD_SIZE = 1 << 20


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
    assume: Mapping[str, float] | None = None,
    torch_version: str | None = None,
    devices: int = 1,
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

    With `devices` the step finds so many of the card, as cuda:0, cuda:1 and so on, for a model that is spread over them by
    `.to("cuda:1")` or a `device_map`. Each has its peaks in `by_device`; the prediction is that of the one that needs most, and
    fits if all do.

    `assume` has values to take for those that only a GPU computes, by the keys under which the report lists them:
    `{"train.py:41 nonzero": 250}`. Raises PredictionError if there is no such key, or the value is outside of its bounds.

    `torch_version` is the PyTorch that will run there, "2.10" to "2.15" or in full ("2.12.1+cu130"), by default the one that
    runs here: the order of equal free blocks and the workspaces of cuBLAS are those of that release, operators and kernels
    those of this one, which the assumptions say. Before 2.12 *reserved* hangs on where the driver puts segments, and is a range.
    """
    if not callable(step):
        raise PredictionError(
            f"predict needs a function without arguments, got {type(step).__name__}: pass lambda: ..."
        )
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step) or inspect.isasyncgenfunction(step):
        why = "predict calls the step once, which does nothing for `async` functions and generators"
        raise PredictionError(f"{why}: wrap it.")
    where, version = find(card), checked_version(torch_version)
    conf, given = configured(conf, version), checked(assume)
    how: dict[str, Any] = {"raises_oom": raises_oom, "given": given, "torch_version": version}
    if world_size is None:
        prediction = predict_both_ends(
            StepToPredict(step, where, name, conf, devices=devices_of(devices), **how), limit_s
        )
    elif devices != 1:
        why = "devices and world_size do not go together: a rank is predicted with one GPU"
        raise PredictionError(f"{why}, give one of them.")
    else:
        mesh = mesh_of(world_size)
        job = first_rank(math.prod(mesh), local_world_size)
        prediction = predict_ranks(StepToPredict(step, where, name, conf, **how), job, limit_s, mesh)
    runs.add(prediction)
    return prediction


def devices_of(devices: object) -> int:
    """The number of GPUs of a program, checked."""
    if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
        raise PredictionError(f"devices is a number of GPUs, 1 to {MOST_DEVICES}, got {devices!r:.80}.")
    return devices


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


def corners(mesh: Sequence[int]) -> list[int]:
    """The ranks at the corners of a mesh, whose last dimension counts fastest; the first and the last are among them."""
    ranks = [0]
    for size in mesh:
        ranks = [rank * size + place for rank in ranks for place in sorted({0, size - 1})]
    every = -(-len(ranks) // MOST_RANKS) | 1  # odd, or all of them would be at the same end of the last dimension
    return [*ranks[:-1][::every], ranks[-1]]


def predict_ranks(
    what: StepToPredict, job: ThisRank, limit_s: float | None = None, mesh: Sequence[int] = ()
) -> Prediction:
    """Predict the ranks of a job that may differ; the prediction of the one that needs most, which has all of them.

    They are the corners of the mesh that the ranks form, by default of one dimension, and those to which the first one sends.
    """
    limit = TimeLimit(limit_s)
    what = dataclasses.replace(what, name=what.name or runs.new_name())
    found, stages = dict[int, Prediction](), dict[int, Any]()
    todo = corners(mesh or (job.world_size,))
    while todo:
        if (rank := todo.pop(0)) in found:
            continue
        left_s = limit.left_for(f"rank {rank}")
        try:
            one = predict_step(what, left_s, dataclasses.replace(job, rank=rank, stages=stages))
        except PredictionError as error:
            error.args = (f"rank {rank} of {job.world_size}: {error}",)
            raise
        found[rank] = one
        stages.update(one.trace.notes.get(NOTES, {}).get("stages", ()))
        if not found.keys() - {0}:
            peers = one.trace.notes.get(NOTES, {}).get("peers", ())
            todo = [*peers[:: -(-len(peers) // MOST_RANKS)], *todo] if peers else todo
    return worst_of(found)
