"""The widget of a guess: a slider, a box for the keyboard, Commit and Skip; the state stands beside it as static text."""

from __future__ import annotations

from typing import Any

import ipywidgets
from IPython.display import display

from memlab import seams
from memlab.errors import MemlabError
from memlab.lesson.guess import Choice, Guess, Share, Size, hint
from memlab.session.show import ipython
from memlab.units import format_bytes


def ask(guess: Guess) -> None:
    """Show the question: with a widget in a notebook, else as text."""
    if not seams.is_kernel(ipython()):
        print(guess)
        return
    Asked(guess)


class Asked:
    """The controls of one guess, and beside them its state, kept current by display id."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._input = _input(guess)
        self._said = ipywidgets.HTML()
        commit = ipywidgets.Button(description="Commit", button_style="primary", tooltip="Lock this guess")
        skip = ipywidgets.Button(description="Skip", tooltip="Go on without a guess; the outcome will say so")
        commit.on_click(lambda button: self._try(lambda: guess.commit(self._value())))
        skip.on_click(lambda button: self._try(guess.skip))
        self._controls = ipywidgets.VBox([self._input, ipywidgets.HBox([commit, skip, self._said])])
        self._listener, guess.on_change = guess.on_change, self._heard
        self._place = display(self._controls, display_id=True)
        self._text = display({"text/plain": str(guess)}, raw=True, display_id=True)

    def _value(self) -> Any:
        if isinstance(self._guess.answer, Size) and isinstance(self._input, ipywidgets.HBox):
            return self._input.children[1].value
        return self._input.value

    def _try(self, change: Any) -> None:
        try:
            change()
        except MemlabError as error:
            self._said.value = f"<span role='alert'>{_escaped(str(error))}</span>"

    def _heard(self, guess: Guess) -> None:
        self._listener(guess)
        self._changed()

    def _changed(self) -> None:
        """Show the state; once it is settled the controls go."""
        if self._text is not None:
            self._text.update({"text/plain": str(self._guess)}, raw=True)
        if self._guess.state != "open" and self._place is not None:
            self._place.update({"text/plain": ""}, raw=True)
            self._place = None
            _close(self._controls)


def _input(guess: Guess) -> Any:
    answer = guess.answer
    if isinstance(answer, Choice):
        return ipywidgets.RadioButtons(options=list(answer.options), description=guess.question, style=_WIDE)
    if isinstance(answer, Share):
        return ipywidgets.IntSlider(50, 0, 100, description=guess.question, style=_WIDE, layout={"width": "95%"})
    return _size_input(guess.question, answer)


def _size_input(question: str, answer: Size) -> Any:
    """A slider over powers of two, and a box that takes "1.5 GiB"; each follows the other."""
    low, high = (max(count, 1).bit_length() - 1 for count in (answer.low_bytes, answer.high_bytes))
    slider = ipywidgets.FloatLogSlider(
        value=2 ** ((low + high) / 2), base=2, min=low, max=high, step=0.05, readout=False, description=question
    )
    slider.style.description_width, slider.layout.width = "initial", "75%"
    box = ipywidgets.Text(format_bytes(int(slider.value)), description="or type", layout={"width": "14em"})
    slider.observe(lambda change: setattr(box, "value", format_bytes(int(change["new"]))), "value")
    return ipywidgets.HBox([slider, box])


_WIDE = {"description_width": "initial"}


def _close(widget: Any) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


__all__ = ["Asked", "ask", "hint"]
