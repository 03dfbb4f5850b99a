"""One experiment: run the baseline, then the chosen techniques, and compare them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.api import workload_run
from memlab.api.compare import Comparison, compare
from memlab.api.display import LevelNow
from memlab.api.run import Run
from memlab.errors import DoesNotApply, MemlabError
from memlab.lab.run_table import LabRun, RunTable
from memlab.lab.state import LabChoices, LabState
from memlab.lab.worker import OnProgress
from memlab.prediction.cards import Card
from memlab.probes.host import HostMemory
from memlab.saving_techniques import techniques
from memlab.units import ByteRange, GiB, TiB, format_bytes, one_line
from memlab.views.comparison import peak_words
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
        self._pinned, remark, not_compared = state.baseline, "", f"{state.baseline!r} is pinned but not compared: "
        if state.baseline and not self._table[state.baseline].state.is_comparable(state):
            remark = f"{not_compared}its workload, size or device differs."
            state = dataclasses.replace(state, baseline="")
        before = self._baseline(state)
        row, problem = self._tried(state, state.techniques, ())
        if before is not None and not before.starts_like(row):
            if state.baseline:
                levels = [format_bytes(one.start_bytes) for one in (before, row)]
                remark = f"{not_compared}{levels[0]} was there before it, and {levels[1]} before this run."
                state = dataclasses.replace(state, baseline="")
            before = self._baseline(state, row)
        result = self.compared(before, row, problem)
        return dataclasses.replace(result, remark=" ".join(filter(None, [remark, result.remark])))

    def compared(self, before: LabRun | None, row: LabRun, problem: BaseException | None = None) -> LabResult:
        """Compare the second row with the first and store the outcome in it."""
        if before is None or before.run is None or row.run is None:
            return LabResult(row, before, problem=problem, remark=row.older)
        try:
            comparison = compare(before.run, row.run)
            compared_row = row.compared(comparison)
        except Exception as error:  # the runs exist all the same
            return LabResult(row, before, problem=problem or error, remark=row.older)
        self._table.replace(row, compared_row)
        return LabResult(compared_row, before, comparison, problem, _older(before, row, comparison))

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

    def _baseline(self, state: LabState, beside: LabRun | None = None) -> LabRun | None:
        """The pinned run, else the job without the techniques; one that starts like the run `beside` it."""
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
            is_same = is_same and row.state.place == plain.place and (beside is None or row.starts_like(beside))
            if row.run is not None and row.habits == habits and is_same:
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
        left_bytes = _left_bytes[state.device]
        try:
            run = self._run(state, chosen, habits, what, steps=state.steps, name=name)
            row = LabRun.of(run, state, chosen, habits, left_bytes=left_bytes, left_out=left_out)
        except Exception as error:
            inapplicable = self._inapplicable(error, state, chosen) if isinstance(error, DoesNotApply) else {}
            if inapplicable and (fewer := tuple(one for one in chosen if one not in inapplicable)):
                left_out |= inapplicable
                return self._tried(state, fewer, tuple(workload_run.baseline_patterns_of(left_out)), left_out)
            row, problem = LabRun(name, state, chosen, habits, left_out, error=error_line(error)), error
        if not isinstance(problem, DoesNotApply):  # else nothing was run
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
        before_bytes = _gpu_bytes(state)
        run = workload_run.run_workload(self._choices.work(state), chosen, habits, **more)
        _left_bytes[state.device] += _gpu_bytes(state) - before_bytes
        return run


_left_bytes = Counter[str]()
"""Device -> what the runs of this process have left there, such as workspaces of cuBLAS: none of the notebook's."""


def _gpu_bytes(state: LabState) -> int:
    """What is allocated on the GPU that is measured; 0 elsewhere, where runs leave nothing."""
    if state.device != "cuda":
        return 0
    gc.collect()
    return int(torch.cuda.memory_allocated())


def _older(before: LabRun, row: LabRun, comparison: Comparison) -> str:
    """What of both peaks was there before, and what the rest of them is, in one sentence; "" if that does not matter."""
    if not (before.older or row.older):
        return ""
    levels = dict.fromkeys(format_bytes(one.start_bytes) for one in (before, row))
    first, second = (
        dataclasses.replace(side, peak=side.peak - ByteRange.exact(one.start_bytes))
        for side, one in ((comparison.side_a, before), (comparison.side_b, row))
    )
    return f"The peaks include {' and '.join(levels)} that was there before: without that, {peak_words(first, second)}."


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
