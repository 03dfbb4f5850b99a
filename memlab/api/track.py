"""`memlab.track()`: measure what happens in a block. `%%memtrack` is this and no more."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, overload

import torch

from memlab.analysis.curves import BUDGET
from memlab.analysis.peak import peak
from memlab.analysis.timeline import timeline
from memlab.api.child_ranks import ChildRanks
from memlab.api.display import Display, LevelNow
from memlab.api.run import CELLS, Run
from memlab.api.runs import runs
from memlab.api.saver import Saver
from memlab.api.watched_code import caller, known_by_now, lines_at
from memlab.errors import BudgetExceeded, MemlabError
from memlab.probes.counters import cuda_counters, cuda_devices
from memlab.probes.history import RING_ENTRIES
from memlab.probes.host import oom_kills
from memlab.probes.job_rank import job_rank
from memlab.probes.marks import marker
from memlab.probes.measurement import MEASURING_FRAMES, Measurement, Target
from memlab.probes.sampler import Sample
from memlab.torch_internals import cell_code, is_kernel
from memlab.torch_internals.traceback import leave_out, running_shell
from memlab.trace.file import savable
from memlab.trace.trace import (
    CPU,
    ERROR,
    RANK,
    STEPS_BEFORE,
    WORK_IN_CHILDREN,
    Trace,
)
from memlab.units import format_bytes, number_of, parse_bytes, sentence

_MAX_NAME = 200
_SECRET = re.compile(r"secret|token|passw|pwd|key|credential|auth", re.IGNORECASE)
"""In names of environment variables whose values are written into no file."""
_LEAST_SECRET = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of a track, checked before anything runs."""

    name: str | None = None
    _: dataclasses.KW_ONLY
    device: Any = None
    budget: str | int | None = None
    save: str | os.PathLike[str] | None = None
    rate_hz: float = 10.0
    entries: int = RING_ENTRIES
    live: bool = True
    show: bool | None = None
    lines: bool = False
    functions: Sequence[Any] = ()
    shapes: bool = False
    target: Target = dataclasses.field(init=False)
    budget_bytes: int | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        name, rate, entries, save, functions = self.name, self.rate_hz, self.entries, self.save, self.functions
        if name is not None and (not isinstance(name, str) or not name.strip() or len(name) > _MAX_NAME):
            raise MemlabError(f"a name is a text of 1 to {_MAX_NAME} characters, got {name!r:.80}.")
        if not isinstance(rate, int | float) or not math.isfinite(rate) or not 0 < rate <= 20:
            raise MemlabError(f"the rate must be above 0 and at most 20 Hz, got {rate!r}.")
        if not isinstance(entries, int) or not 1000 <= entries <= 10_000_000:
            raise MemlabError(
                f"entries (the length of the ring of history) must be 1,000 to 10,000,000, got {entries!r}."
            )
        if isinstance(save, str) and (not save or save.endswith(("/", os.sep))):
            raise MemlabError(f"cannot save to {save!r:.200}: name a file in a folder that exists.")
        watched = (functions,) if isinstance(functions, str) or callable(functions) else tuple(functions)
        for field, value in {
            "name": name or "",
            "rate_hz": float(rate),
            "lines": self.lines or bool(watched),
            "functions": watched,
            "target": Target.parse(self.device),
            "budget_bytes": None if self.budget is None else parse_bytes(self.budget),
            # Absolute, because the cell may change the working directory.
            "save": None if save is None else savable(save),
        }.items():
            object.__setattr__(self, field, value)


