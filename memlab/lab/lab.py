"""The Lab: choose a workload, techniques and a device, run it, and see what was saved, at what price, with what results.

`lab.state` sets and reads everything, so it works without a front end; the widgets are one way to set it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab import seams
from memlab.errors import MemlabError
from memlab.lab.code import script
from memlab.lab.experiment import Experiment, Found, details, said
from memlab.lab.running import Worker
from memlab.lab.state import Choices, State
from memlab.lab.table import Row, Table
from memlab.session.run import Run
from memlab.session.show import ipython
from memlab.views.who import Listing
from memlab.workloads.workload import Workload

if TYPE_CHECKING:
    import os

    from memlab.lab.view import View


STOPPED = "Stopped: nothing was kept of this run."


class Lab:
    """`lab = memlab.Lab()`: show it in a notebook, or drive it by `state`, `run()`, `comparison`, `table`.

    `workload` is the name of one, a Workload, or a function of your own that gives model, optimizer, batch and loss;
    `workloads` a dict of such functions by name. Anything of `state` can be given by name: `Lab("gpt", card="RTX 4060")`.
    """

    def __init__(
        self,
        workload: str | Workload | Callable[[], Any] | None = None,
        *,
        workloads: Mapping[str, Callable[[], Any]] | None = None,
        **state: Any,
    ) -> None:
        own = dict(workloads or {})
        if workload is not None and not isinstance(workload, str):
            if not callable(workload):
                raise MemlabError(
                    f"a workload is a name, or a function of model, optimizer, batch and loss, got {workload!r:.80}."
                )
            name = workload.name if isinstance(workload, Workload) else getattr(workload, "__name__", "mine")
            own = {str(name): workload, **own}
            workload = str(name)
        self.choices = Choices(own)
        self.found: Found | None = None
        """What came of the last run or comparison."""
        self.problem = ""
        """What prevented the last one, in a line."""
        self._raised: BaseException | None = None
        self._found_before: Found | None = None
        self._table = Table()
        self._lock = threading.RLock()
        self._worker: Worker | None = None
        self._view: View | None = None
        self._experiment = Experiment(self.choices, self._table, self._tell)
        self._state = self.choices.first()
        self.state = {**({"workload": workload} if workload is not None else {}), **state}

    # --- what is chosen --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Everything that is chosen, as plain values; set it whole or in part."""
        return self._state.plain()

    @state.setter
    def state(self, wanted: Mapping[str, Any]) -> None:
        with self._lock:
            self._state = self.choices.changed(self._state, wanted, self._table.names)
        self._show("state")

    @property
    def chosen(self) -> State:
        """The same as a value that cannot be changed."""
        return self._state

    # --- running ---------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a run goes on, or waits for a cell to end."""
        return self._worker is not None

    def run(self, **state: Any) -> Run:
        """Run what is chosen (and what is named here), wait for it, and give back the run; what fails is raised."""
        if state:
            self.state = state
        worker = self._begin()
        if worker is None:
            raise MemlabError("this Lab is running: wait for it, or stop it.")
        worker.call()
        found = self.found
        if self._raised is not None:
            raise self._raised
        assert found is not None and found.row.run is not None
        return found.row.run

    def start(self) -> bool:
        """Run what is chosen in a thread, as the button does; False, and nothing, while it runs."""
        worker = self._begin()
        if worker is None:
            return False
        worker.start()
        return True

    def stop(self) -> None:
        """End the run that goes on: after its step, or inside of one that lasts."""
        worker = self._worker
        if worker is not None:
            self._say("stopping …")
            worker.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a run that was started; whether it has ended."""
        worker = self._worker
        return worker is None or worker.join(timeout_s)

    def _begin(self) -> Worker | None:
        with self._lock:
            if self._worker is not None:
                return None
            self._worker = Worker(self._work, self._ended)
            self._raised, self._found_before, self.problem = None, self.found, ""
        self._show("running")
        return self._worker

    def _work(self, worker: Worker) -> None:
        """What a run does, in whatever thread; errors are kept and shown."""
        try:
            self._finish(self._experiment(self._state))
        except KeyboardInterrupt as error:
            self._raised, self.problem = error, STOPPED
            raise
        except BaseException as error:
            self._raised, self.problem = error, said(error)

    def _finish(self, found: Found) -> None:
        self.found, self._raised = found, found.problem
        self.problem = said(found.problem) if found.problem is not None else ""

    def _ended(self, worker: Worker) -> None:
        """The work is over, however it ended: it may have been stopped before it began."""
        with self._lock:
            self._worker = None
            if worker.is_stopped and self._raised is None and self.found is self._found_before:
                self.problem = STOPPED
        self._show("ended")

    def _tell(self, what: str, done: int, total: int) -> None:
        worker = self._worker
        if worker is not None:
            worker.check()
        if self._view is not None:
            self._view.progress(what, done, total)

    # --- what came of it -------------------------------------------------------------------------------------------------

    @property
    def comparison(self) -> Any:
        """The last comparison; MemlabError where there is none yet."""
        if self.found is None or self.found.comparison is None:
            raise MemlabError("nothing was compared yet: choose a technique, or pin a baseline, and run.")
        return self.found.comparison

    @property
    def sentence(self) -> str:
        """The last result in one line."""
        found = self.found
        if found is None:
            return "No run yet."
        if found.comparison is not None:
            return str(found.comparison.sentence)
        peak, _, step, name, where, _ = found.row.cells()
        if found.row.run is None:
            return f"{name}: {found.row.error or 'no figures'}"
        return f"{name}, {where}: peak {peak}{f', {step} a step' if step else ''}."

    @property
    def details(self) -> str:
        """What there is to say of what prevented the last run, beside that line."""
        return details(self._raised)

    @property
    def table(self) -> Any:
        """Every run of this Lab as a pandas DataFrame, the oldest first."""
        return self._table.to_pandas()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The same as values, with the runs."""
        return tuple(self._table)

    def listing(self) -> Listing:
        """The table as text and HTML."""
        return self._table.listing(f"Runs of this Lab ({len(self._table)})")

    @property
    def names(self) -> list[str]:
        """The names of the runs that can be pinned and compared, the oldest first."""
        return self._table.names

    def pin(self, name: str | None = None) -> str:
        """Compare with this run (the last one) from now on; `state["baseline"] = ""` ends it. Gives back its name."""
        wanted = self._last() if name is None else name
        self._table.run(wanted)
        self.state = {"baseline": wanted}
        return wanted

    def compare(self, a: str | None = None, b: str | None = None) -> Any:
        """Compare two runs by name: `a` (by default the baseline) is before, `b` (the last run) after; and show it."""
        after = self._last() if b is None else b
        before = a if a is not None else self._state.baseline or self._table[after].against
        if not before:
            raise MemlabError("which run to compare with? Pin one as baseline, or name two.")
        for name in (before, after):
            self._table.run(name)
        found = self._experiment.compared(self._table[before], self._table[after])
        if found.problem is not None:
            raise found.problem
        self._finish(found)
        self._show("result")
        return found.comparison

    def _last(self) -> str:
        names = self._table.names
        if not names:
            raise MemlabError("this Lab has no run yet: run one first.")
        return names[-1]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write every run (`memlab.load` reads them) and the table (table.csv) into a folder."""
        if not self._table.names:
            raise MemlabError("this Lab has no run yet: there is nothing to save.")
        return self._table.save(path)

    def code(self, name: str | None = None) -> str:
        """A script that runs this again: what a run of this name was, or what is chosen now."""
        if name is None:
            return script(self.choices, self._state)
        row = self._table[name]
        return script(self.choices, row.state, row)

    # --- faces -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop what runs and take the widgets away; runs, table and the last result stay."""
        worker, view = self._worker, self._view
        if worker is not None:
            worker.stop()
            worker.join()
        self._view = None
        if view is not None:
            view.close()

    def _show(self, what: str) -> None:
        if self._view is not None:
            self._view.show(what)

    def _say(self, text: str) -> None:
        if self._view is not None:
            self._view.say(text)

    def __str__(self) -> str:
        chosen = ", ".join(f"{key}={value!r}" for key, value in self.state.items() if value not in ("", [], {}, False))
        lines = ["Lab", f"  {chosen}", "", self.sentence]
        return "\n".join([*lines, *(["", self.listing().text()] if len(self._table) else [])])

    def __repr__(self) -> str:
        return f"<Lab: {' '.join(filter(None, [self._state.workload, self._state.size]))}, {len(self._table)} runs>"

    def _ipython_display_(self) -> None:
        """Controls, and below them the result; text where there is no notebook."""
        if not seams.is_kernel(ipython()):
            print(self)
            return
        from memlab.lab.view import View

        if self._view is not None:
            self._view.close()
        self._view = View(self)
        self._view.open()
