"""What a Lab shows in a notebook: controls, words for where there are none, the result, and the table of runs.

Controls are widgets, which a saved notebook does not have: JupyterLab then shows an error text in their place. So two
outputs stand there, and a style decides: the words are hidden by a style that lives in the controls, and the output that
has lost its controls by one that comes with the words. Result and table are static, and kept current by display id.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from html import escape
from typing import TYPE_CHECKING, Any

from memlab.lab import words
from memlab.lab.experiment import said
from memlab.lab.running import the_turn
from memlab.session.show import ipython
from memlab.views.bundle import PLOTLY

if TYPE_CHECKING:
    from memlab.lab.controls import Controls
    from memlab.lab.lab import Lab

_numbers = itertools.count(1)


class View:
    """The outputs of one Lab. Whatever fails here is shown in the controls, and never fails a run."""

    def __init__(self, lab: Lab) -> None:
        from memlab.lab.controls import Controls

        self.lab = lab
        # The process too: outputs of an earlier kernel may stand on the same page.
        self.name = f"memlab-lab-{os.getpid()}-{next(_numbers)}"
        self.cell = _cell()
        self.controls: Controls = Controls(lab, self.name)
        self._places: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_open = False

    def open(self) -> None:
        """Show all of it; a Lab that an earlier run of this cell has shown is closed."""
        from IPython.display import display

        for other in [one for one in _open if one.cell and one.cell == self.cell]:
            other.lab.close()
        _open.append(self)
        the_turn.enter()
        self._is_open = True
        self._places["controls"] = display(self.controls.bundle(), raw=True, display_id=True)
        self._places["words"] = display(words.bundle(self.name), raw=True, display_id=True)
        for place, content in self._results().items():
            self._places[place] = display(content, raw=True, display_id=True)

    def close(self) -> None:
        """Replace the controls by a line and close them; the results stay."""
        if not self._is_open:
            return
        self._is_open = False
        _open.remove(self)
        the_turn.leave()
        with contextlib.suppress(Exception):
            self._places["controls"].update(words.closed(), raw=True)
            self._places["words"].update({"text/plain": "", "text/html": ""}, raw=True)
        self.controls.close()

    def show(self, what: str) -> None:
        """Something of the Lab has changed: "state", "running", "ended" or "result"."""
        if not self._is_open:
            return
        with self._lock:
            self.controls.show()
            if what in ("ended", "result"):
                self.controls.show_result()
                self._update()

    def _update(self) -> None:
        for place, content in self._results().items():
            try:
                if PLOTLY in content:  # JupyterLab's extension does not draw over a figure that is there
                    self._places[place].update({"text/plain": content["text/plain"]}, raw=True)
                self._places[place].update(content, raw=True)
            except Exception as error:
                self.controls.error(error)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far the run is."""
        if self._is_open:
            self.controls.progress(what, done, total)

    def say(self, text: str) -> None:
        """Show a line."""
        if self._is_open:
            self.controls.say(text)

    def _results(self) -> dict[str, dict[str, Any]]:
        """Place -> content. What cannot be drawn is said in its place; the table does not depend on it."""
        made = {}
        for place, make in (("figure", self._figure), ("table", self._table)):
            try:
                made[place] = make()
            except Exception as error:
                self.controls.error(error)
                made[place] = {"text/plain": f"This result cannot be shown: {said(error)}"}
        return made

    def _figure(self) -> dict[str, Any]:
        """The picture of the last comparison, or of the last run."""
        found = self.lab.found
        if found is None or found.row.run is None:
            return {"text/plain": "The result of a run appears here." if found is None else ""}
        if found.comparison is None:
            return dict(found.row.run.report().figure_bundle())
        return dict(found.comparison.figure_bundle())

    def _table(self) -> dict[str, Any]:
        """The sentence, what went wrong, and all runs."""
        lab = self.lab
        if lab.found is None and not lab.problem:
            return {"text/plain": "", "text/html": ""}
        listing = lab.listing()
        lines = [*([lab.problem] if lab.problem and lab.problem not in lab.sentence else []), lab.sentence]
        text = "\n".join([*lines, "", listing.text()] if lab.rows else lines)
        said = "".join(f"<p style='margin:2px 0 6px'><b>{escape(line)}</b></p>" for line in lines)
        return {"text/plain": text, "text/html": said + (listing.html() if lab.rows else "")}


_open: list[View] = []


def close_all() -> None:
    """Close every Lab that is shown."""
    for view in list(_open):
        view.lab.close()


def _cell() -> str:
    """The cell that is being executed, where the front end names it."""
    shell = ipython()
    with contextlib.suppress(Exception):
        return str(shell.get_parent().get("metadata", {}).get("cellId") or "")
    return ""
