"""The check of an exercise, which has two sides: a peak below a limit, and the same result as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memlab.errors import MemlabError
from memlab.session.compare import compare
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.session.track import track
from memlab.units import format_bytes, format_seconds, parse_bytes
from memlab.workloads.job import seeded

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an exercise is solved; `lines` say what is reached and, where it is not, what to look at next."""

    passed: bool
    lines: tuple[str, ...]
    run: Run | None = None
    took_s: float = -1.0

    def __str__(self) -> str:
        return "\n".join([("Solved. " if self.passed else "Not yet. ") + self.lines[0], *self.lines[1:]])

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}


class Check:
    """`check(yours).same_as(reference).peak_below("2 GiB")`: both sides are asked of every exercise."""

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
        """What it gives must be what `reference` gives: bit for bit, or up to this share of the largest value."""
        if not callable(reference):
            raise MemlabError(f"compare with a function without arguments, got {type(reference).__name__}.")
        self._reference, self._relative = reference, relative
        return self

    def peak_below(self, limit: str | int) -> Verdict:
        """Run both and judge."""
        if self._reference is None:
            raise MemlabError("say what the result must be: check(yours).same_as(reference).peak_below(limit).")
        verdict = self._judged(self._reference, parse_bytes(limit))
        self._on_verdict(verdict)
        return verdict

    def _judged(self, expected: Step, limit_bytes: int) -> Verdict:
        try:
            mine, took_s = self._run(self._yours)
        except Unwritten:
            return Verdict(False, (f"{_name(self._yours)}() gives nothing back yet: write it, then run this cell.",))
        except Exception as error:
            return Verdict(False, (f"{_name(self._yours)}() raised {_in_a_line(error)}",))
        reference, reference_s = self._run(expected)
        peak, same = self._peak_side(mine, limit_bytes), self._result_side(reference, mine)
        score = (
            f"It takes {format_seconds(took_s)}, the reference {format_seconds(reference_s)} and {_size(reference)}."
        )
        return Verdict(peak[0] and same[0], (peak[1], same[1], score), mine, took_s)

    def _run(self, step: Step) -> tuple[Run, float]:
        tracked = track(f"exercise {_name(step)}", device=self._device, show=False)
        with runs.as_they_are(), seeded(), tracked as run:
            begin = time.perf_counter()
            result = step()
            took_s = time.perf_counter() - begin
        if result is None or result is Ellipsis:
            raise Unwritten
        run.result(result)
        return run, took_s

    @staticmethod
    def _peak_side(run: Run, limit_bytes: int) -> tuple[bool, str]:
        peak = run.peak_allocated_bytes
        words = f"Peak {format_bytes(peak)}, limit {format_bytes(limit_bytes)}."
        if peak < limit_bytes:
            return True, words
        name, most = next(iter(run.breakdown().items()), ("nothing", 0))
        return (
            False,
            f"{words} At the peak {format_bytes(most)} were {name}: lesson.verdicts[-1].run shows who else.",
        )

    def _result_side(self, reference: Run, mine: Run) -> tuple[bool, str]:
        found = compare(reference, mine).results
        if found.verdict == "not checked":
            return True, f"Results not checked: {found.why}"
        off = found.relative if found.relative is not None else float("inf")
        if found.verdict == "equal" or off <= self._relative:
            return True, "The same result" + (" bit for bit." if found.verdict == "equal" else f", within {off:.1g}.")
        return (
            False,
            f"Results differ: {found.why} Allowed: {self._relative:g}. A saving must not change the answer here.",
        )


class Unwritten(Exception):
    """The learner has not written it yet."""


def _name(step: Step) -> str:
    return str(getattr(step, "__name__", "yours"))


def _in_a_line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _size(run: Run) -> str:
    return format_bytes(run.peak_allocated_bytes)
