"""The ranks that a tracked cell of a notebook starts: each measures itself, and the cell shows all of them.

While the cell runs, processes that torch.multiprocessing starts (by `spawn`, by accelerate's `notebook_launcher`) begin with a
track of their own, which writes to a temporary folder. Engines of ipyparallel, which are there before, measure themselves from the
first request that the cell sends them. Output and errors of all are what they are without memlab.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.analysis.rank_run import rank_run
from memlab.api.ranks import ENDINGS, Ranks
from memlab.errors import MemlabError
from memlab.torch_internals import process_start
from memlab.torch_internals.engines import Engines
from memlab.trace.file import load
from memlab.trace.trace import RANK, Trace
from memlab.units import format_bytes, number_of

if TYPE_CHECKING:
    from memlab.api.display import LevelNow

FEW = 6
"""Up to so many ranks have a line each while they run; of more the highest and the lowest are named."""
ENGINES_WAIT_S = 20.0
"""How long the end of a cell waits until engines that are idle have written what they measured."""
_LEVEL = ".level"
_FILE = re.compile(r"rank(\d+)\.(\d+)\.memlab")


@dataclass(frozen=True, slots=True)
class ChildTrack:
    """How a process that is started measures itself: what makes its track, the folder for its file, and options."""

    make: Callable[..., Any]
    folder: str
    name: str
    device: str | None
    rate_hz: float
    shapes: bool

    def begin(self, function: Callable[..., Any], index: int, arguments: Any, error_file: Any) -> None:
        """In the new process: what torch.multiprocessing would do, with a track around the function."""
        process_start.leave()(functools.partial(self._measured, function), index, arguments, error_file)

    def _measured(self, function: Callable[..., Any], index: int, *arguments: Any) -> Any:
        leave_parents_tracks()
        track = self._start(index)
        try:
            result = function(index, *arguments)
        except BaseException as error:
            _stop(track, error)
            raise
        _stop(track, None)
        return result

    def _start(self, index: int) -> Any:
        """A track that has begun; None if that failed, of which the process must not learn."""
        try:
            path = Path(self.folder, f"rank{index}.{os.getpid()}.memlab")
            level = path.with_suffix(_LEVEL).open("w")
            track = self.make(self.name, path, self.device, self.rate_hz, self.shapes)
            track.on_level = functools.partial(_write_level, level)
            track.start()
            return track
        except Exception:
            return None

    def begin_on_engine(self, number: int) -> None:
        """In an engine: measure from here to `end_on_engine`, unless its machine does not have the folder."""
        if Path(self.folder).is_dir():
            _on_engine[self.folder] = self._start(number)


_on_engine: dict[str, Any] = {}
"""In an engine: the folder of a tracked cell -> the track that runs."""


def end_on_engine(folder: str) -> None:
    """In an engine: end what was begun for a tracked cell."""
    _stop(_on_engine.pop(folder, None), None)


def leave_parents_tracks() -> None:
    """In a forked process: take the parent's modes off this thread; its sampler is not there, and nobody reads its log."""
    from memlab.probes.storage_tracker import StorageTracker
    from memlab.torch_internals import dispatch

    for mode in dispatch.modes():
        if isinstance(mode, StorageTracker):
            dispatch.remove_mode(mode)


def _stop(track: Any, error: BaseException | None) -> None:
    """End the track of a rank; what goes wrong there is none of the rank's business."""
    with contextlib.suppress(Exception):
        if track is not None:
            track.stop(error)


def _write_level(file: Any, level: LevelNow) -> None:
    """Write what is held in one line of fixed length, over the one before."""
    with contextlib.suppress(OSError, ValueError):
        file.seek(0)
        file.write(json.dumps([level.allocated_bytes, level.peak_bytes, level.peak_is_exact]).ljust(80) + "\n")
        file.flush()


