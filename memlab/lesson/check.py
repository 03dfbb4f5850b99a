"""The check of an exercise: a peak below a limit, and the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any

from memlab.analysis.results import share
from memlab.api.compare import compare
from memlab.api.run import Run
from memlab.api.track import track
from memlab.errors import MemlabError
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import format_bytes, format_seconds, one_line, parse_bytes
from memlab.views import theme
from memlab.views.shown import Shown
from memlab.views.table import BOX
from memlab.workloads.job import seeded

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Shown):
    """Whether an exercise is solved; `lines` says what to look at next.

    `sides` has for each line whether its requirement is met, None if it is none. Nothing `is_written` before the learner begins.
    """

    passed: bool
    lines: tuple[str, ...]
    run: Run | None = None
    took_s: float = -1.0
    sides: tuple[bool | None, ...] = ()
    is_written: bool = True

    @property
    def _headline(self) -> tuple[str, str, str]:
        """Sign, word and colour: none of them stands alone."""
        if self.passed:
            return SIGNS[True], "Solved.", theme.SERIES["used"]
        return (SIGNS[False], "Not yet.", theme.CAPACITY) if self.is_written else ("○", "Not yet.", theme.WARNING)

    @property
    def text(self) -> str:
        """Sign and word, and the lines with their signs."""
        sign, word, _ = self._headline
        rows = (f"  {SIGNS[side]} {line}" for side, line in zip_longest(self.sides, self.lines))
        return "\n".join((f"{sign} {word}", *rows))

    @property
    def html(self) -> str:
        """The same in green or red."""
        sign, word, colour = self._headline
        rows = ""
        for side, line in zip_longest(self.sides, self.lines):
            spoken = "met" if side else "not met"
            mark = "" if side is None else f"<span role='img' aria-label='{spoken}'>{SIGNS[side]}</span> "
            rows += f"<div>{mark}{escape(line)}</div>"
        head = f"<b style='color:{colour};font-size:15px'><span aria-hidden='true'>{sign}</span> {word}</b>"
        return f"<div role='status' style='border-left:5px solid {colour};padding:2px 10px;{BOX}'>{head}{rows}</div>"


SIGNS = {True: "✓", False: "✗", None: " "}


class NotWritten(Exception):
    """The learner has not written the function yet."""


class Check:
    """`check(yours).same_as(reference).peak_below("2 GiB")`: every exercise requires both."""

    def __init__(
        self,
        yours: Step,
        device: str | None = None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
        name: str = "",
    ) -> None:
        if not callable(yours):
            raise MemlabError(f"check a function without arguments, got {type(yours).__name__}.")
        self._yours, self._device, self._on_verdict, self._name = yours, device, on_verdict, name
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
            return Verdict(False, (f"{name}() returns nothing yet: write it, then run this cell.",), is_written=False)
        except Exception as error:
            first_line = one_line(next(iter(str(error).strip().splitlines()), ""))
            text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
            return Verdict(False, (f"{name}() raised {text}",))
        expected, expected_s = self._run(reference)
        peak, limit = format_bytes(mine.peak_allocated_bytes), format_bytes(limit_bytes)
        is_below, peak_line = mine.peak_allocated_bytes < limit_bytes, f"Peak {peak}, limit {limit}."
        if not is_below:
            owner, most = next(iter(mine.breakdown().items()), ("nothing", 0))
            peak_line += f" {format_bytes(most)} of it are {owner}"
            peak_line += f": {self._name}.verdicts[-1].run shows the rest." if self._name else "."
        is_same, result_line = self._result_side(expected, mine)
        theirs = f"the reference {format_seconds(expected_s)} and {format_bytes(expected.peak_allocated_bytes)}"
        score = f"It takes {format_seconds(took_s)}, {theirs}."
        if mine.trace.provenance == "simulated":
            score = f"The reference takes {format_bytes(expected.peak_allocated_bytes)}. This is a {SIMULATED_GPU}."
        lines, sides = (peak_line, result_line, score), (is_below, is_same, None)
        return Verdict(is_below and is_same, lines, mine, took_s, sides)

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
        said = f"differ by {share(off)} of the largest value" if math.isfinite(off) else results.short
        most = f", most in {results.where}" if results.where else ""
        allowed = f"{100 * self._relative:g} % is allowed" if self._relative else "no difference is allowed"
        return False, f"The results {said}{most}; {allowed}. They must agree."


def _name(step: Step) -> str:
    return str(getattr(step, "__name__", "yours"))
