"""The widgets of a Lab: they set its state and press its buttons, and show what it says. They decide nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from memlab.lab import toggles, words
from memlab.lab.experiment import details, said
from memlab.lab.parts import clickable, close_all, failed, flowing, setting, told

if TYPE_CHECKING:
    from memlab.lab.lab import Lab

DEVICES = {"cpu": "measured here: CPU", "cuda": "measured here: CUDA", "card": "predicted for a card"}
TICK_S = 0.1
STYLE = """
.memlab-lab { max-width: 1100px }
.memlab-lab .widget-html-content { line-height: 1.45; white-space: normal; overflow-wrap: anywhere }
.memlab-lab .memlab-problem { border-left: 3px solid #d74450; padding-left: 8px }
.memlab-lab .memlab-problem pre { max-height: 240px; overflow: auto; font-size: 12px }
.memlab-lab button:focus-visible, .memlab-lab select:focus-visible { outline: 2px solid currentColor; outline-offset: 1px }
"""


class Controls:
    """Everything to press and choose. Callbacks come from the front end, on whatever thread it is heard."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self._showing = 0
        """The thread that sets widgets now: what they tell of it is no choice of the user's."""
        self._lock = threading.RLock()
        self._settings: dict[str, Any] = {}
        self._of: tuple[str, str] = ("", "")
        self._next_tick = 0.0
        self._make_choices()
        self._make_buttons()
        self.toggles = toggles.Toggles(lab.choices.techniques, self._toggled)
        for widget in (self.toggles.filter, self.toggles.group):
            widget.layout.width = "auto"
        style = widgets.HTML(f"<style>{STYLE}{toggles.STYLE}</style>{words.hidden(name)}")
        style.layout.display = "none"
        self.box = widgets.VBox([style, *self._rows()])
        self.box.add_class(words.CONTROLS)
        self.box.add_class(f"{name}-controls")
        self.show()
        self.show_result()

    # --- making ----------------------------------------------------------------------------------------------------------

    def _make_choices(self) -> None:
        choices = self._lab.choices
        self.workload = self._choice("Workload", choices.workloads, "workload")
        self.size = self._choice("Size", [""], "size")
        devices = [(DEVICES[one], one) for one in choices.devices]
        self.device = self._choice("Device", devices, "device")
        self.card = self._choice("Card", choices.cards, "card")
        self.steps = clickable(widgets.BoundedIntText(description="Steps", min=1, max=1000))
        self.steps.layout.width = "120px"
        self.steps.observe(self._guarded(lambda: self._set(steps=self.steps.value)), "value")
        self.force = clickable(
            widgets.Checkbox(description="measure even if the memory here may not suffice", indent=False)
        )
        self.force.layout.width = "auto"
        self.force.observe(self._guarded(lambda: self._set(force=self.force.value)), "value")
        self.idea = widgets.HTML()
        self.settings = flowing()

    def _choice(self, description: str, options: list[Any], key: str) -> Any:
        widget = clickable(widgets.Dropdown(description=description, options=options))
        widget.layout.width, widget.layout.max_width = "auto", "100%"
        widget.observe(self._guarded(lambda: self._set(**{key: widget.value})), "value")
        return widget

    def _make_buttons(self) -> None:
        lab = self._lab
        self.run = self._button("Run", lab.start, "Run what is chosen, and its baseline where it is not known yet")
        self.run.button_style = "primary"
        self.stop = self._button("Stop", lab.stop, "End the run that goes on")
        self.bar = widgets.IntProgress(description="Progress", max=1, layout=widgets.Layout(width="260px"))
        self.bar.style.description_width = "initial"
        self.status, self.problem = widgets.HTML(), widgets.HTML()
        self.chosen_run = self._plain_choice("Run")
        self.against = self._plain_choice("Against")
        self.pin = self._button("Pin as baseline", self._pin, "Compare with this run from now on")
        self.unpin = self._button("Unpin", lambda: self._set(baseline=""), "Compare with the plain job again")
        self.compare = self._button("Compare", self._compare, "Show this run against the other")
        self.folder = clickable(widgets.Text(value="memlab-lab", description="Folder", continuous_update=False))
        self.folder.layout.width = "auto"
        self.save = self._button("Save", self._save, "Write all runs and the table into the folder")
        self.code = self._button("Code", self._code, "Show a script that runs this again")
        self.script = widgets.Textarea(description="Script", rows=14, layout=widgets.Layout(width="auto"))
        self.script.layout.display = "none"

    def _plain_choice(self, description: str) -> Any:
        widget = clickable(widgets.Dropdown(description=description, options=[("no run yet", "")]))
        widget.layout.width, widget.layout.max_width = "auto", "100%"
        return widget

    def _button(self, text: str, action: Callable[[], object], tooltip: str) -> Any:
        widget = clickable(widgets.Button(description=text, tooltip=tooltip, layout=widgets.Layout(width="auto")))
        widget.on_click(self._guarded(action))
        return widget

    def _rows(self) -> list[Any]:
        return [
            flowing(self.workload, self.size, self.device, self.card, self.steps),
            self.idea,
            self.settings,
            self.toggles.box,
            flowing(self.run, self.stop, self.bar, self.force),
            self.status,
            self.problem,
            flowing(self.chosen_run, self.against, self.pin, self.unpin, self.compare),
            flowing(self.folder, self.save, self.code),
            self.script,
        ]

    # --- hearing ---------------------------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[[], object]) -> Callable[..., None]:
        """What a press or change calls: what fails is shown, and the widgets go back to what holds."""

        def call(*_: Any) -> None:
            if self._showing == threading.get_ident():
                return
            try:
                self.problem.value = ""
                action()
            except Exception as error:
                self.show()
                self.error(error)

        return call

    def _set(self, **wanted: Any) -> None:
        self._lab.state = wanted

    def _toggled(self, name: str, on: bool) -> None:
        def change() -> None:
            chosen = [one for one in self._lab.chosen.techniques if one != name]
            self._set(techniques=[*chosen, name] if on else chosen)

        self._guarded(change)()

    def _setting(self, name: str, value: Any) -> None:
        self._set(settings={**self._lab.chosen.settings, name: value})

    def _pin(self) -> None:
        self.say(f"Pinned: {self._lab.pin(self.chosen_run.value or None)}")

    def _compare(self) -> None:
        self._lab.compare(self.against.value or None, self.chosen_run.value or None)

    def _save(self) -> None:
        self.say(f"Saved to {self._lab.save(self.folder.value)}")

    def _code(self) -> None:
        self.script.value = self._lab.code(self.chosen_run.value or None)
        self.script.layout.display = "flex"

    # --- showing ---------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Set every widget to what the Lab's state says."""
        with self._lock:
            before, self._showing = self._showing, threading.get_ident()
            try:
                self._show_choices()
                self._show_runs()
            finally:
                self._showing = before

    def _show_choices(self) -> None:
        state, choices = self._lab.chosen, self._lab.choices
        self.workload.value = state.workload
        _set_options(self.size, choices.sizes(state.workload) or [("as it is", "")], state.size)
        self.device.value = state.device
        _set_options(self.card, choices.cards, state.card)
        self.card.disabled = state.device != "card"
        self.steps.value, self.force.value = state.steps, state.force
        self.force.layout.display = "flex" if state.device == "cpu" else "none"
        self.idea.value = told(choices.idea(state.workload), "note")
        self._show_settings()
        self.toggles.show(state.techniques, choices.excluded(state.techniques))

    def _show_settings(self) -> None:
        state, choices = self._lab.chosen, self._lab.choices
        values = choices.settings(state.workload, state.size)
        if (state.workload, state.size) != self._of:
            self._of = (state.workload, state.size)
            old = self.settings.children
            made = {name: setting(name, value) for name, value in values.items()}
            self._settings = {name: one for name, one in made.items() if one is not None}
            for name, one in self._settings.items():
                one.observe(self._heard_setting(name), "value")
            self.settings.children = list(self._settings.values())
            for one in old:
                close_all(one)
        for name, one in self._settings.items():
            one.value = state.settings.get(name, values[name])

    def _heard_setting(self, name: str) -> Callable[[Any], None]:
        return lambda change: self._guarded(lambda: self._setting(name, change["new"]))()

    def _show_runs(self) -> None:
        names, lab = self._lab.names, self._lab
        newest = names[-1] if names else ""
        is_new = newest not in [one[1] for one in self.chosen_run.options]
        runs = [(name, name) for name in reversed(names)] or [("no run yet", "")]
        _set_options(self.chosen_run, runs, newest if is_new else self.chosen_run.value)
        pinned, found = lab.chosen.baseline, lab.found
        against = pinned or (found.baseline.name if found is not None and found.baseline is not None else "")
        others = [(f"{shown} (pinned)" if name and name == pinned else shown, name) for shown, name in runs]
        _set_options(self.against, others, against if against in names else others[-1][1])

    def show_result(self) -> None:
        """Say what came of the last run, or what prevented it."""
        lab = self._lab
        self.bar.value, self.problem.value = 0, ""
        self.status.value = told(lab.sentence)
        if lab.problem:
            self.problem.value = failed(lab.problem, lab.details)
        elif lab.found is not None and lab.found.row.note:
            self.problem.value = failed(lab.found.row.note, "")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a run is; not more often than an eye sees."""
        now = time.monotonic()
        if now < self._next_tick and 0 < done < total:
            return
        self._next_tick = now + TICK_S
        self.bar.max, self.bar.value = max(total, 1), done
        self.status.value = told(f"{what}: step {done} of {total}")

    def say(self, text: str) -> None:
        """Show a line."""
        self.status.value = told(text)

    def error(self, error: BaseException) -> None:
        """Show what went wrong."""
        self.problem.value = failed(said(error), details(error))

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content: the widgets; nothing where there are none, as the words stand below."""
        shown = self.box._repr_mimebundle_()
        shown = shown[0] if isinstance(shown, tuple) else shown
        return {**shown, "text/plain": words.USE, "text/html": "<div></div>"}

    def close(self) -> None:
        """Close every widget."""
        close_all(self.box)


def _set_options(widget: Any, options: list[Any], value: Any) -> None:
    """New options and the value among them; nothing is sent where they are as they were."""
    if list(widget.options) != list(options):
        widget.options = options
    if widget.value != value:
        widget.value = value
