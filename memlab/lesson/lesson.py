"""A lesson: the guesses, claims, checks and summary of its cells."""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal

import torch

from memlab.api.predict import predict
from memlab.api.provenance import provenance_here
from memlab.api.run import Run
from memlab.api.runs import runs
from memlab.errors import ClaimRefuted, MemlabError
from memlab.lesson import progress_file
from memlab.lesson.check import Check, Verdict
from memlab.lesson.claim import (
    LEAST_SAVING,
    MOST_OF_A_MYTH,
    Account,
    AccountTerm,
    Claim,
    Maker,
    Measured,
    by_category,
    saving,
    source_of,
)
from memlab.lesson.guess import Answer, Choice, Guess, Share, Size, show_guess
from memlab.lesson.guess_plot import GuessPlot
from memlab.lesson.progress import CourseProgress
from memlab.lesson.progress_file import FinishedLesson, StoredExercise, StoredGuess
from memlab.lesson.scoreboard import PAIRS, Scoreboard, flops_ratio, seconds_ratios
from memlab.lesson.sweep import Sweep
from memlab.probes.counters import Nvml
from memlab.probes.host import HostMemory
from memlab.torch_internals import blas_workspace_sizes
from memlab.trace.trace import SIMULATED_GPU, is_simulated_gpu
from memlab.units import MiB, format_bytes, number_of, one_line, parse_bytes
from memlab.views.shown import Shown, print_text

HEADLINES = "application/vnd.memlab.headlines+json"
"""The MIME type of a lesson's figures, used to compare two executions."""
SMALL_WORKSPACE = ":4096:2:16:8"
"""8.125 MiB per handle: PyTorch's default except on Hopper and later, where 32 MiB exceed some exercises."""

CONTEXTS_BYTES = 1024 * MiB
"""Room for the CUDA contexts of a lesson and of a program that it starts; on most cards one takes 80 to 500 MiB."""


def check_gpu(lesson: str, needs_bytes: int) -> None:
    """Raise MemlabError if other processes leave too little of the GPU: kernels of other notebooks keep what they had."""
    if not torch.cuda.is_initialized():
        return
    with Nvml.open() as nvml:
        reading = nvml.read(torch.cuda.current_device())
    if reading.total_bytes is None or reading.others_bytes is None:
        return
    room_bytes, wanted_bytes = reading.total_bytes - reading.others_bytes, needs_bytes * 6 // 5 + CONTEXTS_BYTES
    if room_bytes < wanted_bytes:
        raise MemlabError(
            f"lesson {lesson} takes up to {format_bytes(wanted_bytes)} of the GPU's memory, and other processes leave "
            f"{format_bytes(room_bytes)}: shut down the kernels of other notebooks, then run this cell again."
        )


