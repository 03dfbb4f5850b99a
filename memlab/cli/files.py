"""`memlab show`, `compare`, `fit` and `check`: what can be asked of runs in files; and `memlab progress` of a course."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.cli.parser import UNKNOWN, Parser, given
from memlab.errors import MemlabError

if TYPE_CHECKING:
    from memlab.api.ranks import RankRun, Ranks
    from memlab.api.regression import JobRegression, Regression
    from memlab.api.run import Run


def show(arguments: Sequence[str]) -> int:
    """`memlab show FILE|DIR`: the report of a run, or of all runs in a folder; the ranks of a job side by side."""
    parser = Parser(
        "show", "[OPTIONS] FILE|DIR",
        "Show the report of a saved run, of a PyTorch snapshot, or of all runs in a folder; the ranks of a job side by side.",
        "  memlab show runs/train.memlab\n  memlab show --html page.html runs/train.memlab\n  memlab show --json runs",
    )  # fmt: skip
    what = "what `memlab run --out`, %%%%memtrack --save or PyTorch wrote"
    parser.add_argument("path", metavar="FILE|DIR", type=given, help=what)
    page = "write a page that needs nothing else; for one run or job"
    parser.add_argument("--html", metavar="FILE", type=given, help=page)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each run or job")
    asked = parser.parse_args(arguments)
    from memlab.scripts import run_page

    with parser.refusing():
        shown: list[Run | Ranks] = list(_runs(asked.path))
        if asked.html is not None and len(shown) != 1:
            raise MemlabError(f"--html is for one run or job, and {asked.path!r:.200} has {len(shown)}. Name one file.")
        if asked.html is not None:
            write(asked.html, run_page.as_html(shown[0]))
        for one in shown:
            text = run_page.as_json(one) if asked.json else run_page.as_text(one)
            print(text, end="\n" if one is shown[-1] or asked.json else "\n\n\n")
    return 0


def _runs(path: str) -> Iterator[Run | Ranks]:
    """The run of a file; of a folder the jobs, the one that began last first, then the other runs."""
    from memlab.api.ranks import folder_of, ranks_of
    from memlab.api.runs import load

    if not _is_folder(path):
        yield load(path)
        return
    found = folder_of(path)
    if not found.jobs and not found.others:
        what = f" that can be read ({found.unreadable[0]})" if found.unreadable else ""
        raise MemlabError(f"there is no run{what} in {path!r:.200}. Name a folder that `memlab run --out` filled.")
    for text in found.unreadable:
        print(f"memlab: left out {text}", file=sys.stderr)
    for job in found.jobs:
        if job[0].world_size > 1:
            yield ranks_of(job)
        else:
            yield from (load(one.path) for one in job)
    yield from map(load, found.others)


@dataclass(frozen=True, slots=True)
class _NamedRun:
    """The run that a file or a folder stands for; of a folder of ranks that with the highest peak, and the job.

    `is_highest`: whether no other rank can have a higher one. One that was cut off, or has left no file, can.
    """

    run: Run
    is_highest: bool = True
    job: Ranks | None = None
    folder: Path = Path()

    def whole_ranks(self) -> dict[int, RankRun]:
        """The ranks of the job whose peak is known, by number."""
        return {one.rank: one for one in self.job.ranks if not one.is_partial} if self.job is not None else {}


def _run_of(path: str, command: str) -> _NamedRun:
    """The run of a file; of a folder its only run, or of the job that began last the rank with the highest peak, which is said."""
    from memlab.api.ranks import Ranks
    from memlab.api.runs import load

    if not _is_folder(path):
        return _NamedRun(load(path))
    runs = _runs(path)
    first = next(runs)  # a job comes before other runs, which need not be read then
    if isinstance(first, Ranks):
        return _worst_of(first, Path(path), command)
    if more := len(list(runs)):
        raise MemlabError(f"{path!r:.200} has {more + 1} runs and no job of several ranks. Name one file.")
    return _NamedRun(first)


def _is_folder(path: str) -> bool:
    return any(map(os.path.isdir, [path]))  # False if there can be no such name: `load` says what is wrong with it


def _worst_of(job: Ranks, folder: Path, command: str) -> _NamedRun:
    from memlab.api.ranks import ranks_text

    worst = job.peak.worst_rank
    file, chosen = _highest_part(job[worst], folder)
    which = f"rank {worst} of {job.world_size}, whose peak is the highest ({file})"
    unknown = [one.rank for one in job.ranks if one.is_partial and one.rank != worst] + [*job.missing]
    rest = f"; {ranks_text(unknown)} may have been higher: cut off, or without a file" if unknown else ""
    print(f"memlab {command}: of {str(folder)[:200]} {which}{rest}", file=sys.stderr)
    return _NamedRun(chosen, not unknown, job, folder)


def _highest_part(rank: RankRun, folder: Path) -> tuple[str, Run]:
    """The file of a rank, and its run; of parts that SIGUSR1 wrote that with the highest peak."""
    from memlab.api.runs import load

    parts = [(name, load(folder / name)) for name in rank.files]
    return max(parts, key=lambda part: max((one.levels[0].peak.low_bytes for one in part[1].devices), default=0))


def write(path: str, text: str) -> None:
    """Write a file that was named in a command; MemlabError if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MemlabError(f"cannot write {path!r:.200}: {error.strerror}. Name another file.") from None


