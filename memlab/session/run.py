"""A Run: one measured stretch of work, its figures, its file, its faces."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.analysis.breakdown import Breakdown, breakdown
from memlab.analysis.summary import DeviceSummary, Summary, summary
from memlab.errors import MemlabError
from memlab.trace import snapshot
from memlab.trace.file import load as load_trace
from memlab.trace.file import save as save_trace
from memlab.trace.trace import Gap, Trace
from memlab.units import format_bytes

if TYPE_CHECKING:
    from memlab.analysis.leak import Leaks
    from memlab.session.lines import LineReport
    from memlab.session.modules import RunModules

SNAPSHOT = ".pickle"
"""How the names of PyTorch's memory snapshots end."""


class Run:
    """What `memlab.track()` and `%%memtrack` give: figures of the device with the largest peak, all devices in `devices`.

    While the run goes on it has no figures yet; `trace`, peaks and reports raise MemlabError until it has ended.
    """

    def __init__(self, name: str = "", trace: Trace | None = None) -> None:
        self.name = name
        self._trace = trace
        self._summary: Summary | None = None
        self._result: dict[str, Any] | None = None
        self._offered: Any = None
        self._failed = ""
        self.is_running = False
        self.again = ""
        """The text of the notebook cell that was measured, where it can be run again; it is not saved."""

    def __repr__(self) -> str:
        if self._trace is None:
            return f"<Run {self.name!r}: {self._state()}>"
        label = self.devices[0].device.label if self.devices else "no device was used"
        return f"<Run {self.name!r}: {label}, peak allocated {format_bytes(self.peak_bytes)}>"

    def __str__(self) -> str:
        return repr(self) if self._trace is None else self.report().text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self)} if self._trace is None else self.report().bundle()

    def finish(self, trace: Trace, notes: Sequence[str] = ()) -> None:
        """Take the trace that was measured; from here on the run has figures."""
        facts = {**trace.notes, "name": self.name, "notes": list(notes)}
        if self._offered is not None and self._result is None:
            from memlab.session.results import noted_if_possible

            self._result = noted_if_possible(self._offered)
        self._offered = None
        if self._result is not None:
            facts["result"] = self._result
        self._trace = dataclasses.replace(trace, notes=facts)

    def note(self, key: str, facts: Any) -> None:
        """Keep plain JSON facts with the trace, under this key of its notes; saved files have them."""
        self._trace = dataclasses.replace(self.trace, notes={**self.trace.notes, key: facts})

    def fail(self, reason: str) -> None:
        """Take note that the run will have no figures, and why."""
        self._failed = reason

    def _state(self) -> str:
        if self._failed:
            return f"has no figures: {self._failed}"
        return "still going on" if self.is_running else "not measured yet"

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """Everything that was measured."""
        if self._trace is None:
            raise MemlabError(
                f"run {self.name!r}: {self._state()}; figures are there when its block or cell has ended."
            )
        return self._trace

    @property
    def summary(self) -> Summary:
        """The figures, as a value."""
        if self._summary is None:
            self._summary = summary(self.trace, self.name)
        return self._summary

    @property
    def devices(self) -> Sequence[DeviceSummary]:
        """The figures of every device, the one with the largest peak of *allocated* first."""
        return self.summary.devices

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was allocated at once. Where it is no exact figure (`gaps` says so), what is certain at least."""
        return self._peak("allocated")

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that PyTorch's allocator held at once; 0 on the CPU, which reserves nothing."""
        return self._peak("reserved")

    @property
    def peak_device_bytes(self) -> int:
        """The most that was in use on the whole device, as far as samples and *reserved* tell: a lower bound."""
        return self._peak("device used")

    peak_bytes = peak_allocated_bytes

    def _peak(self, of: str) -> int:
        levels = [level for device in self.devices[:1] if (level := device.level(of)) is not None]
        return levels[0].peak.low_bytes if levels else 0

    @property
    def is_exact(self) -> bool:
        """Whether the peak of *allocated* is known to the byte, on every device."""
        return all(device.levels[0].peak.is_exact for device in self.devices)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What could not be seen."""
        return self.trace.gaps

    def breakdown(self, by: str = "category", of: str = "allocated", device: int | None = None) -> Breakdown:
        """Name -> bytes at the peak of `of`, summing to it.

        `by` is "category", "module", "line", "tensor" or "phase"; `of` is "allocated", "reserved" (adds cached) or "device"
        (adds context, other processes, unknown).
        """
        if device is None and not self.devices:
            raise MemlabError(f"run {self.name!r} used no device of those it measured: there is nothing to break down.")
        index = self.devices[0].device.index if device is None else device
        return breakdown(self.trace, index, by, of)

    def modules(self, device: int | None = None) -> RunModules:
        """Who of the modules held the peak, what each forward left for backward, and its transient peak, as a tree."""
        from memlab.session.modules import modules

        return modules(self, device)

    def lines(self, device: int | None = None) -> LineReport:
        """What each line held, freed and needed on the way; for runs that were tracked with lines."""
        from memlab.session.lines import lines

        return lines(self, device)

    def leaks(self, device: int | None = None) -> Leaks:
        """What grows from one iteration to the next and does not stop, with the line or module that allocates it."""
        from memlab.analysis.leak import Leaks, leaks

        if not self.devices:
            return Leaks()
        return leaks(self.trace, self.devices[0].device.index if device is None else device)

    def result(self, value: Any) -> Any:
        """Note a result of the run for later comparison and give it back; what is noted keeps no tensor alive.

        Tensors, arrays, numbers, texts, and dicts, lists, tuples and dataclasses of them. Up to 1 MiB the values are kept, above
        that dtype, shape, a digest and a sample.
        """
        from memlab.session.results import noted

        self._result = noted(value)
        if self._trace is not None:
            self.note("result", self._result)
        return value

    def offer(self, value: Any) -> None:
        """What becomes the result when the run ends, if nothing else was noted and it can be one; None takes it back."""
        self._offered = value

    def to_pandas(self) -> Any:
        """The events as a pandas DataFrame; `summary.to_pandas()` has the figures."""
        return self.trace.to_pandas()

    # --- faces and file ----------------------------------------------------------------------------------------------

    def report(self) -> Any:
        """The report that a tracked cell ends with."""
        from memlab.session.show import RunReport

        return RunReport(self)

    def explore(self) -> Any:
        """Open a widget to zoom into the timeline; closing it leaves the static figure."""
        from memlab.session.explore import explore

        return explore(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the run to a file, whole or not at all; `memlab.load` reads it.

        A name that ends in ".pickle" gets a PyTorch memory snapshot, which memory_viz opens; of a run of CUDA, measured or
        predicted.
        """
        if str(path).endswith(SNAPSHOT):
            return snapshot.save(self.trace, path)
        return save_trace(self.trace, path)

    def nbytes(self) -> int:
        """How much host memory the run takes, in bytes."""
        return 0 if self._trace is None else self._trace.nbytes()


def load(path: str | os.PathLike[str]) -> Run:
    """Read a run that was saved, or a PyTorch memory snapshot; files are read without executing anything in them."""
    if snapshot.looks_like_snapshot(path):
        from memlab.probes.snapshot import load as load_snapshot

        return Run(Path(path).name, load_snapshot(path))
    trace = load_trace(path)
    name = str(trace.notes.get("name", ""))
    if "prediction" in trace.notes:
        from memlab.session.predict import Prediction

        return Prediction(name, trace)
    return Run(name, trace)
