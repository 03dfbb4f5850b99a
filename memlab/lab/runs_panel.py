"""The controls over the runs of a Lab: choose two, compare, pin, save, and show the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from memlab.lab.session import LabSession
from memlab.lab.widgets import button, clickable, flowing, set_options

_NONE = ("no run yet", "")


class RunsPanel:
    """`guarded` wraps the action of a button so that its errors are shown; `say` shows a line."""

    def __init__(
        self,
        session: LabSession,
        guarded: Callable[[Callable[[], object]], Callable[..., None]],
        say: Callable[[str], None],
    ) -> None:
        self._session, self._say = session, say
        self.chosen_run = clickable(ipywidgets.Dropdown(description="Run", options=[_NONE]))
        self.against = clickable(ipywidgets.Dropdown(description="Against", options=[_NONE]))

        def acting(text: str, action: Callable[[], object], tooltip: str) -> Any:
            return button(text, guarded(action), tooltip)

        self.pin = acting("Pin as baseline", self._pin, "Compare with this run from now on")
        self.unpin = acting("Unpin", self._unpin, "Compare with the plain job again")
        self.compare = acting("Compare", self._compare, "Show this run against the other")
        self.folder = clickable(ipywidgets.Text("memlab-lab", description="Folder", continuous_update=False))
        self.save = acting("Save", self._save, "Write all runs and the table into the folder")
        self.code = acting("Code", self._code, "Show a script that repeats this run, or what is chosen")
        self.script = ipywidgets.Textarea(description="Script", rows=14, layout=ipywidgets.Layout(width="auto"))
        self.script.layout.display = "none"
        self.box = ipywidgets.VBox([
            flowing(self.chosen_run, self.against, self.compare, self.pin, self.unpin),
            flowing(self.folder, self.save, self.code), self.script,
        ])  # fmt: skip

    def show(self) -> None:
        """List the runs; a button is disabled where a press would mean nothing."""
        session = self._session
        names, pinned, result = session.names, session.chosen.baseline, session.result
        newest = names[-1] if names else ""
        is_new = newest not in [value for _, value in self.chosen_run.options]
        runs = [(name, name) for name in reversed(names)] or [_NONE]
        set_options(self.chosen_run, runs, newest if is_new else self.chosen_run.value)
        against = pinned or (result.baseline.name if result is not None and result.baseline is not None else "")
        others = [(f"{text} (pinned)" if name and name == pinned else text, name) for text, name in runs]
        set_options(self.against, others, against if against in names else others[-1][1])
        self.pin.disabled = self.save.disabled = not names
        self.compare.disabled, self.unpin.disabled = len(names) < 2, not pinned

    def _pin(self) -> None:
        self._say(f"Pinned: {self._session.pin(self.chosen_run.value or None)}")

    def _unpin(self) -> None:
        self._session.state = {"baseline": ""}
        self._say("Unpinned: runs are compared with the plain job again.")

    def _compare(self) -> None:
        self._session.compare(self.against.value or None, self.chosen_run.value or None)

    def _save(self) -> None:
        self._say(f"Saved to {self._session.save(self.folder.value)}")

    def _code(self) -> None:
        self.script.value = self._session.code(self.chosen_run.value or None)
        self.script.layout.display = "flex"
