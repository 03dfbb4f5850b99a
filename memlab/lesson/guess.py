"""A guess: what the learner says before the run; locked as soon as something was measured. It knows no widget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from memlab.errors import MemlabError
from memlab.units import format_bytes, parse_bytes

State = Literal["open", "committed", "skipped"]
Value = float | str


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes between two: said as "1.5 GiB", or as an int of bytes."""

    low_bytes: int
    high_bytes: int

    def read(self, said: object) -> Value:
        """The value behind what was said."""
        if not isinstance(said, str | int) or isinstance(said, bool):
            raise MemlabError(f'guess a size such as "300 MiB", got {said!r:.80}.')
        found = parse_bytes(said)
        if found <= 0:
            raise MemlabError(f"guess a size above nothing, got {said!r:.80}.")
        return found

    def text(self, value: Value) -> str:
        """As it is written."""
        return format_bytes(int(value))

    def ratio(self, guessed: Value, measured: Value) -> float:
        """How many times the measured value was guessed."""
        return float(guessed) / float(measured) if measured else math.nan


@dataclass(frozen=True, slots=True)
class Share:
    """A share of something, in percent from 0 to 100."""

    def read(self, said: object) -> Value:
        """The value behind what was said."""
        try:
            found = float(str(said).strip().removesuffix("%"))
        except ValueError:
            found = math.nan
        if not 0 <= found <= 100:
            raise MemlabError(f"guess a number of percent from 0 to 100, got {said!r:.80}.")
        return found

    def text(self, value: Value) -> str:
        """As it is written."""
        return f"{float(value):.0f} %"

    def ratio(self, guessed: Value, measured: Value) -> float:
        """How many times the measured value was guessed."""
        return float(guessed) / float(measured) if measured else math.nan


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    options: tuple[str, ...]

    def read(self, said: object) -> Value:
        """The option behind what was said: itself, or its number from 1."""
        if isinstance(said, int) and not isinstance(said, bool) and 1 <= said <= len(self.options):
            return self.options[said - 1]
        if said not in self.options:
            raise MemlabError(f"choose one of {', '.join(map(repr, self.options))}, or its number, got {said!r:.80}.")
        return str(said)

    def text(self, value: Value) -> str:
        """As it is written."""
        return f'"{value}"'

    def ratio(self, guessed: Value, measured: Value) -> float:
        """1 where it was right, else not a number: a word has no distance."""
        return 1.0 if guessed == measured else math.nan


Answer = Size | Share | Choice


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was guessed (None: skipped) beside what was measured, or `found` in another way, as "predicted"."""

    question: str
    answer: Answer
    guessed: Value | None
    measured: Value
    found: str = "measured"

    @property
    def ratio(self) -> float:
        """Guess over measurement: 1 is right; not a number where there is no guess, or no distance."""
        return math.nan if self.guessed is None else self.answer.ratio(self.guessed, self.measured)

    def __str__(self) -> str:
        measured = self.answer.text(self.measured)
        if self.guessed is None:
            return f"{self.question} {self.found.capitalize()}: {measured}. You skipped the guess."
        guessed = self.answer.text(self.guessed)
        if isinstance(self.answer, Choice):
            return f"{self.question} You said {guessed}: {'right' if self.ratio == 1 else f'it was {measured}'}."
        return f"{self.question} You said {guessed}, it was {measured} (guess over measurement {self.ratio:.2f})."

    __repr__ = __str__


class Guess:
    """`commit` a guess before the run, or `skip` it; `compare` shows it beside what was measured.

    `clock` gives something else as soon as there is a new measurement: from then on nothing can be committed.
    """

    def __init__(
        self,
        question: str,
        answer: Answer,
        clock: Callable[[], object] = lambda: None,
        on_change: Callable[[Guess], None] = lambda guess: None,
    ) -> None:
        self.question, self.answer = question, answer
        self.state: State = "open"
        self.value: Value | None = None
        self.outcome: Outcome | None = None
        self._clock, self._made_at = clock, clock()
        self.on_change = on_change

    @property
    def is_late(self) -> bool:
        """Whether something was measured since the question was asked."""
        return self._clock() != self._made_at

    def commit(self, said: object) -> Guess:
        """Commit a guess: `guess.commit("1.5 GiB")`, a number of percent, or a word of those offered."""
        self._refuse_if_locked()
        self.value, self.state = self.answer.read(said), "committed"
        self.on_change(self)
        return self

    def skip(self) -> Guess:
        """Go on without a guess; the outcome says so."""
        self._refuse_if_locked()
        self.state = "skipped"
        self.on_change(self)
        return self

    def compare(self, measured: object, found: str = "measured") -> Outcome:
        """What was guessed beside what was measured (or `found` otherwise); one that is still open counts as skipped."""
        if self.state == "open":
            self.state = "skipped"
        said = self.value if self.state == "committed" else None
        self.outcome = Outcome(self.question, self.answer, said, self.answer.read(measured), found)
        self.on_change(self)
        return self.outcome

    def _refuse_if_locked(self) -> None:
        if self.state == "committed":
            assert self.value is not None
            raise MemlabError(
                f"this guess is locked: you said {self.answer.text(self.value)}. Go on to the measurement."
            )
        if self.state == "skipped" or self.is_late:
            self.state = "skipped"
            raise MemlabError(
                "this guess is locked: it was skipped, or measured before it was made. Go on and compare."
            )

    def __str__(self) -> str:
        # No answer here, right below the question: whoever opens the notebook next may still guess.
        if self.state == "skipped":
            return f"{self.question} You skipped the guess; the answer stands further down."
        if self.outcome is not None:
            return str(self.outcome)
        if self.state == "committed":
            assert self.value is not None
            return f"{self.question} You said {self.answer.text(self.value)}; locked."
        return f"{self.question} Not guessed yet: {hint(self.answer)}, or guess.skip()."

    __repr__ = __str__


def hint(answer: Answer) -> str:
    """How to commit by the keyboard."""
    if isinstance(answer, Choice):
        return f"guess.commit(1 to {len(answer.options)}): {_numbered(answer.options)}"
    return 'guess.commit("300 MiB")' if isinstance(answer, Size) else "guess.commit(25)"


def _numbered(options: Sequence[str]) -> str:
    return ", ".join(f"{number} {option}" for number, option in enumerate(options, 1))
