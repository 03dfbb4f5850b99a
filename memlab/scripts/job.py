"""A script while it is measured: from the import of torch, or after some optimizer steps, to its end or for some steps.

Everything is written to stderr and to files; the script's own output, arguments, signals and exit code stay its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.errors import MemlabError
from memlab.scripts.after_torch import AfterTorch
from memlab.scripts.script import Script, frame_of_script, show_as_python
from memlab.units import number_of

if TYPE_CHECKING:
    from memlab.api.oom import OomExplained
    from memlab.api.run import Run
    from memlab.api.track import Track

OVER_BUDGET = 1
"""The exit status of a script that ended well and used more than its budget."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure of a script, and what to keep.

    `skip` optimizer steps come before the measurement, `steps` are measured (None: until it ends). `out` is a folder for the run
    and its page (None: only the report is printed, and a page is kept if memory runs out). With `quiet` nothing is printed.
    """

    name: str
    device: str | None = None
    lines: bool = False
    shapes: bool = False
    budget: str | None = None
    skip: int = 0
    steps: int | None = None
    out: Path | None = None
    as_json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name:
            raise MemlabError(f"--name is the name of a run, and of its files in --out, got {self.name!r:.200}.")
        for what, count, least in (("--skip", self.skip, 0), ("--steps", self.steps, 1)):
            if count is not None and count < least:
                raise MemlabError(f"{what} is a number of optimizer steps, {least} or more, got {count}.")


class MeasuredScript:
    """One script, measured in this process."""

    def __init__(self, script: Script, wanted: Wanted) -> None:
        self.script, self.wanted = script, wanted
        self.run: Run | None = None
        self._track: Track | None = None
        self._pid, self._begin_s = os.getpid(), time.monotonic()
        self._steps: Counter[int] = Counter()
        self._hooks: list[Any] = []
        self._parts = 0
        self._status = 0
        self._is_over = self._has_failed = False

    def execute(self) -> int:
        """Run the script to its end; its own errors and exits are raised again, with the report before them."""
        waiting = AfterTorch(self._has_torch)
        waiting.start()
        try:
            self.script.run()
        except BaseException as error:
            self._ended(error)
            show_as_python(error)
            raise
        finally:
            waiting.stop()
        self._ended(None)
        return self._status

    # --- while it runs ---

    def _has_torch(self) -> None:
        """Torch was imported: measure from here, or count the steps that come before."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if self.wanted.skip == 0:
            with self._harmless():
                self._start()
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._report_now)  # which would otherwise end the script

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the steps of this optimizer by a hook of its own: those that are called for all optimizers cannot be changed
        by one of them, and a measurement that starts or stops changes them."""
        if id(optimizer) not in self._steps:
            self._steps[id(optimizer)] = 0
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps[id(optimizer)] += 1
        count, wanted = self.count, self.wanted
        if os.getpid() != self._pid:  # a forked child measures nothing
            return
        with self._harmless():
            if self._track is None and self.run is None and count == wanted.skip:
                self._start()
            elif wanted.steps is not None and count == wanted.skip + wanted.steps:
                self._stop(None)

    @property
    def count(self) -> int:
        """The steps of the optimizer that has taken most of them."""
        return max(self._steps.values(), default=0)

    def _start(self) -> None:
        from memlab.api.track import Options, Track

        wanted = self.wanted
        options = Options(
            wanted.name, device=wanted.device, lines=wanted.lines, shapes=wanted.shapes, budget=wanted.budget,
            show=False, save=self._file(".memlab"),
        )  # fmt: skip
        track = Track(options)
        track.start(frame_of_script())
        track.steps_before, self._track = self.count, track

    def _stop(self, error: BaseException | None) -> None:
        """End the measurement; the run is kept, and saved if a folder was given."""
        track, self._track = self._track, None
        if track is None:
            return
        over = track.stop(error)
        self.run = track.run
        if over is not None:
            self._say(f"memlab: {over}")
            self._status = OVER_BUDGET

    def _report_now(self, number: int, frame: Any) -> None:
        """SIGUSR1: report what was measured so far, and go on with a new part."""
        if self._track is None or os.getpid() != self._pid:
            return
        with self._harmless():
            self._stop(None)
            self._report(None)
            self._parts += 1
            self._start()

    # --- the end ---

    def _ended(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:
            return
        with self._harmless(), _termination_waits():
            self._is_over = True
            for hook in self._hooks:
                hook.remove()
            failed = None if isinstance(error, SystemExit) else error
            self._stop(failed)
            self._report(failed)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Whatever goes wrong in memlab is said in one line and does not change how the script ends."""
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, MemlabError) else f"{type(error).__name__}: {error!s:.200}"
            self._say(f"memlab run: {'there is no report: ' if self._is_over else 'nothing is measured: '}{why}")
            self._has_failed = True

    def _report(self, error: BaseException | None) -> None:
        if self.run is None and self._has_failed:
            return  # that was said
        if self.run is None:
            if not self.wanted.quiet:
                self._say(f"memlab run: nothing was measured: {self._why_nothing()}")
            return
        from memlab.api.kept_names import keep_names
        from memlab.api.oom import note_oom
        from memlab.scripts import page

        explained: OomExplained | None = note_oom(error, self.run, goes_on=False)
        file = self._file(".memlab")
        if file is not None and keep_names(self.run, explained):
            self.run.save(file)
        if not self.wanted.quiet:
            self._say(page.as_json(self.run, explained) if self.wanted.as_json else page.as_text(self.run, explained))
        where = self._file(".html")
        if explained is not None and where is None:
            where = Path(f"memlab-{self.wanted.name}-{self._pid}.html").absolute()
        if where is not None:
            where.write_text(page.as_html(self.run, explained), encoding="utf-8")
            kept = self._file(".memlab")
            if not self.wanted.quiet:
                self._say(f"memlab: page {where}" + (f", run {kept}" if kept is not None else ""))

    def _why_nothing(self) -> str:
        if "torch" not in sys.modules:
            return "the script did not import torch."
        if self.wanted.skip > self.count:
            return f"--skip {self.wanted.skip}, and it took {number_of(self.count, 'optimizer step')}."
        return "it ended before it could begin."

    def _file(self, suffix: str) -> Path | None:
        """The file of this process in the folder: `train.memlab`, `train.rank3.memlab`, with SIGUSR1 `train.2.memlab`."""
        if self.wanted.out is None:
            return None
        rank = os.environ.get("RANK", "")
        parts = [self.wanted.name, f"rank{rank}" if rank.isdigit() else "", str(self._parts + 1) if self._parts else ""]
        return self.wanted.out / ".".join(filter(None, (*parts, suffix.lstrip("."))))

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _termination_waits() -> Iterator[None]:
    """Delay SIGTERM until the report is written: torchrun sends it to the other ranks as soon as one has failed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
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
