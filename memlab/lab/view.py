"""The notebook outputs of a Lab: controls or a placeholder, the result, and the runs.

Result and table are static outputs, kept current by display id.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from html import escape
from typing import Any

from memlab.lab import widgets
from memlab.lab.controls import LabControls
from memlab.lab.experiment import error_line
from memlab.lab.session import LabSession
from memlab.lab.worker import execution_lock
from memlab.torch_internals.traceback import running_shell
from memlab.views.shown import PLOTLY

_numbers = itertools.count(1)
_open: list[LabView] = []


class LabView:
    """The outputs of one Lab. Errors here are shown, and never fail a run."""

    def __init__(self, session: LabSession) -> None:
        self.session = session
        # Includes the process id: outputs of an earlier kernel may be on the same page.
        self.name = f"memlab-lab-{os.getpid()}-{next(_numbers)}"
        self.cell = ""  # the cell being executed, if the front end names it
        with contextlib.suppress(Exception):
            self.cell = str(running_shell().get_parent().get("metadata", {}).get("cellId") or "")
        self.controls = LabControls(session, self.name)
        self.progress, self.say, self.level = self.controls.progress, self.controls.say, self.controls.level
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_open = False

    def open(self) -> None:
        """Show everything; close a Lab shown by an earlier run of this cell."""
        from IPython.display import display

        for other in [one for one in _open if one.cell and one.cell == self.cell]:
            other.session.close()
        _open.append(self)
        execution_lock.lab_opens()
        self._is_open = True
        outputs = {"controls": self.controls.bundle(), "placeholder": widgets.placeholder(self.name), **self.results()}
        for name, content in outputs.items():
            self._handles[name] = display(content, raw=True, display_id=True)
        self.controls.estimates.want(self.session.chosen)

    def close(self) -> None:
        """Replace the controls by a line and close them; the results stay."""
        if self._is_open:
            self._is_open = False
            _open.remove(self)
            execution_lock.lab_closes()
            with contextlib.suppress(Exception):
                closed = {"text/plain": widgets.CLOSED, "text/html": f"<div><i>{widgets.CLOSED}</i></div>"}
                self._handles["controls"].update(closed, raw=True)
                self._handles["placeholder"].update({"text/plain": "", "text/html": ""}, raw=True)
        self.controls.close()

    def changed(self, what: str) -> None:
        """Show what has changed: "state", "running", "ended" or "result"."""
        with self._lock:
            self.controls.show()
            self.controls.estimates.want(self.session.chosen)
            if what not in ("ended", "result"):
                return
            self.controls.show_result()
            for name, content in self.results().items() if self._is_open else ():
                try:
                    if PLOTLY in content:  # JupyterLab's extension does not redraw an existing figure
                        self._handles[name].update({"text/plain": content["text/plain"]}, raw=True)
                    self._handles[name].update(content, raw=True)
                except Exception as error:
                    self.controls.error(error)

    def results(self) -> dict[str, dict[str, Any]]:
        """Output -> content. Errors are shown in its place."""
        contents = {}
        for name, make in (("figure", self._figure), ("table", self._table)):
            try:
                contents[name] = make()
            except Exception as error:
                self.controls.error(error)
                contents[name] = {"text/plain": f"This result cannot be shown: {error_line(error)}"}
        return contents

    def _figure(self) -> dict[str, Any]:
        """The figure of the last comparison, or of the last run."""
        result = self.session.result
        if result is None or result.row.run is None:
            return {"text/plain": "The result of a run appears here." if result is None else ""}
        shown = result.comparison if result.comparison is not None else result.row.run.report()
        return dict(shown.figure_bundle())

    def _table(self) -> dict[str, Any]:
        """The sentence, what went wrong, and all runs."""
        session = self.session
        if session.result is None and not session.problem:
            return {"text/plain": "", "text/html": ""}
        problem = [session.problem] if session.problem and session.problem not in session.sentence else []
        lines, table = [*problem, session.sentence], session.listing()
        said = f"class='{self.name}-said' style='margin:2px 0 6px'"
        heads = "".join(f"<p {said}><b>{escape(line)}</b></p>" for line in lines)
        if not session.rows:
            return {"text/plain": "\n".join(lines), "text/html": heads}
        return {"text/plain": "\n".join([*lines, "", table.text()]), "text/html": heads + table.html()}


def close_all() -> None:
    """Close every Lab that is shown."""
    for view in list(_open):
        view.session.close()
