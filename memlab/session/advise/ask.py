"""Asking for advice: what is asked about, within which bounds, and the search that answers."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from memlab.errors import MemlabError
from memlab.predictor.cards import Card, find
from memlab.savings import techniques
from memlab.session.advise.advice import Advice
from memlab.session.advise.again import OfStep
from memlab.session.advise.candidates import candidates
from memlab.session.advise.search import Search, level
from memlab.session.advise.subject import OfWork, Subject, card_of, here, of_trial, of_work
from memlab.session.predict import Prediction, asks_for_nothing
from memlab.session.progress import Progress
from memlab.session.run import Run
from memlab.units import format_bytes, format_seconds, parse_bytes
from memlab.workloads.workload import Workload

LIMIT_S = 300.0
"""An advice takes no longer, unless it is told."""


def advise(
    what: Any,
    target: str | int | None = None,
    *,
    card: str | Card | None = None,
    techniques: Iterable[str] | None = None,
    allow_changes: bool = False,
    habits: Iterable[str] = (),
    size: str = "laptop",
    settings: dict[str, Any] | None = None,
    steps: int = 2,
    limit_s: float = LIMIT_S,
) -> Advice:
    """Which techniques save memory here, found by running the work with each of them, and how to reach `target` ("8GiB").

    `what` is a workload (a name, a Workload, or a function that gives model, optimizer, batch and loss), a step (a function
    without arguments, run in a child process), or the run of a `%%memtrack` cell, a prediction of one, or a run of the Lab.
    With `card` everything is predicted for it, and the target is of what the device uses; else it is measured here, and the
    target is of *allocated*. `techniques` names those to try; by default those that attack what holds the peak, without those that
    change training unless `allow_changes`. `habits`, `size`, `settings` and `steps` are those of a workload. It ends
    after `limit_s` seconds, or when interrupted, with what was found until then.
    """
    _check(steps, limit_s)
    began = time.monotonic()
    target_bytes = None if target is None else parse_bytes(target)
    named = None if techniques is None else _known([techniques] if isinstance(techniques, str) else techniques)
    on = None if card is None else find(card)
    with Trying(limit_s) as trying:
        subject, before = _begun(what, on, size, settings or {}, steps, _known(habits), trying, began + limit_s)
        target_bytes, of, notes = _goal(before, target_bytes)
        search = Search(subject, of, trying.say, began + limit_s, target_bytes)
        search.begin(before)
        names, left_out = candidates(subject, search.shares, of, named, allow_changes)
        if target_bytes is None or max(search.before_bytes) > target_bytes:
            search.go(names)
        notes += list(_said(what, search))
        found = search.findings(left_out, notes, time.monotonic() - began)
    return Advice(found, subject, before, search.best)


def _check(steps: Any, limit_s: Any) -> None:
    if type(steps) is not int or not 1 <= steps <= 100:
        raise MemlabError(f"steps is a number from 1 to 100, got {steps!r:.80}.")
    if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not 0 < limit_s < math.inf:
        raise MemlabError(f"limit_s is a number of seconds above 0, got {limit_s!r:.80}.")


def _known(names: Iterable[str]) -> list[str]:
    return [techniques[name].name for name in ([names] if isinstance(names, str) else names)]


# --- what is asked about -----------------------------------------------------------------------------------------------------


def _begun(
    what: Any,
    on: Card | None,
    size: str,
    settings: dict[str, Any],
    steps: int,
    habits: list[str],
    trying: Trying,
    deadline: float,
) -> tuple[Subject, Run]:
    """The subject, and the run of it as it is: whether a function gives the parts of a workload is known when it has run."""
    gives_parts: list[bool] = []
    subject: Subject
    if isinstance(what, Run):
        subject = _of_run(what, on, steps)
    elif isinstance(what, str | Workload):
        subject = of_work(what, size, settings, on or here(), steps, habits)
    elif callable(what):
        name = str(getattr(what, "__name__", type(what).__name__))
        subject = OfStep(name, on or "cpu", what, on_parts=lambda: gives_parts.append(True))
    else:
        raise MemlabError(f"advise needs a workload, a step or a run, got {type(what).__name__}: {what!r:.80}")
    if (settings or habits) and isinstance(what, Run):
        raise MemlabError("settings and habits are those of a workload: leave them out for a run.")
    before = _first(subject, trying, deadline)
    if gives_parts:
        subject = of_work(what, size, settings, on or here(), steps, habits)
        before = _first(subject, trying, deadline)
    return subject, before


def _first(subject: Subject, trying: Trying, deadline: float) -> Run:
    trying.say("as it is")
    before = subject.attempt((), lambda text: trying.say(f"as it is, {text}"), max(deadline - time.monotonic(), 0.001))
    if isinstance(before, Prediction) and asks_for_nothing(before.forecast):
        raise MemlabError(
            f'it asked nothing of {before.card.name}: is it written for "cuda"? Without card= it is measured here.'
        )
    if not before.devices or not level(before, "allocated")[1]:
        raise MemlabError("it used no memory that can be saved.")
    return before


def _of_run(run: Run, on: Card | None, steps: int) -> Subject:
    """The subject of a run: its cell's text, or the workload that it was of."""
    if isinstance(run.trace.notes.get("trial"), dict) and "workload" in run.trace.notes["trial"]:
        return of_trial(run, on, steps)
    if run.again:
        return OfStep(run.name, on or card_of(run) or "cpu", text=run.again)
    what = "prediction of a step" if isinstance(run, Prediction) else "run of a block"
    raise MemlabError(
        f"run {run.name!r} cannot be run again: a {what}, or from a file. Pass the step itself, memlab.advise(step), "
        "or the run of a %%memtrack cell."
    )


