"""A Lab without a front end: its state and its results."""

from __future__ import annotations

import dataclasses
import operator
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlab.api.compare import changed
from memlab.api.display import LevelNow
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.lab.experiment import Experiment, LabResult, error_details, error_line
from memlab.lab.run_table import LabRun, RunTable, script
from memlab.lab.state import LabChoices, LabState
from memlab.lab.worker import Worker, execution_lock
from memlab.units import format_seconds, number_of
from memlab.views.table import Table

STOPPED = "Stopped: this run was discarded."


class LabSession:
    """`state` reads and sets all choices; widgets are one way to set it.

    `listener` shows it, as LabView does: it has `changed(what)`, with "state", "running", "ended" or "result",
    `progress(what, done, total)`, `level(now)`, `say(line)` and `close()`.
    """

    def __init__(self, choices: LabChoices, state: Mapping[str, Any]) -> None:
        self.choices = choices
        self.result: LabResult | None = None
        self.problem = ""
        """The error of the last run or comparison, in one line."""
        self.listener: Any = None
        self._raised: BaseException | None = None
        self._result_before: LabResult | None = None
        self._table = RunTable()
        self._lock = threading.RLock()
        self._worker: Worker | None = None
        self._experiment = Experiment(self.choices, self._table, self.tell, self._level)
        self._state = self.choices.first()
        self.state = state

    @property
    def state(self) -> dict[str, Any]:
        """All choices as plain values; set it whole or in part."""
        return self._state.plain()

    @state.setter
    def state(self, wanted: Mapping[str, Any]) -> None:
        with self._lock:
            self._state = self.choices.changed(self._state, wanted, self._table.names)
        self._show("state")

    @property
    def chosen(self) -> LabState:
        """The same as an immutable value."""
        return self._state

    @property
    def is_running(self) -> bool:
        """Whether a run is active, or waits for a cell to end."""
        return self._worker is not None

    @property
    def is_working(self) -> bool:
        """Whether a run has started and not ended."""
        return (worker := self._worker) is not None and worker.is_working

    def run(self, **state: Any) -> Run:
        """Run what is chosen (and named here), wait, and return the run; errors are raised."""
        if state:
            self.state = state
        worker = self._begin()
        if worker is None:
            raise MemlabError("this Lab is running: wait for it, or stop it.")
        worker.call()
        if self._raised is not None:
            raise self._raised
        assert self.result is not None and self.result.row.run is not None
        return self.result.row.run

    def start(self) -> bool:
        """Run what is chosen in a thread; False while another run is active."""
        worker = self._begin()
        if worker is not None:
            worker.start()
        return worker is not None

    def stop(self) -> None:
        """Stop the active run: after its step, or inside one that takes long."""
        if (worker := self._worker) is not None:
            if self.listener is not None:
                self.listener.say("stopping …")
            worker.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a run that was started; whether it has ended. In a cell the run need not wait for that."""
        worker = self._worker
        if worker is None:
            return True
        with execution_lock.cell_waits():
            return worker.join(timeout_s)

    def _begin(self) -> Worker | None:
        with self._lock:
            if self._worker is not None:
                return None
            worker = self._worker = Worker(self._work, self._ended)
            self._raised, self._result_before, self.problem = None, self.result, ""
        self._show("running")
        return worker

    def _work(self, worker: Worker) -> None:
        """The work of a run, in any thread; errors are kept and shown."""
        try:
            self._finish(self._experiment(self._state))
        except KeyboardInterrupt as error:
            self._raised, self.problem = error, STOPPED
            raise
        except BaseException as error:
            self._raised, self.problem = error, error_line(error)

    def _finish(self, result: LabResult) -> None:
        self.result, self._raised = result, result.problem
        self.problem = error_line(result.problem) if result.problem is not None else ""

    def _ended(self, worker: Worker) -> None:
        """Called after the work, however it ended: it may have been stopped before it began."""
        with self._lock:
            self._worker = None
            if worker.is_stopped and self._raised is None and self.result is self._result_before:
                self.problem = STOPPED
        self._show("ended")

    def tell(self, what: str, done: int, total: int) -> None:
        """Report progress; a requested stop takes effect here."""
        if self._worker is not None:
            self._worker.check()
        if self.listener is not None:
            self.listener.progress(what, done, total)

    def _level(self, now: LevelNow) -> None:
        if self.listener is not None:
            self.listener.level(now)

    @property
    def comparison(self) -> Any:
        """The last comparison; MemlabError if there is none yet."""
        if self.result is None or self.result.comparison is None:
            raise MemlabError("nothing was compared yet: choose a technique, or pin a baseline, and run.")
        return self.result.comparison

    @property
    def sentence(self) -> str:
        """The last result in one line, with what was run and where; for a prediction, first whether it fits."""
        result = self.result
        if result is None:
            return "No run yet."
        row = result.row
        if result.comparison is not None:
            line = f"{self._subject(result)}{result.comparison.sentence}."
        elif row.peak_bytes is None:
            error = row.error.removeprefix(f"{row.techniques[0]}: ") if len(row.techniques) == 1 else row.error
            line = f"{row.name}: {(error or 'no figures').removesuffix('.')}."
        else:
            step = f", {format_seconds(row.step_s)} a step" if row.step_s is not None else ""
            line = f"{row.name}, {row.state.where}: peak {row.peak_bytes}{step}."
        verdict = f"{row.verdict[:1].upper()}{row.verdict[1:]}." if row.verdict else ""
        return " ".join(filter(None, [verdict, line, result.remark]))

    def _subject(self, result: LabResult) -> str:
        """What comes before the sentence of a comparison: "gpt laptop, measured on CPU, "; "" if that names the second run."""
        row, before = result.row, result.baseline
        if before is not None and not before.state.is_comparable(row.state):
            return f"{row.name} against {before.name}: "
        is_named = not changed(result.comparison.a, result.comparison.b)
        return "" if is_named else f"{self.choices.work(row.state)}, {row.state.where}, "

    @property
    def is_of_choice(self) -> bool:
        """Whether the last result is of what is chosen now, whatever is pinned."""
        state = self._state
        return self.result is not None and dataclasses.replace(self.result.row.state, baseline=state.baseline) == state

    found = property(operator.attrgetter("result"))  # the earlier name

    @property
    def details(self) -> str:
        """Details of the error, in addition to its line."""
        return error_details(self._raised)

    @property
    def table(self) -> Any:
        """Every run of this Lab as a pandas DataFrame, the oldest first."""
        return self._table.to_pandas()

    @property
    def rows(self) -> tuple[LabRun, ...]:
        """The same as values, with the runs."""
        return tuple(self._table.rows)

    def listing(self) -> Table:
        """The same as text and HTML."""
        return self._table.table()

    @property
    def names(self) -> list[str]:
        """The names of the runs that can be pinned and compared, the oldest first."""
        return self._table.names

    def pin(self, name: str | None = None) -> str:
        """Compare with this run (the last one) until `state["baseline"] = ""`. Returns its name."""
        wanted = self._last() if name is None else name
        self._table.require_run(wanted)
        self.state = {"baseline": wanted}
        return wanted

    def compare(self, a: str | None = None, b: str | None = None) -> Any:
        """Compare two runs by name: by default the last one with its baseline; and show it."""
        after = self._last() if b is None else b
        before = a if a is not None else self._state.baseline or self._table[after].against
        if not before:
            raise MemlabError("which run to compare with? Pin one as baseline, or name two.")
        for name in (before, after):
            self._table.require_run(name)
        result = self._experiment.compared(self._table[before], self._table[after])
        if result.problem is not None:
            raise result.problem
        self._finish(result)
        self._show("result")
        return result.comparison

    def _last(self) -> str:
        if not self._table.names:
            raise MemlabError("this Lab has no run yet: run one first.")
        return self._table.names[-1]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write every run (`memlab.load` reads them) and the table (table.csv) into a folder."""
        self._last()
        return self._table.save(path)

    def code(self, name: str | None = None) -> str:
        """A script that repeats the run of this name, or what is chosen now."""
        if name is None:
            return script(self.choices, self._state)
        row = self._table[name]
        return script(self.choices, row.state, row)

    def _show(self, what: str) -> None:
        if self.listener is not None:
            self.listener.changed(what)

    def close(self) -> None:
        """Stop and close the widgets; runs, table and the last result stay."""
        if (worker := self._worker) is not None:
            worker.stop()
            worker.join()
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.close()

    def __str__(self) -> str:
        chosen = ", ".join(f"{key}={value!r}" for key, value in self.state.items() if value not in ("", [], {}, False))
        table = ["", self.listing().text()] if self.rows else []
        return "\n".join(["Lab", f"  {chosen}", "", self.sentence, *table])

    def __repr__(self) -> str:
        return f"<Lab: {' '.join(filter(None, [self._state.workload, self._state.size]))}, {number_of(len(self.rows), 'run')}>"
