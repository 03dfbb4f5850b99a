"""The runs of a Lab, one row each: its memory, its saving, its baseline; and a script that repeats one."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import pprint
import re
import statistics
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.analysis.advice import LEAST_SHARE
from memlab.api.prediction import Prediction
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.lab.state import LabChoices, LabState
from memlab.prediction.cards import cards
from memlab.prediction.forecast import ANSWERS
from memlab.saving_techniques import techniques
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import ByteRange, MiB, format_bytes, format_seconds, one_line, plain
from memlab.views.table import Column, Table

MOST_BYTES = 512 * MiB
"""The bytes of traces that a Lab keeps; rows of dropped ones keep their figures."""
CSV = "table.csv"
COLUMNS = (
    Column("run", limit=180), Column("peak", "bytes"), Column("saved", "bytes"), Column("a step", "seconds"),
    Column("where"), Column("fits"), Column("results"),
)  # fmt: skip
_FITS = {"yes": "yes", "no": "no", "close": ANSWERS["close"]}


@dataclass(frozen=True, slots=True)
class LabRun:
    """One run of a Lab; `run` is None if it failed (`error`), or was dropped to bound memory.

    `start_bytes` of the peak were there before the run. `left_out` says why techniques do not apply here, `notes` what they
    add to the figures.
    """

    name: str
    state: LabState
    techniques: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run: Run | None = None
    peak_bytes: ByteRange | None = None
    start_bytes: int = 0
    step_s: float | None = None
    fits: str = ""
    verdict: str = ""
    against: str = ""
    saved_bytes: ByteRange | None = None
    results: str = ""
    error: str = ""

    where = property(operator.attrgetter("state.where"))  # the earlier name

    @classmethod
    def of(
        cls, run: Run, state: LabState, techniques: tuple[str, ...], habits: tuple[str, ...], *, left_bytes: int = 0, **more: Any
    ) -> LabRun:  # fmt: skip
        """The row of a run that has figures; seconds are the median of the timed steps, none on a simulated GPU.

        `left_bytes` of what was there before it are left by runs: it would have allocated them itself.
        """
        facts = run.trace.notes.get("trial", {})
        more["notes"] = tuple(map(str, facts.get("notes") or ()))
        is_timed = facts.get("step_s") and run.trace.provenance == "measured"
        more["step_s"] = statistics.median(facts["step_s"]) if is_timed else None
        allocated = run.devices[0].levels[0] if run.devices else None
        more["peak_bytes"] = allocated.peak.bytes if allocated is not None else ByteRange.exact(0)
        more["start_bytes"] = max(allocated.start_bytes - left_bytes, 0) if allocated is not None else 0
        if isinstance(run, Prediction):
            needed = f"needs {run.peak_device_bytes} of {format_bytes(run.card.usable_bytes)} usable"
            verdict = (
                f"{ANSWERS[run.fits]} on {state.predicted_place}: {needed}{' per rank' if run.job is not None else ''}"
            )
            more |= {"peak_bytes": run.allocated_bytes, "fits": str(run.fits), "verdict": verdict}
        return cls(run.name, state, techniques, habits, run=run, **more)

    def compared(self, comparison: Any) -> LabRun:
        """Add the outcome of a comparison; this run is the second of the two."""
        saved = comparison.saved_bytes
        saved_bytes = ByteRange.exact(saved) if isinstance(saved, int) else ByteRange(*saved)
        return dataclasses.replace(
            self, against=comparison.a.name, saved_bytes=saved_bytes, results=str(comparison.results.verdict)
        )

    @property
    def own_bytes(self) -> ByteRange | None:
        """The peak without what was there before the run."""
        return None if self.peak_bytes is None else self.peak_bytes - ByteRange.exact(self.start_bytes)

    def starts_like(self, other: LabRun) -> bool:
        """Whether the same was there before both, but for less than matters; True if one of them has no figures."""
        if self.own_bytes is None or other.own_bytes is None:
            return True
        least_bytes = LEAST_SHARE * min(self.own_bytes.low, other.own_bytes.low)
        return abs(self.start_bytes - other.start_bytes) <= least_bytes

    @property
    def older(self) -> str:
        """How much of the peak was there before the run, in one sentence; "" if that does not matter."""
        if self.own_bytes is None or self.start_bytes <= LEAST_SHARE * self.own_bytes.low:
            return ""
        return f"{format_bytes(self.start_bytes)} of the peak was there before the run: without that, {self.own_bytes}."

    @property
    def note(self) -> str:
        """Remarks on the figures."""
        left_out = (f"left out {name}: {why}" for name, why in self.left_out.items())
        return "; ".join(filter(None, [*left_out, *self.notes, self.error]))

    def facts(self) -> dict[str, Any]:
        """A row of `lab.table`."""
        state = self.state
        settings = ", ".join(f"{key}={value}" for key, value in state.settings.items())
        peak, saved = (bounds.numbers() if bounds else (None, None) for bounds in (self.peak_bytes, self.saved_bytes))
        chosen = {"name": self.name, "workload": state.workload, "size": state.size, "settings": settings}
        where = {"device": state.place, "how": state.where.partition(" ")[0]}
        what = {"techniques": ", ".join(self.techniques), "habits": ", ".join(self.habits)}
        peaks = {"peak_bytes": peak[0], "peak_high_bytes": peak[1], "start_bytes": self.start_bytes, "fits": self.fits}
        compared = {"against": self.against, "saved_bytes": saved[0], "saved_high_bytes": saved[1]}
        rest = {"step_s": self.step_s, "results": self.results, "note": self.note}
        return {**chosen, **where, **what, **peaks, **compared, **rest}

    def cells(self) -> tuple[str | float | ByteRange | None, ...]:
        """A row of the displayed table."""
        peak = self.peak_bytes if self.peak_bytes is not None else "no figures"
        where, fits = self.state.where, _FITS.get(self.fits, "")
        return (self.name, peak, self.saved_bytes, self.step_s, where, fits, self.results)


FACTS = tuple(LabRun("", LabState("")).facts())


class RunTable:
    """The rows of a Lab, oldest first; equal names get a number."""

    def __init__(self) -> None:
        self.rows: list[LabRun] = []
        self._saved: dict[Path, str] = {}

    def __getitem__(self, name: str) -> LabRun:
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(repr(row.name) for row in self.rows[-10:]) or "none yet"
        raise MemlabError(f"this Lab has no run {name!r:.100}. It has: {known}.")

    @property
    def names(self) -> list[str]:
        """The names of rows that still have their run, and can be pinned and compared."""
        return [row.name for row in self.rows if row.run is not None]

    def require_run(self, name: str) -> None:
        """Raise MemlabError if there is no longer a run of this name."""
        if self[name].run is None:
            why = self[name].error or "it was dropped to bound memory: run it again"
            raise MemlabError(f"run {name!r:.100} has no figures: {why}.")

    def new_name(self, wanted: str) -> str:
        """This name, with a number if it is taken."""
        taken = {row.name for row in self.rows}
        wanted = one_line(wanted, 180)
        numbered = (f"{wanted} ({number})" for number in range(2, len(taken) + 3))
        return wanted if wanted not in taken else next(name for name in numbered if name not in taken)

    def add(self, row: LabRun, pinned: str = "") -> None:
        """Add a row; drop the oldest runs if the traces take too many bytes."""
        self.rows.append(row)
        for old in self.rows[:-1]:
            if sum(one.run.nbytes() for one in self.rows if one.run is not None) <= MOST_BYTES:
                return
            if old.name != pinned:
                self.replace(old, dataclasses.replace(old, run=None))

    def replace(self, old: LabRun, new: LabRun) -> None:
        """Replace a row."""
        self.rows = [new if row is old else row for row in self.rows]

    def table(self) -> Table:
        """The rows as text and HTML."""
        notes = [f"{row.name}: {row.note}" for row in self.rows if row.note]
        notes += [SIMULATED_GPU] if any(row.state.where.startswith("simulated") for row in self.rows) else []
        rows = tuple(row.cells() for row in self.rows)
        return Table(f"Runs of this Lab ({len(self.rows)})", COLUMNS, rows, tuple(notes))

    def to_pandas(self) -> Any:
        """One row for each run; sizes in bytes."""
        import pandas

        return pandas.DataFrame([row.facts() for row in self.rows], columns=list(FACTS))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write every run and the table into a folder; existing files are not overwritten."""
        if not isinstance(path, str | os.PathLike) or not str(path).strip():
            raise MemlabError("name a folder to save to.")
        folder = Path(path)
        files = {}
        for number, row in enumerate(self.rows, 1):
            slug = re.sub(r"[^a-z0-9]+", "-", row.name.lower()).strip("-")[:60] or "run"
            if row.run is not None:
                files[folder / f"{number:02d}-{slug}.memlab"] = row
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


