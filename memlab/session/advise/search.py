"""The search: the work as it is, each technique alone, then together, the best first, until the target is reached.

Savings do not add up, because the peak moves: every combination is run. What was tried until an interrupt is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from memlab.analysis.advice import LEAST_SHARE, Findings, Interval, Tried, cheapest, ranked, saved
from memlab.errors import DoesNotApply, MemlabError
from memlab.predictor.cards import Card
from memlab.savings import techniques
from memlab.session.advise.candidates import OF_RESERVED, attacked, shares_of
from memlab.session.advise.subject import Subject, Tell, TimeUp
from memlab.session.predict import Prediction
from memlab.session.run import Run

MAX_COMBINED = 12
"""So many combinations are run at most."""
MAX_LATER = 4
"""Of techniques that save nothing alone so many are tried with others."""
KEPT_BYTES = 256 << 20
"""So much of host memory may the runs take that are kept until the best is known."""


@dataclass(slots=True)
class Search:
    """One search; `findings` and the runs `before` and `best` are there at any time after `begin`."""

    subject: Subject
    of: str
    tell: Tell
    deadline: float
    target_bytes: int | None = None
    before: Run = field(init=False)
    before_bytes: Interval = (0, 0)
    shares: dict[str, int] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    combined: list[Tried] = field(default_factory=list)
    stopped: str = ""
    recommended: Tried | None = None
    _runs: dict[tuple[str, ...], Run] = field(default_factory=dict)
    _count: str = ""

    def begin(self, before: Run) -> None:
        """Take the run of the work as it is."""
        self.before, self.before_bytes, self.shares = before, level(before, self.of), shares_of(before)

    def go(self, names: Sequence[str]) -> None:
        """Try each of these alone, then together; an interrupt ends it, and what was found stays."""
        try:
            for index, name in enumerate(names):
                self._count = f"{index + 1} of {len(names)}: "
                self.tried.append(self.attempt((name,)))
            self._combine()
        except KeyboardInterrupt:
            self.stopped = f"interrupted after {len(self.tried)} of {len(names)} techniques"
        except TimeUp:
            self.stopped = f"its time was over after {len(self.tried)} of {len(names)} techniques"
        self.recommended = self._choose()

    def attempt(self, names: tuple[str, ...]) -> Tried:
        """Run the work with these techniques; what cannot be is told with its reason."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeUp("its time was over")
        label = self._count + " + ".join(names)
        self.tell(label)
        prices = tuple(techniques[name].price for name in names)
        try:
            run = self.subject.attempt(names, lambda text: self.tell(f"{label}, {text}"), left_s)
        except TimeUp:
            raise
        except DoesNotApply as error:
            reason = str(error).removeprefix(f"{names[0]}: ")
            return Tried(names, prices=prices, failed=f"does not apply: {reason}")
        except Exception as error:
            return Tried(names, prices=prices, failed=one_reason(error))
        self._keep(names, run)
        return self._figures(names, run, prices)

    def _figures(self, names: tuple[str, ...], run: Run, prices: tuple[str, ...]) -> Tried:
        peak, used = level(run, self.of), [techniques[name] for name in names]
        verdict, why, is_wrong = agreement(self.before, run, names)
        return Tried(
            names, peak, saved(self.before_bytes, peak), ratio(self.before, run), verdict, why, is_wrong,
            any(one.slower for one in used), any(one.equality.kind == "changes" for one in used), prices,
        )  # fmt: skip

    def _keep(self, names: tuple[str, ...], run: Run) -> None:
        if sum(one.nbytes() for one in self._runs.values()) + run.nbytes() <= KEPT_BYTES:
            self._runs[names] = run

    @property
    def best(self) -> Run | None:
        """The run of what is recommended, where it could be kept."""
        return self._runs.get(self.recommended.names) if self.recommended is not None else None

    # --- together -----------------------------------------------------------------------------------------------------

    def _combine(self) -> None:
        """Add the best to what is there, and keep it where it helps; once more from what saves most, where that was excluded."""
        alone = [one.names[0] for one in ranked(self.tried, self.before_bytes)]
        if not alone:
            return
        best = self._chain(alone, self._later(alone))
        largest = min((one for one in self.tried if one.names[0] in alone), key=lambda one: max(one.peak_bytes))
        if not self._reached(best) and best is not None and largest.names[0] not in best.names:
            others = [one for one in alone if one not in largest.names]
            self._chain([*largest.names, *others], self._later(alone))

    def _later(self, alone: Sequence[str]) -> list[str]:
        """Those that save nothing alone and may, once the peak has moved: what costs nothing first."""
        rest = [one for one in self.tried if not one.failed and not one.is_wrong and one.names[0] not in alone]
        return [one.names[0] for one in sorted(rest, key=lambda one: (one.changes, one.costs))][:MAX_LATER]

    def _chain(self, first: Sequence[str], later: Sequence[str]) -> Tried | None:
        """Add one after the other, and keep what helps."""
        best: Tried | None = None
        for name in (*first, *later):
            if self._reached(best) or len(self.combined) >= MAX_COMBINED:
                break
            names = (*(best.names if best is not None else ()), name)
            if techniques.conflict([*self._base(), *names]) or not self._can_help(name, best):
                continue
            found = self._one(names)
            if found.failed or found.is_wrong:
                continue
            now = best.peak_bytes if best is not None else self.before_bytes
            if min(saved(now, found.peak_bytes)) > LEAST_SHARE * max(self.before_bytes):
                best = found
        return best

    def _base(self) -> Sequence[str]:
        return getattr(self.subject, "techniques", ())

    def _one(self, names: tuple[str, ...]) -> Tried:
        known = next((one for one in (*self.tried, *self.combined) if set(one.names) == set(names)), None)
        if known is not None:
            return known
        self._count = "together: "
        self.combined.append(self.attempt(names))
        return self.combined[-1]

    def _can_help(self, name: str, best: Tried | None) -> bool:
        """Whether what it attacks holds something of the peak as it is now."""
        run = self._runs.get(best.names) if best is not None else None
        if run is None or not (shares := shares_of(run)):
            return True
        return attacked(techniques[name], shares) or (self.of == "device" and OF_RESERVED in techniques[name].attacks)

    def _reached(self, best: Tried | None) -> bool:
        now = best.peak_bytes if best is not None else self.before_bytes
        return self.target_bytes is not None and max(now) <= self.target_bytes

    def _choose(self) -> Tried | None:
        """The cheapest that reaches the target; else what saves most."""
        if self._reached(None):
            return None
        everything = [*self.tried, *self.combined]
        if self.target_bytes is not None and (found := cheapest(everything, self.target_bytes)) is not None:
            return found
        return min(
            ranked(everything, self.before_bytes), key=lambda one: (max(one.peak_bytes), len(one.names)), default=None
        )

    def findings(self, left_out: Sequence[tuple[str, str]], notes: Sequence[str], duration_s: float) -> Findings:
        """Everything as plain values."""
        on = self.subject.on
        return Findings(
            self.subject.name, str(on) if isinstance(on, str) else on.name, self.of, self.before_bytes, self.target_bytes,
            self.shares, tuple(self.tried), tuple(self.combined), self.recommended, tuple(left_out), tuple(notes),
            self.stopped, isinstance(on, Card), duration_s,
        )  # fmt: skip