def _goal(before: Run, target_bytes: int | None) -> tuple[int | None, str, list[str]]:
    """The target, and of which peak it is: for a card of what the device uses, and by default what the card has."""
    if not isinstance(before, Prediction):
        return target_bytes, "allocated", []
    if target_bytes is not None:
        return target_bytes, "device", []
    if before.fits != "yes":
        usable = before.card.usable_bytes
        return usable, "device", [f"No target was named: it is what {before.card.name} has, {format_bytes(usable)}."]
    return None, "allocated", []


def _said(what: Any, search: Search) -> Iterator[str]:
    """What is to be known beside the figures."""
    if isinstance(what, Run) and isinstance(search.subject, OfStep) and isinstance(search.subject.on, str):
        first, again = what.peak_allocated_bytes, search.before_bytes[0]
        if abs(first - again) * 50 > max(first, again):
            yield (
                f"Run again, the cell peaks at {format_bytes(again)}; the first time it was {format_bytes(first)}, as the "
                "notebook held something else then."
            )
        yield "Seconds are those of the tracked cell; its values were not compared."
    if isinstance(search.subject, OfWork) and isinstance(search.subject.on, Card):
        yield "Predicted: seconds and results were not checked. advice.measure() runs it here."


class Trying(Progress):
    """One line that tells what is being tried."""

    def __init__(self, limit_s: float) -> None:
        super().__init__("advice")
        self._limit_s, self._count = limit_s, 0
        self._last_s = -1.0

    def say(self, text: str) -> None:
        """Show what is being tried; at most five times a second."""
        self._count += "," not in text
        took_s = time.monotonic() - self._begin
        if took_s < 1.0 or took_s - self._last_s < 0.2:
            return
        self._last_s = took_s
        with contextlib.suppress(Exception):  # a front end that fails must not end the search
            self._write(f"advising: {format_seconds(took_s)} of at most {format_seconds(self._limit_s)}, {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end = f"advice: {self._count} runs in {format_seconds(time.monotonic() - self._begin)}"
        with contextlib.suppress(Exception):
            if self._place is not None:
                self._place.update({"text/plain": end}, raw=True)
            elif self._width:
                sys.stderr.write(f"\r{' ' * self._width}\r")
                sys.stderr.flush()