class Lesson:
    """The API of a course notebook: `lesson = Lesson("08 checkpointing", needs="600 MiB")`.

    `device` is where its cells run: "cuda" if available, else "cpu". cuBLAS is configured to the workspace that it has on
    most GPUs, unless CUBLAS_WORKSPACE_CONFIG is set already. `source` is what figures of that device are: "measured", or
    "simulated" on a simulated GPU. Raises MemlabError if the host, or the GPU beside other processes, has less memory than
    the lesson needs.
    """

    def __init__(self, name: str, needs: str | int = "200 MiB", card: str = "RTX 4060") -> None:
        self.name, self.card = name, card
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", SMALL_WORKSPACE)
        self.headlines: dict[str, int | float | str] = {}
        self._claims: dict[str, Claim] = {}  # a cell that is run again makes its claim again
        self.guesses: list[Guess] = []
        self.verdicts: list[Verdict] = []
        free_bytes, needs_bytes = HostMemory().read().available_bytes, parse_bytes(needs)
        if free_bytes < 1.2 * needs_bytes:
            raise MemlabError(
                f"lesson {name} takes about {format_bytes(needs_bytes)} of this machine's memory, and "
                f"{format_bytes(free_bytes)} are free: close other notebooks and programs, then run this cell again."
            )
        where = torch.cuda.get_device_name() if self.device == "cuda" else "this machine's CPU; no GPU was found"
        if self.device == "cuda":
            check_gpu(name, needs_bytes)
        self.source = "simulated" if is_simulated_gpu(where) else "measured"
        how = f"on {where}, a {SIMULATED_GPU}" if self.source == "simulated" else f"measured on {where}"
        print_text(f"Lesson {name}: {how}.")

    @property
    def claims(self) -> list[Claim]:
        """The claims that held so far, each once."""
        return list(self._claims.values())

    def guess(
        self, question: str, *, between: tuple[str | int, str | int] | None = None, choices: Sequence[str] = ()
    ) -> Guess:
        """Ask before the run: a size `between` two, one of `choices`, or else a share in percent."""
        answer: Answer = Choice(tuple(choices)) if choices else Share()
        if between is not None:
            answer = Size(parse_bytes(between[0]), parse_bytes(between[1]))
        questions = [guess.question for guess in self.guesses]
        place = questions.index(question) if question in questions else len(questions)  # a cell may be run again
        lesson = self._name_in(sys._getframe(1))
        name = f"{lesson}.guesses[{place}]" if lesson else ""
        asked_at = frozenset(map(id, runs.values()))

        def source() -> str:
            since = (run.trace.provenance for run in runs.values() if id(run) not in asked_at)
            return " and ".join(dict.fromkeys(since))

        guess = Guess(question, answer, lambda: tuple(map(id, runs.values())), self._store, name, source)
        self.guesses[place : place + 1] = [guess]
        show_guess(guess)
        return guess

    def _name_in(self, frame: FrameType) -> str:
        """The name by which this frame knows the lesson; "" without one."""
        names = {**frame.f_globals, **frame.f_locals}
        return next((name for name, value in names.items() if value is self and not name.startswith("_")), "")

    def _store(self, guess: Guess) -> None:
        if guess.outcome is not None:
            ratio = guess.outcome.ratio
            usable = ratio if math.isfinite(ratio) and ratio > 0 else None
            state: Literal["committed", "skipped"] = "committed" if guess.state == "committed" else "skipped"
            progress_file.save(StoredGuess(self.name, guess.question, usable, state))

    def guesses_so_far(self) -> GuessPlot:
        """The learner's guesses of all lessons: guess divided by measurement, lesson by lesson."""
        return GuessPlot(progress_file.guesses())

    def progress(self) -> CourseProgress:
        """What the learner has guessed, held and solved in all lessons so far."""
        return CourseProgress(progress_file.load())

    def sweep(self, name: str, runs: Mapping[Any, Measured]) -> Sweep:
        """The peaks over the values of one setting: `lesson.sweep("batch", {8: run, 16: other})`."""
        return Sweep(name, runs)

    knob = sweep  # the earlier name

    def saves(
        self, what: str, before: Measured, after: Measured, at_least: float = LEAST_SAVING, of: str = "allocated"
    ) -> Claim:
        """Assert that `what` saves at least this share of the peak of `of`, else raise ClaimRefuted."""
        if not 0 < at_least < 1:
            raise MemlabError(f"at_least is a share between 0 and 1, got {at_least!r:.80}.")
        claim = saving(what, before, after, of)
        return self._claimed(what, claim, claim.saved_share >= at_least, f"At least {at_least:.0%}")

    def saves_nothing(
        self, what: str, before: Measured, after: Measured, at_most: float = MOST_OF_A_MYTH, of: str = "allocated"
    ) -> Claim:
        """Assert that `what` does not change the peak of `of` by more than this share, else raise ClaimRefuted."""
        claim = saving(what, before, after, of)
        return self._claimed(what, claim, abs(claim.saved_share) <= at_most, f"At most {at_most:.0%}")

    def _claimed(self, what: str, claim: Claim, is_so: bool, claimed: str) -> Claim:
        if not is_so:
            raise ClaimRefuted(f"not so here: {claim.sentence} {claimed} was claimed.")
        self._claims[what] = claim
        self.headlines[f"{what}: share of the peak saved"] = round(claim.saved_share, 4)
        return claim

    def holds(self, sentence: str, is_so: bool, *by: Maker) -> Claim:
        """Assert anything else that the lesson says; `by` is what the figures were taken from, if not computed here."""
        return self._held(sentence, is_so, source_of(by))

    def _held(self, sentence: str, is_so: bool, source: str) -> Claim:
        if not is_so:
            raise ClaimRefuted(f"not so here: {sentence}")
        held = self._claims[re.sub(r"\d[\d.,]*", "#", sentence)] = Claim(sentence, source, 0.0)
        return held

    def price(
        self, what: str, before: Callable[[], object], after: Callable[[], object], at_most: float, of: str = "FLOPs"
    ) -> Claim | str:
        """Assert what a saving costs: `after` takes at most so many times the "FLOPs", or "seconds", of `before`.

        Of seconds the low end of the spread is compared, since other work on the machine only adds to them; a simulated GPU
        has none, and says so.
        """
        if of == "FLOPs":
            ratio = flops_ratio(before, after)
            self.headline(f"{what}: times the FLOPs", round(ratio, 3))
            times = f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
            return self.holds(f"{what}: {times} times the FLOPs (at most {at_most:g})", ratio <= at_most)
        if of != "seconds":
            raise MemlabError(f'a price is in "FLOPs" or "seconds", got {of!r:.80}.')
        source = provenance_here([self.device])
        if source == "simulated":
            return f"{what}: not measurable here: a simulated GPU has no times"
        ratios = seconds_ratios(before, after)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {PAIRS} pairs"
        sentence = f"{what}: {statistics.median(ratios):.2f} times the seconds ({spread}; at most {at_most:g})"
        return self._held(sentence, ratios[0] <= at_most, f"{source} on {self.device}")

    def accuracy(self, what: str, off: float, at_most: float = math.inf, at_least: float = 0.0) -> None:
        """Assert how far `what` is off, as a share of the exact values; a simulated GPU computes none, and says so."""
        if self.source == "simulated":
            self.not_measurable(f"{what}: accuracy", "a simulated GPU computes no values")
            return
        bounds = "" if at_most == math.inf else f", at most {at_most:.0%}"
        bounds += f", at least {at_least:.0%}" if at_least else ""
        print_text(str(self.holds(f"{what}: off by {off:.1%}{bounds}", at_least <= off <= at_most)))

    def headline(self, name: str, figure: int | float | str) -> Any:
        """Record a figure that every execution on this kind of machine reproduces."""
        self.headlines[name] = figure
        return figure

    def not_measurable(self, what: str, why: str) -> None:
        """State that this device cannot show `what`; a zero would look like a measurement."""
        print_text(f"{what}: {self.headline(what, f'not measurable here: {why}')}.")

    def seconds(self, what: str, figure: str) -> None:
        """Print the time that `what` took on this device; a simulated GPU has none."""
        print_text(f"{what}: " + ("no times on a simulated GPU" if self.source == "simulated" else figure))

    def predict(self, step: Callable[[], object], name: str | None = None, card: str | None = None) -> Any:
        """Predict for a GPU what this machine cannot show."""
        return predict(step, card or self.card, name=name)

    on_card = predict  # the earlier name

    def account(
        self,
        title: str,
        total: Run | int,
        terms: Mapping[str, int] | Sequence[tuple[str, str, int, int]],
        *by: Maker,
    ) -> Account:
        """Every large term of a peak, computed and measured; raises ClaimRefuted if one is missing.

        `total` is a run, for its peak of allocated memory, or a number of bytes, with what it was taken from in `by`. `terms`
        has the computed bytes of each category of the run, or of several ("input and other"): what each held is in the run.
        Terms that are no category are rows: name, formula, computed bytes, measured bytes.
        """
        total_bytes = total if isinstance(total, int) else total.peak_allocated_bytes
        self.headlines[title] = total_bytes
        source = source_of(by if isinstance(total, int) else [total])
        rows = by_category(total, terms) if isinstance(terms, Mapping) else (AccountTerm(*term) for term in terms)
        # cuBLAS has one for the thread of forward and one for that of backward, and cuBLASLt one while it multiplies.
        workspaces = 3 * max(blas_workspace_sizes()) if self.device == "cuda" else 0
        return Account(title, total_bytes, tuple(rows), source, workspaces).checked()

    def check(self, yours: Callable[[], object]) -> Check:
        """Check an exercise: `lesson.check(yours).same_as(reference).peak_below("2 GiB")`."""
        exercise = one_line(str(getattr(yours, "__name__", "yours")))

        def judged(verdict: Verdict) -> None:
            self.verdicts.append(verdict)
            if verdict.is_written:
                progress_file.save(StoredExercise(self.name, exercise, verdict.passed))

        return Check(yours, self.device, judged, self._name_in(sys._getframe(1)))

    def scoreboard(self, budget: str | int, steps: int = 5) -> Scoreboard:
        """Score edits of one program: `board.score("plain", train)`, where `train(steps)` returns the last loss.

        On CUDA the workspaces of cuBLAS, for the threads of forward and of backward, are added to the budget.
        """
        workspaces = 2 * max(blas_workspace_sizes()) if self.device == "cuda" else 0
        return Scoreboard(parse_bytes(budget) + workspaces, self.device, steps, self.source == "simulated")

    def end(self) -> LessonEnd:
        """Summarize claims and guesses; the last cell of a lesson."""
        progress_file.save(FinishedLesson(self.name, len(self.claims)))
        return LessonEnd(self)


class LessonEnd(Shown):
    """The claims that held, the guesses, and for the build of the course the figures."""

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson

    @property
    def text(self) -> str:
        """How many claims held, the outcome of each guess, and all claims: a cell shows no more than its last one."""
        lesson, guesses = self._lesson, self._lesson.guesses
        committed = sum(guess.state == "committed" for guess in guesses)
        where = f"a {SIMULATED_GPU}" if lesson.source == "simulated" else "this machine"
        lines = [f"Lesson {lesson.name}: {number_of(len(lesson.claims), 'claim')} held on {where}."]
        lines += [f"You committed {committed} of {len(guesses)} guesses."] if guesses else []
        if skipped := len(guesses) - committed:
            were = "1 guess was" if skipped == 1 else f"{skipped} guesses were"
            lines.append(f"{were} skipped. To answer, run the cell that asks again, commit, and only then go on.")
        lines += [f"  {guess.outcome}" for guess in guesses if guess.outcome is not None]
        return "\n".join([*lines, *map(str, lesson.claims)])

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the text, and the figures."""
        return {"text/plain": self.text, HEADLINES: {"device": self._lesson.device, **self._lesson.headlines}}
