"""The widgets of a Lab: they set and show its state, without logic of their own.

What to train on stands on the left, the techniques on the right; below them one line says what they save, predicted until it
is run, and a curve shows the memory while it is measured.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets

from memlab import simulated_gpu
from memlab.api.display import LevelNow
from memlab.api.provenance import remark_here
from memlab.lab import widgets
from memlab.lab.estimates import Estimates
from memlab.lab.experiment import error_details, error_line
from memlab.lab.session import LabSession
from memlab.lab.state import MAX_STEPS, MAX_WORLD_SIZE, LabState
from memlab.lab.technique_cards import TechniqueCards
from memlab.lab.widgets import button, clickable, flowing, line, problem, set_options
from memlab.saving_techniques import techniques
from memlab.trace.trace import SIMULATED_GPU
from memlab.views import theme
from memlab.views.live import LiveView

DEVICES = {"cpu": "CPU, measured here", "cuda": "CUDA, measured here", "card": "GPU, predicted"}
SIMULATED_CUDA = f"CUDA, a {SIMULATED_GPU}"
TICK_S = 0.1
TWICE_S = 0.5
"""A second press of the button within so many seconds of a start is no stop."""
_NONE = ("no run yet", "")


class RunsPanel:
    """The controls over the runs: choose two, compare, pin, save, and show the code.

    `guarded` wraps the action of a button so that its errors are shown; `say` shows a line.
    """

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


class LabControls:
    """The controls. Callbacks may come on any thread."""

    def __init__(self, session: LabSession, name: str) -> None:
        self._session, choices = session, session.choices
        self._showing_thread = 0  # the thread that is setting widgets: changes it causes are not the user's
        self._lock = threading.RLock()
        self._settings: dict[str, Any] = {}
        self._settings_of = ("", "")
        self._next_tick = self.began_s = 0.0
        self._live: Any = None
        self._said_of: LabState | None = None
        self.estimates = Estimates(choices, self._estimated)
        self.workload = self._choice("Workload", choices.workloads, "workload")
        self.size = self._choice("Size", [""], "size")
        said = DEVICES | ({"cuda": SIMULATED_CUDA} if simulated_gpu.is_simulated() else {})
        self.device = self._choice("Device", [(said[one], one) for one in choices.devices], "device")
        self.card = self._choice("GPU", choices.cards, "card")
        gpus = ipywidgets.BoundedIntText(description="GPUs", min=1, max=MAX_WORLD_SIZE)
        self.world_size = self._observed(clickable(gpus, "auto"), "world_size")
        self.version = self._choice("PyTorch", choices.versions(), "torch_version")
        steps = ipywidgets.BoundedIntText(description="Steps", min=1, max=MAX_STEPS)
        self.steps = self._observed(clickable(steps, "auto"), "steps")
        text = "measure even if host memory may not be enough"
        self.force = self._observed(clickable(ipywidgets.Checkbox(description=text, indent=False), "auto"), "force")
        self.idea, self.settings = ipywidgets.HTML(), ipywidgets.VBox()
        what = "Run the selection, and its baseline if it has not been run yet"
        self.run = button("Run", self._guarded(self._run), what)
        self.run.button_style = "primary"
        self.bar = ipywidgets.IntProgress(description="Progress", max=1, layout=ipywidgets.Layout(width="150px"))
        self.bar.style.description_width = "initial"
        self.more, more = self._opening("More settings", self.steps, self.version, self.settings, self.force)
        self.techniques = TechniqueCards(techniques, self._toggled)
        self.verdict, self.status, self.problem = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self.verdict.add_class("memlab-verdict")
        self.runs = RunsPanel(session, self._guarded, self.say)
        self.about_runs, runs = self._opening("Runs, baseline, save, code", self.runs.box)
        self.live = ipywidgets.VBox()
        self.box = self._arranged(name, more, runs)
        self.show()
        self.show_result()

    def _arranged(self, name: str, more: Any, runs: Any) -> Any:
        """The box of everything, with its style; `more` and `runs` are the parts that open."""
        fields = ipywidgets.VBox([
            self.workload, self.size, self.device, self.card, self.world_size, self.idea, self.more, more,
            flowing(self.run, self.bar),
        ])  # fmt: skip
        fields.add_class("memlab-fields")
        self.techniques.box.add_class("memlab-choice")
        columns = ipywidgets.HBox([fields, self.techniques.box])
        columns.add_class("memlab-columns")
        less = theme.SERIES["allocated"]
        colours = f"--memlab-less: {less}; --memlab-more: {theme.CAPACITY}; --memlab-grid: {theme.GRID}"
        rules = f".memlab-lab {{ {colours} }}\n{theme.static('lab.css')}"
        style = ipywidgets.HTML(f"<style>{rules}</style>{widgets.hiding_style(name)}")
        style.layout.display = "none"
        box = ipywidgets.VBox([
            style, columns, self.verdict, self.status, self.problem, self.live, self.about_runs, runs,
        ])  # fmt: skip
        box.add_class(widgets.CONTROLS)
        box.add_class(f"{name}-controls")
        return box

    def _choice(self, description: str, options: list[Any], key: str) -> Any:
        return self._observed(clickable(ipywidgets.Dropdown(description=description, options=options), "auto"), key)

    def _observed(self, widget: Any, key: str) -> Any:
        widget.observe(self._guarded(lambda: self._set(**{key: widget.value})), "value")
        return widget

    @staticmethod
    def _opening(text: str, *children: Any) -> tuple[Any, Any]:
        """A button that opens and closes a part, which is closed at first."""
        part = ipywidgets.VBox(list(children), layout=ipywidgets.Layout(display="none"))
        opens = clickable(ipywidgets.ToggleButton(description=f"▸ {text}", tooltip="Open or close"))
        opens.layout.align_self = "flex-start"

        def show(change: Any) -> None:
            part.layout.display = "flex" if change["new"] else "none"
            opens.description = f"{'▾' if change['new'] else '▸'} {text}"

        opens.observe(show, "value")
        return opens, part

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

    def _run(self) -> None:
        """The button: it starts, and then it stops. It is one, so that the focus stays."""
        if not self._session.is_running:
            self.began_s, self.verdict.value = time.monotonic(), ""
            self._session.start()
        elif time.monotonic() - self.began_s > TWICE_S:
            self._session.stop()

    def _toggled(self, name: str, on: bool) -> None:
        def change() -> None:
            chosen = [one for one in self._session.chosen.techniques if one != name]
            self._set(techniques=[*chosen, name] if on else chosen)

        self._guarded(change)()

    def _setting_changed(self, name: str) -> None:
        if (entry := self._settings.get(name)) is not None:  # else it belongs to a workload that is no longer chosen
            self._set(settings={**self._session.chosen.settings, name: entry.value})

    def show(self) -> None:
        """Set every widget from the session's state."""
        with self._as_shown():
            self._show_choices()
            self._show_settings()
            self._show_running()
            self.runs.show()
        self.show_estimates()

    @contextlib.contextmanager
    def _as_shown(self) -> Any:
        """Changes of widgets in this block are not the user's."""
        with self._lock:
            before, self._showing_thread = self._showing_thread, threading.get_ident()
            try:
                yield
            finally:
                self._showing_thread = before

    def _show_choices(self) -> None:
        state, choices = self._session.chosen, self._session.choices
        self.workload.value = state.workload
        set_options(self.size, choices.sizes(state.workload) or [("as it is", "")], state.size)
        self.device.value = state.device
        set_options(self.card, choices.cards, state.card)
        set_options(self.version, choices.versions(state.torch_version), state.torch_version)
        self.card.layout.display = self.version.layout.display = "flex" if state.device == "card" else "none"
        self.steps.value, self.force.value, self.world_size.value = state.steps, state.force, state.world_size
        self.world_size.layout.display = "flex" if state.is_sharded else "none"
        self.force.layout.display = "flex" if state.device == "cpu" else "none"
        self.idea.value = line(choices.idea(state.workload), "note")

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

    def _show_running(self) -> None:
        is_running = self._session.is_running
        self.run.description = "Stop" if is_running else "Run"
        self.run.button_style = "warning" if is_running else "primary"
        self.bar.layout.display = "flex" if is_running else "none"
        if not is_running and self._live is not None:
            self.live.children, live, self._live = (), self._live, None
            live.close()

    def _estimated(self) -> None:
        try:
            self.show_estimates()
        except Exception as error:  # it must not end the thread that calls this
            self.error(error)

    def show_estimates(self) -> None:
        """Show what each technique would save, and in one line what those that are chosen save."""
        session, state = self._session, self._session.chosen
        known = {name: self.estimates.of(state, (name,)) for name in techniques}
        with self._as_shown():
            self.techniques.show(state.techniques, session.choices.excluded(state), known)
            if None not in known.values():
                self.techniques.rank(known)
            if not session.is_of_choice and not session.is_running:
                done, total = self.estimates.done(state)
                said = session.sentence if session.result is not None else ""
                below = line(f"The result below is of another choice: {said}", "note") if said else ""
                self.verdict.value = line(self.estimates.sentence(state)) + below
                at_work = f"What each would save, predicted for {state.predicted_place}: {done} of {total} techniques."
                if self._said_of != state:  # what was said stays until another choice
                    self.status.value = line(at_work if 0 < done < total else "")

    def show_result(self) -> None:
        """Show the outcome of the last run, or what prevented it."""
        session = self._session
        note = session.result.row.note if session.result is not None else ""
        self.bar.value, self.status.value, self._said_of = 0, "", None
        if session.is_of_choice:  # what prevented it is said once
            is_said = session.problem != "" and session.problem in session.sentence
            self.verdict.value = line("" if is_said else session.sentence)
        else:
            self.show_estimates()
        self.problem.value = problem(session.problem or note, session.details if session.problem else "")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a run, at a limited rate."""
        now = time.monotonic()
        if now < self._next_tick and 0 < done < total:
            return
        self._next_tick = now + TICK_S
        self.bar.max, self.bar.value = max(total, 1), done
        self.status.value = line(f"{what}: step {done} of {total}")

    def level(self, now: LevelNow) -> None:
        """Draw what a measured run holds, on one curve for a baseline and what is compared with it."""
        if self._live is None:
            state = self._session.chosen
            work, remark = str(self._session.choices.work(state)), remark_here([state.device])
            self._live = LiveView(work, ("allocated",), now.capacity_bytes, remark=remark)
            self.live.children = (self._live,)
        since_s = time.monotonic() - self.began_s
        self._live.push(
            [since_s], {"allocated": [float(now.allocated_bytes)]}, peak_bytes=now.peak_bytes,
            peak_is_exact=now.peak_is_exact, elapsed_s=since_s,
        )  # fmt: skip

    def say(self, text: str) -> None:
        """Show a line."""
        self.status.value, self._said_of = line(text), self._session.chosen

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
        self.estimates.close()
        live, self._live = self._live, None
        if live is not None:
            self.live.children = ()
            live.close()
        widgets.close_all(self.box)