class ChildRanks:
    """The ranks that are started between `open` and `close`.

    `make(name, path, device, rate_hz, shapes)` makes the track of one, in its process; it is a function of a module.
    """

    def __init__(self, make: Callable[..., Any], name: str, device: str | None, rate_hz: float, shapes: bool) -> None:
        self._folder: Path | None = None
        self._begin: Callable[..., None] | None = None
        self._engines: Engines | None = None
        self._make, self._options = make, (name, device, rate_hz, shapes)
        self.ranks: tuple[Ranks, ...] = ()
        """After `close`: the ranks of each job, in the order in which they were started."""

    def open(self) -> None:
        """Let every process that is started from now on measure itself."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"memlab-ranks-{os.getpid()}-"))
        except OSError:  # a full disk must not fail the cell
            return
        track = ChildTrack(self._make, str(folder), *self._options)
        begin = track.begin
        if process_start.replace_entry(begin):
            self._folder, self._begin = folder, begin
            text = f"__import__('pickle').loads({pickle.dumps(track)!r}).begin_on_engine"
            end = f"__import__('sys').modules[{__name__!r}].end_on_engine({str(folder)!r})"
            self._engines = Engines(lambda number: f"{text}({number})", end, ENGINES_WAIT_S)
            self._engines.follow()
        else:  # a track around this one has done it, or this version of torch begins elsewhere
            folder.rmdir()

    def lines(self) -> tuple[str, ...]:
        """What each rank holds now, and its peak so far; of many ranks the highest and the lowest."""
        levels: dict[int, tuple[int, int, bool]] = {}
        for path in self._folder.glob(f"*{_LEVEL}") if self._folder is not None else ():
            with contextlib.suppress(OSError, ValueError, TypeError):  # it is being written
                held, peak, is_exact = json.loads(path.read_text())
                levels[int(path.name.partition(".")[0].removeprefix("rank"))] = held, peak, is_exact
        if len(levels) > FEW:
            by_peak = sorted(levels, key=lambda rank: levels[rank][1])
            ends = (
                f"{word} {_level(levels[rank])} (rank {rank})"
                for word, rank in zip(("highest", "lowest"), (by_peak[-1], by_peak[0]), strict=True)
            )
            return (f"{number_of(len(levels), 'rank')}: {', '.join(ends)}",)
        return tuple(f"rank {rank}: {_level(level)}" for rank, level in sorted(levels.items()))

    def close(self, save: Path | None = None) -> None:
        """Put everything back, and read what the ranks have written; `save` is the file of the run, next to which theirs go."""
        if self._begin is None or self._folder is None:
            return
        process_start.restore_entry(self._begin)
        if self._engines is not None:
            self._engines.leave()
        folder, self._folder, self._begin = self._folder, None, None
        try:
            self.ranks = tuple(_jobs(folder, save))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _level(level: tuple[int, int, bool]) -> str:
    held, peak, is_exact = level
    return f"{format_bytes(held)}, peak {'' if is_exact else '≥ '}{format_bytes(peak)}"


def _jobs(folder: Path, save: Path | None) -> Iterator[Ranks]:
    """The jobs in a folder: the files that were the first of their index, then the second ones."""
    of_index: dict[int, list[tuple[Trace, str]]] = defaultdict(list)
    refused = []
    for path in sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS)):
        found = _FILE.match(path.name)
        try:
            if found is not None:
                of_index[int(found[1])].append((load(path), path.name))
        except MemlabError as error:
            refused.append(f"{path.name}: {error}")
    for files in of_index.values():
        files.sort(key=lambda one: one[0].made_by.started_at_s)
    for number in range(max(map(len, of_index.values()), default=0)):
        job = {index: files[number] for index, files in sorted(of_index.items()) if len(files) > number}
        yield _job(job, number, refused, save)


def _job(job: dict[int, tuple[Trace, str]], number: int, refused: Sequence[str], save: Path | None) -> Ranks:
    """The ranks of one job, with the numbers that the job itself gave them, else those of torch.multiprocessing."""
    from memlab.api.run import Run

    given = {index: trace.notes.get(RANK) for index, (trace, _) in job.items()}
    known = all(isinstance(facts, dict) for facts in given.values())
    found = []
    for index, (trace, name) in job.items():
        facts = given[index] if known else {"rank": index, "world_size": max(job) + 1, "job": "", "attempt": 0}
        trace = dataclasses.replace(trace, notes={**trace.notes, RANK: facts})
        found.append(rank_run([trace], [name]))
        if save is not None:
            part = f".{number + 1}" if number else ""
            path = save.with_name(f"{save.stem}{part}.rank{found[-1].rank}.memlab")
            Run(str(trace.notes.get("name", "")), trace).save(path)
    return Ranks(tuple(sorted(found, key=lambda one: one.rank)), tuple(refused))
