"""A guess: committed before the run, locked once something was measured; its widget, and its state as static text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import ipywidgets
from IPython.display import display

from memlab import torch_internals
from memlab.errors import MemlabError
from memlab.lab.widgets import close_all, flowing, hiding_style
from memlab.lesson.claim import Maker, source_of
from memlab.torch_internals.traceback import running_shell
from memlab.units import format_bytes, parse_bytes
from memlab.views.shown import print_text

Value = float | str


@dataclass(frozen=True, slots=True)
class Size:
    """A size within a range: given as "1.5 GiB", or as an int of bytes."""

    low_bytes: int
    high_bytes: int

    def read(self, guess: object) -> Value:
        """The bytes of a guess."""
        if not isinstance(guess, str | int) or isinstance(guess, bool):
            raise MemlabError(f'guess a size such as "300 MiB", got {guess!r:.80}.')
        return parse_bytes(guess)

    def text(self, value: Value) -> str:
        """The value as it is written."""
        return format_bytes(int(value))


@dataclass(frozen=True, slots=True)
class Share:
    """A share of something, in percent from 0 to 100."""

    def read(self, guess: object) -> Value:
        """The percent of a guess."""
        try:
            value = float(str(guess).strip().removesuffix("%"))
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise MemlabError(f"guess a number of percent from 0 to 100, got {guess!r:.80}.")
        return value

    def text(self, value: Value) -> str:
        """The value as it is written."""
        return f"{float(value):.0f} %"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    options: tuple[str, ...]

    def read(self, guess: object) -> Value:
        """The option of a guess: itself, or its number from 1."""
        if isinstance(guess, int) and not isinstance(guess, bool) and 1 <= guess <= len(self.options):
            return self.options[guess - 1]
        if guess not in self.options:
            raise MemlabError(f"choose one of {', '.join(map(repr, self.options))}, or its number, got {guess!r:.80}.")
        return str(guess)

    def text(self, value: Value) -> str:
        """The value as it is written."""
        return f'"{value}"'


Answer = Size | Share | Choice


@dataclass(frozen=True, slots=True)
class Outcome:
    """A guess (None: skipped) and the true value, measured or from another `source`, "" if that is not known."""

    question: str
    answer: Answer
    guessed: Value | None
    measured: Value
    source: str = "measured"

    @property
    def ratio(self) -> float:
        """Guess divided by measurement: 1 is right; NaN without a guess, or for a wrong word."""
        if isinstance(self.answer, Choice) and self.guessed is not None:
            return 1.0 if self.guessed == self.measured else math.nan
        return float(self.guessed) / float(self.measured) if self.measured and self.guessed is not None else math.nan

    def __str__(self) -> str:
        measured = self.answer.text(self.measured)
        if self.guessed is None:
            source = self.source[:1].upper() + self.source[1:] or "The answer"
            return f"{self.question} {source}: {measured}. You skipped the guess."
        where = f", {self.source}" if self.source and not self.source.startswith("measured") else ""
        if isinstance(self.answer, Choice):
            verdict = "right" if self.ratio == 1 else f"it was {measured}"
            return f"{self.question} You said {self.answer.text(self.guessed)}: {verdict}{where}."
        off = f" ({distance(self.ratio)})" if self.ratio > 0 else ""
        return f"{self.question} You said {self.answer.text(self.guessed)}, it was {measured}{where}{off}."

    __repr__ = __str__


def distance(ratio: float) -> str:
    """How far off a guess is, of guess divided by measurement: "7 times too high".

    >>> distance(7.01), distance(0.5), distance(1.04)
    ('7 times too high', '2 times too low', 'right')
    """
    times = max(ratio, 1 / ratio)
    digits = f"{times:.2g}" if times < 100 else f"{times:,.0f}"
    return f"{digits} times too {'high' if ratio > 1 else 'low'}" if times >= 1.05 else "right"


class Guess:
    """`commit` a guess before the run, or `skip` it; `compare` shows it next to the measurement.

    `clock` changes its value with each new measurement: from then on nothing can be committed. `name` is what to type to
    get this guess, "" if no name of the learner's leads to it. `source` says where the figures come from that were made since.
    """

    def __init__(
        self,
        question: str,
        answer: Answer,
        clock: Callable[[], object] = lambda: None,
        on_change: Callable[[Guess], None] = lambda guess: None,
        name: str = "guess",
        source: Callable[[], str] = lambda: "measured",
    ) -> None:
        self.question, self.answer, self.name = question, answer, name
        self.state: Literal["open", "committed", "skipped"] = "open"
        self.value: Value | None = None
        self.outcome: Outcome | None = None
        self.on_change = on_change
        self._clock, self._asked_at, self._source = clock, clock(), source

    @property
    def example(self) -> str:
        """An answer, as it is typed."""
        if isinstance(self.answer, Choice):
            return self.answer.text(self.answer.options[0])
        return '"300 MiB"' if isinstance(self.answer, Size) else "25"

    @property
    def is_late(self) -> bool:
        """Whether something was measured since the question was asked."""
        return self._clock() != self._asked_at

    def commit(self, guess: object) -> Guess:
        """Commit a guess: `guess.commit("1.5 GiB")`, a number of percent, or an option."""
        self._refuse_if_locked()
        self.value, self.state = self.answer.read(guess), "committed"
        self.on_change(self)
        return self

    def skip(self) -> Guess:
        """Continue without a guess; the outcome says so."""
        self._refuse_if_locked()
        self.state = "skipped"
        self.on_change(self)
        return self

    def compare(self, measured: object, *by: Maker) -> Outcome:
        """The guess next to the true value; an open one counts as skipped.

        `by` is what the value was taken from, and says whether it was measured, simulated, predicted or computed. Without it
        the runs made since the question say so.
        """
        if self.state == "open":
            self.state = "skipped"
        source = source_of(by) if by else self._source()
        self.outcome = Outcome(self.question, self.answer, self.value, self.answer.read(measured), source)
        self.on_change(self)
        return self.outcome

    def _refuse_if_locked(self) -> None:
        if self.value is not None:
            said = self.answer.text(self.value)
            raise MemlabError(f"this guess is locked: you said {said}. Go on to the measurement.")
        if self.state == "skipped" or self.is_late:
            self.state = "skipped"
            why = "it was skipped, or measured before it was made"
            raise MemlabError(f"this guess is locked: {why}. Go on and compare.")

    def __str__(self) -> str:
        # The answer never stands here, right below the question: the next reader of the notebook may still want to guess.
        if self.state == "skipped":
            return f"{self.question} You skipped the guess; the answer stands further down."
        if self.value is not None:
            return f"{self.question} You said {self.answer.text(self.value)}; locked."
        hint = f"{self.name}.commit({self.example})"
        if isinstance(self.answer, Choice):
            *others, last = map(self.answer.text, self.answer.options)
            hint += f", one of {', '.join(others)} and {last}"
        return f"{self.question} Not guessed yet: {hint}, or {self.name}.skip()."

    __repr__ = __str__


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
        question = ipywidgets.HTML(
            f"<div style='line-height: 1.45; white-space: normal'>{escape(guess.question)}</div>"
        )
        self._controls = ipywidgets.VBox([question, row, ipywidgets.HBox([commit, skip, self._problem]), style])
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
    answer = guess.answer
    if isinstance(answer, Choice):
        radio = ipywidgets.RadioButtons(options=list(answer.options), value=None)
        return radio, radio
    # A slider, and a box that takes "1.5 GiB"; each follows the other. The box is empty until one of them is used.
    settings = {"readout": False, "layout": {"width": "auto", "flex": "1 1 220px", "max_width": "600px"}}
    if isinstance(answer, Share):
        slider = ipywidgets.IntSlider(50, 0, 100, **settings)
    else:
        low, high = (max(count, 1).bit_length() - 1 for count in (answer.low_bytes, answer.high_bytes))
        middle = 2 ** ((low + high) / 2)
        slider = ipywidgets.FloatLogSlider(middle, base=2, min=low, max=high, step=0.05, **settings)
    box = ipywidgets.Text(placeholder=guess.example.strip('"'), description="or type", layout={"width": "14em"})

    def moved(change: Any) -> None:
        box.unobserve(typed, "value")
        box.value = answer.text(change["new"])
        box.observe(typed, "value")

    def typed(change: Any) -> None:
        slider.unobserve(moved, "value")  # what was typed stays as it is
        with contextlib.suppress(MemlabError):
            slider.value = round(float(answer.read(change["new"])))  # its ends limit it
        slider.observe(moved, "value")

    slider.observe(moved, "value")
    box.observe(typed, "value")
    return box, flowing(slider, box)
