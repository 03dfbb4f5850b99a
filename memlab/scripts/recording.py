"""The recording of one process: measured for some optimizer steps, reported, and kept with a page about it.

`memlab run` and the callbacks of trainers record by this. Everything is written to stderr and to files, and nothing that
fails here reaches what is recorded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from memlab.errors import MemlabError, TraceError
from memlab.scripts.step_times import StepTimes

if TYPE_CHECKING:
    from memlab.api.display import LevelNow
    from memlab.api.oom import OomExplained
    from memlab.api.run import Run
    from memlab.api.track import Track


LONGEST_NAME = 200
OVER_BUDGET = 1
"""The exit status of a script that ended well and used more than its budget."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure, and what to keep.

    `skip` optimizer steps come before the measurement, `steps` are measured (None: until it ends). `out` is a folder for the run
    and its page (None: a page is kept only if memory runs out). With `quiet` nothing is printed.
    """

    name: str
    device: str | None = None
    lines: bool = False
    shapes: bool = False
    budget: str | int | None = None
    skip: int = 0
    steps: int | None = None
    out: Path | None = None
    as_json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name or self.name == ".." or len(self.name) > LONGEST_NAME:
            wanted = f"1 to {LONGEST_NAME} characters without a folder"
            raise MemlabError(f"a name is that of a run, and of its files: {wanted}; got {self.name!r:.200}.")
        for what, count, least in (("skip", self.skip, 0), ("steps", self.steps, 1)):
            if count is not None and count < least:
                raise MemlabError(f"{what} is a number of optimizer steps, {least} or more, got {count}.")


class Recording:
    """What is recorded of this process; `who` begins the lines that it says, `device` is measured if none was wanted."""

    def __init__(self, wanted: Wanted, who: str, device: str | None = None) -> None:
        self.wanted, self.who, self.device = wanted, who, wanted.device or device
        self.run: Run | None = None
        self.model: tuple[Any, str] | None = None
        """A model and its name, for a trainer's that no variable of the script may lead to."""
        self.is_over_budget = self.is_over = self.has_failed = False
        self._track: Track | None = None
        self._is_saved = False
        self._pid = os.getpid()
        self._parts = self._count = 0
        self.ended_by = ""
        """The name of the signal that ends the process."""
        self.times = StepTimes()
        self.on_level: Callable[[LevelNow], None] | None = None
        """Called a few times a second, on another thread, with what is held."""

    @property
    def is_here(self) -> bool:
        """Whether this is the process that is recorded, and not a fork of it."""
        return os.getpid() == self._pid

    @property
    def is_measuring(self) -> bool:
        """Whether it is measuring now."""
        return self._track is not None

    def begin(self, frame: FrameType | None) -> None:
        """Measure from here, unless steps are to be skipped. `frame` is the one whose lines are followed."""
        if self.wanted.skip == 0:
            with self.harmless():
                self._start(frame)

    def stepped(self, count: int, frame: FrameType | None) -> None:
        """So many optimizer steps were taken: begin or end if it is time."""
        wanted = self.wanted
        if not self.is_here:  # a forked child measures nothing
            return
        if count > self._count:
            self._count = count
            self.times.stepped(self.is_measuring)
        with self.harmless():
            if self._track is None and self.run is None and count == wanted.skip and not self.has_failed:
                self._start(frame)
            elif wanted.steps is not None and count == wanted.skip + wanted.steps:
                self._stop(None)

    def report_part(self, frame: FrameType | None) -> None:
        """Report what was measured so far, and go on with a new part."""
        if self._track is None or not self.is_here:
            return
        with self.harmless():
            self._stop(None)
            self._report(None, "")
            self._parts += 1
            self._start(frame)

    def end(self, error: BaseException | None, why_nothing: str = "", is_quiet: bool = False) -> None:
        """End it, report, and if memory ran out leave a page. `is_quiet` leaves out a report without an error.

        Call it while the error exists. `why_nothing` is the reason if nothing was measured.
        """
        if not self.is_here or self.is_over:
            return
        with self.harmless(), _termination_waits():
            self.is_over = True
            failed = None if isinstance(error, SystemExit) else error
            self._stop(failed)
            self._report(failed, why_nothing, is_quiet)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        """Whatever goes wrong in memlab is said in one line, and does not change how the program goes on."""
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, MemlabError) else f"{type(error).__name__}: {error!s:.200}"
            say(f"{self.who}: {'there is no report: ' if self.is_over else 'nothing is measured: '}{why}")
            self.has_failed = True

    def file(self, suffix: str) -> Path | None:
        """The file of this process in the folder: `train.memlab`, `train.rank3.memlab`, of a second part `train.2.memlab`."""
        if self.wanted.out is None:
            return None
        rank = os.environ.get("RANK", "")
        parts = [self.wanted.name, f"rank{rank}" if rank.isdigit() else "", str(self._parts + 1) if self._parts else ""]
        return self.wanted.out / ".".join(filter(None, (*parts, suffix.lstrip("."))))

    def _start(self, frame: FrameType | None) -> None:
        from memlab.api.track import Options, Track

        wanted = self.wanted
        options = Options(
            wanted.name, device=self.device, lines=wanted.lines, shapes=wanted.shapes, budget=wanted.budget,
            show=False, save=self.file(".memlab"),
        )  # fmt: skip
        track = Track(options)
        track.on_level, track.steps_before = self.on_level, self._count
        track.start(frame)
        self._track = track
        if self.model is not None:
            track.know(*self.model)
        self.times.interrupt()

    def _stop(self, error: BaseException | None) -> None:
        """End the measurement; the run is kept, and saved if a folder was given."""
        track, self._track = self._track, None
        if track is None:
            return
        track.ended_by = self.ended_by
        if self.wanted.out is not None:
            with contextlib.suppress(OSError):  # saving says what is wrong
                self.wanted.out.mkdir(parents=True, exist_ok=True)  # the script may have deleted it
        self._is_saved = False
        try:
            over = track.stop(error)
            self._is_saved = self.wanted.out is not None
        except TraceError as problem:  # a full disk: what was measured is reported all the same
            over = track.over_budget()
            self._not_kept("run", problem)
        self.times.interrupt()
        self.run = track.run
        if over is not None:
            say(f"memlab: {over}")
            self.is_over_budget = True

    def _report(self, error: BaseException | None, why_nothing: str, is_quiet: bool = False) -> None:
        if self.run is None:
            if not self.has_failed and not self.wanted.quiet:  # a failure was said
                say(f"{self.who}: nothing was measured: {why_nothing}")
            return
        from memlab.api.kept_names import keep_names
        from memlab.api.oom import note_oom
        from memlab.scripts import run_page

        explained: OomExplained | None = note_oom(error, self.run, goes_on=False)
        kept = self.file(".memlab") if self._is_saved else None
        if explained is not None:
            run_page.keep(self.run, explained)
        if keep_names(self.run, explained) and kept is not None:
            try:
                self.run.save(kept)  # again; without these names it is there
            except TraceError as problem:
                self._not_kept("run with the names of what it held", problem)
        if not self.wanted.quiet and (explained is not None or not is_quiet):
            as_words = run_page.as_json if self.wanted.as_json else run_page.as_text
            say(as_words(self.run, explained, self.times))
        where = self.file(".html")
        if explained is not None and where is None:
            where = Path(f"memlab-{self.wanted.name}-{self._pid}.html").absolute()
        files = [f"run {kept}"] if kept is not None else []
        if where is not None:
            page = run_page.as_html(self.run, explained, self.times)
            try:
                where.write_text(page, encoding="utf-8")
                files.insert(0, f"page {where}")
            except OSError as problem:
                with contextlib.suppress(OSError):
                    where.unlink(missing_ok=True)  # half a page
                self._not_kept("page", f"cannot write {str(where)!r}: {problem.strerror}. Choose another place.")
        if files and not self.wanted.quiet:
            say(f"memlab: {', '.join(files)}")

    def _not_kept(self, what: str, why: object) -> None:
        say(f"{self.who}: the {what} is not kept: {why}")


def say(text: str) -> None:
    """Write a line to stderr."""
    if sys.stderr is None:  # print would take stdout
        return
    with contextlib.suppress(Exception):  # it may be anything that the script put there
        try:
            print(text, file=sys.stderr, flush=True)
        except RuntimeError:  # a signal came while the script was writing there
            os.write(sys.stderr.fileno(), f"{text}\n".encode("utf-8", "replace"))


@contextlib.contextmanager
def _termination_waits() -> Iterator[None]:
    """Delay SIGTERM until the report is written: torchrun sends it to the other ranks as soon as one has failed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGTERM)


def folder(name: str | os.PathLike[str] | None) -> Path | None:
    """The folder for runs and pages, made if it is not there; None stays None."""
    if name is None:
        return None
    path = Path(name).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemlabError(f"cannot write to {str(name)!r:.200}: {error.strerror}. Name another folder.") from None
    if not os.access(path, os.W_OK | os.X_OK):  # said now, and not when the script has run for hours
        raise MemlabError(f"cannot write to {str(name)!r:.200}: it is read-only. Name another folder.")
    return path
