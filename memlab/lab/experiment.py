"""One experiment: run the baseline, then the chosen techniques, and compare them."""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.api import workload_run
from memlab.api.compare import compare
from memlab.api.display import LevelNow
from memlab.api.run import Run
from memlab.errors import DoesNotApply, MemlabError
from memlab.lab.run_table import LabRun, RunTable
from memlab.lab.state import LabChoices, LabState
from memlab.lab.worker import OnProgress
from memlab.prediction.cards import Card
from memlab.probes.host import HostMemory
from memlab.saving_techniques import techniques
from memlab.units import GiB, TiB, format_bytes, one_line
from memlab.workloads.job import seeded

USABLE_SHARE = 0.8
"""A share of the host's free memory: a kernel that runs out of it is killed without a message."""
LEAST_BYTES = GiB
"""The free memory required for a run of laptop size, whose need is not predicted."""


class HostMemoryTooSmall(MemlabError):
    """A run may take more memory than the host has."""


@dataclass(frozen=True, slots=True)
class LabResult:
    """A run, its baseline, their comparison, what prevented one of them, and a remark."""

    row: LabRun
    baseline: LabRun | None = None
    comparison: Any = None
    problem: BaseException | None = None
    remark: str = ""


class Experiment:
    """Runs what a state describes, and keeps each run as a row."""

    def __init__(
        self, choices: LabChoices, table: RunTable, tell: OnProgress, on_level: Callable[[LevelNow], None]
    ) -> None:
        self._choices, self._table, self._tell, self._on_level = choices, table, tell, on_level
        self._pinned = ""  # never dropped to bound memory

    def __call__(self, state: LabState) -> LabResult:
        """Run it. An error is part of the result, and the baseline is kept; interrupts propagate."""
        self._check_host_memory(state)
        _warm_up()
        self._pinned, remark = state.baseline, ""
        if state.baseline and not self._table[state.baseline].state.is_comparable(state):
            remark = f"{state.baseline!r} is pinned but not compared: its workload, size or device differs."
            state = dataclasses.replace(state, baseline="")
        before = self._baseline(state)
        row, problem = self._tried(state, state.techniques, ())
        return dataclasses.replace(self.compared(before, row, problem), remark=remark)

    def compared(self, before: LabRun | None, row: LabRun, problem: BaseException | None = None) -> LabResult:
        """Compare the second row with the first and store the outcome in it."""
        if before is None or before.run is None or row.run is None:
            return LabResult(row, before, problem=problem)
        try:
            comparison = compare(before.run, row.run)
            compared_row = row.compared(comparison)
        except Exception as error:  # the runs exist all the same
            return LabResult(row, before, problem=problem or error)
        self._table.replace(row, compared_row)
        return LabResult(compared_row, before, comparison, problem)

    def _check_host_memory(self, state: LabState) -> None:
        """Raise HostMemoryTooSmall if a run on the CPU may need more host memory than is free."""
        if state.device != "cpu" or state.force:
            return
        free_bytes = HostMemory().read().available_bytes
        work, needed_bytes, is_large = self._choices.work(state), LEAST_BYTES, state.size == "card"
        if is_large:
            # The peak of the job without its techniques, predicted; the CPU's kernels may need a little more. Later
            # cards than this one have larger workspaces.
            host = Card("this host", total_bytes=TiB, compute_capability=(8, 6))
            habits = tuple(workload_run.baseline_patterns_of(state.techniques))
            on_card = dataclasses.replace(state, device="card")
            run = self._run(on_card, (), habits, f"how much memory {work} needs", steps=1, on=host, keep=False)
            needed_bytes = run.peak_bytes
        if needed_bytes > USABLE_SHARE * free_bytes:
            need = f"{'needs about' if is_large else 'should have'} {format_bytes(needed_bytes)} on the host"
            raise HostMemoryTooSmall(
                f"{work} {need}, and {format_bytes(free_bytes)} is free: the kernel may be killed. Take a smaller size "
                "or batch, predict it for a GPU, or tick "
                '"measure even if host memory may not be enough" (force=True).'
            )

    def _baseline(self, state: LabState) -> LabRun | None:
        """The pinned run, else the job without the techniques."""
        if state.baseline:
            return self._table[state.baseline]
        if not state.techniques:
            return None
        habits = tuple(workload_run.baseline_patterns_of(state.techniques))
        plain = dataclasses.replace(state, techniques=())
        for row in reversed(self._table.rows):
            like = dataclasses.replace(
                row.state, card=plain.card, force=plain.force, baseline="", world_size=plain.world_size
            )
            is_same = dataclasses.replace(like, torch_version=plain.torch_version) == plain
            if row.run is not None and row.habits == habits and is_same and row.state.place == plain.place:
                return row
        row, problem = self._tried(plain, (), habits)
        if problem is not None:
            raise problem
        return row

    def _tried(
        self,
        state: LabState,
        chosen: tuple[str, ...],
        habits: tuple[str, ...],
        left_out: Mapping[str, str] | None = None,
    ) -> tuple[LabRun, BaseException | None]:
        """The row of a run, without the techniques that find nothing to change, if there are others.

        The baseline patterns of those stay, as in the baseline.
        """
        left_out, problem = dict(left_out or {}), None
        said = techniques.said(chosen, state.world_size)
        parts = [str(self._choices.work(state)), *said, *(f"habit of {one}" for one in habits)]
        name = " + ".join(parts) if state.device == "cpu" else f"{' + '.join(parts)} on {state.place}"
        name = self._table.new_name(name)
        what = f"{'predicting' if state.device == 'card' else 'measuring'} {name}"
        try:
            run = self._run(state, chosen, habits, what, steps=state.steps, name=name)
            row = LabRun.of(run, state, chosen, habits, left_out=left_out)
        except Exception as error:
            inapplicable = self._inapplicable(error, state, chosen) if isinstance(error, DoesNotApply) else {}
            if inapplicable and (fewer := tuple(one for one in chosen if one not in inapplicable)):
                left_out |= inapplicable
                return self._tried(state, fewer, tuple(workload_run.baseline_patterns_of(left_out)), left_out)
            row, problem = LabRun(name, state, chosen, habits, left_out, error=error_line(error)), error
        self._table.add(row, self._pinned)
        return row, problem

    def _inapplicable(self, error: DoesNotApply, state: LabState, chosen: tuple[str, ...]) -> dict[str, str]:
        """Technique -> why it does not apply: the one named in the error, else those that fail alone."""
        named = re.match(r"(\w+): (.*)", str(error), re.DOTALL)
        if named and named[1] in chosen:
            return {named[1]: named[2]}
        reasons: dict[str, str] = {}
        for name in chosen if len(chosen) > 1 else ():
            try:
                self._run(state, (name,), (), f"trying {name} alone", steps=1, timed=False, keep=False)
            except DoesNotApply as why:
                reasons[name] = str(why)
        return reasons

    def _run(
        self, state: LabState, chosen: tuple[str, ...], habits: tuple[str, ...], what: str, *, steps: int, **more: Any
    ) -> Run:
        """Run it, on the device of the state or `on` another one, and report progress."""
        self._tell(what, 0, steps)
        told = functools.partial(self._tell, what)
        more = {"on": self._choices.on(state), "on_step": told, "steps": steps, "world_size": state.world_size, **more}
        more |= {"on_level": self._on_level, "torch_version": state.torch_version or None}
        return workload_run.run_workload(self._choices.work(state), chosen, habits, **more)


@functools.cache
def _warm_up() -> None:
    """Do the one-time work of a process, so that the first run does not look slower.

    Optimizers import torch._dynamo at first use (torch/_compile.py), which takes longer than many small runs.
    """
    with seeded(), torch.enable_grad():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.zeros(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def error_line(error: BaseException) -> str:
    """An error in one line."""
    text = one_line(" ".join(str(error).split()), 500)
    if isinstance(error, MemlabError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_details(error: BaseException | None) -> str:
    """The traceback; for memlab's own errors, which say everything in one line, their notes."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    if isinstance(error, MemlabError):
        return "\n".join(getattr(error, "__notes__", ()))
    return "".join(traceback.format_exception(error))
