"""One step, predicted in a child process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from memlab.allocator import ConfError, parse_conf
from memlab.analysis.summary import has_raised
from memlab.api.display import Progress
from memlab.api.prediction import Prediction, prediction_from
from memlab.api.runs import runs
from memlab.api.watched_code import lines_at
from memlab.errors import PredictionError
from memlab.fake_cuda.process_groups import ThisRank
from memlab.prediction import dry_run
from memlab.prediction.assumptions import assumed_in, check_given, fewest
from memlab.prediction.cards import Card
from memlab.prediction.child import Channel, Child, ChildOutcome
from memlab.prediction.child.runner import OnNews
from memlab.units import format_bytes, one_line

CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""If both are set the first one counts: measured with PyTorch 2.12.1 on CUDA, unlike c10/core/AllocatorConfig.h says."""


@dataclass(frozen=True, slots=True)
class StepToPredict:
    """A step, the card that it is predicted for, and what is set there; `name` is that of the prediction, None for the next free.

    `on_news` gets the child's messages; `is_quiet` hides what the step prints. With `functions` the lines of these, of the
    script and of the notebook's cells are followed, which is slower. `given` has the values of `assume`; there are `devices` of
    the card. `torch_version` is one that was checked, "" that of this PyTorch.
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
