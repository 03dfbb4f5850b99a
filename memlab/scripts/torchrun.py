"""A script on several ranks of this machine: torchrun, with `memlab run` on each of them, and one report at the end.

A job that keeps nothing has a temporary folder; those that processes which were killed have left are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.scripts.recording import OVER_BUDGET, say
from memlab.units import format_bytes, number_of, parse_bytes

OURS = re.compile(r"memlab-(?:run|ranks|child)-(\d{1,10})-[a-z0-9_]{8}")
"""A folder of `memlab run`, a tracked cell that starts ranks, or a prediction; it has the id of the process that made it."""
OLD_S = 24 * 3600.0
"""A job outlives a parent that was killed, and its files may be wanted: what was written to within a day is left alone."""


def new_folder() -> Path:
    """A folder that `remove_leftovers` of a later process removes if this one is killed."""
    return Path(tempfile.mkdtemp(prefix=f"memlab-run-{os.getpid()}-"))


def remove_leftovers() -> None:
    """Remove the folders that processes which are gone have left, if nothing was written to them for a day."""
    if os.name != "posix":  # whose folders they are is not known there
        return
    with contextlib.suppress(OSError):
        for folder in list(_old_folders(Path(tempfile.gettempdir()))):
            shutil.rmtree(folder, ignore_errors=True)


def _old_folders(where: Path) -> Iterator[Path]:
    now_s = time.time()
    with os.scandir(where) as entries:
        for one in entries:
            ours = OURS.fullmatch(one.name)
            if ours is None or not one.is_dir(follow_symlinks=False):
                continue
            import psutil  # only where there is such a folder

            if psutil.pid_exists(int(ours[1])):
                continue
            with contextlib.suppress(OSError):  # of another user, or being removed
                if one.stat().st_uid == os.getuid() and now_s - _written_s(Path(one.path)) > OLD_S:
                    yield Path(one.path)


def _written_s(folder: Path) -> float:
    """When something in it was last written to; a rank that still runs does so a few times a second."""
    return max(one.lstat().st_mtime for one in (folder, *folder.rglob("*")))


@dataclass(frozen=True, slots=True)
class Launch:
    """How many ranks to run a script on (a number, or "gpu", "cpu", "auto"), with which options of `memlab run`, and what to keep.

    Without a folder `out` the files of the ranks are deleted after the report, unless one ran out of memory, of the host too.
    """

    count: str
    name: str
    options: tuple[str, ...]
    script: tuple[str, ...]
    out: Path | None = None
    budget: str | None = None
    as_json: bool = False

    def execute(self) -> int:
        """Run it to its end and report on all ranks; torchrun's exit status, or 1 if a rank is over the budget."""
        remove_leftovers()
        with _Signals(self.out) as signals:
            folder = self.out if self.out is not None else new_folder()
            try:
                status, over = self.run(folder, signals)
            finally:
                if self.out is None:
                    signals.wait()
                    shutil.rmtree(folder, ignore_errors=True)
        status = 128 - status if status < 0 else status  # a signal ended it, as a shell would say
        return status or (OVER_BUDGET if over else 0)

    def run(self, folder: Path, signals: _Signals) -> tuple[int, bool]:
        """Run the ranks and report; torchrun's status, negative of a signal, and whether one is over the budget."""
        from memlab.api.ranks import oom_kills

        over = False
        rank = [sys.executable, "-m", "memlab", "run", "--quiet", "--out", str(folder), *self.options, *self.script]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", self.count]
        kills = oom_kills()
        status = signals.started(lambda: subprocess.Popen([*torchrun, "--no-python", *rank])).wait()
        if kills is not None and (more := (oom_kills() or 0) - kills) > 0:
            which = f"{more:,} of the processes of this control group"
            say(f"memlab run: the kernel killed {which} for host memory meanwhile.")
        try:
            over = self._report(folder)
        except Exception as error:  # the exit status is that of the job
            say(f"memlab run: there is no report: {type(error).__name__}: {error!s:.200}")
        return status, over

    def _report(self, folder: Path) -> bool:
        """The ranks side by side, on stderr and as a page; whether one of them is over the budget."""
        from memlab.api.ranks import ranks
        from memlab.scripts import run_page

        try:
            found = ranks(folder, self.name)
        except MemlabError as error:
            say(f"memlab run: nothing was measured{f': {error}' if self.out is not None else '.'}")
            return False
        say(run_page.as_json(found) if self.as_json else run_page.as_text(found))
        has_run_out = any(one.ran_out or (one.host is not None and one.host.is_short) for one in found.ranks)
        try:
            if self.out is None and has_run_out:
                folder = Path(shutil.move(folder, f"memlab-{self.name}-{os.getpid()}")).absolute()
            if folder.is_dir() and (self.out is not None or has_run_out):
                (folder / f"{self.name}.html").write_text(run_page.as_html(found), encoding="utf-8")
                say(f"memlab: page {folder / self.name}.html, ranks in {folder}")
        except (OSError, shutil.Error) as error:  # a full disk; the budget is checked all the same
            say(f"memlab run: the page of the ranks is not kept: {error!s:.300}. Choose another place by --out.")
        worst, limit = found.peak, parse_bytes(self.budget) if self.budget is not None else None
        if limit is None or worst.worst_bytes <= limit:
            return False
        over = format_bytes(worst.worst_bytes - limit)
        say(f"memlab: rank {worst.worst_rank} peaked {over} above the budget of {format_bytes(limit)}.")
        return True


class _Signals:
    """While torchrun runs, this process outlives Ctrl-C, which a terminal sends to all, and hands on SIGTERM.

    Before and after, both end it, in a way that removes its folder. SIGUSR1 goes to the ranks themselves, of which each writes
    its report: it would end torchrun.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._waiting = folder, False
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        handlers: dict[int, Any] = {signal.SIGINT: self._end, signal.SIGTERM: self._end}
        if hasattr(signal, "SIGUSR1"):
            handlers[signal.SIGUSR1] = self._report
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def started(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Start torchrun; a signal that comes meanwhile must find it, or would leave it without a parent."""
        came: list[int] = []
        ours = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in self._before}
        try:
            self._process = start()
        finally:
            for number, handler in ours.items():
                signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
        return self._process

    def wait(self) -> None:
        """From here on SIGINT and SIGTERM change nothing: the end is near."""
        self._waiting = True

    def _end(self, number: int, frame: Any) -> None:
        if self._process is not None and self._process.poll() is None:
            if number != signal.SIGINT:
                self._process.send_signal(number)
        elif not self._waiting:
            raise SystemExit(128 + number)

    def _report(self, number: int, frame: Any) -> None:
        asked = _ranks_under(self._process.pid, number) if self._process is not None else []
        for rank in asked:
            rank.send_signal(number)
        where = f", in {self._folder}" if self._folder is not None else ""
        say(f"memlab run: asked {number_of(len(asked), 'rank')} for a report{where}")


def _ranks_under(pid: int, number: int) -> list[Any]:
    """The processes below this one that handle a signal (proc_pid_status(5), SigCgt), which would end any other."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
                caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
                if caught is not None and int(caught[1], 16) >> (number - 1) & 1:
                    found.append(process)
    return found
