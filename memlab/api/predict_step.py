"""One step, predicted in a child process."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from memlab.probes.line_marks import Lines
from memlab.units import format_bytes, one_line

CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""If both are set the first one counts: measured with PyTorch 2.12.1 on CUDA, unlike c10/core/AllocatorConfig.h says."""


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
    functions: Sequence[Callable[..., Any]] | None = None,
    given: Mapping[str, Any] | None = None,
    torch_version: str = "",
    devices: int = 1,
) -> Prediction:
    """Predict a step, without listing it among the runs.

    `on_news` gets the child's messages; `job` is the rank of a job; `is_quiet` hides what the step prints. With `functions` the
    lines of these, of the script and of the notebook's cells are followed, which is slower. `given` has the values of `assume`;
    there are `devices` of the card. `torch_version` is one that was checked, "" that of this PyTorch.
    """
    make_lines = None if functions is None else functools.partial(_lines_of, functions)
    dry_run.prepare()
    with Progress(card.name) as progress:

        def run(variant: Card, left_s: float | None, is_first: bool) -> ChildOutcome:
            child = Child(left_s, on_news or progress.show, is_quiet=is_quiet or not is_first)
            followed = make_lines if is_first else None
            around = functools.partial(
                dry_run.dry_run, variant, conf, raises_oom, job, followed, given, torch_version, devices
            )
            return child.run(functools.partial(_work, step, around))

        outcome, traces = dry_run.dry_runs(card, run, limit_s)
    found = prediction_from(outcome, traces, name or runs.new_name(), card, conf)
    check_given(given or {}, assumed_in(found.trace))
    return found


def predict_both_ends(
    step: Callable[[], object],
    card: Card,
    name: str | None,
    conf: str,
    limit_s: float | None = None,
    raises_oom: bool = False,
    functions: Sequence[Callable[..., Any]] | None = None,
    given: Mapping[str, Any] | None = None,
    torch_version: str = "",
    devices: int = 1,
) -> Prediction:
    """Predict a step; if it may not fit, and sizes in it depend on values, also with the fewest elements.

    What fits with the largest sizes, which are assumed, fits with all, and is predicted once.
    """
    began = time.monotonic()
    predicting = functools.partial(predict_step, step, card, name, conf, torch_version=torch_version, devices=devices)
    found = predicting(limit_s, raises_oom, functions=functions, given=given)
    least = fewest(found.trace) if found.fits != "yes" else {}
    left_s = None if limit_s is None else limit_s - (time.monotonic() - began)
    if least and (left_s is None or left_s > 0):
        other = None
        with contextlib.suppress(PredictionError):  # without any element a program may fail
            settings = {**(given or {}), **least}
            other = predicting(left_s, raises_oom, is_quiet=True, given=settings)
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


def _lines_of(functions: Sequence[Callable[..., Any]]) -> Lines:
    return lines_at(sys._getframe(), functions)


def _work(step: Callable[[], object], around: Callable[[], Any], channel: Channel) -> bytes:
    with around() as finish:
        step()
    trace: bytes = finish()
    return trace


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
