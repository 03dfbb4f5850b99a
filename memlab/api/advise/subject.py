"""The subject of an advice and how techniques are applied to it: to the parts of a workload, or to a step or cell from outside.

The user's objects are never touched: a workload is built again for each try; a step and a cell run in a child process, with
techniques switched on from outside. What they print there is discarded: the user has seen it. A forked child
computes with one thread, because it does not inherit the threads of the parent's pool.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from memlab import workloads
from memlab.analysis.oom.actions import root_of
from memlab.analysis.summary import has_raised
from memlab.api.advise.edits import EDITS, diff, edited
from memlab.api.advise.observed import OBSERVED, Observer
from memlab.api.cell_names import names_read
from memlab.api.predict import configured, first_rank
from memlab.api.prediction import Prediction, failure, prediction_from
from memlab.api.run import Run
from memlab.api.track import track
from memlab.api.workload_run import Work, run_workload, work_of
from memlab.errors import MemlabError, PredictionError
from memlab.prediction import dry_run
from memlab.prediction.cards import Card, find
from memlab.prediction.child import Channel, Child, ChildOutcome, current
from memlab.prediction.torch_versions import other_version
from memlab.references import release
from memlab.references.live_storages import live_storages
from memlab.saving_techniques import Technique, techniques
from memlab.torch_internals.traceback import running_shell
from memlab.trace.file import dumps, loads
from memlab.trace.trace import CPU, Trace
from memlab.units import format_bytes
from memlab.workloads.job import checked
from memlab.workloads.workload import Workload

Tell = Callable[[str], None]
TIMED_STEPS, TIMED_S = 3, 5.0
"""How many steps are timed, and after how many seconds no further one is started."""
KEPT_BYTES = 256 << 20
"""Up to which size requests are kept."""
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile"})
PARTS = "gives_parts"
"""The message of a child whose step returned the four parts of a workload."""


class TimeUp(MemlabError):
    """The time limit was reached."""


@dataclass(frozen=True, slots=True)
class WorkloadSubject:
    """A workload, on "cpu", "cuda" or predicted for a card: techniques change the parts of its job.

    `techniques` and `habits` are already applied.
    """

    work: Work
    on: str | Card
    steps: int = 2
    techniques: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()
    world_size: int = 1

    @property
    def name(self) -> str:
        """Its name."""
        said = techniques.said(self.techniques, self.world_size)
        return " + ".join([str(self.work), *said, *(f"habit of {one}" for one in self.habits)])

    def why_not(self, technique: Technique) -> str:
        """Why this technique cannot be tried on it; "" where it can."""
        if technique.name in self.techniques:
            return "is in use"
        if not isinstance(self.on, Card) and (why := technique.only_predicted):
            return why
        if technique.shards and self.world_size == 1:
            return "is for several GPUs: world_size=8 tries it"
        return techniques.conflict([*self.techniques, technique.name])

    def attempt(self, names: Sequence[str], tell: Tell, left_s: float) -> Run:
        """Run it with these techniques; the run is not kept among the runs."""
        deadline = time.monotonic() + left_s

        def on_step(done: int, total: int) -> None:
            tell(f"step {done} of {total}")
            if time.monotonic() > deadline:
                raise TimeUp("the time limit was reached")

        chosen, habits = [*self.techniques, *names], [one for one in self.habits if one not in names]
        said = techniques.said(names, self.world_size)
        name = " + ".join(["advise: with", *said]) if names else "advise: as it is"
        more: dict[str, Any] = {"name": name, "on_step": on_step, "keep": False, "world_size": self.world_size}
        return run_workload(self.work, chosen, habits, on=self.on, steps=self.steps, **more)


@dataclass(frozen=True, slots=True)
class OfStep:
    """A function without arguments that builds and trains, or a cell's text; its parts are unknown. It finds `devices` GPUs.

    In the child `before` is called first, and `inside` on the fake GPU, where the notebook's CUDA tensors are fake.
    """

    name: str
    on: str | Card
    step: Callable[[], object] | None = None
    text: str = ""
    before: Callable[[], None] | None = None
    inside: Callable[[], None] | None = None
    torch_version: str = ""
    """The PyTorch that it is predicted for, "" for the one that runs here."""
    devices: int = 1
    original: str = ""
    """What a diff shows the change of, if not `text`."""
    observed: dict[str, Any] = field(default_factory=dict)
    """What the first run has shown: why techniques do not apply, what edits of the text need, whether it gives `PARTS`."""
    asked: dict[Any, tuple[ChildOutcome, list[Trace]]] = field(default_factory=dict)
    """What was dry-run -> what it requested: settings of the allocator change what becomes of that, and need no child."""

    def changed(self, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The cell's text with these techniques, and the names of those that could be written into it."""
        return edited(self.text, self.observed, names) if self.text else ("", ())

    def diff(self, names: Sequence[str]) -> str:
        """The change of the cell, as it was run; "" if one of the techniques could not be written into it.

        A setting of the allocator is no part of a cell: it is made before the kernel starts.
        """
        text, done = self.changed(names)
        left = [one for one in names if one not in done and not techniques[one].conf]
        return diff(self.original or self.text, text) if done and not left else ""

    def why_not(self, technique: Technique) -> str:
        """Why this technique cannot be tried on it; "" where it can."""
        if not isinstance(self.on, Card) and (why := technique.only_predicted):
            return why
        if why := self.observed.get("reasons", {}).get(technique.name):
            return f"does not apply: {why}"
        if technique.patch is None and not technique.conf and not self.changed([technique.name])[1]:
            if technique.name in EDITS and self.text:
                return "cannot be written into this cell: what it would change was not recognized"
            return "cannot be switched on from outside: pass the workload (a function of model, optimizer, batch, loss)"
        return ""

    def attempt(self, names: Sequence[str], tell: Tell, left_s: float) -> Run:
        """Run it with these techniques in a child; the run is not kept among the runs."""
        what = "the cell" if self.text else "the step"
        conf = ""
        text, written = self.changed(names)
        names = [one for one in names if one not in written]
        observes = not names and not written and not self.observed

        def hear(news: dict[str, Any]) -> None:
            if OBSERVED in news:
                self.observed.update(news[OBSERVED])
            if PARTS in news:
                self.observed[PARTS] = True
            if "peak_allocated_bytes" in news:
                tell(f"peak so far {format_bytes(int(news['peak_allocated_bytes']))}")

        def run(card: Card | None, limit_s: float | None, _: bool = True) -> ChildOutcome:
            child = Child(limit_s, hear, is_quiet=True, what=what)
            if card is None and child.forks and torch.cuda.is_initialized():
                why = "would be measured in a forked child, which must not touch CUDA once this process has used it"
                how = 'predict it, memlab.advise(..., card="RTX 4060"), or pass the workload'
                raise MemlabError(f"{what} {why}: {how}.")
            around = functools.partial(_switched_on, self, list(names), card, conf, child.forks, observes)
            if self.step is not None:
                return child.run(functools.partial(_work, self.step, around, list(names)))
            shell = running_shell()
            if shell is None:
                raise MemlabError("a cell can be run again only in its notebook: there is none.")
            return child.run_cell(shell, text, functools.partial(_of_cell, around))

        failed = functools.partial(failure, raised=f"{what} failed when it was run again", nothing="", kind=MemlabError)
        if isinstance(self.on, Card):
            dry_run.prepare()
            conf = ",".join(filter(None, [configured(None), *(techniques[one].conf for one in names)]))
            key = (text, id(self.step), self.before, self.inside, *(one for one in names if not techniques[one].conf))
            is_setting_alone = any(techniques[one].conf for one in names) and key in self.asked
            outcome, traces = self.asked[key] if is_setting_alone else dry_run.dry_runs(self.on, run, left_s)
            if outcome.error is not None or not traces:
                raise failed(outcome)
            if sum(one.nbytes() for _, kept in self.asked.values() for one in kept) < KEPT_BYTES:
                self.asked[key] = outcome, traces
            return prediction_from(outcome, traces, self.name, self.on, conf)
        outcome = run(None, left_s)
        if outcome.error is not None or outcome.result is None:
            raise failed(outcome)
        return Run(self.name, loads(outcome.result))


