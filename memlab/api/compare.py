"""`memlab.compare()`: two runs on one axis, with bytes, seconds, and whether their results agree.

Seconds are those of timed steps, else of runs of the same engine; never of predictions or of a simulated GPU.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.analysis.comparison import Differences, Picture, Side, differences, known_by, picture
from memlab.analysis.peak import predicted_peak
from memlab.analysis.results import CLOSE, ResultCheck, share
from memlab.api.results import check_results, is_simulated
from memlab.api.run import Run
from memlab.api.runs import last_run, load, runs
from memlab.errors import MemlabError
from memlab.saving_techniques import techniques
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import ByteRange, format_seconds, number_of, one_line
from memlab.views import comparison as view
from memlab.views.page import Page
from memlab.views.scene import Scene
from memlab.views.shown import ShownWithFigure, bundle
from memlab.views.table import Cell

LAST = "last"


@dataclass(frozen=True, slots=True)
class Seconds:
    """The durations: of a "step" timed untracked, or of the whole tracked "run"."""

    a_s: float
    b_s: float
    of: str
    ratios: tuple[float, float] | None = None
    """The least and the greatest ratio of a timed step of `b` to one of `a`; None if single runs were timed."""

    def __iter__(self) -> Iterator[float]:
        return iter((self.a_s, self.b_s))

    def __getitem__(self, index: int) -> float:
        return (self.a_s, self.b_s)[index]

    @property
    def ratio(self) -> float:
        """The duration of `b` divided by that of `a`."""
        return self.b_s / self.a_s

    @property
    def words(self) -> str:
        """The ratio as text, with its range: a machine that others use as well can make a step that does more look faster."""
        spread = f" ({view.between(*self.ratios)})" if self.ratios else ""
        return f"{view.times(self.ratio)} as long{spread}"


@dataclass(frozen=True, slots=True)
class Comparison(ShownWithFigure):
    """Run `b` against run `a`: as text, in a notebook, or as `sentence`, `by()`, `figure`, `to_pandas()`."""

    a: Run
    b: Run
    side_a: Side = field(repr=False)
    side_b: Side = field(repr=False)
    results: ResultCheck
    seconds: Seconds | None
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int | ByteRange:
        """Peak *allocated* of `a` minus that of `b`; (low, high) if one is not exact."""
        found = self.side_a.peak - self.side_b.peak
        return found.low if found.is_exact else found

    def by(self, by: str = "category") -> Differences:
        """Name -> bytes at both peaks and their difference (`b` minus `a`), by "category", "module", "line", "phase" or "tensor".

        The differences sum to that of the peaks; for intervals, of their lower ends, or of what the traces reach if that is more.
        """
        return differences(self.side_a, self.side_b, by)

    @property
    def sentence(self) -> str:
        """Bytes saved, time paid, and whether the results agree, in one line."""
        peaks = view.peak_words(self.side_a, self.side_b)
        if self.a is self.b:
            return f"{one_line(self.a.name, 80) or 'a run'}: the same run twice, so nothing differs; {peaks}"
        said = [peaks]
        if self.seconds:
            what = "a step takes" if self.seconds.of == "step" else "the run took"
            said.append(f"{what} {self.seconds.words}")
        said.append(f"results {one_line(self.results.short, 160)}")
        return f"{changed(self.a, self.b) or one_line(self.side_b.name, 80)}: {', '.join(said)}"

    @property
    def picture(self) -> Picture:
        """The data of the figure."""
        return picture(self.side_a, self.side_b, has_time=all(map(_has_time, (self.a, self.b))))

    def scene(self) -> Scene:
        """Both timelines on one axis and next to them who held each peak, below the sentence."""
        return view.comparison_scene(self.picture, self.sentence, self.sentence)

    @property
    def page(self) -> Page:
        """The comparison as text and tables."""
        sides = self.side_a, self.side_b
        tables = (self._with_cells(self.by(one)) for one in known_by(*sides))
        names = (self.side_a.name, self.side_b.name)
        return view.comparison_page(self.sentence, names, self._levels(), tables, self.results, self.notes)

    def _with_cells(self, table: Differences) -> Differences:
        """The same with the execution counts of cells in place of their temporary files."""
        if table.by != "line":
            return table
        rows = {}
        for name, one in table.items():  # "cell:3" is in both runs, each of another cell
            rows[name if name.startswith("cell:") else self.b.cell_line(self.a.cell_line(name))] = one
        return dataclasses.replace(table, rows=rows)

    def _levels(self) -> Iterator[tuple[Cell, ...]]:
        both = [{level.of: level.peak.bytes for level in run.devices[0].levels} for run in (self.a, self.b)]
        a, b = self.side_a, self.side_b
        yield view.level_row("peak allocated", a.peak, b.peak, view.saved_words(a, b))
        for of in ("reserved", "device used"):
            if of in both[0] and of in both[1]:
                yield view.level_row(f"peak {of}", both[0][of], both[1][of])
        if self.seconds:
            what = "a step" if self.seconds.of == "step" else "the run"
            first, second = map(format_seconds, self.seconds)
            yield view.level_row(what, first, second, self.seconds.words)

    def figure_bundle(self) -> dict[str, Any]:
        """MIME type -> the figure as plotly, SVG or text."""
        return bundle(view.comparison_scene(self.picture, self.sentence))

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the whole comparison; the figure includes the sentence."""
        return {**bundle(self.scene()), **self.table_bundle()}

    def to_pandas(self) -> Any:
        """One row per name at either peak, by category, module and line; sizes in bytes."""
        import pandas

        rows = [
            (table.by, name, one.a_bytes, one.b_bytes, one.difference_bytes)
            for table in map(self.by, known_by(self.side_a, self.side_b))
            for name, one in table.items()
        ]
        return pandas.DataFrame(rows, columns=["by", "name", "a_bytes", "b_bytes", "difference_bytes"])

    def __repr__(self) -> str:
        return f"<Comparison {self.sentence}>"


