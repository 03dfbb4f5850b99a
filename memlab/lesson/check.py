"""The check of an exercise: a peak below a limit, and the same result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab.api.compare import compare
from memlab.api.run import Run
from memlab.api.track import track
from memlab.errors import MemlabError
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import format_bytes, format_seconds, one_line, parse_bytes
from memlab.workloads.job import seeded

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an exercise is solved; `lines` says what to look at next."""

    passed: bool
    lines: tuple[str, ...]
    run: Run | None = None
    took_s: float = -1.0

    def __str__(self) -> str:
        return ("Solved. " if self.passed else "Not yet. ") + "\n".join(self.lines)

    __repr__ = __str__


class NotWritten(Exception):
    """The learner has not written the function yet."""


class Check:
    """`check(yours).same_as(reference).peak_below("2 GiB")`: every exercise requires both."""

    def __init__(
        self,
        yours: Step,
        device: str | None = None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        if not callable(yours):
            raise MemlabError(f"check a function without arguments, got {type(yours).__name__}.")
        self._yours, self._device, self._on_verdict = yours, device, on_verdict
        self._reference: Step | None = None
        self._relative = 0.0

    def same_as(self, reference: Step, relative: float = 0.0) -> Check:
        """Require this result: bit for bit, or up to this share of the largest value."""
        if not callable(reference):
            raise MemlabError(f"compare with a function without arguments, got {type(reference).__name__}.")
        self._reference, self._relative = reference, relative
        return self

    def peak_below(self, limit: str | int) -> Verdict:
        """Run both and judge."""
        if self._reference is None:
            raise MemlabError("say what the result must be: check(yours).same_as(reference).peak_below(limit).")
        verdict = self._verdict(self._reference, parse_bytes(limit))
        self._on_verdict(verdict)
        return verdict

    def _verdict(self, reference: Step, limit_bytes: int) -> Verdict:
        name = _name(self._yours)
        try:
            mine, took_s = self._run(self._yours)
        except NotWritten:
            return Verdict(False, (f"{name}() returns nothing yet: write it, then run this cell.",))
        except Exception as error:
            first_line = one_line(next(iter(str(error).strip().splitlines()), ""))
            text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
            return Verdict(False, (f"{name}() raised {text}",))
        expected, expected_s = self._run(reference)
        peak, limit = format_bytes(mine.peak_allocated_bytes), format_bytes(limit_bytes)
        is_below, peak_line = mine.peak_allocated_bytes < limit_bytes, f"Peak {peak}, limit {limit}."
        if not is_below:
            owner, most = next(iter(mine.breakdown().items()), ("nothing", 0))
            peak_line += f" {format_bytes(most)} of it are {owner}: lesson.verdicts[-1].run shows the rest."
        is_same, result_line = self._result_side(expected, mine)
        theirs = f"the reference {format_seconds(expected_s)} and {format_bytes(expected.peak_allocated_bytes)}"
        score = f"It takes {format_seconds(took_s)}, {theirs}."
        if mine.trace.provenance == "simulated":
            score = f"The reference takes {format_bytes(expected.peak_allocated_bytes)}. This is a {SIMULATED_GPU}."
        return Verdict(is_below and is_same, (peak_line, result_line, score), mine, took_s)

    def _run(self, step: Step) -> tuple[Run, float]:
        tracked = track(f"exercise {_name(step)}", device=self._device, show=False)
        tracked.is_kept = False
        with seeded(), tracked as run:
            begin = time.perf_counter()
            result = step()
            took_s = time.perf_counter() - begin
        if result is None or result is Ellipsis:
            raise NotWritten
        run.result(result)
        return run, took_s

    def _result_side(self, reference: Run, mine: Run) -> tuple[bool, str]:
        results = compare(reference, mine).results
        if results.verdict == "not checked":
            return True, f"Results not checked: {results.why}"
        if results.verdict == "equal":
            return True, "The same result bit for bit."
        off = results.relative if results.relative is not None else float("inf")
        if off <= self._relative:
            return True, f"The same result, within {off:.1g} of the largest value."
        allowed = f"{self._relative:.1g} of the largest value" if self._relative else "no difference"
        why = results.why.rstrip(". ")
        return False, f"Results differ: {why}. Allowed: {allowed}. A saving must not change the answer here."


def _name(step: Step) -> str:
    return str(getattr(step, "__name__", "yours"))
