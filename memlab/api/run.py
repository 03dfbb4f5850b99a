"""A Run: one measured cell or block, its trace and its figures. Views take the trace and know no Run."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.analysis.breakdown import Breakdown, breakdown
from memlab.analysis.summary import CODE, DeviceSummary, Summary, summary
from memlab.errors import MemlabError
from memlab.trace import file, snapshot_write
from memlab.trace.columns import MarkKind
from memlab.trace.trace import Gap, Trace
from memlab.units import format_bytes

if TYPE_CHECKING:
    from memlab.analysis.leak import Leaks
    from memlab.api.report import LineReport, RunModules, RunReport
    from memlab.views.explorer import Explorer

CELLS = "cells"
"""The key of a trace's notes that has the execution counts of the cells by the names of their code."""
_MOST_CODE, _LONGEST_CODE = 200, 120  # lines whose text is saved with a run, and characters of each


class Run:
    """What `memlab.track()` and `%%memtrack` return: figures of the device with the largest peak, all devices in `devices`.

    A run has no figures while it is active: `trace`, peaks and reports raise MemlabError until it has ended.
    """

    def __init__(self, name: str = "", trace: Trace | None = None) -> None:
        self.name = name
        self._trace = trace
        self._summary: Summary | None = None
        self._result: dict[str, Any] | None = None
        self._offered: Any = None
        self._failed = ""
        self.measured_by = 0
        """The id of the process that measured it; 0 for a run from a file, and a prediction."""
        self.is_running = False
        self.started_ranks: tuple[Any, ...] = ()
        """The ranks of each job that the measured cell started, as `memlab.ranks` gives them; they are not saved with the run."""
        self.cell_text = ""
        """The text of the notebook cell that was measured, if it can be run again; it is not saved."""

    def __repr__(self) -> str:
        if self._trace is None:
            return f"<Run {self.name!r}: {self._state()}>"
        label = self.devices[0].device.label if self.devices else "no device was used"
        label = f"simulated on {label}" if self.trace.remark else label
        return f"<Run {self.name!r}: {label}, peak allocated {format_bytes(self.peak_bytes)}>"

    def __str__(self) -> str:
        return repr(self) if self._trace is None else self.report().text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self)} if self._trace is None else self.report().bundle()

    def _mime_(self) -> tuple[str, str]:
        return ("text/plain", repr(self)) if self._trace is None else self.report()._mime_()

    # --- while it is measured ---

    def finish(self, trace: Trace, notes: Sequence[str] = ()) -> None:
        """Set the measured trace; the run now has figures."""
        facts = {**trace.notes, "name": self.name, "notes": list(notes)}
        if code := _code(trace):
            facts[CODE] = code
        if self._offered is not None and self._result is None:
            from memlab.api.results import serialized

            # It was recorded without a request, and the cell has ended: neither a refusal nor an interrupt may cost the report.
            with contextlib.suppress(Exception, KeyboardInterrupt):
                self._result = serialized(self._offered)
        self._offered = None
        if self._result is not None:
            facts["result"] = self._result
        self._trace = dataclasses.replace(trace, notes=facts)
        self.measured_by = 0 if trace.provenance == "predicted" else os.getpid()

    def note(self, key: str, facts: Any) -> None:
        """Store plain JSON with the trace, under this key of its notes; saved files include it."""
        self._trace = dataclasses.replace(self.trace, notes={**self.trace.notes, key: facts})
        self._summary = None

    def fail(self, reason: str) -> None:
        """Mark the run as failed: it will have no figures."""
        self._failed = reason

    def _state(self) -> str:
        if self._failed:
            return f"has no figures: {self._failed}"
        return "still going on" if self.is_running else "not measured yet"

    def result(self, value: Any) -> Any:
        """Record a result for later comparison and return it; recording keeps no tensor alive.

        Tensors, arrays, numbers, texts, and dicts, lists, tuples and dataclasses of them. Up to 1 MiB the values are kept, above
        that dtype, shape, a digest and a sample.
        """
        from memlab.api.results import serialized

        self._result = serialized(value)
        if self._trace is not None:
            self.note("result", self._result)
        return value

    def offer(self, value: Any) -> None:
        """Set the result to record at the end if there is no other; None withdraws it."""
        self._offered = value

    # --- figures ---

    @property
    def trace(self) -> Trace:
        """The recorded trace."""
        if self._trace is None:
            state = self._state()
            raise MemlabError(f"run {self.name!r}: {state}; figures are there when its block or cell has ended.")
        return self._trace

    @property
    def summary(self) -> Summary:
        """The figures, as a value."""
        if self._summary is None:
            found = summary(self.trace, self.name)
            devices = []
            for one in found.devices:
                at = {key: self.cell_line(text) if key == "line" else text for key, text in one.at.items()}
                shares = tuple(map(self.with_cells, one.shares))
                tensors = tuple(dataclasses.replace(group, line=self.cell_line(group.line)) for group in one.tensors)
                devices.append(dataclasses.replace(one, at=at, shares=shares, tensors=tensors))
            code = {self.cell_line(line): text for line, text in found.code.items()}
            self._summary = dataclasses.replace(found, devices=tuple(devices), code=code)
        return self._summary

    def cell_line(self, line: str) -> str:
        """A line of a cell by the cell's execution count, "cell [3]:8"; any other, or of an earlier version's run, as it is."""
        place, _, number = line.rpartition(":")
        count = self.trace.noted(CELLS).get(place)
        return f"cell [{count}]:{number}" if isinstance(count, int) else line

    def with_cells(self, share: Breakdown) -> Breakdown:
        """Shares with the execution counts of cells in the names of lines, and of unnamed tensors that are called after one."""
        if share.by not in ("line", "tensor") or not self.trace.notes.get(CELLS):
            return share
        named = Counter[str]()
        for name, count in share.items():
            kind, of, place = ("", "", name) if share.by == "line" else name.partition(" of ")
            named[f"{kind}{of}{self.cell_line(place)}"] += count
        return dataclasses.replace(share, shares=dict(named))

    @property
    def devices(self) -> Sequence[DeviceSummary]:
        """The figures of every device, the one with the largest peak of *allocated* first."""
        return self.summary.devices

    @property
    def peak_allocated_bytes(self) -> int:
        """The peak of *allocated*; a lower bound if it is not exact (see `gaps`)."""
        return self._peak("allocated")

    @property
    def peak_reserved_bytes(self) -> int:
        """The peak of *reserved*; 0 on the CPU, which reserves nothing."""
        return self._peak("reserved")

    @property
    def peak_device_bytes(self) -> int:
        """The peak of memory in use on the whole device, from samples and *reserved*: a lower bound."""
        return self._peak("device used")

    peak_bytes = peak_allocated_bytes

    def _peak(self, of: str) -> int:
        level = self.devices[0].level(of) if self.devices else None
        return level.peak.low_bytes if level is not None else 0

    @property
    def verdict(self) -> str:
        """Whether it fits on its card and what is left, in a few words; "" unless it was predicted."""
        return ""

    @property
    def is_exact(self) -> bool:
        """Whether the peak of *allocated* is known to the byte, on every device."""
        return all(device.levels[0].peak.is_exact for device in self.devices)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What could not be seen."""
        return self.trace.gaps

    again = property(lambda self: self.cell_text)
    """The earlier name of `cell_text`."""

    def _device(self, device: int | None, what: str) -> int:
        """The chosen device, by default the one with the largest peak."""
        if device is None and not self.devices:
            raise MemlabError(f"run {self.name!r} used no device: {what}.")
        return self.devices[0].device.index if device is None else device

    def breakdown(self, by: str = "category", of: str = "allocated", device: int | None = None) -> Breakdown:
        """Name -> bytes at the peak of `of`, summing to it.

        `by` is "category", "module", "line", "tensor" or "phase"; `of` is "allocated", "reserved" (adds cached) or "device"
        (adds context, other processes, unknown).
        """
        return breakdown(self.trace, self._device(device, "there is nothing to break down"), by, of)

    def modules(self, device: int | None = None) -> RunModules:
        """Which modules held the peak, and what each forward kept and needed, as a tree."""
        from memlab.analysis.modules import modules
        from memlab.api.report import RunModules

        return RunModules.showing(modules(self.trace, self._device(device, "there are no modules to show")))

    def lines(self, device: int | None = None) -> LineReport:
        """What each line held, freed and needed at its peak; for runs that were tracked with lines."""
        from memlab.analysis.lines import lines
        from memlab.api.report import LineReport

        return LineReport.showing(lines(self.trace, self._device(device, "its lines took nothing")), name=self.name)

    def leaks(self, device: int | None = None) -> Leaks:
        """What grows from one iteration to the next, with the line or module that allocates it."""
        from memlab.analysis.leak import Leaks, leaks

        return leaks(self.trace, self._device(device, "")) if self.devices else Leaks()

    def to_pandas(self) -> Any:
        """The events as a pandas DataFrame; `summary.to_pandas()` has the figures."""
        return self.trace.to_pandas()

    # --- report and file ---

    def report(self) -> RunReport:
        """The report shown at the end of a tracked cell."""
        from memlab.api.report import RunReport

        return RunReport(self)

    def explore(self, other: Run | None = None, device: int | None = None) -> Explorer:
        """The stack of single allocations over time, to zoom, search and click; with `other`, that of two runs.

        It shows itself in a notebook, and stays in a saved one; `.save("explorer.html")` writes a page of its own.
        """
        from memlab.api.explore import explore

        if other is not None and not isinstance(other, Run):
            raise MemlabError(f"explore() takes another run, got a {type(other).__name__}. Give memlab.runs['name'].")
        runs = [run for run in (self, other) if run is not None]
        return explore([(run, run._device(device, "there is nothing to explore")) for run in runs])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the run to a file, whole or not at all; `memlab.load` reads it.

        A name that ends in ".pickle" gets a PyTorch memory snapshot, which memory_viz opens; for CUDA runs, measured or
        predicted.
        """
        return snapshot_write.save(self.trace, path) if str(path).endswith(".pickle") else file.save(self.trace, path)

    def nbytes(self) -> int:
        """The host memory of the run, in bytes."""
        return 0 if self._trace is None else self._trace.nbytes()


def _code(trace: Trace) -> dict[str, str]:
    """The text of the lines that allocated or called backward, by their names, as long as it is known."""
    called = trace.marks.name[trace.marks.kind == MarkKind.BACKWARD_CALL]
    lines = dict.fromkeys([*trace.texts["line"], *(trace.texts["mark"][name] for name in set(called.tolist()))])
    found: dict[str, str] = {}
    for line in list(lines)[:_MOST_CODE]:
        path, _, number = line.rpartition(":")
        text = linecache.getline(path, int(number)).strip() if path and number.isdecimal() else ""
        found |= {line: text[:_LONGEST_CODE]} if text else {}
    return found
