"""A step or a cell run again in a child process, with techniques switched on from outside of it.

Predicted for a card, or measured on the CPU. What it prints and shows is let go: the user has seen it. A forked child computes
with one thread, because the threads of the parent's pool are not there.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memlab.errors import DoesNotApply, MemlabError
from memlab.predictor import rehearsal
from memlab.predictor.cards import Card
from memlab.predictor.child import Outcome
from memlab.predictor.child.cell import perform_cell
from memlab.predictor.child.channel import Channel
from memlab.predictor.child.needed import of_cell
from memlab.predictor.child.parent import Child, Heard, watch
from memlab.predictor.child.step import chosen, forked, fresh, perform
from memlab.savings import Technique, techniques
from memlab.seams import shell as shells
from memlab.seams.traceback import running_shell
from memlab.session.advise.subject import Tell
from memlab.session.predict import come_of, configured
from memlab.session.run import Run
from memlab.session.track import track
from memlab.trace.file import dumps, loads
from memlab.units import format_bytes, one_line
from memlab.workloads.job import checked

ABOVE = "%%memtrack"
TIMED_STEPS, TIMED_S = 3, 5.0
"""So many steps are timed, and no further one is begun after so many seconds."""
PARTS = "gives_parts"
"""The news of a child whose step gave the four parts of a workload."""


@dataclass(frozen=True, slots=True)
class OfStep:
    """A function without arguments that builds and trains, or a cell's text; nothing is known of its pieces."""

    name: str
    on: str | Card
    step: Callable[[], object] | None = None
    text: str = ""
    on_parts: Callable[[], None] | None = None

    def why_not(self, technique: Technique) -> str:
        """Why this technique cannot be tried on it; "" where it can."""
        if technique.conf and not isinstance(self.on, Card):
            return "is said to CUDA's allocator before it starts: it can be predicted for a card"
        if technique.outside is None and not technique.conf:
            return "cannot be switched on from outside: pass the workload (a function of model, optimizer, batch, loss)"
        return ""

    def attempt(self, names: Sequence[str], tell: Tell, left_s: float) -> Run:
        """Run it with these techniques in a child; the run is not kept among the runs."""
        what = "the cell" if self.text else "the step"
        if not isinstance(self.on, Card) and torch.cuda.is_initialized() and _forks():
            raise MemlabError(
                f"{what} would be measured in a forked child, which must not touch CUDA once this process has used it: "
                'predict it, memlab.advise(..., card="RTX 4060"), or pass the workload.'
            )
        conf = _conf(names) if isinstance(self.on, Card) else ""
        rehearsal.prepare()
        heard = Quiet(functools.partial(self._heard, tell), None)
        outcome = watch(self._child(list(names), conf), heard, left_s, what)
        if outcome.error is not None or outcome.result is None:
            raise _failure(outcome, what)
        if isinstance(self.on, Card):
            return come_of(outcome, self.name, self.on, conf)
        return Run(self.name, loads(outcome.result))

    def _heard(self, tell: Tell, news: dict[str, Any]) -> None:
        if PARTS in news and self.on_parts is not None:
            self.on_parts()
        if "peak_allocated_bytes" in news:
            tell(f"peak so far {format_bytes(int(news['peak_allocated_bytes']))}")

    def _child(self, names: list[str], conf: str) -> Callable[[Path], Child]:
        """How to make the child: forked where that can be, else fresh."""
        around: Callable[[], Any] = functools.partial(_measured, names)
        if isinstance(self.on, Card):
            around = functools.partial(_rehearsed, names, self.on, conf)
        if self.step is not None:
            work = functools.partial(_work, self.step, around)
            return (
                forked(lambda channel: perform(work, contextlib.nullcontext, channel))
                if _forks()
                else fresh([contextlib.nullcontext, work, None, None], (), None)
            )
        shell = running_shell()
        if shell is None:
            raise MemlabError("a cell can be run again in its notebook alone: there is none.")
        text = self.text
        if _forks():
            return forked(
                lambda channel: perform_cell(shell, text, ABOVE, functools.partial(_of_cell, around), channel)
            )
        code, _ = shells.transform(shell, ABOVE, text)
        return fresh([functools.partial(_of_cell, around), None, text, ABOVE], of_cell(code, shell.user_ns), shell)


def _forks() -> bool:
    return chosen(None) == "fork"


def _conf(names: Sequence[str]) -> str:
    return ",".join(filter(None, [configured(None), *(techniques[one].conf for one in names)]))


class Quiet(Heard):
    """What came from a child, none of which is shown again."""

    def _print(self, name: str, text: str) -> None:
        pass


def _failure(outcome: Outcome, what: str) -> MemlabError:
    if outcome.error is None:
        return MemlabError(outcome.ended or "the child process ended without a result")
    if outcome.error.name == DoesNotApply.__name__:
        return DoesNotApply(outcome.error.text)
    error = MemlabError(f"{what} failed when it was run again: {one_line(str(outcome.error), 500)}")
    error.add_note("\n".join(outcome.error.traceback))
    return error


# --- in the child ----------------------------------------------------------------------------------------------------------


class _Stretch:
    """What runs once within its `tracked()`, then for time alone; `trace` is there when it has ended."""

    def __init__(self, names: list[str], finish: Callable[[], bytes], run: Run | None) -> None:
        self.names, self._finish, self.run = names, finish, run
        self.step_s: list[float] = []

    def trace(self) -> bytes:
        """The trace, as bytes."""
        if self.run is None:
            return self._finish()
        if torch.cuda.is_initialized():
            raise MemlabError('it works on CUDA: say for which card, memlab.advise(..., card="RTX 4060")')
        if self.step_s:
            self.run.note(
                "trial", {"on": "cpu", "step_s": self.step_s, "techniques": self.names, "habits": [], "notes": []}
            )
        return dumps(self.run.trace)


@contextlib.contextmanager
def _rehearsed(names: list[str], card: Card, conf: str) -> Iterator[tuple[_Stretch, Any]]:
    with rehearsal.rehearsal(card, conf) as finish, _switched_on(names):
        yield _Stretch(names, finish, None), contextlib.nullcontext()


@contextlib.contextmanager
def _measured(names: list[str]) -> Iterator[tuple[_Stretch, Any]]:
    if _forks():
        torch.set_num_threads(1)
    tracked = track("again", device="cpu", show=False)
    with _switched_on(names):
        yield _Stretch(names, bytes, tracked.run), tracked


@contextlib.contextmanager
def _switched_on(names: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in techniques.ordered(names):
            if one.outside is not None:
                stack.enter_context(one.outside())
        yield


def _work(step: Callable[[], object], around: Callable[[], Any], channel: Channel) -> bytes:
    """Take the step once tracked, and where it is measured a few times more on their own."""
    with around() as (stretch, tracked):
        with tracked:
            value = step()
        if _is_parts(value):
            channel.send({PARTS: True})
        elif stretch.run is not None:
            with contextlib.suppress(MemlabError):  # a value that cannot be noted is no reason to fail
                stretch.run.result(value)
            del value
            stretch.step_s += _seconds(step)
    return stretch.trace()


def _is_parts(value: object) -> bool:
    try:
        checked(value)
    except MemlabError:
        return False
    return True


def _seconds(step: Callable[[], object]) -> list[float]:
    taken: list[float] = []
    while len(taken) < TIMED_STEPS and sum(taken) < TIMED_S:
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


@contextlib.contextmanager
def _of_cell(around: Callable[[], Any]) -> Iterator[Callable[[], bytes]]:
    """Around a cell, which the shell runs once; its error passes through."""
    with around() as (stretch, tracked), tracked:
        yield stretch.trace