Subject = WorkloadSubject | OfStep


@dataclass(frozen=True, slots=True)
class Asked:
    """What advice is asked for: a workload, a step or a run, and where and how it is run; `on` is None for here."""

    what: Any
    on: Card | None
    steps: int
    habits: tuple[str, ...]
    world_size: int
    size: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 1 <= self.steps <= 100:
            raise MemlabError(f"steps is a number from 1 to 100, got {self.steps!r:.80}.")
        if isinstance(self.what, Run) and (self.settings or self.habits):
            raise MemlabError("settings and habits are those of a workload: leave them out for a run.")
        if first_rank(self.world_size, None).world_size > 1 and self.on is None:
            raise MemlabError('world_size is for predictions: name the GPUs, card="RTX 4060".')

    def workload(self) -> WorkloadSubject:
        """The subject of a workload."""
        work = work_of(self.what, self.size, **self.settings)
        return WorkloadSubject(work, self.on or here(), self.steps, habits=self.habits, world_size=self.world_size)

    def subject(self) -> Subject:
        """A step, the cell of a run, or a workload."""
        what = self.what
        if isinstance(what, str | Workload):
            return self.workload()
        if not isinstance(what, Run):
            if not callable(what):
                raise MemlabError(f"advise needs a workload, a step or a run, got {type(what).__name__}: {what!r:.80}")
            return OfStep(str(getattr(what, "__name__", type(what).__name__)), self.on or "cpu", what)
        if "workload" in what.trace.noted("trial"):
            return of_workload_run(what, self.on, self.steps, self.world_size)
        if what.cell_text:
            version, devices = other_version(what.trace), gpus_of(what)
            where = self.on or card_of(what) or "cpu"
            # What the failed cell's frames hold would be counted in every prediction, and is released before it is run again.
            before = (
                as_after_release if has_raised(what.trace) and isinstance(where, Card) and running_shell() else None
            )
            return OfStep(what.name, where, text=what.cell_text, before=before, torch_version=version, devices=devices)
        kind = "prediction of a step" if isinstance(what, Prediction) else "run of a block"
        why = f"run {what.name!r} cannot be run again: a {kind}, or from a file"
        raise MemlabError(f"{why}. Pass the step itself, memlab.advise(step), or the run of a %%memtrack cell.")


