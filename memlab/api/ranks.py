"""`memlab.ranks()`: the runs of all ranks of one job, side by side."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from memlab.analysis.job_ranks import JobRanks
from memlab.analysis.job_ranks import RankRun as RankRun
from memlab.analysis.job_ranks import ranks_text as ranks_text
from memlab.analysis.rank_run import rank_run
from memlab.errors import MemlabError
from memlab.probes.host import oom_kills as oom_kills
from memlab.trace.file import load, load_head
from memlab.trace.trace import RANK, Trace
from memlab.units import number_of, one_line
from memlab.views.page import Page
from memlab.views.ranks import ranks_page, ranks_scene, ranks_title
from memlab.views.scene import Scene
from memlab.views.shown import ShownWithFigure

ENDINGS = (".memlab", ".memlab.partial")
_MOST_RANKS = 1 << 17
_LEAST_OVERLAP_S = 1.0
"""Consecutive parts of a run do not overlap; clocks may be off by less."""

_Job = tuple[str, int, int, str]
"""What the files of one job have in common: the job, its attempt, the world size, the name of the run."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of one rank, as its header describes it."""

    path: Path
    rank: int
    job: _Job
    began_s: float

    @property
    def world_size(self) -> int:
        """How many ranks its job has."""
        return self.job[2]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.job[3]


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of a folder: those of jobs, the newest job first; those of other runs; what could not be used, and why."""

    jobs: tuple[tuple[RankFile, ...], ...]
    others: tuple[Path, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True, repr=False, eq=False)
class Ranks(ShownWithFigure, JobRanks):
    """The ranks of a job: as text, in a notebook, or `ranks`, `peak`, `by()`, `first_failed`, `growth`, `missing`, `to_pandas()`.

    `left_out` says which files were not used, and why.
    """

    left_out: tuple[str, ...] = ()
    job = property(lambda self: self)
    """The job as a value."""

    def __len__(self) -> int:
        return len(self.ranks)

    @cached_property
    def page(self) -> Page:
        """What happened, which ranks differ and in what, and what was not seen."""
        return ranks_page(self, self.left_out)

    def scene(self) -> Scene:
        """The picture: peaks by optimizer step and by rank."""
        return ranks_scene(self, self.page.text())

    def __repr__(self) -> str:
        return f"<Ranks {ranks_title(self)}>"


def ranks(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], name: str | None = None) -> Ranks:
    """The ranks of a job side by side, from the folder (or the files) that `memlab run --out` wrote on each of them.

    Of a folder with several jobs, the one that began last; `name` chooses by the name of the run. Files of ranks that were
    killed are read as far as they go.
    """
    found = folder_of(files)
    jobs = [job for job in found.jobs if name is None or job[0].name == name]
    if not jobs:
        names = sorted({job[0].name for job in found.jobs})
        where = "these files" if not isinstance(files, str | os.PathLike) else repr(os.fspath(files))[:200]
        if names:
            raise MemlabError(f"no job in {where} has the name {name!r:.80}. There: {', '.join(names)[:200]}.")
        how = (
            "`memlab run --nproc-per-node 2 --out DIR train.py` or `torchrun --no-python memlab run --out DIR train.py`"
        )
        why = f" ({found.unreadable[0]})" if found.unreadable else ""
        raise MemlabError(f"there are no ranks of a job in {where}{why}. Fill a folder by {how}.")
    left_out = [*found.unreadable, *(f"{path.name}: not a rank of a job" for path in found.others)]
    for other in found.jobs:
        if other is not jobs[0]:
            what = f"another job, {one_line(other[0].name, 40)!r} with {number_of(other[0].world_size, 'rank')}"
            left_out += [f"{one.path.name}: of {what}" for one in other]
    return ranks_of(jobs[0], left_out)


def ranks_of(job: Sequence[RankFile], left_out: Sequence[str] = ()) -> Ranks:
    """The ranks of one job; each trace is dropped as soon as it was summarized."""
    by_rank: dict[int, list[RankFile]] = defaultdict(list)
    for one in sorted(job, key=lambda one: (one.rank, one.began_s, one.path.name)):
        by_rank[one.rank].append(one)
    found, refused = [], list(left_out)
    for rank, files in sorted(by_rank.items()):
        traces, used = list[Trace](), list[str]()
        for file in files:
            try:
                trace = load(file.path)
            except MemlabError as error:
                refused.append(f"{file.path.name}: {error}")
                continue
            before = traces[-1].made_by if traces else None
            if before is not None and file.began_s < before.started_at_s + before.duration_ns / 1e9 - _LEAST_OVERLAP_S:
                refused.append(f"{file.path.name}: rank {rank} once more, at the time of {used[-1]}")
                continue
            traces.append(trace)
            used.append(file.path.name)
        if traces:
            found.append(rank_run(traces, used))
    if not found:
        raise MemlabError(f"no rank can be read: {'; '.join(refused)[:400]}.")
    return Ranks(tuple(found), tuple(refused))


def folder_of(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Folder:
    """The runs of a folder or of a list of files, by job; only their headers are read."""
    if isinstance(files, str | os.PathLike):
        folder = Path(files)
        if not folder.is_dir():
            how = "Name one that `memlab run --out` filled, or its files"
            raise MemlabError(f"there is no folder {str(folder)!r:.200}. {how}.")
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS) and path.is_file())
    else:
        paths = [Path(path) for path in files]
    jobs: dict[_Job, list[RankFile]] = defaultdict(list)
    others, unreadable = [], []
    for path in paths:
        try:
            began_s, notes = load_head(path)
        except MemlabError as error:
            unreadable.append(f"{path.name}: {error}")
            continue
        one = _rank_file(path, began_s, notes)
        if one is None:
            others.append(path)
        else:
            jobs[one.job].append(one)
    newest_first = sorted(jobs.values(), key=lambda job: -max(one.began_s for one in job))
    return Folder(tuple(map(tuple, newest_first)), tuple(others), tuple(unreadable))


def _rank_file(path: Path, began_s: float, notes: dict[str, Any]) -> RankFile | None:
    """The rank that a file is of; None if its notes have none."""
    facts = notes.get(RANK)
    if not isinstance(facts, dict):
        return None
    numbers = rank, world_size, attempt = tuple(facts.get(key, 0) for key in ("rank", "world_size", "attempt"))
    if any(type(number) is not int for number in numbers) or not 0 <= rank < world_size <= _MOST_RANKS:
        return None
    return RankFile(path, rank, (str(facts.get("job", "")), attempt, world_size, str(notes.get("name", ""))), began_s)