class Track:
    """The context manager behind `track()`, `with track() as run: ...`, and its decorator."""

    def __init__(self, wanted: Options) -> None:
        self.options = wanted
        self.run = Run(wanted.name or runs.new_name())
        self.code: ast.Module | None = None
        """The code that will run, if the calling frame is not that of the cell."""
        self.is_kept = True
        """Whether the finished run is listed among the runs."""
        self.ended_by = ""
        """The name of the signal that ended the process."""
        self.steps_before = 0
        """How many optimizer steps the script took before."""
        self.on_level: Callable[[LevelNow], None] | None = None
        """Called a few times a second, on another thread, with what is held."""
        self._measurement: Measurement | None = None
        self._display: Display | None = None
        self._saver: Saver | None = None
        self._ranks: ChildRanks | None = None
        self._thread, self._file = 0, ""
        self._kills: int | None = None
        """How many processes the kernel had killed in this control group when the run began."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: each of its calls is a run of its own, by default of the function's name."""
        wanted = dataclasses.replace(self.options, name=self.options.name or getattr(function, "__name__", None))
        if self.options.lines:
            wanted = dataclasses.replace(wanted, functions=(*self.options.functions, function))
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with Track(wanted):
                    return await function(*args, **kwargs)

            return awaited

        @functools.wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            with Track(wanted):
                return function(*args, **kwargs)

        return tracked

    def __enter__(self) -> Run:
        self.start()
        return self.run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            over = self.stop(error)
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"memlab has no report of run {self.run.name!r}: {_described(problem)}")
            return
        if error is not None:
            from memlab.api.ledger import the_ledger  # both are much, and most runs need none of it
            from memlab.api.oom import note_oom

            if running_shell() is None or not the_ledger.is_on:  # else it is noted at the end of the cell
                note_oom(error, self.run)
        elif over is not None:
            raise over

    def start(self, at: FrameType | None = None) -> None:
        """Start measuring; if that fails, everything is switched off again. `at` is the frame to follow, if not the caller's."""
        if self._measurement is not None:
            raise MemlabError(f"run {self.run.name!r} was started before; call track() again for another.")
        fake = sys.modules.get("memlab.fake_cuda.tensors")
        if fake is not None and fake.State.active is not None:  # the report of the prediction covers it
            what = "a run inside a prediction measures nothing"
            raise MemlabError(f"{what}: the prediction is of all that runs in it.")
        wanted = self.options
        self._thread = threading.get_ident()
        frame = at or caller(sys._getframe(1))
        self._file = frame.f_code.co_filename
        known = known_by_now(wanted.functions, frame, self.code) if wanted.lines else ()
        lines = lines_at(frame, list(known)) if wanted.lines else None
        measurement = Measurement(wanted.target, wanted.rate_hz, wanted.entries, lines, wanted.shapes)
        if Display.is_wanted(wanted.show, open_tracks[self._thread]):
            self._display = Display(self.run, measurement, wanted.live)
        self._measurement, measurement.on_tick = measurement, self._tick
        self._kills = oom_kills()
        try:
            if wanted.save is not None:
                self._saver = Saver(Path(wanted.save), self.run.name, measurement)
            if is_kernel(running_shell()) and not open_tracks[self._thread]:
                device = None if wanted.device is None else str(wanted.device)
                self._ranks = ChildRanks(track_of_rank, self.run.name, device, wanted.rate_hz, wanted.shapes)
                self._ranks.open()
            if self._display is not None:
                self._display.rank_lines = self._ranks.lines if self._ranks is not None else None
                self._display.open()
            measurement.start(frame)
        except BaseException as error:
            self._abandon(_described(error))
            raise
        open_tracks[self._thread] += 1
        self.run.is_running = True

    def know(self, model: torch.nn.Module, name: str) -> None:
        """Name the modules of a model that no variable leads to, and whose own `forward` may never be called."""
        marker.know(model, name)
        marker.tell("met", model)

    def _tick(self, sample: Sample) -> None:
        for one in (self._saver, self._display):
            if one is not None:
                one.tick(sample)
        if self.on_level is not None and self._measurement is not None:
            level = LevelNow.of(self._measurement, sample)
            if level is not None:
                self.on_level(level)

    def _abandon(self, reason: str) -> None:
        self.run.fail(reason)
        self._close_ranks()
        if self._display is not None:
            self._display.fail(reason)
        if self._saver is not None:
            self._saver.close()

    def stop(self, error: BaseException | None = None) -> BudgetExceeded | None:
        """End, keep the run, show the report; return the error if the budget was exceeded."""
        if self._measurement is None or not self.run.is_running:
            return None
        self.run.is_running = False
        if error is not None:
            without_our_frames(error)  # for those who keep it, too: what our frame held of an operator goes with it
        open_tracks[self._thread] -= 1  # that of the start: a generator may be closed by another thread
        with _interrupts_wait():
            try:
                trace = self._measurement.stop()
                self._close_ranks()
                self._keep(trace, error)
            except BaseException as problem:
                self._abandon(_described(problem))
                raise
            try:
                if self.options.save is not None:
                    self.run.save(self.options.save)
            finally:
                if self._saver is not None:
                    self._saver.close()
                if self._display is not None:
                    self._display.finish()
        return self.over_budget()

    def over_budget(self) -> BudgetExceeded | None:
        """The error of a finished run whose peak is above the budget; None if it is not, or if there is none."""
        limit = self.options.budget_bytes
        for device in self.run.devices if limit is not None else ():
            peak_bytes = device.levels[0].peak.low_bytes
            if limit is not None and peak_bytes > limit:
                what = f"{device.device.label} peaked at {format_bytes(peak_bytes)} allocated"
                text = f"{what}, {format_bytes(peak_bytes - limit)} above its budget of {format_bytes(limit)}."
                return BudgetExceeded(f"run {self.run.name!r}: {text}")
        return None

    def _close_ranks(self) -> None:
        """Read what the ranks have left that the cell has started; a failure costs their report alone."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            with contextlib.suppress(Exception):
                ranks.close(None if self.options.save is None else Path(self.options.save))
            self.run.started_ranks = ranks.ranks

    def _keep(self, trace: Trace, error: BaseException | None) -> None:
        notes = [self._display.note] if self._display is not None and self._display.note else []
        notes += _about_cuda(trace, is_forced=self.options.target.type is not None)
        if error is not None:
            who = "The cell" if running_shell() is not None else "It"
            notes.append(f"{who} raised {_described(error)}.")
            if self._kills is not None and (kills := (oom_kills() or 0) - self._kills) > 0:
                of = "of the processes of this control group for host memory meanwhile"
                notes.append(f"The kernel killed {kills:,} {of}.")
        counts = {}
        # "cell" is the name of the measured cell if its lines are followed
        for place in {"cell", *(text.rpartition(":")[0] for text in (*trace.texts["line"], *trace.texts["mark"]))}:
            if count := cell_code.cell_number(self._file if place == "cell" else place):
                counts[place] = count
        # By how much *allocated* rose above its level at the start, on the device where it rose most.
        rises = (peak(trace, index).low_bytes - timeline(trace, index).start_bytes for index in trace.device_indices)
        risen_bytes = max(rises, default=0)
        if self._measurement is not None and (gap := self._measurement.children.gap(risen_bytes)) is not None:
            trace = trace.with_gaps(gap)
            if gap.name == WORK_IN_CHILDREN and not self.run.started_ranks:
                how = "memlab.track(save='child.memlab') in each, with a file of its own, measures them."
                notes.append(f"The work was done elsewhere: {gap.text}. {how}")
        if self.run.started_ranks:
            ranks = number_of(sum(map(len, self.run.started_ranks)), "rank")
            notes.append(f"This is the process that started {ranks}, each measured by itself and shown above.")
        if counts:
            trace = dataclasses.replace(trace, notes={**trace.notes, CELLS: counts})
        self.run.finish(trace, notes)
        self.run.note("raised", error is not None)
        if self.options.budget_bytes is not None:
            self.run.note(BUDGET, self.options.budget_bytes)
        if error is not None:
            from memlab.api.oom import oom_error  # it is much, and most runs need none of it

            self.run.note(ERROR, {"text": _described(error), "out_of_memory": oom_error(error) is not None})
        elif self.ended_by:
            self.run.note(ERROR, {"text": f"ended by {self.ended_by}", "out_of_memory": False})
        if (rank := job_rank()) is not None:
            self.run.note(RANK, rank)
        if self.steps_before:
            self.run.note(STEPS_BEFORE, self.steps_before)
        if self.is_kept:
            runs.add(self.run)


def track_of_rank(name: str, path: Path, device: str | None, rate_hz: float, shapes: bool) -> Track:
    """The track of a process that a tracked cell has started, which writes to a file and shows nothing."""
    track = Track(Options(name, device=device, rate_hz=rate_hz, shapes=shapes, save=path, show=False))
    track.is_kept = False
    return track


def without_our_frames(error: BaseException, codes: Collection[CodeType] = frozenset()) -> None:
    """Take the frames of what measures, and of this code, out of the traceback of an error and of those that led to it."""
    from memlab.references.release import all_errors

    for one in all_errors([error]):
        leave_out(one, MEASURING_FRAMES | set(codes))


open_tracks: Counter[int] = Counter()
"""The number of open tracks by the thread that started them."""


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C until the finished run is assembled and shown; a second one interrupts at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def wait(number: int, frame: Any) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _about_cuda(trace: Trace, is_forced: bool) -> Iterator[str]:
    """A note on CUDA memory in a run that measured only the CPU."""
    if any(index != CPU for index in trace.device_indices):
        return
    held = {f"cuda:{device}": cuda_counters(device) for device in cuda_devices()}
    there = ", ".join(
        f"{format_bytes(one['allocated'])} allocated and {format_bytes(one['reserved'])} reserved on {device}"
        for device, one in held.items()
        if one["reserved"] > 0
    )
    if there and is_forced:
        yield f"Only the CPU was measured. When this run ended, PyTorch held {there}."
    elif there:
        yield f"Nothing was allocated or freed on CUDA in this run. Throughout, PyTorch held {there}."


def _described(error: BaseException) -> str:
    """An error in one line, even if its `str()` fails; in place of a secret of the environment stands its name."""
    try:
        text = str(error).strip().split("\n")[0]
        for name, value in os.environ.items():
            if len(value) >= _LEAST_SECRET and _SECRET.search(name):
                text = text.replace(value, f"[{name}]")
        text = sentence(text)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@overload
def track(name: str | None = None, **kwargs: Any) -> Track: ...


@overload
def track(name: Callable[..., Any]) -> Callable[..., Any]: ...


def track(name: Any = None, **kwargs: Any) -> Any:
    """Measure a block: `with memlab.track("baseline") as run: ...`, then use `run`; or each call of a function, `@memlab.track`.

    `device` chooses what is measured ("cpu", "cuda", "cuda:1"; by default what the block uses); `budget` ("2GiB") makes a
    higher peak raise BudgetExceeded; `save` names a file; `rate_hz` is the rate of the live view; `entries` the length of
    the allocator's history; `live=False` shows the report only, `show=False` nothing, `show=True` also outside of
    notebooks and in nested blocks. `lines=True` follows the lines of the block's function, of the notebook's cells or the
    script, and of `functions` (names or functions, methods, classes), for `run.lines()`; `shapes=True` records the shapes of
    tensors (on CUDA operators become slower).
    """
    if inspect.isroutine(name) and not kwargs:  # the decorator without parentheses
        return Track(Options())(name)
    return Track(Options(name, **kwargs))
