"""`memlab.compare()`: two runs on one axis, with bytes, seconds, and whether their results agree.

Limits: seconds are compared between steps that were timed, or between runs of one engine; of predictions and of the pretend device
they mean nothing.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab import seams
from memlab.analysis.comparison import (
    Differences,
    Interval,
    Picture,
    Side,
    differences,
    known_by,
    picture,
    saved,
)
from memlab.analysis.results import CLOSE, ResultCheck, share
from memlab.errors import MemlabError
from memlab.savings import techniques
from memlab.savings.technique import Equality
from memlab.session.results import check_results, is_pretend
from memlab.session.run import Run, load
from memlab.session.runs import last_run, runs
from memlab.session.show import ipython
from memlab.units import format_seconds, one_line
from memlab.views.comparison_table import Level, Said, peak_words, results_words, time_words, times

LAST = "last"


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long both took: a "step" that was timed by itself, or the whole "run" as it was tracked."""

    a_s: float
    b_s: float
    of: str

    def __iter__(self) -> Iterator[float]:
        return iter((self.a_s, self.b_s))

    def __getitem__(self, index: int) -> float:
        return (self.a_s, self.b_s)[index]

    @property
    def ratio(self) -> float:
        """How many times as long as `a` the other took."""
        return self.b_s / self.a_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run `b` against run `a`: `print` it, let a notebook show it, or take `sentence`, `by()`, `figure` and `to_pandas()`."""

    a: Run
    b: Run
    side_a: Side = field(repr=False)
    side_b: Side = field(repr=False)
    results: ResultCheck
    seconds: Seconds | None
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int | Interval:
        """Peak of *allocated* of `a` less that of `b`: how much `b` saves. (At least, at most) where one is no exact figure."""
        low, high = saved(self.side_a, self.side_b)
        return low if low == high else (low, high)

    def by(self, by: str = "category") -> Differences:
        """Name -> bytes at both peaks and their difference (`b` less `a`), by "category", "module", "line", "phase" or "tensor".

        The differences sum to that of the peaks, of their lower ends where they are intervals.
        """
        return differences(self.side_a, self.side_b, by)

    @property
    def sentence(self) -> str:
        """Bytes saved, time paid, and whether the results agree, in one line."""
        parts = [
            peak_words(self.side_a, self.side_b),
            *([time_words(self.seconds.of, self.seconds.ratio)] if self.seconds else []),
            results_words(self.results),
        ]
        if self.a is self.b:
            return f"{one_line(self.a.name, 80) or 'a run'}: the same run twice, so nothing differs; {parts[0]}"
        return f"{self._title}: {', '.join(parts)}"

    @property
    def _title(self) -> str:
        return changed(self.a, self.b) or one_line(self.side_b.name, 80)

    @property
    def picture(self) -> Picture:
        """What the figure shows."""
        return picture(self.side_a, self.side_b, has_time=all(map(_has_time, (self.a, self.b))))

    @property
    def figure(self) -> Any:
        """Both timelines on one axis, and beside them who held each peak, as a plotly figure."""
        from memlab.views.comparison import comparison_figure

        return comparison_figure(self.picture, self.sentence)

    @property
    def text(self) -> str:
        """All of it in words and tables."""
        return self._said().text()

    @property
    def html(self) -> str:
        """The same as small HTML tables."""
        return self._said().html()

    def _said(self) -> Said:
        return Said(
            sentence=self.sentence,
            names=(self.side_a.name, self.side_b.name),
            levels=tuple(self._levels()),
            tables=tuple(self.by(one) for one in known_by(self.side_a, self.side_b) if self._is_shown(one)),
            results=self.results,
            notes=self.notes,
        )

    def _is_shown(self, by: str) -> bool:
        """Lines of one run alone only say that the other has none."""
        return by != "line" or all(by in known_by(side, side) for side in (self.side_a, self.side_b))

    def _levels(self) -> Iterator[Level]:
        both = [{level.of: level.peak for level in run.devices[0].levels} for run in (self.a, self.b)]
        yield Level.of_sides("peak allocated", self.side_a, self.side_b)
        for of in ("reserved", "device used"):
            if of in both[0] and of in both[1]:
                yield Level(f"peak {of}", both[0][of], both[1][of])
        if self.seconds:
            words = {"step": "a step", "run": "the run"}[self.seconds.of]
            first, second = map(format_seconds, self.seconds)
            yield Level(words, first, second, f"{times(self.seconds.ratio)} as long")

    def figure_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the figure and its twins."""
        from memlab.views.comparison import comparison_bundle

        return comparison_bundle(self.picture, "", self.sentence)

    def table_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the sentence and the tables."""
        return {"text/html": self.html, "text/plain": self.text}

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content of all in one; a front end shows the richest it knows, so the figure has the sentence, too."""
        from memlab.views.comparison import comparison_bundle

        return {**comparison_bundle(self.picture, self.sentence, self.sentence), **self.table_bundle()}

    def to_pandas(self) -> Any:
        """A row for each name that holds anything at either peak, by category, module and line; sizes in bytes."""
        import pandas

        rows = [
            (table.by, name, one.a_bytes, one.b_bytes, one.difference_bytes)
            for table in map(self.by, known_by(self.side_a, self.side_b))
            for name, one in table.items()
        ]
        return pandas.DataFrame(rows, columns=["by", "name", "a_bytes", "b_bytes", "difference_bytes"])

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Comparison {self.sentence}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()

    def _ipython_display_(self) -> None:
        """The figure, and below it the sentence and the tables."""
        if not seams.is_kernel(ipython()):
            print(self.text)
            return
        from IPython.display import display

        display(self.figure_bundle(), raw=True)
        display(self.table_bundle(), raw=True)


