"""What an advice is about, and how a change of it is tried: a workload in its pieces, or a step or a cell from outside.

The user's objects are never touched: a workload is built anew for each try, a step and a cell run in a child process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memlab import workloads
from memlab.errors import MemlabError, PredictionError
from memlab.predictor.cards import Card, find
from memlab.savings import Technique, techniques
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.session.trial import Work, trial, work_of
from memlab.trace.trace import CPU

Tell = Callable[[str], None]


class TimeUp(MemlabError):
    """The time that an advice may take is over."""


class Subject(Protocol):
    """What is advised on: it runs as it is, and with techniques switched on."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def on(self) -> str | Card:
        """Where it runs: "cpu", "cuda", or a card for which it is predicted."""

    def why_not(self, technique: Technique) -> str:
        """Why this technique cannot be tried on it; "" where it can."""

    def attempt(self, names: Sequence[str], tell: Tell, left_s: float) -> Run:
        """Run it with these techniques; the run is not kept among the runs."""


@dataclass(frozen=True, slots=True)
class OfWork:
    """A workload: techniques change the pieces of its job. `techniques` and `habits` are those that it has already."""

    work: Work
    on: str | Card
    steps: int = 2
    techniques: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called."""
        return " + ".join([str(self.work), *self.techniques, *(f"habit of {one}" for one in self.habits)])

    def why_not(self, technique: Technique) -> str:
        """Why this technique cannot be tried on it; "" where it can."""
        if technique.name in self.techniques:
            return "is in use"
        if technique.conf and not isinstance(self.on, Card):
            return "is said to CUDA's allocator before it starts: it can be predicted for a card"
        replaces = technique.name in self.habits
        if technique.apply is None and technique.before is None and not technique.conf and not replaces:
            return "replaces a habit that this workload does not have"
        return techniques.conflict([*self.techniques, technique.name])

    def attempt(self, names: Sequence[str], tell: Tell, left_s: float) -> Run:
        """Run it with these techniques; the run is not kept among the runs."""
        deadline = time.monotonic() + left_s

        def on_step(done: int, total: int) -> None:
            tell(f"step {done} of {total}")
            if time.monotonic() > deadline:
                raise TimeUp("its time was over")

        habits = [one for one in self.habits if one not in names]
        with runs.as_they_are():
            return trial(
                self.work,
                [*self.techniques, *names],
                habits,
                on=self.on,
                steps=self.steps,
                name=_name(names),
                on_step=on_step,
            )


def _name(names: Sequence[str]) -> str:
    """A name that no run of the user has: keeping it must replace none."""
    return " + ".join(["advise: with", *names]) if names else "advise: as it is"


def of_work(
    what: Any, size: str, settings: dict[str, Any], on: str | Card, steps: int, habits: Sequence[str]
) -> OfWork:
    """The subject of a workload by name, a Workload, or a function of four parts."""
    return OfWork(work_of(what, size, **settings), on, steps, habits=tuple(habits))


def of_trial(run: Run, on: str | Card | None, steps: int) -> OfWork:
    """The subject of a run of the Lab or of a trial, with the techniques and habits that it had."""
    noted = run.trace.notes["trial"]
    name, size = noted.get("workload"), noted.get("size") or "laptop"
    if name not in workloads:  # type: ignore[operator]  # the module is a mapping
        raise MemlabError(
            f"run {run.name!r} is of {name!r:.80}, which is no workload of memlab: pass the function that makes it."
        )
    where = on or _where(str(noted.get("on", "cpu")))
    work = work_of(name, size, **noted.get("settings", {}))
    return OfWork(
        work, where, int(noted.get("steps", steps)), tuple(noted.get("techniques", ())), tuple(noted.get("habits", ()))
    )


def _where(noted: str) -> str | Card:
    if noted == "cuda" and not torch.cuda.is_available():
        raise MemlabError('the run was measured on CUDA, and there is none here: say for which card, card="RTX 4060".')
    return noted if noted in ("cpu", "cuda") else find(noted)


def here() -> str:
    """Where a workload is measured in this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def card_of(run: Run) -> Card | None:
    """The card that a run was measured on or predicted for; None for a run on the CPU."""
    from memlab.session.predict import Prediction

    if isinstance(run, Prediction):
        return run.card
    if not run.devices or run.devices[0].device.index == CPU:
        return None
    device = run.devices[0].device
    try:
        return find(device.name)
    except PredictionError:
        if not torch.cuda.is_available():
            return Card(device.name, device.capacity_bytes, (8, 6))
        facts = torch.cuda.get_device_properties(device.index)
        return Card(
            device.name, device.capacity_bytes, (facts.major, facts.minor), multiprocessors=facts.multi_processor_count
        )