def of_workload_run(run: Run, on: str | Card | None, steps: int, world_size: int) -> WorkloadSubject:
    """The subject of a Lab run, with its techniques and baseline patterns."""
    facts = run.trace.notes["trial"]
    name, size = facts.get("workload"), facts.get("size") or "laptop"
    if name not in workloads:  # type: ignore[operator]  # the module is a mapping
        why = f"run {run.name!r} is of {name!r:.80}, which is not a workload of memlab"
        raise MemlabError(f"{why}: pass the function that makes it.")
    where = on or str(facts.get("on", "cpu"))
    if on is None and where == "cuda" and not torch.cuda.is_available():
        raise MemlabError('the run was measured on CUDA, and there is none here: name a GPU, card="RTX 4060".')
    return WorkloadSubject(
        work=work_of(name, size, **facts.get("settings", {})),
        on=where if isinstance(where, Card) or where in ("cpu", "cuda") else find(where),
        steps=int(facts.get("steps", steps)),
        techniques=tuple(facts.get("techniques", ())),
        habits=tuple(facts.get("habits", ())),
        world_size=int(facts.get("world_size", world_size)),
    )


def here() -> str:
    """The device on which a workload is measured in this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def card_of(run: Run) -> Card | None:
    """The card that a run was measured on or predicted for; None for a run on the CPU."""
    if isinstance(run, Prediction):
        return run.card
    if not run.devices or run.devices[0].device.index == CPU:
        return None
    device = run.devices[0].device
    name, total = device.name, device.capacity_bytes
    try:
        return find(name)
    except PredictionError:
        if not torch.cuda.is_available():
            return Card(name, total, (8, 6))
        facts = torch.cuda.get_device_properties(device.index)
        return Card(name, total, (facts.major, facts.minor), multiprocessors=facts.multi_processor_count)


def names_unused(text: str) -> list[str]:
    """The notebook's variables that hold memory of a GPU and that a cell does not name, nor a function of its own."""
    shell: Any = running_shell()
    if shell is None:
        return []
    used = {*re.findall(r"\w+", text), *names_read(text, shell.user_ns)}
    roots = dict.fromkeys(root_of(one.path) for one in live_storages().storages if one.device.startswith("cuda"))
    return [name for name in roots if name in shell.user_ns and name not in used]


