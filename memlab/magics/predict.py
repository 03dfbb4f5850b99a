"""`%%memtrack --predict CARD`: a cell on a card that is not there."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from IPython.core.error import UsageError

from memlab.errors import BudgetExceeded, MemlabError
from memlab.predictor import child
from memlab.predictor.cards import Card, find
from memlab.predictor.child import ChildError, Outcome
from memlab.predictor.child.step import Around
from memlab.predictor.rehearsal import prepare, rehearsal
from memlab.session.predict import Prediction, configured, failure, finished
from memlab.session.progress import Progress
from memlab.session.runs import runs
from memlab.session.track import Options
from memlab.units import format_bytes


class CellError(Exception):
    """A cell that failed in the child process; its classes are named after the errors there."""


def predict_cell(
    shell: Any, asked: argparse.Namespace, wanted: Options, line: str, body: str, local: dict[str, Any] | None = None
) -> None:
    """Rehearse the body of a cell for a card, and show the report; the cell's own error goes out, as from any cell.

    `local` has the names of the function in which the magic stands.
    """
    card = _card(asked)
    conf = _conf()
    prepare()
    around: Around = functools.partial(rehearsal, card, conf, asked.raises_oom)
    if local is not None and local is not shell.user_ns:
        around = functools.partial(_with_names, shell, local, around)
    with Progress(card.name) as progress:
        outcome = child.run_cell(shell, body, around, on_frame=progress.show, above=f"%%memtrack {line}".strip())
    found = None
    if outcome.result is not None:
        found = finished(outcome, wanted.name or runs.new_name(), card, conf)
        found.again = "" if local is not None and local is not shell.user_ns else body
        _show(found, wanted)
    _raise(outcome, found, wanted)


@contextlib.contextmanager
def _with_names(shell: Any, names: dict[str, Any], around: Around) -> Iterator[Any]:
    """In the child: the names of a function, as if they were the notebook's."""
    shell.user_ns.update(names)
    with around() as finish:
        yield finish


def _card(asked: argparse.Namespace) -> Card:
    try:
        return find(asked.predict)
    except MemlabError as error:
        raise UsageError(f"%memtrack --predict: {error}") from None


def _conf() -> str:
    try:
        return configured(None)
    except MemlabError as error:
        raise UsageError(f"%memtrack --predict: {error}") from None


def _show(found: Prediction, wanted: Options) -> None:
    if wanted.show is not False:
        found.report()._ipython_display_()
    if wanted.save is not None:
        found.save(wanted.save)


def _raise(outcome: Outcome, found: Prediction | None, wanted: Options) -> None:
    """What the cell ends with, if it does not end well."""
    if outcome.error is not None:
        raise _as_raised(outcome.error)
    if found is None:
        raise _in_one_line(failure(outcome))
    limit = wanted.budget_bytes
    if limit is not None and found.allocated_bytes[0] > limit:
        needs = format_bytes(found.allocated_bytes[0])
        text = f"run {found.name!r}: needs {needs} allocated, above its budget of {format_bytes(limit)}."
        raise _in_one_line(BudgetExceeded(text))


def _in_one_line(error: MemlabError) -> MemlabError:
    """The error, which the shell shows without our frames."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


def _as_raised(error: ChildError) -> CellError:
    """An error with the name, the text and the traceback of the one in the child; nothing of it is rebuilt."""

    def shown(self: Any) -> list[str]:
        return list(error.traceback)

    kind = type(error.name, (CellError,), {"_render_traceback_": shown, "__module__": "builtins"})
    raised: CellError = kind(error.text)
    return raised
