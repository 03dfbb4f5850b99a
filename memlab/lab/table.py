"""The runs of a Lab, one row each: what was run, what it took, what it saved against which baseline."""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.lab.state import State
from memlab.session.predict import Prediction, interval
from memlab.session.run import Run
from memlab.units import MiB, format_seconds, one_line
from memlab.views.who import Listing

Span = tuple[int, int]
MOST_BYTES = 512 * MiB
"""Of the traces that a Lab keeps; rows of older ones keep their figures."""
HEAD = ("peak", "saved", "a step", "run", "where", "results")
CSV = "table.csv"


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a Lab, also one that failed (`error`); `run` is None then, and where it was let go to bound memory."""

    name: str
    state: State
    techniques: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Technique -> why it does not apply here."""
    notes: tuple[str, ...] = ()
    """What the techniques say beside the figures."""
    run: Run | None = None
    peak_bytes: Span | None = None
    step_s: float | None = None
    against: str = ""
    saved_bytes: Span | None = None
    results: str = ""
    error: str = ""

    @classmethod
    def of(cls, run: Run, state: State, techniques: tuple[str, ...], habits: tuple[str, ...], **more: Any) -> Row:
        """The row of a run."""
        facts: dict[str, Any] = {"notes": notes_of(run), "peak_bytes": peak_of(run), "step_s": seconds_of(run)}
        return cls(run.name, state, techniques, habits, run=run, **facts, **more)

    def compared(self, comparison: Any) -> Row:
        """With what a comparison found; it stands in the row of the second."""
        saved = comparison.saved_bytes
        span = (saved, saved) if isinstance(saved, int) else tuple(saved)
        return dataclasses.replace(
            self, against=comparison.a.name, saved_bytes=span, results=str(comparison.results.verdict)
        )

    @property
    def where(self) -> str:
        """Measured or predicted, and where."""
        if self.state.device == "card":
            return f"predicted for {self.state.card}"
        return f"measured on {self.state.device.upper()}"

    @property
    def note(self) -> str:
        """What has to be said of it."""
        left_out = (f"left out {name}: {why}" for name, why in self.left_out.items())
        return "; ".join(filter(None, [*left_out, *self.notes, self.error]))

    def facts(self) -> dict[str, Any]:
        """A row of `lab.table`."""
        low, high = self.peak_bytes or (None, None)
        saved_low, saved_high = self.saved_bytes or (None, None)
        state = self.state
        return {
            "name": self.name,
            "workload": state.workload,
            "size": state.size,
            "settings": ", ".join(f"{key}={one}" for key, one in state.settings.items()),
            "device": state.card if state.device == "card" else state.device,
            "how": "predicted" if state.device == "card" else "measured",
            "techniques": ", ".join(self.techniques),
            "habits": ", ".join(self.habits),
            "peak_bytes": low,
            "peak_high_bytes": high,
            "against": self.against,
            "saved_bytes": saved_low,
            "saved_high_bytes": saved_high,
            "step_s": self.step_s,
            "results": self.results,
            "note": self.note,
        }

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        peak = interval(self.peak_bytes) if self.peak_bytes else "no figures"
        saved = interval(self.saved_bytes) if self.saved_bytes else ""
        step = format_seconds(self.step_s) if self.step_s is not None else ""
        return (peak, saved, step, self.name, self.where, self.results)


COLUMNS = tuple(Row("", State("")).facts())


class Table:
    """The rows of a Lab, the oldest first; names are told apart by a number where they would be equal."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._saved: dict[Path, str] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self.rows))

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(repr(row.name) for row in self.rows[-10:]) or "none yet"
        raise MemlabError(f"this Lab has no run {name!r:.100}. It has: {known}.")

    @property
    def names(self) -> list[str]:
        """The names of the rows that still have their run: what can be pinned and compared."""
        return [row.name for row in self.rows if row.run is not None]

    def run(self, name: str) -> Run:
        """The run of this name."""
        run = self[name].run
        if run is None:
            why = self[name].error or "it was let go, to bound memory: run it again"
            raise MemlabError(f"run {name!r:.100} has no figures: {why}.")
        return run

    def new_name(self, wanted: str) -> str:
        """This name, or with a number where it is taken."""
        taken = {row.name for row in self.rows}
        wanted = one_line(wanted, 180)
        numbered = (f"{wanted} ({number})" for number in range(2, len(taken) + 3))
        return wanted if wanted not in taken else next(name for name in numbered if name not in taken)

    def add(self, row: Row, pinned: str = "") -> None:
        """Keep a row; the oldest runs are let go where there are too many bytes of them."""
        self.rows.append(row)
        for old in self.rows[:-1]:
            if sum(one.run.nbytes() for one in self.rows if one.run is not None) <= MOST_BYTES:
                return
            if old.name != pinned:
                self.replace(old, dataclasses.replace(old, run=None))

    def replace(self, old: Row, new: Row) -> None:
        """Put a row in the place of another."""
        self.rows = [new if row is old else row for row in self.rows]

    # --- faces and files ------------------------------------------------------------------------------------------------

    def listing(self, title: str) -> Listing:
        """The table as text and HTML."""
        notes = tuple(f"{row.name}: {row.note}" for row in self.rows if row.note)
        return Listing(title, HEAD, tuple(row.cells() for row in self.rows), notes, numbers=3)

    def to_pandas(self) -> Any:
        """One row for each run; sizes in bytes."""
        import pandas

        return pandas.DataFrame([row.facts() for row in self.rows], columns=list(COLUMNS))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write every run and the table into a folder; what is there already and not ours is refused."""
        if not isinstance(path, str | os.PathLike) or not str(path).strip():
            raise MemlabError("name a folder to save to.")
        folder = Path(path)
        files = {folder / f"{at:02d}-{slug(row.name)}.memlab": row for at, row in enumerate(self.rows, 1) if row.run}
        for file in (*files, folder / CSV):
            if file.exists() and file.resolve() not in self._saved:
                raise MemlabError(f"{str(file)!r:.200} is there already: name another folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, row in files.items():
                if self._saved.get(file.resolve()) != row.name and row.run is not None:
                    row.run.save(file)
                    self._saved[file.resolve()] = row.name
            self.to_pandas().to_csv(folder / CSV, index=False)
            self._saved[(folder / CSV).resolve()] = CSV
        except OSError as error:
            raise MemlabError(f"cannot save to {str(folder)!r:.200}: {error.strerror or error}.") from None
        return folder


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "run"


def peak_of(run: Run) -> Span:
    """The peak of *allocated*, at least and at most."""
    return run.allocated_bytes if isinstance(run, Prediction) else (run.peak_bytes, run.peak_bytes)


def notes_of(run: Run) -> tuple[str, ...]:
    """What the techniques of a trial had to say."""
    return tuple(str(one) for one in run.trace.notes.get("trial", {}).get("notes") or ())


def seconds_of(run: Run) -> float | None:
    """Seconds a step, untracked: the middle of those that were timed."""
    times = run.trace.notes.get("trial", {}).get("step_s") or ()
    return statistics.median(times) if times else None