def script(choices: LabChoices, state: LabState, row: LabRun | None = None) -> str:
    """The script. `row` is its result here."""
    what = " ".join(filter(None, [state.workload, state.size]))
    chosen = ", ".join(techniques.said(state.techniques, state.world_size)) or "no technique"
    head = [f"# {plain(what)} with {chosen}, {plain(state.where)}."]
    if row is not None and row.peak_bytes:
        saved = f", saved {row.saved_bytes}" if row.saved_bytes else ""
        step = f", a step {format_seconds(row.step_s)}" if row.step_s is not None else ""
        head.append(f"# Where this script was made: peak {row.peak_bytes}{saved}{step}.")
    function, source = _own_function(choices, state)
    parts = ["\n".join([*head, "import memlab"]), source, _call(choices, state, function)]
    for name in state.techniques:
        one = techniques[name]  # its code is a comment: its names are those of the reader's program
        lines = [f"{name}: {one.idea}", "", *one.code_over(state.world_size).splitlines()]
        parts.append("\n".join(f"# {line}".rstrip() for line in lines))
    return "\n\n".join(filter(None, parts)) + "\n"


def _own_function(choices: LabChoices, state: LabState) -> tuple[str, str]:
    """The name and the text of the user's own function; nothing for a workload of memlab."""
    if state.workload not in choices.own:
        return "", ""
    make = choices.own[state.workload]
    if inspect.isfunction(make) and make.__name__.isidentifier():  # a lambda has "<lambda>"
        try:
            source = textwrap.dedent(inspect.getsource(make)).rstrip()
            return make.__name__, f"# Import or define here what it uses of its notebook.\n{source}"
        except (OSError, TypeError):
            pass
    missing = f"    raise NotImplementedError({f'put the function {state.workload!r} here'!r})"
    return "mine", f"# The text of this function is not known: paste it here.\ndef mine():\n{missing}"


def _call(choices: LabChoices, state: LabState, function: str) -> str:
    """Open a Lab, set its state, run it, print the result."""
    wanted = {**state.plain(), "baseline": "", "world_size": state.world_size if state.is_sharded else 0}
    if state.device != "card":
        del wanted["card"], wanted["torch_version"]
    shown = {key: value for key, value in wanted.items() if value or key in ("workload", "device", "techniques")}
    body = pprint.pformat(shown, width=100, sort_dicts=False)
    lab = f"memlab.Lab(workloads={{{state.workload!r}: {function}}})" if function else "memlab.Lab()"
    made, card = "", choices.card(state.card)
    if state.device == "card" and card.name not in cards:  # a GPU that is not in the catalog
        names = ("name", "total_bytes", "compute_capability", "usable_bytes", "usable_high_bytes", "multiprocessors")
        values = {name: getattr(card, name) for name in (*names, "plausible_multiprocessors")}
        values["context_bytes"] = tuple(card.context_bytes)
        made = f"card = memlab.Card({', '.join(f'{name}={value!r}' for name, value in values.items())})\n"
        body = body.replace(f"'card': {state.card!r}", "'card': card")
    return f"{made}lab = {lab}\nlab.state = {body}\nlab.run()\nprint(lab)"