def gpus_of(run: Run) -> int:
    """How many GPUs a run found: all of a prediction, and of a measured one those up to the last that it used."""
    trace = run.trace
    last = max(trace.device_indices) if isinstance(run, Prediction) else int(trace.events.device.max(initial=0))
    return max(last, 0) + 1


# --- in the child ---


def as_after_release(names: Sequence[str] = ()) -> None:
    """What the failed cell's frames hold is released, and so are these variables; no program may be started."""
    shell: Any = running_shell()
    release.release_errors(shell)
    for name in names:
        shell.user_ns.pop(name, None)
    gc.collect()
    shell.system = _refuse
    sys.addaudithook(lambda event, args: _refuse() if event in _STARTS else None)


def _refuse(*command: Any) -> NoReturn:
    raise PredictionError("it starts programs, which would be started again")


@contextlib.contextmanager
def _switched_on(
    subject: OfStep, names: list[str], card: Card | None, conf: str, is_forked: bool, observes: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """Switch techniques on; yield the context for the work, its run, and a function that returns the trace."""
    with contextlib.ExitStack() as stack:
        tracked: Any = track("again", device="cpu", show=False)
        run: Run | None = tracked.run

        def finish() -> bytes:
            if torch.cuda.is_initialized():
                raise MemlabError('it works on CUDA: name a card, memlab.advise(..., card="RTX 4060")')
            return dumps(tracked.run.trace)

        if subject.before is not None:
            subject.before()
        if card is not None:
            how: dict[str, Any] = {"torch_version": subject.torch_version, "devices": subject.devices}
            finish = stack.enter_context(dry_run.dry_run(card, conf, **how))
            tracked, run = contextlib.nullcontext(), None
        elif is_forked:
            torch.set_num_threads(1)
        if subject.inside is not None:
            subject.inside()
        for one in techniques.ordered(names):
            if one.patch is not None:
                stack.enter_context(one.patch())
        if observes:
            observer, ending = stack.enter_context(Observer().on()), finish

            def finish_observed() -> bytes:
                channel, shell = current(), running_shell()
                if channel is not None:
                    channel.send({OBSERVED: observer.facts(shell.user_ns if shell is not None else {})})
                return ending()

            finish = finish_observed
        yield tracked, run, finish


def _work(step: Callable[[], object], around: Callable[[], Any], names: list[str], channel: Channel) -> bytes:
    """Run the step once tracked and, if it is measured, a few more times untracked."""
    with around() as (tracked, run, finish):
        with tracked:
            value = step()
        gives_parts, step_s = False, list[float]()
        with contextlib.suppress(MemlabError):
            checked(value)
            gives_parts = True
        if gives_parts:
            channel.send({PARTS: True})
        elif run is not None:
            with contextlib.suppress(MemlabError):  # a result that cannot be recorded is no reason to fail
                run.result(value)
            del value
            while len(step_s) < TIMED_STEPS and sum(step_s) < TIMED_S:
                start = time.perf_counter()
                step()
                step_s.append(time.perf_counter() - start)
            run.note("trial", {"on": "cpu", "step_s": step_s, "techniques": names, "habits": [], "notes": []})
    trace: bytes = finish()
    return trace


@contextlib.contextmanager
def _of_cell(around: Callable[[], Any]) -> Iterator[Callable[[], bytes]]:
    """The context around a cell, which the shell runs once; errors propagate."""
    with around() as (tracked, _, finish), tracked:
        yield finish
