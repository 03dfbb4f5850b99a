"""The widgets of a Lab: they set and show its state, without logic of their own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets

from memlab import simulated_gpu
from memlab.lab import technique_list, widgets
from memlab.lab.experiment import error_details, error_line
from memlab.lab.session import LabSession
from memlab.lab.state import MAX_STEPS, MAX_WORLD_SIZE
from memlab.lab.widgets import clickable, flowing, line, problem, set_options
from memlab.trace.trace import SIMULATED_GPU

DEVICES = {"cpu": "measured here: CPU", "cuda": "measured here: CUDA", "card": "predicted for a GPU"}
SIMULATED_CUDA = f"CUDA, a {SIMULATED_GPU}"
TICK_S = 0.1
_NONE = ("no run yet", "")
STYLE = """
.memlab-lab { max-width: 1100px }
.memlab-lab .widget-html-content { line-height: 1.45; white-space: normal; overflow-wrap: anywhere }
.memlab-lab .memlab-problem { border-left: 3px solid #d74450; padding-left: 8px }
.memlab-lab .memlab-problem pre { max-height: 240px; overflow: auto; font-size: 12px }
.memlab-lab button:focus-visible, .memlab-lab select:focus-visible { outline: 2px solid currentColor; outline-offset: 1px }
"""


class LabControls:
    """The controls. Callbacks may come on any thread."""

    def __init__(self, session: LabSession, name: str) -> None:
        self._session, choices = session, session.choices
        self._showing_thread = 0  # the thread that is setting widgets: changes it causes are not the user's
        self._lock = threading.RLock()
        self._settings: dict[str, Any] = {}
        self._settings_of = ("", "")
        self._next_tick = 0.0
        self.workload = self._choice("Workload", choices.workloads, "workload")
        self.size = self._choice("Size", [""], "size")
        said = DEVICES | ({"cuda": SIMULATED_CUDA} if simulated_gpu.is_simulated() else {})
        self.device = self._choice("Device", [(said[one], one) for one in choices.devices], "device")
        self.card = self._choice("GPU", choices.cards, "card")
        steps = ipywidgets.BoundedIntText(description="Steps", min=1, max=MAX_STEPS)
        self.steps = self._observed(clickable(steps, "120px"), "steps")
        gpus = ipywidgets.BoundedIntText(description="GPUs", min=1, max=MAX_WORLD_SIZE)
        self.world_size = self._observed(clickable(gpus, "120px"), "world_size")
        text = "measure even if host memory may not be enough"
        self.force = self._observed(clickable(ipywidgets.Checkbox(description=text, indent=False)), "force")
        self.idea, self.settings = ipywidgets.HTML(), flowing()
        self.techniques = technique_list.TechniqueList(choices.techniques, self._toggled)
        self.run = self._button("Run", session.start, "Run the selection, and its baseline if it has not been run yet")
        self.run.button_style = "primary"
        self.stop = self._button("Stop", session.stop, "Stop the active run")
        self.bar = ipywidgets.IntProgress(description="Progress", max=1, layout=ipywidgets.Layout(width="260px"))
        self.bar.style.description_width = "initial"
        self.status, self.problem = ipywidgets.HTML(), ipywidgets.HTML()
        self.chosen_run, self.against = self._choice("Run", [_NONE]), self._choice("Against", [_NONE])
        self.pin = self._button("Pin as baseline", self._pin, "Compare with this run from now on")
        self.unpin = self._button("Unpin", lambda: self._set(baseline=""), "Compare with the plain job again")
        self.compare = self._button("Compare", self._compare, "Show this run against the other")
        self.folder = clickable(ipywidgets.Text("memlab-lab", description="Folder", continuous_update=False))
        self.save = self._button("Save", self._save, "Write all runs and the table into the folder")
        self.code = self._button("Code", self._code, "Show a script that repeats this run")
        self.script = ipywidgets.Textarea(description="Script", rows=14, layout=ipywidgets.Layout(width="auto"))
        self.script.layout.display = "none"
        style = ipywidgets.HTML(f"<style>{STYLE}{technique_list.STYLE}</style>{widgets.hiding_style(name)}")
        style.layout.display = "none"
        self.box = ipywidgets.VBox([
            style, flowing(self.workload, self.size, self.device, self.card, self.world_size, self.steps), self.idea, self.settings,
            self.techniques.box, flowing(self.run, self.stop, self.bar, self.force), self.status, self.problem,
            flowing(self.chosen_run, self.against, self.pin, self.unpin, self.compare),
            flowing(self.folder, self.save, self.code), self.script,
        ])  # fmt: skip
        self.box.add_class(widgets.CONTROLS)
        self.box.add_class(f"{name}-controls")
        self.show()
        self.show_result()

    def _choice(self, description: str, options: list[Any], key: str = "") -> Any:
        widget = clickable(ipywidgets.Dropdown(description=description, options=options))
        return self._observed(widget, key) if key else widget

    def _observed(self, widget: Any, key: str) -> Any:
        widget.observe(self._guarded(lambda: self._set(**{key: widget.value})), "value")
        return widget

    def _button(self, text: str, action: Callable[[], object], tooltip: str) -> Any:
        widget = clickable(ipywidgets.Button(description=text, tooltip=tooltip))
        widget.on_click(self._guarded(action))
        return widget

    def _guarded(self, action: Callable[[], object]) -> Callable[..., None]:
        """The callback of a press or change; errors are shown, and the widgets reset."""

        def call(*_: Any) -> None:
            if self._showing_thread == threading.get_ident():
                return
            try:
                self.problem.value = ""
                action()
            except Exception as error:
                self.show()
                self.error(error)

        return call

    def _set(self, **wanted: Any) -> None:
        self._session.state = wanted

    def _toggled(self, name: str, on: bool) -> None:
        def change() -> None:
            chosen = [one for one in self._session.chosen.techniques if one != name]
            self._set(techniques=[*chosen, name] if on else chosen)

        self._guarded(change)()

    def _setting_changed(self, name: str) -> None:
        if (entry := self._settings.get(name)) is not None:  # else it belongs to a workload that is no longer chosen
            self._set(settings={**self._session.chosen.settings, name: entry.value})

    def _pin(self) -> None:
        self.say(f"Pinned: {self._session.pin(self.chosen_run.value or None)}")

    def _compare(self) -> None:
        self._session.compare(self.against.value or None, self.chosen_run.value or None)

    def _save(self) -> None:
        self.say(f"Saved to {self._session.save(self.folder.value)}")

    def _code(self) -> None:
        self.script.value = self._session.code(self.chosen_run.value or None)
        self.script.layout.display = "flex"

    def show(self) -> None:
        """Set every widget from the session's state."""
        with self._lock:
            before, self._showing_thread = self._showing_thread, threading.get_ident()
            try:
                self._show_choices()
                self._show_settings()
                self._show_runs()
            finally:
                self._showing_thread = before

    def _show_choices(self) -> None:
        state, choices = self._session.chosen, self._session.choices
        self.workload.value = state.workload
        set_options(self.size, choices.sizes(state.workload) or [("as it is", "")], state.size)
        self.device.value = state.device
        set_options(self.card, choices.cards, state.card)
        self.card.disabled = state.device != "card"
        self.steps.value, self.force.value, self.world_size.value = state.steps, state.force, state.world_size
        self.world_size.layout.display = "flex" if state.is_sharded else "none"
        self.force.layout.display = "flex" if state.device == "cpu" else "none"
        self.idea.value = line(choices.idea(state.workload), "note")
        self.techniques.show(state.techniques, choices.excluded(state))

    def _show_settings(self) -> None:
        state = self._session.chosen
        values = self._session.choices.settings(state.workload, state.size)
        if (state.workload, state.size) != self._settings_of:
            self._settings_of = (state.workload, state.size)
            old, self._settings = self.settings.children, {}
            for name, value in values.items():
                entry = widgets.setting_entry(name, value)
                if entry is not None:
                    entry.observe(self._guarded(functools.partial(self._setting_changed, name)), "value")
                    self._settings[name] = entry
            self.settings.children = list(self._settings.values())
            for entry in old:
                widgets.close_all(entry)
        for name, entry in self._settings.items():
            entry.value = state.settings.get(name, values[name])

    def _show_runs(self) -> None:
        session = self._session
        names, pinned, result = session.names, session.chosen.baseline, session.result
        newest = names[-1] if names else ""
        is_new = newest not in [value for _, value in self.chosen_run.options]
        runs = [(name, name) for name in reversed(names)] or [_NONE]
        set_options(self.chosen_run, runs, newest if is_new else self.chosen_run.value)
        against = pinned or (result.baseline.name if result is not None and result.baseline is not None else "")
        others = [(f"{text} (pinned)" if name and name == pinned else text, name) for text, name in runs]
        set_options(self.against, others, against if against in names else others[-1][1])

    def show_result(self) -> None:
        """Show the outcome of the last run, or what prevented it."""
        session = self._session
        note = session.result.row.note if session.result is not None else ""
        self.bar.value, self.status.value = 0, line(session.sentence)
        self.problem.value = problem(session.problem or note, session.details if session.problem else "")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a run, at a limited rate."""
        now = time.monotonic()
        if now < self._next_tick and 0 < done < total:
            return
        self._next_tick = now + TICK_S
        self.bar.max, self.bar.value = max(total, 1), done
        self.status.value = line(f"{what}: step {done} of {total}")

    def say(self, text: str) -> None:
        """Show a line."""
        self.status.value = line(text)

    def error(self, error: BaseException) -> None:
        """Show what went wrong."""
        self.problem.value = problem(error_line(error), error_details(error))

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the widgets; empty if there are none: the placeholder follows."""
        content = self.box._repr_mimebundle_()
        content = content[0] if isinstance(content, tuple) else content
        return {**content, "text/plain": widgets.USE, "text/html": "<div></div>"}

    def close(self) -> None:
        """Close every widget."""
        widgets.close_all(self.box)