def compare(a: Any, b: Any, *, tolerance: float = CLOSE) -> Comparison:
    """Run `b` against run `a`, measured or predicted: a name of `memlab.runs`, "last", a Run, a Prediction, or a saved file.

    Results are close where they are apart by no more than `tolerance` times the largest value around them.
    """
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < math.inf:
        raise MemlabError(f"tolerance is a share such as 0.001, got {tolerance!r:.80}.")
    first, second = run_of(a), run_of(b)
    names = _names(first, second)
    sides = [side_of(run, name) for run, name in zip((first, second), names, strict=True)]
    results = check_results(first.trace, second.trace, names, tolerance)
    seconds, notes = _seconds(first, second), list(_notes(first, second, sides[0], sides[1]))
    if seconds is not None and seconds.of == "run" and first is not second:
        notes.append("seconds are those of the whole runs as they were tracked, with all that a first call takes")
    return Comparison(first, second, sides[0], sides[1], results, seconds, tuple(notes))


def run_of(what: Any) -> Run:
    """The run that somebody means; MemlabError where there is none, or where it has no figures yet."""
    found = what if isinstance(what, Run) else _found(what)
    try:
        devices = found.devices
    except (KeyError, TypeError, ValueError) as error:  # a file that says it holds a prediction, and does not
        why = f"{type(error).__name__}: {error!s:.100}"
        raise MemlabError(f"run {found.name!r:.200} cannot be read: {why}. Make it again.") from None
    if not devices:
        raise MemlabError(f"run {found.name!r:.200} used no device of those it measured: there is nothing to compare.")
    return found


def _found(what: Any) -> Run:
    if not isinstance(what, str | os.PathLike):
        raise MemlabError(
            f"compare takes runs: names of memlab.runs, runs or files of them, got {type(what).__name__}."
        )
    if isinstance(what, str) and what in runs:
        return runs[what]
    if what == LAST:
        return last_run()
    if _is_file(what):
        return load(what)
    if isinstance(what, os.PathLike):
        return load(what)  # which says what is wrong
    known = ", ".join(f"{name!r:.60}" for name in list(runs)[-10:]) or "none yet"
    raise MemlabError(f"there is no run {what!r:.200}, and no file of that name. Known: {known}.")


def is_run(what: str) -> bool:
    """Whether a word means a run: a name, `last`, or a file."""
    return what in runs or what == LAST or _is_file(what)


def _is_file(what: str | os.PathLike[str]) -> bool:
    try:
        return Path(what).is_file()
    except (OSError, ValueError):
        return False


def _names(a: Run, b: Run) -> tuple[str, str]:
    """How they are called: by their names, told apart where these are the same."""
    first, second = (one_line(run.name, 200).strip() or "a run" for run in (a, b))
    if first != second:
        return first, second
    how = _how(a), _how(b)
    how = how if how[0] != how[1] else ("a", "b")
    return f"{first} ({how[0]})", f"{second} ({how[1]})"