def compare(a: Any, b: Any, *, tolerance: float = CLOSE) -> Comparison:
    """Run `b` against run `a`, measured or predicted: a name of `memlab.runs`, "last", a Run, a Prediction, or a saved file.

    Results are close if no value differs by more than `tolerance` times the largest of its part.
    """
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < math.inf:
        raise MemlabError(f"tolerance is a share such as 0.001, got {tolerance!r:.80}.")
    first, second = run_of(a), run_of(b)
    names = _names(first, second)
    sides = side_of(first, names[0]), side_of(second, names[1])
    results = check_results(first.trace, second.trace, names, tolerance)
    seconds, notes = _seconds(first, second), list(_notes(first, second, *sides))
    if seconds is not None and seconds.of == "run" and first is not second:
        first_call = "including one-time work of a first call"
        notes.append(f"Seconds are those of the whole runs as they were tracked, {first_call}")
    return Comparison(first, second, *sides, results, seconds, tuple(notes))


def run_of(what: Any) -> Run:
    """Resolve a run; MemlabError if there is none, or if it has no figures yet."""
    if not isinstance(what, Run | str | os.PathLike):
        kinds = "names of memlab.runs, runs or files of them"
        raise MemlabError(f"compare takes runs: {kinds}, got {type(what).__name__}.")
    if isinstance(what, Run):
        found = what
    elif isinstance(what, str) and what in runs:
        found = runs[what]
    elif what == LAST:
        found = last_run()
    elif isinstance(what, os.PathLike) or _is_file(what):
        found = load(what)  # whose error says what is wrong
    else:
        known = ", ".join(f"{name!r:.60}" for name in list(runs)[-10:]) or "none yet"
        raise MemlabError(f"there is no run {what!r:.200}, and no file of that name. Known: {known}.")
    try:
        devices = found.devices
    except (KeyError, TypeError, ValueError) as error:  # a damaged file of a prediction
        why = f"{type(error).__name__}: {error!s:.100}"
        raise MemlabError(f"run {found.name!r:.200} cannot be read: {why}. Make it again.") from None
    if not devices:
        raise MemlabError(f"run {found.name!r:.200} used no device of those it measured: there is nothing to compare.")
    return found


def is_run(what: str) -> bool:
    """Whether a word means a run: a name, `last`, or a file."""
    return what in runs or what == LAST or _is_file(what)


def _is_file(what: str | os.PathLike[str]) -> bool:
    try:
        return Path(what).is_file()
    except (OSError, ValueError):
        return False