def compare(arguments: Sequence[str]) -> int:
    """`memlab compare A B`: run B against run A."""
    parser = Parser(
        "compare", "[--json] A B",
        "Compare two saved runs: peaks, who held them, and whether results agree. Of a folder of ranks, the worst.",
        "  memlab compare before.memlab after.memlab\n  memlab compare runs/before runs/after",
    )  # fmt: skip
    parser.add_argument("a", metavar="A", type=given, help="the file of a run, or a folder of ranks")
    parser.add_argument("b", metavar="B", type=given, help="the file of another")
    parser.add_argument("--json", action="store_true", help="bytes by category, module and line as one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.api.compare import compare as compared

    with parser.refusing():
        found = compared(_run_of(asked.a, "compare").run, _run_of(asked.b, "compare").run)
        print(_records(found.to_pandas()) if asked.json else found.text)
    return 0


def fit(arguments: Sequence[str]) -> int:
    """`memlab fit FILE`: the run against every GPU known."""
    parser = Parser(
        "fit", "[--json] [--on CARD]... FILE",
        "Say on which GPUs a saved run that was measured on CUDA would fit; of a folder of ranks, the worst. For a script "
        "without a run: memlab predict.",
        '  memlab fit runs/train.memlab\n  memlab fit --on T4 --on "RTX 4060" runs/train.memlab',
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", type=given, help="the file of a run, or a folder of ranks")
    parser.add_argument("--on", metavar="CARD", type=given, action="append", help="this card only; may be repeated")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.api.fit import fit as fitted

    with parser.refusing():
        table = fitted(_run_of(asked.file, "fit").run, on=asked.on)
        print(_records(table.to_pandas()) if asked.json else table.text)
    return 0


def check(arguments: Sequence[str]) -> int:
    """`memlab check RUN --baseline FILE`: 1 if the peak grew beyond the tolerance, with what grew; 3 if that is not known."""
    parser = Parser(
        "check", "[--json] RUN --baseline FILE [--tolerance 2%%]",
        "Compare the peak of a run with a baseline; exit with 1 if it grew, with 3 if that is not known. Of two folders of as "
        "many ranks each rank is compared with the same rank of the baseline, else those with the highest peaks.",
        "  memlab check runs/train.memlab --baseline main.memlab --tolerance 2%",
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", type=given, help="the file of a run, or a folder of ranks")
    other, share = "the file of the run to compare with", "by how much the peak may grow (default: 2%%)"
    parser.add_argument("--baseline", metavar="FILE", type=given, required=True, help=other)
    parser.add_argument("--tolerance", metavar="SHARE", default="2%", help=share)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.api.compare import compare as compared
    from memlab.api.regression import regression_of

    with parser.refusing():
        tolerance = _share(asked.tolerance)
        before, after = (_run_of(one, "check") for one in (asked.baseline, asked.run))
        are_highest = (before.is_highest, after.is_highest)
        found = _of_ranks(before, after, regression_of(compared(before.run, after.run), tolerance, are_highest))
        print(json.dumps(found.facts) if asked.json else found.text)
    return UNKNOWN if found.is_regression is None else int(found.is_regression)


def _of_ranks(before: _NamedRun, after: _NamedRun, highest: Regression) -> Regression | JobRegression:
    """The regression of two runs; of two jobs of as many ranks that of each rank, which are read a pair at a time."""
    from memlab.api.regression import job_regression_of

    if before.job is None or after.job is None or before.job.world_size != after.job.world_size:
        return highest
    # The others may have been as high as the run, and only the highest peak is compared.
    baseline = before.whole_ranks()
    pairs = (
        (one.rank, _highest_part(baseline[one.rank], before.folder)[1], _highest_part(one, after.folder)[1])
        for one in after.job.ranks
        if one.rank in baseline
    )
    return job_regression_of(highest, after.job.peak.worst_rank, pairs)


def progress(arguments: Sequence[str]) -> int:
    """`memlab progress [FILE ...]`: the progress in one file, or of a class."""
    parser = Parser(
        "progress", "[OPTIONS] [FILE ...]",
        "Show what was guessed, held and solved in the lessons of the course; of several files, a class.",
        "  memlab progress\n  memlab progress --html class.html collected/*.json",
    )  # fmt: skip
    what = "what lessons wrote (default: that of this folder)"
    parser.add_argument("files", metavar="FILE", nargs="*", type=given, help=what)
    parser.add_argument("--html", metavar="FILE", type=given, help="write a page that needs nothing else")
    parser.add_argument("--json", action="store_true", help="one line of JSON: one row per lesson, and per learner")
    asked = parser.parse_args(arguments)
    from memlab.lesson.progress import as_html, progress_of
    from memlab.lesson.progress_file import path

    with parser.refusing():
        found = progress_of([Path(name) for name in asked.files] or [path()])
        if asked.html is not None:
            write(asked.html, as_html(found))
        print(found.to_pandas().to_json(orient="records") if asked.json else found)
    return 0


def _share(text: str) -> float:
    """A share as text, "2%" or "0.02", as a number."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 10:
        raise MemlabError(f"--tolerance is a share such as 2% or 0.02, got {text!r:.80}.")
    return share


def _records(frame: Any) -> str:
    return str(frame.to_json(orient="records"))