def _how(run: Run) -> str:
    is_predicted = "prediction" in run.trace.notes
    return f"predicted for {one_line(run.devices[0].device.name, 80)}" if is_predicted else "measured"


def side_of(run: Run, name: str) -> Side:
    """What is compared of a run: the device with the largest peak, and that peak."""
    one = run.devices[0]
    peak = one.levels[0].peak
    low, high = peak.low_bytes, peak.high_bytes
    foretold = run.trace.notes.get("prediction")
    if isinstance(foretold, dict):  # what it needs: on a card that is too small its trace ends before
        low, high = max(low, int(foretold["peaks"]["allocated"][0])), max(high, int(foretold["peaks"]["allocated"][1]))
    return Side(name, run.trace, one.device, low, high)


# --- seconds -----------------------------------------------------------------------------------------------------------


def _seconds(a: Run, b: Run) -> Seconds | None:
    if not all(map(_has_time, (a, b))):
        return None
    steps = [_step_s(run) for run in (a, b)]
    if steps[0] and steps[1]:
        return Seconds(steps[0], steps[1], "step")
    spans = [run.trace.made_by.duration_ns / 1e9 for run in (a, b)]
    if a.trace.made_by.engine != b.trace.made_by.engine or min(spans) <= 0:
        return None
    return Seconds(spans[0], spans[1], "run")


def _has_time(run: Run) -> bool:
    return "prediction" not in run.trace.notes and not is_pretend(run.trace)


def _step_s(run: Run) -> float:
    """The median of the steps that were timed; 0.0 where none were. The notes may come from a file."""
    facts = run.trace.notes.get("trial")
    times = facts.get("step_s") if isinstance(facts, dict) else None
    found = [one for one in times if isinstance(one, float) and 0 < one < math.inf] if isinstance(times, list) else []
    return statistics.median(found) if found else 0.0


# --- words -------------------------------------------------------------------------------------------------------------


def changed(a: Run, b: Run) -> str:
    """What `b` has and `a` has not, where both are trials of the same work: "with checkpoint"."""
    first, second = _techniques(a), _techniques(b)
    if first is None or second is None:
        return ""
    with_, without = (
        " + ".join(one for one in some if one not in others) for some, others in ((second, first), (first, second))
    )
    return one_line(" ".join(filter(None, [with_ and f"with {with_}", without and f"without {without}"])), 200)


def _techniques(run: Run) -> list[str] | None:
    facts = run.trace.notes.get("trial")
    found = facts.get("techniques") if isinstance(facts, dict) else None
    return [str(one) for one in found] if isinstance(found, list) else None


def _notes(a: Run, b: Run, first: Side, second: Side) -> Iterator[str]:
    """What a reader has to know beside the figures."""
    if first.device.label != second.device.label:
        yield f"{first.name!r} was on {first.device.label}, {second.name!r} on {second.device.label}"
    for run, side in ((a, first), (b, second)):
        others = [one.device.label for one in run.devices[1:] if one.levels[0].peak.high_bytes]
        if others:
            yield f"{side.name!r} used {', '.join(others)} as well; compared is {side.device.label}, which has the largest peak"
        if side.is_predicted:
            yield f"{side.name!r} is predicted for {side.device.name}: no seconds, no values"
        elif is_pretend(run.trace):
            yield f"{side.name!r} ran on a pretend device: its seconds and values mean nothing"
    yield from _declared(a, b)


def _declared(a: Run, b: Run) -> Iterator[str]:
    """What the techniques that make the difference say of their results."""
    first, second = _techniques(a) or [], _techniques(b) or []
    for name in dict.fromkeys([*second, *first]):
        if (name in first) != (name in second) and name in techniques:
            yield _promise(name, techniques[name].equality)


def _promise(name: str, equality: Equality) -> str:
    if equality.kind == "changes":
        return f"{name} changes training: {equality.why}"
    promised = "bit for bit" if equality.kind == "exact" else f"within {share(equality.relative)} of the largest value"
    return f"{name} promises results that are equal {promised}{f': {equality.why}' if equality.why else ''}"