def _names(a: Run, b: Run) -> tuple[str, str]:
    """The labels of both runs: their names, distinguished if equal."""
    first, second = (one_line(run.name, 200).strip() or "a run" for run in (a, b))
    if first != second:
        return first, second
    how = []
    for run in (a, b):
        is_predicted = run.trace.provenance == "predicted"
        how.append(f"predicted for {one_line(run.devices[0].device.name, 80)}" if is_predicted else "measured")
    how = how if how[0] != how[1] else ["a", "b"]
    return f"{first} ({how[0]})", f"{second} ({how[1]})"


def side_of(run: Run, name: str) -> Side:
    """The compared side of a run: the device with the largest peak, and that peak; of a prediction the range that it needs."""
    one = run.devices[0]
    needed = predicted_peak(run.trace, one.device.index, "allocated")
    return Side(name, run.trace, one.device, needed or ByteRange(*one.levels[0].peak.bytes))


# --- seconds, techniques and notes of runs ---


def _has_time(run: Run) -> bool:
    return run.trace.provenance == "measured" and not is_simulated(run.trace)


def _seconds(a: Run, b: Run) -> Seconds | None:
    """The median of timed steps, else the duration of the whole runs; None if they are not comparable."""
    if not (_has_time(a) and _has_time(b)):
        return None
    if (steps_a := step_seconds(a)) and (steps_b := step_seconds(b)):
        ratios = min(steps_b) / max(steps_a), max(steps_b) / min(steps_a)
        return Seconds(statistics.median(steps_a), statistics.median(steps_b), "step", ratios)
    first, second = a.trace.made_by, b.trace.made_by
    if first.current_engine != second.current_engine or min(first.duration_ns, second.duration_ns) <= 0:
        return None
    return Seconds(first.duration_ns / 1e9, second.duration_ns / 1e9, "run")


def step_seconds(run: Run) -> list[float]:
    """The median of the steps timed untracked."""
    return [one for one in _trial(run, "step_s") or [] if isinstance(one, float) and 0 < one < math.inf]


def _trial(run: Run, what: str, kind: type = list) -> Any:
    """A value of the notes of a run of a workload, None if it is of another type: they may come from a file."""
    found = run.trace.noted("trial").get(what)
    return found if type(found) is kind else None


def changed(a: Run, b: Run) -> str:
    """What `b` has and `a` lacks, if both ran the same work: "with checkpoint"."""
    first, second = _trial(a, "techniques"), _trial(b, "techniques")
    if first is None or second is None:
        return ""
    words = []
    for what, some, others in (("with", second, first), ("without", first, second)):
        if only := [str(one) for one in some if one not in others]:
            words.append(f"{what} {' + '.join(only)}")
    if (over := _trial(b, "world_size", int)) is not None and over != _trial(a, "world_size", int):
        words.append(f"over {number_of(over, 'GPU')}, per rank")
    return one_line(" ".join(words), 200)


def _notes(a: Run, b: Run, first: Side, second: Side) -> Iterator[str]:
    """Remarks on the figures, and the promises of the techniques."""
    if first.device.label != second.device.label:
        yield f"{first.name!r} was on {first.device.label}, {second.name!r} on {second.device.label}"
    for run, side in ((a, first), (b, second)):
        others = [one.device.label for one in run.devices[1:] if one.levels[0].peak.high_bytes]
        if others:
            compared = f"compared is {side.device.label}, which has the largest peak"
            yield f"{side.name!r} used {', '.join(others)} as well; {compared}"
        if side.is_predicted:
            yield f"{side.name!r} is predicted for {side.device.name}: no seconds, no values"
        elif is_simulated(run.trace):
            yield f"{side.name!r} ran on a {SIMULATED_GPU}"
    used, also = ([str(one) for one in _trial(run, "techniques") or []] for run in (a, b))
    for name in dict.fromkeys([*also, *used]):
        if (name in used) == (name in also) or name not in techniques:
            continue
        equality = techniques[name].equality
        if equality.kind == "changes":
            yield f"{name} changes training: {equality.why}"
            continue
        within = f"within {share(equality.relative)} of the largest value"
        promised = "bit for bit" if equality.kind == "exact" else within
        yield f"{name} promises results that are equal {promised}{f': {equality.why}' if equality.why else ''}"
