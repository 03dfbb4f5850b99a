"""The Trace: what a probe measured, immutable; the only interface between measuring and showing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.errors import TraceError
from memlab.trace.columns import Array, Blocks, Category, Events, Kind, Marks, Phase, Recategorised, Samples

CPU = -1
"""The device number of the host's own memory; accelerators count from 0."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something an engine could not see: a short name to test for, and a sentence to read."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a trace, with the facts about it that no event carries.

    `peak_*_bytes` are what PyTorch's own counters said at the end and `start_*` at the start (-1: not read);
    `capacity_bytes` is the whole memory of the device, -1 where unknown.
    """

    index: int
    name: str
    capacity_bytes: int = -1
    start_allocated_bytes: int = -1
    start_reserved_bytes: int = -1
    start_peak_allocated_bytes: int = -1
    start_peak_reserved_bytes: int = -1
    end_allocated_bytes: int = -1
    end_reserved_bytes: int = -1
    end_peak_allocated_bytes: int = -1
    end_peak_reserved_bytes: int = -1
    num_ooms: int = 0
    num_alloc_retries: int = 0

    @property
    def label(self) -> str:
        """How users name it: "cpu" or "cuda:0"."""
        return "cpu" if self.index == CPU else f"cuda:{self.index}"


SIMULATED_GPU = "simulated GPU: bytes are real, values and times are not"
"""What stands with figures of a simulated GPU."""


def is_simulated_gpu(name: str) -> bool:
    """Whether the device of this name is a simulated GPU: the name is what a saved run keeps of it."""
    # The recorded runs of tests/frozen are older than the project's own simulated GPU, and have the other name.
    return name.endswith("(simulated)") or name.startswith("FakeGPU")


@dataclass(frozen=True, slots=True)
class Bounded:
    """A range of events of one device that is not in the trace: lost unread, or dropped to bound host memory.

    The peaks of dropped rows are known exactly; for lost ones (-1) only counters and samples are known.
    """

    device: int
    begin_ns: int
    end_ns: int
    lost_events: int
    peak_allocated_bytes: int = -1
    peak_reserved_bytes: int = -1

    @property
    def is_exact(self) -> bool:
        """Whether the peaks of the range are known."""
        return self.peak_allocated_bytes >= 0


PREDICTING = "fake CUDA"
"""The engine of predictions."""
UNFINISHED = "samples of a run that did not end"
"""The engine of files that a killed process left."""
RANK, ERROR, STEPS_BEFORE, HOLDERS = "rank", "error", "steps_before", "holders"
"""Keys of a trace's notes: the rank that was measured in its job; the error that ended it; how many optimizer steps came before;
names, with bytes, of what grows.
"""
CHILD_PROCESSES, WORK_IN_CHILDREN = "child processes", "work in child processes"
"""Names of gaps: children were not measured; they did more than the process that was, so that its peak is not that of the run."""
_FORMER = {"CPU dispatch tally": "CPU tensor tracker", "pretend CUDA": PREDICTING}
"""Engine names in files of earlier versions -> current names."""


@dataclass(frozen=True, slots=True)
class MadeBy:
    """Who made a trace and how: the engine, versions, devices, and what it could not see."""

    engine: str
    devices: tuple[Device, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    started_at_s: float = 0.0
    duration_ns: int = 0
    gaps: tuple[Gap, ...] = ()
    bounded: tuple[Bounded, ...] = ()

    @property
    def current_engine(self) -> str:
        """The current name of the engine, also for traces saved by earlier versions."""
        for former, now in _FORMER.items():
            if self.engine.startswith(former):  # a snapshot adds its origin
                return now + self.engine.removeprefix(former)
        return self.engine

    def device(self, index: int) -> Device:
        """The facts about one device."""
        for device in self.devices:
            if device.index == index:
                return device
        raise TraceError(f"the trace has no device {index}; it has {[d.index for d in self.devices]}")

    def lost_until_ns(self, device: int) -> int:
        """The end of the last range of a device that is not in the trace; -1 without one."""
        return max((one.end_ns for one in self.bounded if one.device == device), default=-1)


TEXT_COLUMNS = (*Blocks.TEXTS, "mark")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What happened to memory during one cell or block.

    Rows before `first_row` describe what existed at the start (segments, and blocks as PREEXISTING). `texts` holds a table of
    strings for each column of indices; `notes` are further facts from the probe, saved as plain JSON.
    """

    events: Events
    blocks: Blocks
    made_by: MadeBy
    first_row: int = 0
    marks: Marks = field(default_factory=Marks.empty)
    samples: Samples = field(default_factory=Samples.empty)
    recategorised: Recategorised = field(default_factory=Recategorised.empty)
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = {column: tuple(self.texts.get(column, ())) for column in TEXT_COLUMNS}
        object.__setattr__(self, "texts", texts)
        if not 0 <= self.first_row <= len(self.events):
            raise TraceError(f"first_row {self.first_row} lies outside the {len(self.events)} events")
        _check_range("events.block", self.events.block, len(self.blocks))
        _check_range("recategorised.block", self.recategorised.block, len(self.blocks))
        _check_range("marks.name", self.marks.name, len(self.texts["mark"]))
        for column in Blocks.TEXTS:
            _check_range(f"blocks.{column}", getattr(self.blocks, column), len(self.texts[column]))

    def __repr__(self) -> str:
        rows, blocks = len(self.events), len(self.blocks)
        last = f"{self.made_by.duration_ns / 1e9:.3f} s" if self.has_times else self.provenance
        return f"<Trace by {self.made_by.engine}: {rows:,} events, {blocks:,} blocks, {last}>"

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the engine could not see."""
        return self.made_by.gaps

    @property
    def provenance(self) -> str:
        """Whether its figures are "measured", "simulated" (on a simulated GPU) or "predicted"."""
        if "prediction" in self.notes or self.made_by.current_engine.startswith(PREDICTING):
            return "predicted"
        return "simulated" if any(is_simulated_gpu(device.name) for device in self.made_by.devices) else "measured"

    @property
    def remark(self) -> str:
        """What has to stand with its figures: that the GPU is simulated, else ""."""
        return SIMULATED_GPU if self.provenance == "simulated" else ""

    @property
    def has_times(self) -> bool:
        """Whether its seconds mean anything: not where it was predicted, nor on a simulated GPU, where kernels take none."""
        return self.provenance == "measured"

    @property
    def device_indices(self) -> tuple[int, ...]:
        """The devices of this trace, in order."""
        return tuple(device.index for device in self.made_by.devices)

    def noted(self, key: str) -> Mapping[str, Any]:
        """A table among the notes; empty if there is none, or something else stands there, as a file may say anything."""
        found = self.notes.get(key)
        return found if isinstance(found, Mapping) else {}

    def text(self, column: str, index: int) -> str:
        """The string of an index in a column; "" if unknown."""
        return self.texts[column][index] if index >= 0 else ""

    def marks_named(self, *texts: str) -> Array:
        """Which marks have one of these texts."""
        return np.isin(self.marks.name, [index for index, text in enumerate(self.texts["mark"]) if text in texts])

    def first_known_row(self, device: int) -> int:
        """The first row of the run after all that is missing of a device."""
        since, lost_ns = self.first_row, self.made_by.lost_until_ns(device)
        return since + int(np.searchsorted(self.events.time_ns[since:], lost_ns, side="right"))

    def with_blocks(
        self, blocks: Blocks, texts: Mapping[str, tuple[str, ...]] | None = None, changes: Recategorised | None = None
    ) -> Trace:
        """A new trace with more known about its blocks, the texts they refer to, and changing categories."""
        changes = self.recategorised if changes is None else changes
        return dataclasses.replace(self, blocks=blocks, texts=texts or self.texts, recategorised=changes)

    def with_gaps(self, *gaps: Gap) -> Trace:
        """A new trace with further gaps."""
        return dataclasses.replace(self, made_by=dataclasses.replace(self.made_by, gaps=self.made_by.gaps + gaps))

    def to_pandas(self) -> Any:
        """One row per event as a pandas DataFrame, with the facts about its block; texts are categoricals.

        Rows before `first_row` (what existed at the start) have `before_start` True.
        """
        import pandas

        events, blocks = self.events, self.blocks
        is_block = events.block >= 0
        of_block = np.where(is_block, events.block, 0)

        def named(codes: Array, names: Iterable[str]) -> Any:  # to keep ten million rows affordable
            return pandas.Categorical.from_codes(codes, categories=pandas.Index(list(names), dtype=object))

        frame = pandas.DataFrame({"time_s": events.time_ns / 1e9})
        frame["kind"] = named(events.kind, (kind.name.lower() for kind in Kind))
        for name in ("block", "requested_bytes", "allocated_bytes", "device", "stream", "address"):
            frame[name] = getattr(events, name)
        frame["before_start"] = np.arange(len(events)) < self.first_row
        for name, codes in (("category", Category), ("phase", Phase)):
            column = getattr(blocks, name)[of_block] if len(blocks) else np.zeros(len(events), "u1")
            frame[name] = named(column, (code.name.lower() for code in codes))
        for name in Blocks.TEXTS:
            column = getattr(blocks, name)[of_block] if len(blocks) else np.zeros(len(events), "i4")
            frame[name] = named(np.where(is_block, column, -1), self.texts[name])
        return frame

    def nbytes(self) -> int:
        """The host memory of the columns in bytes (without texts)."""
        tables = (self.events, self.blocks, self.marks, self.samples, self.recategorised)
        return sum(array.nbytes for table in tables for array in table.arrays().values())


def _check_range(name: str, column: Array, limit: int) -> None:
    if len(column) and (int(column.min()) < -1 or int(column.max()) >= limit):
        raise TraceError(f"{name} refers to row {int(column.max())} of a table of {limit}")