def level(run: Run, of: str) -> Interval:
    """The peak that is looked at, at least and at most."""
    if isinstance(run, Prediction):
        return run.allocated_bytes if of == "allocated" else run.peak_device_bytes
    peak = run.peak_allocated_bytes if of == "allocated" else run.peak_device_bytes
    return peak, peak


def ratio(before: Run, after: Run) -> float | None:
    """How many times as long a step takes; None where it was not measured."""
    both = [seconds_of(before), seconds_of(after)]
    return both[1] / both[0] if both[0] and both[1] else None


def seconds_of(run: Run) -> float:
    """Seconds of a step: the least of those that ran untracked, else of the tracked run; 0.0 for a prediction.

    Whatever else the machine does only adds to them.
    """
    if isinstance(run, Prediction):
        return 0.0
    steps = run.trace.notes.get("trial", {}).get("step_s", [])
    return min(steps) if steps else run.summary.duration_s


def agreement(before: Run, after: Run, names: Sequence[str]) -> tuple[str, str, bool]:
    """Whether results agree, why, and whether they are further off than these techniques say."""
    from memlab.session.compare import compare

    try:
        found = compare(before, after).results
    except MemlabError as error:
        return "not checked", one_reason(error), False
    claims = [techniques[name].equality for name in names]
    if found.verdict != "different" or any(one.kind == "changes" for one in claims):
        return found.verdict, found.why, False
    is_within = found.relative is not None and found.relative <= sum(one.relative for one in claims)
    return ("close", found.why, False) if is_within else (found.verdict, found.why, True)


def one_reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().split("\n")[0][:300]
    return text if isinstance(error, MemlabError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
