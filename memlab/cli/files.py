"""`memlab show`, `compare`, `fit` and `check`: what can be asked of runs in files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.cli.parser import UNKNOWN, Parser, given
from memlab.errors import MemlabError

if TYPE_CHECKING:
    from memlab.api.ranks import Ranks
    from memlab.api.run import Run


def show(arguments: Sequence[str]) -> int:
    """`memlab show FILE|DIR`: the report of a run, or of all runs in a folder; the ranks of a job side by side."""
    parser = Parser(
        "show", "[OPTIONS] FILE|DIR",
        "Show the report of a saved run, of a PyTorch snapshot, or of all runs in a folder; the ranks of a job side by side.",
        "  memlab show runs/train.memlab\n  memlab show --html page.html runs/train.memlab\n  memlab show --json runs",
    )  # fmt: skip
    what = "what `memlab run --out`, %%memtrack --save or PyTorch wrote"
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
    from memlab.api.load import load
    from memlab.api.ranks import folder_of, ranks_of

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


def _run_of(path: str, command: str) -> tuple[Run, bool]:
    """The run of a file; of a folder its only run, or of the job that began last the rank with the highest peak, which is said.

    And whether no other rank can have a higher one: one that was cut off, or has left no file, can.
    """
    from memlab.api.load import load
    from memlab.api.ranks import Ranks

    if not _is_folder(path):
        return load(path), True
    runs = _runs(path)
    first = next(runs)  # a job comes before other runs, which need not be read then
    if isinstance(first, Ranks):
        return _worst_of(first, Path(path), command)
    if more := len(list(runs)):
        raise MemlabError(f"{path!r:.200} has {more + 1} runs and no job of several ranks. Name one file.")
    return first, True


def _is_folder(path: str) -> bool:
    return any(map(os.path.isdir, [path]))  # False if there can be no such name: `load` says what is wrong with it


def _worst_of(job: Ranks, folder: Path, command: str) -> tuple[Run, bool]:
    from memlab.api.load import load
    from memlab.api.ranks import ranks_text

    worst = job.peak.worst_rank
    parts = [load(folder / name) for name in job[worst].files]
    chosen = max(parts, key=lambda run: max((one.levels[0].peak.low_bytes for one in run.devices), default=0))
    file = job[worst].files[parts.index(chosen)]
    which = f"rank {worst} of {job.world_size}, whose peak is the highest ({file})"
    unknown = [one.rank for one in job.ranks if one.is_partial and one.rank != worst] + [*job.missing]
    rest = f"; {ranks_text(unknown)} may have been higher: cut off, or without a file" if unknown else ""
    print(f"memlab {command}: of {str(folder)[:200]} {which}{rest}", file=sys.stderr)
    return chosen, not unknown


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
        found = compared(_run_of(asked.a, "compare")[0], _run_of(asked.b, "compare")[0])
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
        table = fitted(_run_of(asked.file, "fit")[0], on=asked.on)
        print(_records(table.to_pandas()) if asked.json else table.text)
    return 0


def check(arguments: Sequence[str]) -> int:
    """`memlab check RUN --baseline FILE`: 1 if the peak grew beyond the tolerance, with what grew; 3 if that is not known."""
    parser = Parser(
        "check", "[--json] RUN --baseline FILE [--tolerance 2%%]",
        "Compare the peak of a run with a baseline; exit with 1 if it grew, with 3 if that is not known. Of a folder of ranks "
        "the rank with the highest peak is taken.",
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
        tolerance, baseline, run = (
            _share(asked.tolerance),
            _run_of(asked.baseline, "check"),
            _run_of(asked.run, "check"),
        )
        found = regression_of(compared(baseline[0], run[0]), tolerance, (baseline[1], run[1]))
        print(json.dumps(found.facts) if asked.json else found.text)
    return UNKNOWN if found.is_regression is None else int(found.is_regression)


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
