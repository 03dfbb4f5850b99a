"""The widget of a guess, and its state as static text, which is hidden while the widget is alive."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets
from IPython.display import display

from memlab import torch_internals
from memlab.errors import MemlabError
from memlab.lab.widgets import close_all, hiding_style
from memlab.lesson.guess import Choice, Guess, Share
from memlab.torch_internals.traceback import running_shell
from memlab.views.shown import print_text


def show_guess(guess: Guess) -> None:
    """Show the question: with a widget in a notebook, else as text."""
    if torch_internals.is_kernel(running_shell()):
        GuessWidget(guess)
    else:
        print_text(str(guess))


class GuessWidget:
    """The controls of one guess, removed once it is committed or skipped, and its state."""

    def __init__(self, guess: Guess) -> None:
        self._name = f"memlab-guess-{id(guess):x}"
        self._input, row = _inputs(guess)
        self._problem = ipywidgets.HTML()
        commit = ipywidgets.Button(description="Commit", button_style="primary", tooltip="Lock this guess")
        skip = ipywidgets.Button(description="Skip", tooltip="Go on without a guess; the outcome will say so")
        commit.on_click(lambda button: self._try(lambda: guess.commit(self._input.value)))
        skip.on_click(lambda button: self._try(guess.skip))
        commit.disabled = True  # nothing is chosen for the learner
        self._input.observe(lambda change: setattr(commit, "disabled", not change["new"]), "value")
        style = ipywidgets.HTML(hiding_style(self._name), layout={"display": "none"})
        self._controls = ipywidgets.VBox([row, ipywidgets.HBox([commit, skip, self._problem]), style])
        self._controls.add_class(f"{self._name}-controls")
        self._next_listener, guess.on_change = guess.on_change, self._changed
        self._controls_display = display(self._controls, display_id=True)
        self._text_display = display(self._state(guess), raw=True, display_id=True)

    def _try(self, change: Any) -> None:
        try:
            change()
        except MemlabError as error:
            self._problem.value = f"<span role='alert'>{escape(str(error))}</span>"

    def _changed(self, guess: Guess) -> None:
        self._next_listener(guess)
        if self._text_display is not None:
            self._text_display.update(self._state(guess), raw=True)
        if guess.state != "open" and self._controls_display is not None:
            self._controls_display.update({"text/plain": ""}, raw=True)
            self._controls_display = None
            close_all(self._controls)

    def _state(self, guess: Guess) -> dict[str, str]:
        """The state as text, and as HTML: JupyterLab breaks plain text in the middle of words."""
        if guess.state != "open":
            return {"text/plain": str(guess), "text/html": f"<div>{escape(str(guess))}</div>"}
        waiting = f"{escape(guess.question)} <i>Not guessed yet: run this cell to answer.</i>"
        return {"text/plain": str(guess), "text/html": f"<div class='{self._name}'>{waiting}</div>"}


def _inputs(guess: Guess) -> tuple[Any, Any]:
    """The input widget, and the row that contains it."""
    answer, style = guess.answer, {"description_width": "initial"}
    if isinstance(answer, Choice):
        options = list(answer.options)
        radio = ipywidgets.RadioButtons(options=options, value=None, description=guess.question, style=style)
        return radio, radio
    # A slider, and a box that takes "1.5 GiB" and follows it. The box is empty until one of them is used.
    settings = {"readout": False, "description": guess.question, "style": style, "layout": {"width": "75%"}}
    if isinstance(answer, Share):
        slider = ipywidgets.IntSlider(50, 0, 100, **settings)
    else:
        low, high = (max(count, 1).bit_length() - 1 for count in (answer.low_bytes, answer.high_bytes))
        middle = 2 ** ((low + high) / 2)
        slider = ipywidgets.FloatLogSlider(middle, base=2, min=low, max=high, step=0.05, **settings)
    box = ipywidgets.Text(placeholder=guess.example.strip('"'), description="or type", layout={"width": "14em"})
    slider.observe(lambda change: setattr(box, "value", answer.text(change["new"])), "value")
    return box, ipywidgets.HBox([slider, box])
