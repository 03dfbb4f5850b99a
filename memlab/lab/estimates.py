"""What techniques would save in the chosen work: predicted in the background, one child process at a time, and kept.

Nothing is predicted while a cell or a run executes: it would take longer, and what it measures would not be its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.analysis.advice import LEAST_SHARE, interval_text, saved
from memlab.api.advise.search import shares_of
from memlab.api.prediction import Prediction
from memlab.api.workload_run import baseline_patterns_of, run_workload
from memlab.errors import DoesNotApply
from memlab.lab.experiment import error_line
from memlab.lab.state import LabChoices, LabState
from memlab.lab.worker import execution_lock
from memlab.prediction import dry_run
from memlab.prediction.child import Child, guard
from memlab.saving_techniques import techniques
from memlab.units import ByteRange, format_bytes

STEPS = 2
"""The optimizer's state is allocated in the first."""
WAIT_S = 0.2
Names = tuple[str, ...]
_NOTHING = ByteRange.exact(0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted peak with techniques, and that of the same job without them; `why` says why there are no figures.

    Techniques that replace a pattern (`of_pattern`) are compared with a job that has it. `start_bytes` of both peaks is what
    the notebook has on its GPU, which a function of the user's may use.
    """

    peak_bytes: ByteRange = _NOTHING
    before_bytes: ByteRange = _NOTHING
    why: str = ""
    applies: bool = True
    of_pattern: bool = False
    start_bytes: int = 0

    @property
    def saved_bytes(self) -> ByteRange:
        """The interval of the saving; below zero if they need more."""
        return saved(self.before_bytes, self.peak_bytes)

    @property
    def share(self) -> float:
        """The least saving as a share of the peak without them."""
        return self.saved_bytes.low / max(self.before_bytes.low, 1)

    @property
    def text(self) -> str:
        """What they save, or why that is not known."""
        if self.why:
            return f"{'not predicted' if self.applies else 'does not apply'}: {self.why}"
        if abs(self.share) < LEAST_SHARE:
            return "saves nothing here"
        share = f"{100 * abs(self.share):.0f} %"
        if self.share > 0:
            where = " where the pattern that it replaces is used" if self.of_pattern else ""
            return f"saves {interval_text(self.saved_bytes)} ({share}){where}"
        return f"needs {interval_text(ByteRange(*sorted(map(abs, self.saved_bytes))))} more ({share})"


@dataclass(frozen=True, slots=True)
class Found:
    """What one prediction has shown: the peak, who held it by category, and how much was there before."""

    peak_bytes: ByteRange
    shares: Mapping[str, int]
    start_bytes: int = 0


class Paused(Exception):
    """A prediction was given up: a cell or a run began, or something else is wanted now."""


class Estimates:
    """The estimates of a Lab; `changed` is called, on a thread of its own, when there is a new one."""

    def __init__(self, choices: LabChoices, changed: Callable[[], None]) -> None:
        self._choices, self._changed = choices, changed
        self._state: LabState | None = None
        self.peaks: dict[Any, Found | Exception] = {}
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self._woken = threading.Event()

    def want(self, state: LabState) -> None:
        """Estimate what can be chosen in this state from now on, what is chosen first."""
        with self._lock:
            self._state = state
            self._woken.set()
            if self.thread is None and self._next(state) is not None:
                self.thread = threading.Thread(target=self._work, name="memlab lab estimates", daemon=True)
                self.thread.start()

    def close(self) -> None:
        """Stop, and wait until nothing runs any more."""
        with self._lock:
            self._state, thread = None, self.thread
            self._woken.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def of(self, state: LabState, names: Iterable[str]) -> Estimate | None:
        """The estimate of these techniques; None if they have not been predicted yet."""
        names = tuple(names)
        before, after = (self.peaks.get(_key(state, one)) for one in (_plain(names), (names, ())))
        if isinstance(before, Found) and isinstance(after, Found):
            how: dict[str, Any] = {"of_pattern": bool(_plain(names)[1]), "start_bytes": after.start_bytes}
            return Estimate(after.peak_bytes, before.peak_bytes, **how)
        problem = before if isinstance(before, Exception) else after
        if isinstance(problem, Exception):
            why = error_line(problem).removeprefix(f"{names[0]}: " if names else "")
            return Estimate(why=why, applies=not isinstance(problem, DoesNotApply))
        return None

    def done(self, state: LabState) -> tuple[int, int]:
        """How many of the techniques have been estimated, and of how many."""
        return sum(self.of(state, (name,)) is not None for name in techniques), len(techniques)

    def best(self, state: LabState) -> tuple[str, Estimate] | None:
        """The technique that saves most of those that leave the training as it is."""
        useful: list[tuple[str, Estimate]] = []
        for name, technique in techniques.items():
            one = self.of(state, (name,)) if technique.equality.kind != "changes" else None
            if one is not None and not (one.why or one.of_pattern) and one.share >= LEAST_SHARE:
                useful.append((name, one))
        return max(useful, key=lambda pair: pair[1].share, default=None)

    def sentence(self, state: LabState) -> str:
        """The choice in one line, as predicted."""
        names, plain = state.techniques, self.of(state, ())
        said, where = " + ".join(techniques.said(names, state.world_size)), f"predicted for {state.predicted_place}"
        if plain is None:
            return f"Predicting what {self._choices.work(state)} needs …"
        if plain.why:
            return f"It cannot be predicted what this needs: {plain.why}"
        if plain.start_bytes > LEAST_SHARE * plain.peak_bytes.low:
            where += f", with {format_bytes(plain.start_bytes)} that the notebook has on its GPU"
        if not names:
            best = self.best(state)
            most = f" The largest saving so far: {best[0]}, which {best[1].text}." if best is not None else ""
            return f"As it is: peak {plain.peak_bytes}, {where}.{most}"
        if (chosen := self.of(state, names)) is None:
            return f"Predicting {said} …"
        if chosen.why:
            return f"With {said}: {chosen.text}"
        return f"With {said}: peak {chosen.peak_bytes} instead of {chosen.before_bytes}, {chosen.text}; {where}."

    def _next(self, state: LabState) -> tuple[Names, Names] | None:
        """The next job to predict: its techniques and baseline patterns."""
        alone = [(name,) for name in self._ordered(state)] if Child().forks else []  # else each takes seconds to start
        for names in ((), state.techniques, *alone):
            for job in (_plain(names), (names, ())):
                if _key(state, job) not in self.peaks:
                    return job
            if not names and isinstance(self.peaks[_key(state, ((), ()))], Exception):
                return None  # the work itself cannot be predicted
        return None

    def _ordered(self, state: LabState) -> list[str]:
        """Those first that act on what holds the peak, last those that take a prediction for each kind of rank."""
        plain = self.peaks.get(_key(state, ((), ())))
        shares = plain.shares if isinstance(plain, Found) else {}

        def place(name: str) -> tuple[bool, bool, int]:
            one = techniques[name]
            return one.shards, one.kind != "saving", -sum(shares.get(category, 0) for category in one.attacks)

        return sorted(techniques, key=place)

    def _work(self) -> None:
        while True:
            self._woken.clear()
            with self._lock:
                state = self._state
                job = self._next(state) if state is not None else None
                if state is None or job is None:
                    self.thread = None
                    return
            if not execution_lock.is_free:
                self._woken.wait(WAIT_S)
                continue
            guard.set(functools.partial(self._undisturbed, state))
            try:
                with self._undisturbed(state):
                    dry_run.prepare()  # a cell that imported the compiler meanwhile would meet it half imported
                found: Found | Exception = self._peak(state, *job)
            except Paused:
                continue
            except Exception as error:
                found = error.with_traceback(None)
            self.peaks[_key(state, job)] = found
            self._changed()

    @contextlib.contextmanager
    def _undisturbed(self, state: LabState) -> Iterator[None]:
        """Raise Paused unless this is still wanted and nothing else executes; nothing else begins meanwhile.

        A fork copies the locks of PyTorch that other threads hold, and the child would wait for them forever.
        """
        with execution_lock.free() as is_free:
            if self._state is None or not is_free or _subject(self._state) != _subject(state):
                raise Paused
            yield

    def _peak(self, state: LabState, names: Names, habits: Names) -> Found:
        card, work = self._choices.card(state.card), self._choices.work(state)
        run = run_workload(
            work, names, habits, on=card, steps=STEPS, name="estimate", on_step=lambda done, total: None, keep=False,
            world_size=state.world_size, is_quiet=True, torch_version=state.torch_version or None,
        )  # fmt: skip
        assert isinstance(run, Prediction)
        start_bytes = run.devices[0].levels[0].start_bytes if run.devices else 0
        return Found(run.allocated_bytes, shares_of(run), start_bytes)


def _subject(state: LabState) -> Any:
    settings = tuple(sorted((name, repr(value)) for name, value in state.settings.items()))
    return state.workload, state.size, settings, state.predicted_place, state.world_size


def _key(state: LabState, job: tuple[Names, Names]) -> Any:
    return _subject(state), *(tuple(sorted(names)) for names in job)


def _plain(names: Names) -> tuple[Names, Names]:
    """The job without the techniques: with the patterns that they replace."""
    return (), tuple(baseline_patterns_of(names))
