"""A lesson: what its cells ask, claim and check, and what is left to say at its end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memlab.errors import ClaimRefuted, MemlabError
from memlab.lesson import claim, kept
from memlab.lesson.account import Account, account
from memlab.lesson.ask import ask
from memlab.lesson.check import Check, Verdict
from memlab.lesson.claim import LEAST_SAVING, MOST_OF_A_MYTH, Claim, Measured
from memlab.lesson.drawn import Drawn
from memlab.lesson.guess import Answer, Choice, Guess, Share, Size
from memlab.lesson.knob import Knob
from memlab.probes.host import HostMemory
from memlab.session.predict import Prediction, predict
from memlab.session.runs import runs
from memlab.units import format_bytes, parse_bytes

HEADLINES = "application/vnd.memlab.headlines+json"
"""The MIME type under which the end of a lesson keeps its figures, for the check that a fresh execution gives the same."""


SMALL_WORKSPACE = ":4096:2:16:8"
"""8.125 MiB for each handle, PyTorch's default but on Hopper and later, where it is 32 MiB: more than a lesson's exercise."""


class Lesson:
    """What a notebook of the course works with: `lesson = Lesson("08 checkpointing", needs="600 MiB")`.

    `device` is where its cells put things: "cuda" where there is one, else "cpu". cuBLAS is told to take the workspace it
    takes on most cards, unless CUBLAS_WORKSPACE_CONFIG says something already. Raises MemlabError where the host has less
    free memory than the lesson needs.
    """

    def __init__(self, name: str, needs: str | int = "200 MiB", card: str = "RTX 4060") -> None:
        self.name, self.card = name, card
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", SMALL_WORKSPACE)
        self.headlines: dict[str, int | float | str] = {}
        self.claims: list[Claim] = []
        self.guesses: list[Guess] = []
        self.verdicts: list[Verdict] = []
        _look_at_host(name, parse_bytes(needs))
        where = torch.cuda.get_device_name() if self.device == "cuda" else "this machine's CPU; no GPU was found"
        print(f"Lesson {name}: measured on {where}.")

    # --- guessing --------------------------------------------------------------------------------------------------------

    def guess(
        self,
        question: str,
        *,
        between: tuple[str | int, str | int] | None = None,
        choices: Sequence[str] = (),
    ) -> Guess:
        """Ask before the run: a size `between` two, one of `choices`, or else a share in percent."""
        answer: Answer = Choice(tuple(choices)) if choices else Share()
        if between is not None:
            answer = Size(parse_bytes(between[0]), parse_bytes(between[1]))
        guess = Guess(question, answer, clock=_measurements, on_change=self._note)
        self.guesses.append(guess)
        ask(guess)
        return guess

    def _note(self, guess: Guess) -> None:
        if guess.outcome is None:
            return
        ratio = guess.outcome.ratio
        usable = ratio if math.isfinite(ratio) and ratio > 0 else None
        kept.keep(
            kept.Kept(self.name, guess.question, usable, "committed" if guess.state == "committed" else "skipped")
        )

    def guesses_so_far(self) -> Drawn:
        """The learner's guesses over all lessons: guess over measurement, lesson by lesson."""
        return Drawn(kept.read())

    # --- a knob ----------------------------------------------------------------------------------------------------------

    def knob(self, name: str, runs: Mapping[Any, Measured]) -> Knob:
        """The peaks over the values of one setting: `lesson.knob("batch", {8: run, 16: other})`."""
        return Knob(name, runs)

    # --- claims ----------------------------------------------------------------------------------------------------------

    def saves(
        self, what: str, before: Measured, after: Measured, at_least: float = LEAST_SAVING, of: str = "allocated"
    ) -> Claim:
        """Assert that `what` takes at least this share from the peak of `of`."""
        return self._claimed(what, claim.saves(what, before, after, at_least, of))

    def saves_nothing(
        self, what: str, before: Measured, after: Measured, at_most: float = MOST_OF_A_MYTH, of: str = "allocated"
    ) -> Claim:
        """Assert that `what` does not move the peak of `of`."""
        return self._claimed(what, claim.saves_nothing(what, before, after, at_most, of))

    def _claimed(self, what: str, found: Claim) -> Claim:
        self.claims.append(found)
        self.headlines[f"{what}: share of the peak saved"] = round(found.saved_share, 4)
        return found

    def holds(self, sentence: str, is_so: bool) -> Claim:
        """Assert anything else that the lesson says."""
        if not is_so:
            raise ClaimRefuted(f"not so here: {sentence}")
        self.claims.append(Claim(sentence, f"on {self.device}", 0.0))
        return self.claims[-1]

    def headline(self, name: str, figure: int | float | str) -> Any:
        """Note a figure that every execution on a machine of this kind gives again."""
        self.headlines[name] = figure
        return figure

    def on_card(self, step: Callable[[], object], name: str | None = None, card: str | None = None) -> Prediction:
        """What this machine cannot show, predicted for a card, and marked so."""
        return predict(step, card or self.card, name=name)

    def account(
        self, title: str, total_bytes: int, terms: Sequence[tuple[str, str, int, int]], found: str = "measured"
    ) -> Account:
        """Every large term of a peak: name, formula, predicted bytes, measured bytes (or `found` in another way)."""
        self.headlines[title] = total_bytes
        return account(title, total_bytes, terms, found)

    def check(self, yours: Callable[[], object]) -> Check:
        """Check an exercise: `lesson.check(yours).same_as(reference).peak_below("2 GiB")`."""
        return Check(yours, self.device, self.verdicts.append)

    # --- the end ---------------------------------------------------------------------------------------------------------

    def end(self) -> End:
        """What was claimed and guessed; the last cell of a lesson."""
        return End(self)


class End:
    """What a lesson comes to."""

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson

    def __str__(self) -> str:
        asked = len(self._lesson.guesses)
        said = sum(guess.state == "committed" for guess in self._lesson.guesses)
        lines = [f"Lesson {self._lesson.name}: {len(self._lesson.claims)} claims held on this machine."]
        lines.append(f"You committed {said} of {asked} guesses." if asked else "")
        lines += [f"  {guess.outcome}" for guess in self._lesson.guesses if guess.outcome is not None]
        return "\n".join(filter(None, lines))

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": str(self), HEADLINES: {"device": self._lesson.device, **self._lesson.headlines}}


def _measurements() -> object:
    """Something else after each measurement."""
    return tuple(id(run) for run in runs.values())


def _look_at_host(name: str, needs_bytes: int) -> None:
    free_bytes = HostMemory().read().available_bytes
    if free_bytes < 1.2 * needs_bytes:
        raise MemlabError(
            f"lesson {name} takes about {format_bytes(needs_bytes)} of this machine's memory, and {format_bytes(free_bytes)} "
            "are free: close other notebooks and programs, then run this cell again."
        )
