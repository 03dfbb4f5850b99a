"""Run a workload with techniques, measured here or predicted for a GPU; used by the Lab and `advise`.

The job is built inside the track, so that the peak includes building it. Seconds are those of further, untracked steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab import torch_internals, workloads
from memlab.api.display import LevelNow
from memlab.api.predict import StepToPredict, configured, first_rank, predict_ranks, predict_step
from memlab.api.run import Run
from memlab.api.runs import runs
from memlab.api.track import Track, track
from memlab.errors import DoesNotApply, MemlabError
from memlab.prediction import child
from memlab.prediction.cards import Card
from memlab.prediction.child.runner import OnNews
from memlab.prediction.torch_versions import checked_version
from memlab.saving_techniques import techniques
from memlab.workloads.job import Job, Parts, seeded
from memlab.workloads.workload import Workload

TIMED_STEPS = 3
WORLD_SIZE = 8
"""The number of GPUs of a technique that is for several."""
STEPS_DONE = "steps_done"
"""The message of the child process after each step."""
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Work:
    """The work: a function that returns four parts, with its name, size and settings.

    That of a workload `makes_all` that it uses; a function of the user's may use what the notebook has on the GPU.
    """

    name: str
    make: Callable[[], Parts]
    size: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    makes_all: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, self.size, *(f"{key}={one}" for key, one in self.settings.items())]))


def work_of(what: str | Workload | Callable[[], Parts], size: str = "laptop", **settings: Any) -> Work:
    """The work of a workload name, a Workload, or a function that returns model, optimizer, batch and loss."""
    if isinstance(what, str):
        what = workloads[what]  # type: ignore[index]  # the module is a mapping
    if isinstance(what, Workload):
        return Work(what.name, what.sized(size, **settings), size, settings, makes_all=True)
    if not callable(what):
        raise MemlabError(f"a workload is a name, or a function of model, optimizer, batch and loss, got {what!r:.80}.")
    if settings:
        raise MemlabError(f"a function of your own takes no settings, got {', '.join(settings)}: set them in it.")
    return Work(str(getattr(what, "__name__", type(what).__name__)), what)


def baseline_patterns_of(names: Iterable[str]) -> list[str]:
    """The techniques that replace a pattern, which their baseline job has."""
    return [name for name in names if techniques[name].baseline_pattern is not None]


def run_workload(
    work: Work,
    chosen: Iterable[str] = (),
    habits: Iterable[str] = (),
    *,
    on: str | Card = "cpu",
    steps: int = 3,
    name: str | None = None,
    timed: bool = True,
    on_step: OnStep | None = None,
    on_level: Callable[[LevelNow], None] | None = None,
    keep: bool = True,
    world_size: int = WORLD_SIZE,
    is_quiet: bool = False,
    torch_version: str | None = None,
) -> Run:
    """Run the work with these techniques and habits: on "cpu" or "cuda" measured, on a Card predicted (a Prediction).

    `on_step(done, total)` is called after each step, of a prediction more often, and may raise to stop. `on_level` is called
    with what a measured run holds, on another thread. With `keep` the run is listed among the runs. A technique for several
    GPUs is predicted over `world_size` of them: the run is that of the rank that needs most. `is_quiet` hides the output of
    a prediction, which is for `torch_version` if that is given.
    Raises DoesNotApply if a technique finds nothing to change; then there is no run.
    """
    if type(steps) is not int or not 1 <= steps <= 1000:
        raise MemlabError(f"steps is a number from 1 to 1000, got {steps!r:.80}.")
    used, without = [one.name for one in techniques.ordered(chosen)], list(habits)
    said = techniques.said(used, world_size)
    called = name or " + ".join([str(work), *said, *(f"habit of {one}" for one in without)])[:200]
    plain = int | float | str | bool
    settings = {key: one if isinstance(one, plain) else repr(one) for key, one in work.settings.items()}
    facts: dict[str, Any] = {"workload": work.name, "size": work.size, "settings": settings}
    facts |= {"techniques": used, "habits": without, "steps": steps, "step_s": [], "notes": []}

    def prepare(job: Job) -> None:
        techniques.prepare(job, work.make, used, without)  # this allocates memory

    why = next((f"{one}: {why}" for one in used if (why := techniques[one].only_predicted)), "")
    if isinstance(on, Card):
        step, heard = _in_child(prepare, steps, on_step)
        version = checked_version(torch_version)
        conf = ",".join(filter(None, [configured(None, version), *(techniques[one].conf for one in used)]))
        how: dict[str, Any] = {"torch_version": version, "on_news": heard, "is_quiet": is_quiet}
        what = StepToPredict(step, on, called, conf, makes_all=work.makes_all, **how)
        is_sharded, found = any(techniques[one].shards for one in used), {"on": on.name}
        run: Run = predict_ranks(what, first_rank(world_size, None)) if is_sharded else predict_step(what)
        facts |= {"world_size": world_size} if is_sharded else {}
    elif why:
        raise DoesNotApply(f"{why}.")
    else:
        tracked = track(called, device=on, show=False)
        tracked.is_kept = False  # an incomplete run is not listed
        tracked.on_level = on_level
        tell = on_step or (lambda done, total: None)
        run, found = _measured(Job(on, steps), prepare, tracked, TIMED_STEPS if timed else 0, tell)
    run.note("trial", facts | found)
    if keep:
        runs.add(run)
    return run


def _measured(
    job: Job, prepare: Callable[[Job], None], tracked: Track, timed_steps: int, tell: OnStep
) -> tuple[Run, dict[str, Any]]:
    """The run of a job, and the seconds of some further steps."""
    on, steps, total = job.device.type, job.steps, job.steps + timed_steps
    gc.collect()  # uncollected garbage would count as older than the run
    try:
        with seeded(), tracked as run:
            prepare(job)
            job.run(lambda done: tell(done, total))
        run.result(job.outcome())
        step_s = _seconds(job, timed_steps, lambda done: tell(steps + done, total)) if timed_steps else []
        return run, {"on": on, "step_s": step_s, "notes": job.notes}
    except BaseException:
        torch_internals.forget_unfinished_backward()
        raise
    finally:
        # It refers to its own methods: a cycle, which would keep all its tensors until the next collection.
        vars(job).clear()


def _in_child(
    prepare: Callable[[Job], None], steps: int, on_step: OnStep | None
) -> tuple[Callable[[], None], OnNews | None]:
    """A step that runs the job in a child process, and what hears there how many of its steps are done."""
    steps_done = 0

    def step() -> None:
        channel = child.current()
        assert channel is not None
        with seeded():
            job = Job("cuda", steps)
            prepare(job)
            job.run(lambda done: channel.send({STEPS_DONE: done}))
        for sentence in job.notes:
            channel.note(sentence)

    def heard(news: dict[str, Any]) -> None:
        nonlocal steps_done
        steps_done = int(news.get(STEPS_DONE, steps_done))
        if on_step is not None:
            on_step(steps_done, steps)

    return step, heard if on_step is not None else None


def _seconds(job: Job, steps: int, on_step: Callable[[int], None]) -> list[float]:
    """Seconds of each of a few further, untracked steps. The first is already warm."""
    times: list[float] = []
    on_gpu = job.device.type != "cpu"

    def done(count: int) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        on_step(count)

    if on_gpu:
        torch.cuda.synchronize()
    job.steps = steps
    with seeded():
        start = time.perf_counter()
        job.run(done)
    return [end - begin for begin, end in zip([start, *times], times, strict=False)]
