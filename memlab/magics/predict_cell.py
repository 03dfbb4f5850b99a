"""`%%memtrack --predict CARD`: predict a cell for a GPU, without one."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memlab.api.display import Progress
from memlab.api.oom import note_predicted_oom
from memlab.api.predict import configured, devices_of, note_fewest
from memlab.api.prediction import Prediction, failure, prediction_from
from memlab.api.runs import runs
from memlab.api.track import Options
from memlab.errors import BudgetExceeded, MemlabError
from memlab.magics.line_magics import usage_errors
from memlab.prediction.assumptions import assumed_in, check_given, fewest, parsed
from memlab.prediction.cards import Card, find
from memlab.prediction.child import Child, ChildOutcome
from memlab.prediction.child.work import Around
from memlab.prediction.dry_run import dry_run, dry_runs, prepare
from memlab.prediction.torch_versions import checked_version
from memlab.torch_internals.shell import show_as
from memlab.trace.file import loads
from memlab.units import format_bytes


class CellError(Exception):
    """A cell that failed in the child process; subclasses are named after the errors there."""


def predict_cell(
    shell: Any, asked: argparse.Namespace, wanted: Options, line: str, body: str, local: dict[str, Any] | None = None
) -> None:
    """Dry-run the body of a cell for a card, and show the report; the cell's own error propagates.

    `local` has the names of the function that contains the magic.
    """
    with usage_errors("memtrack --predict"):
        card, version, given = find(asked.predict), checked_version(asked.torch), parsed(asked.assume or ())
        conf = configured(None, version)
        devices = devices_of(1 if asked.devices is None else asked.devices)
    names = None if local is shell.user_ns else local  # those of a function
    prepare()
    with Progress(card.name) as progress:

        def run(variant: Card, left_s: float | None, is_first: bool, given: Mapping[str, Any] = given) -> ChildOutcome:
            around: Around = functools.partial(
                dry_run, variant, conf, asked.raises_oom, given=given, torch_version=version, devices=devices
            )
            if names is not None:
                around = functools.partial(_with_names, shell, names, around)
            child = Child(left_s, progress.show, is_quiet=not is_first)
            return child.run_cell(shell, body, around, f"%%memtrack {line}".strip())

        outcome, traces = dry_runs(card, run)
        found = None
        if traces:
            found = prediction_from(outcome, traces, wanted.name or runs.new_name(), card, conf)
            if outcome.error is None:
                with usage_errors("memtrack --predict"):
                    check_given(given, assumed_in(found.trace))
                _also_with_fewest(found, functools.partial(run, card, None, False), given)
    if found is not None:
        runs.add(found)
        found.cell_text = "" if names is not None else body
        error = outcome.error
        message = error.text if error is not None and error.name == "OutOfMemoryError" else ""
        if message or found.fits == "no":
            note_predicted_oom(found, card.name, message or found.out_of_memory)
        if wanted.save is not None:  # first: a terminal that cannot print the report must not cost the file
            found.save(wanted.save)
        if wanted.show is not False:
            found.report()._ipython_display_()
    _raise(outcome, found, wanted)


def _also_with_fewest(found: Prediction, run: Callable[..., ChildOutcome], given: Mapping[str, Any]) -> None:
    """If it may not fit, and sizes depend on values, predict it with the fewest elements, too."""
    least = fewest(found.trace) if found.fits != "yes" else {}
    if least:
        outcome = run(given={**given, **least})
        traces = [loads(outcome.result)] if outcome.result is not None and outcome.error is None else []
        note_fewest(
            found, least, prediction_from(outcome, traces, found.name, found.card, found.conf) if traces else None
        )


@contextlib.contextmanager
def _with_names(shell: Any, names: dict[str, Any], around: Around) -> Iterator[Any]:
    """In the child: use a function's names as if they were the notebook's."""
    shell.user_ns.update(names)
    with around() as finish:
        yield finish


def _raise(outcome: ChildOutcome, found: Prediction | None, wanted: Options) -> None:
    """The error of the cell, if there is one."""
    if outcome.error is not None:  # it has the name, text and traceback of the child's error; nothing is unpickled
        kind = type(outcome.error.name, (CellError,), {"__module__": "builtins"})
        raise show_as(kind(outcome.error.text), functools.partial(list, outcome.error.traceback))
    problem: MemlabError | None = None
    limit = wanted.budget_bytes
    if found is None:
        problem = failure(outcome)
    elif limit is not None and found.allocated_bytes[0] > limit:
        needs = format_bytes(found.allocated_bytes[0])
        text = f"run {found.name!r}: needs {needs} allocated, above its budget of {format_bytes(limit)}."
        problem = BudgetExceeded(text)
    if problem is not None:
        lines = [f"{type(problem).__name__}: {problem}", *getattr(problem, "__notes__", ())]
        try:
            raise show_as(problem, functools.partial(list, lines))
        finally:
            del problem  # otherwise the error holds this frame, and with it the user's objects
