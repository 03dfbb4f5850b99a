"""A trial: a workload with some techniques, measured here or predicted for a card; what the Lab and the advisor run.

The job is built inside of the stretch that is tracked, so that a peak has all of it, and what building takes. Seconds are
those of steps that run again untracked.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab import seams, workloads
from memlab.errors import DoesNotApply, MemlabError
from memlab.predictor import child
from memlab.predictor.cards import Card
from memlab.savings import techniques
from memlab.session.predict import configured, foretold
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.session.track import track
from memlab.workloads.job import Job, Parts, seeded
from memlab.workloads.workload import Workload

TIMED_STEPS = 3
STEPS_DONE = "steps_done"
"""The news of a child that has a trial."""
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What is tried: a function of four parts, with the name, size and settings it is known by."""

    name: str
    make: Callable[[], Parts]
    size: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, self.size, *(f"{key}={one}" for key, one in self.settings.items())]))


def work_of(what: str | Workload | Callable[[], Parts], size: str = "laptop", **settings: Any) -> Work:
    """The work behind the name of a workload, a Workload, or a function that gives model, optimizer, batch and loss."""
    if isinstance(what, str):
        what = workloads[what]  # type: ignore[index]  # the module is a mapping
    if isinstance(what, Workload):
        return Work(what.name, what.sized(size, **settings), size, settings)
    if not callable(what):
        raise MemlabError(f"a workload is a name, or a function of model, optimizer, batch and loss, got {what!r:.80}.")
    if settings:
        raise MemlabError(f"a function of your own takes no settings, got {', '.join(settings)}: set them in it.")
    return Work(str(getattr(what, "__name__", type(what).__name__)), what)


def habits_of(names: Iterable[str]) -> list[str]:
    """Those of the techniques that replace a habit, which the job has that they are compared with."""
    return [name for name in names if techniques[name].habit is not None]


def trial(
    work: Work,
    chosen: Iterable[str] = (),
    habits: Iterable[str] = (),
    *,
    on: str | Card = "cpu",
    steps: int = 3,
    name: str | None = None,
    timed: bool = True,
    on_step: OnStep | None = None,
) -> Run:
    """Run the work with these techniques and habits: on "cpu" or "cuda" measured, on a Card predicted (a Prediction).

    `on_step` hears of each step that is done, and of how many, those untracked among them; it may raise to stop. Raises
    DoesNotApply where a technique finds nothing to change, and leaves no run behind then.
    """
    if type(steps) is not int or not 1 <= steps <= 1000:
        raise MemlabError(f"steps is a number from 1 to 1000, got {steps!r:.80}.")
    asked = _Asked(work, [one.name for one in techniques.ordered(chosen)], list(habits), steps)
    called = name or " + ".join([str(work), *asked.techniques, *(f"habit of {one}" for one in asked.habits)])[:200]
    if isinstance(on, Card):
        run = _predicted(asked, on, called, on_step)
        run.note("trial", {**asked.facts(), "on": on.name, "step_s": [], "notes": []})
        return run
    run, step_s, notes = _measured(asked, on, called, timed, on_step)
    run.note("trial", {**asked.facts(), "on": on, "step_s": step_s, "notes": notes})
    return run


@dataclass(frozen=True, slots=True)
class _Asked:
    work: Work
    techniques: list[str]
    habits: list[str]
    steps: int

    def prepare(self, job: Job) -> None:
        """Build the job: memory is taken here."""
        techniques.prepare(job, self.work.make, self.techniques, self.habits)

    def facts(self) -> dict[str, Any]:
        """What tells this trial from others."""
        settings = {
            key: one if isinstance(one, int | float | str | bool) else repr(one)
            for key, one in self.work.settings.items()
        }
        facts = {"workload": self.work.name, "size": self.work.size, "settings": settings}
        return {**facts, "techniques": self.techniques, "habits": self.habits, "steps": self.steps}

    @property
    def conf(self) -> str:
        """What the techniques say to the allocator of CUDA."""
        return ",".join(filter(None, (techniques[one].conf for one in self.techniques)))


def _predicted(asked: _Asked, card: Card, name: str, on_step: OnStep | None) -> Run:
    def step() -> None:
        channel = child.current()
        assert channel is not None
        with seeded():
            job = Job("cuda", asked.steps)
            asked.prepare(job)
            job.run(lambda done: channel.send({STEPS_DONE: done}))
        for sentence in job.notes:
            channel.note(sentence)

    def heard(news: dict[str, Any]) -> None:
        if STEPS_DONE in news and on_step is not None:
            on_step(int(news[STEPS_DONE]), asked.steps)

    conf = ",".join(filter(None, [configured(None), asked.conf]))
    found = foretold(step, card, name, conf, on_news=heard if on_step is not None else None)
    runs.add(found)
    return found


def _measured(
    asked: _Asked, on: str, name: str, timed: bool, on_step: OnStep | None
) -> tuple[Run, list[float], list[str]]:
    if asked.conf:
        raise DoesNotApply(f"{asked.conf} is said to CUDA's allocator before it starts: predict it for a card.")
    tell = on_step or (lambda done, total: None)
    total = asked.steps + (TIMED_STEPS if timed else 0)
    job = Job(on, asked.steps)
    gc.collect()  # what waits to be collected would be found as being there before
    try:
        with seeded(), _kept_if_whole(name, on) as run:
            asked.prepare(job)
            job.run(lambda done: tell(done, total))
        run.result(job.outcome())
        return run, _seconds(job, on, lambda done: tell(asked.steps + done, total)) if timed else [], job.notes
    except BaseException:
        seams.forget_unfinished_backward()
        raise
    finally:
        # Its pieces are its own methods: a cycle, which would wait for the collector with all its tensors.
        vars(job).clear()


@contextlib.contextmanager
def _kept_if_whole(name: str, on: str) -> Iterator[Run]:
    tracked = track(name, device=on, show=False)
    try:
        with tracked as run:
            yield run
    except BaseException:
        runs.discard(tracked.run)
        raise


def _seconds(job: Job, on: str, on_step: Callable[[int], None]) -> list[float]:
    """Seconds of each of a few steps more, on their own. The first of them is warm: the job has run before."""
    times: list[float] = []

    def done(count: int) -> None:
        _finish(on)
        times.append(time.perf_counter())
        on_step(count)

    _finish(on)
    job.steps = TIMED_STEPS
    with seeded():
        start = time.perf_counter()
        job.run(done)
    return [end - begin for begin, end in zip([start, *times], times, strict=False)]


def _finish(on: str) -> None:
    if on != "cpu":
        torch.cuda.synchronize()
