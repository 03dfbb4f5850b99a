"""What a press of Run does: the baseline where it is not known yet, the chosen techniques, and the comparison of the two.

It shows nothing: it tells how far it is, and fills the table.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.errors import DoesNotApply, MemlabError
from memlab.lab.room import check_room
from memlab.lab.state import Choices, State
from memlab.lab.table import Row, Table
from memlab.predictor.cards import Card
from memlab.savings import techniques
from memlab.session import trial as trials
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.units import one_line
from memlab.workloads.job import seeded

Tell = Callable[[str, int, int], None]
"""Hears what is being run, how many of its steps are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it: the row, that of the baseline, their comparison, and what prevented one of them."""

    row: Row
    baseline: Row | None = None
    comparison: Any = None
    problem: BaseException | None = None


class Experiment:
    """Runs what a state says, and keeps each run as a row."""

    def __init__(self, choices: Choices, table: Table, tell: Tell) -> None:
        self._choices, self._table, self._tell = choices, table, tell

    def __call__(self, state: State) -> Found:
        """Run it. What fails is in the result, after the baseline has been kept."""
        check_room(self._choices, state, self._tell)
        _warm_up()
        before = self._baseline(state)
        if not state.techniques:
            row, problem = self._tried(state, (), ())
            before = before if before is not None and before.name == state.baseline else None
        else:
            row, problem = self._tried(state, *_left_out_at_once(state))
        return self.compared(before, row, problem)

    def compared(self, before: Row | None, row: Row, problem: BaseException | None = None) -> Found:
        """The second row against the first, and noted in it."""
        if before is None or before.run is None or row.run is None:
            return Found(row, before, problem=problem)
        try:
            comparison = compare(before.run, row.run)
            noted = row.compared(comparison)
        except Exception as error:  # the runs are there all the same
            return Found(row, before, problem=problem or error)
        self._table.replace(row, noted)
        return Found(noted, before, comparison, problem)

    def _baseline(self, state: State) -> Row | None:
        """The pinned run, else the job as it is without the techniques, from the table where it stands there."""
        if state.baseline:
            return self._table[state.baseline]
        if not state.techniques:
            return None
        habits = tuple(trials.habits_of(state.techniques))
        known = (row for row in reversed(self._table.rows) if _is_baseline(row, state, habits))
        if (row := next(known, None)) is not None:
            return row
        row, problem = self._tried(dataclasses.replace(state, techniques=()), (), habits)
        if problem is not None:
            raise problem
        return row

    def _tried(
        self,
        state: State,
        chosen: tuple[str, ...],
        habits: tuple[str, ...],
        left_out: Mapping[str, str] | None = None,
    ) -> tuple[Row, BaseException | None]:
        """The row of a run; a technique that finds nothing to change is left out, where there are others.

        The habit that it would have replaced stays then, as the baseline has it.
        """
        left_out = dict(left_out or {})
        try:
            run = self._run(state, chosen, habits)
        except DoesNotApply as error:
            found = culprit(str(error), chosen) or self._each_alone(state, chosen)
            fewer = tuple(one for one in chosen if one not in found)
            if found and fewer:
                left_out |= found
                return self._tried(state, fewer, tuple(trials.habits_of(left_out)), left_out)
            return self._failed(state, chosen, habits, left_out, error)
        except Exception as error:
            return self._failed(state, chosen, habits, left_out, error)
        row = Row.of(run, state, chosen, habits, left_out=left_out)
        self._table.add(row, state.baseline)
        return row, None

    def _each_alone(self, state: State, chosen: tuple[str, ...]) -> dict[str, str]:
        """Technique -> why it does not apply, for an error of a step, which does not say whose it is: one step of each."""
        found: dict[str, str] = {}
        for name in chosen if len(chosen) > 1 else ():
            self._tell(f"trying {name} alone", 0, 1)
            try:
                work, on = self._choices.work(state), self._choices.on(state)
                runs.discard(trials.trial(work, (name,), (), on=on, steps=1, timed=False))
            except DoesNotApply as error:
                found[name] = str(error)
        return found

    def _failed(
        self, state: State, chosen: tuple[str, ...], habits: tuple[str, ...], left_out: dict[str, str], error: Exception
    ) -> tuple[Row, BaseException]:
        name = self._table.new_name(name_of(self._choices.work(state), chosen, habits, state))
        row = Row(name, state, chosen, habits, left_out, error=said(error))
        self._table.add(row, state.baseline)
        return row, error

    def _run(self, state: State, chosen: tuple[str, ...], habits: tuple[str, ...]) -> Run:
        work, on = self._choices.work(state), self._choices.on(state)
        name = self._table.new_name(name_of(work, chosen, habits, state))
        what = f"{'predicting' if isinstance(on, Card) else 'measuring'} {name}"
        self._tell(what, 0, state.steps)
        return trials.trial(
            work,
            chosen,
            habits,
            on=on,
            steps=state.steps,
            name=name,
            on_step=lambda done, total: self._tell(what, done, total),
        )


def compare(a: Run, b: Run) -> Any:
    """The comparison of two runs."""
    from memlab.session.compare import compare as compared

    return compared(a, b)


def name_of(work: trials.Work, chosen: tuple[str, ...], habits: tuple[str, ...], state: State) -> str:
    """What a run is called."""
    name = " + ".join([str(work), *chosen, *(f"habit of {one}" for one in habits)])
    return name if state.device == "cpu" else f"{name} on {state.card if state.device == 'card' else state.device}"


@functools.cache
def _warm_up() -> None:
    """What the first step of a process pays for all: else the first run would look slower than those after it.

    Optimizers import torch._dynamo at their first use (torch/_compile.py), which takes longer than many a small run.
    """
    with seeded(), torch.enable_grad():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.zeros(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _is_baseline(row: Row, state: State, habits: tuple[str, ...]) -> bool:
    def work(of: State) -> tuple[Any, ...]:
        card = of.card if of.device == "card" else ""
        return of.workload, of.size, dict(of.settings), of.device, card, of.steps

    return row.run is not None and not row.techniques and row.habits == habits and work(row.state) == work(state)


def _left_out_at_once(state: State) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """The techniques that can be run here; a switch of CUDA's allocator can only be predicted, once that has started."""
    if state.device == "card":
        return state.techniques, (), {}
    why = "it is said to CUDA's allocator before it starts: predict it for a card"
    without = {name: why for name in state.techniques if techniques[name].conf}
    rest = tuple(name for name in state.techniques if name not in without)
    return (rest, tuple(trials.habits_of(without)), without) if rest else (state.techniques, (), {})


def culprit(text: str, chosen: tuple[str, ...]) -> dict[str, str]:
    """The technique with whose name the error begins, as it does where one is switched on, and why it does not apply."""
    found = re.match(r"(\w+): (.*)", text, re.DOTALL)
    return {found[1]: found[2]} if found and found[1] in chosen else {}


def said(error: BaseException) -> str:
    """An error in one line."""
    text = one_line(" ".join(str(error).split()), 500)
    if isinstance(error, MemlabError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def details(error: BaseException | None) -> str:
    """What there is beside the line: the traceback; of an error of ours, which says all in its line, its notes."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    if isinstance(error, MemlabError):
        return "\n".join(getattr(error, "__notes__", ()))
    return "".join(traceback.format_exception(error))
