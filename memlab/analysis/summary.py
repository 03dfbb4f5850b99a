"""The summary of a run: peaks, when and where, what held them (the largest tensors too), what was not freed or not seen."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.analysis.breakdown import BEFORE, Breakdown, breakdown, categories_at
from memlab.analysis.host_at_end import host_at_end, short_host
from memlab.analysis.leak import leaks, named_bytes
from memlab.analysis.lines import backward_call_at, line_at, sources_of
from memlab.analysis.modules import NUMBER, ranged
from memlab.analysis.peak import Peak, alive_at, device_peak, peak
from memlab.analysis.timeline import timeline
from memlab.errors import MemlabError
from memlab.trace.columns import Category, Kind, Phase
from memlab.trace.trace import CPU, HOLDERS, UNFINISHED, Device, Gap, Trace
from memlab.units import UNBOUNDED, ByteRange, format_bytes, one_line

_LOOKED_UP = 200  # of how many, the largest, the line is looked up in the marks
_TORCH_FRAME = re.compile(r"[/\\]torch[/\\].*?([^/\\]+)\.py:\d+ (\w+)$")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one size whose names differ in numbers only: "net.0…999.weight"; or, without names, with one origin.

    `phase` is "before the run" for tensors that existed already. `operator`, `module` and `line` are "" where
    unknown, and for tensors with names, which say where they belong.
    """

    name: str
    category: str
    phase: str
    operator: str
    module: str
    line: str
    count: int
    tensor_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return self.count * self.tensor_bytes


def tensors_at(trace: Trace, device: int, at: Peak) -> tuple[TensorGroup, ...]:
    """What was alive at a peak, the largest group first."""
    rows, blocks = alive_at(trace, device, at.row), trace.blocks
    block, preexisting = trace.events.block[rows], trace.events.kind[rows] == Kind.PREEXISTING
    texts = ("name", "module", "line", "op", "stack")
    codes = (*(getattr(blocks, column) for column in texts), blocks.phase, categories_at(trace, at.row))
    size = trace.events.requested_bytes[rows]
    keys = np.stack([-size, preexisting, *(column[block].astype(np.int64) for column in codes)], axis=1)
    distinct, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)  # the largest first
    alike: defaultdict[tuple[bool, str, int, str, str, str, str], list[tuple[str, str, int]]] = defaultdict(list)
    found = zip(distinct.tolist(), rows[first].tolist(), counts.tolist(), strict=True)
    for place, ((negative, is_older, *codes_of, phase_code, category_code), row, count) in enumerate(found):
        name, module, line, operator, stack = (trace.text(*one) for one in zip(texts, codes_of, strict=True))
        phase = BEFORE if is_older else Phase(phase_code).name.lower()
        if place < _LOOKED_UP and not (is_older or line or name):
            # Its thread has no Python frames: the line that waits for backward has started it.
            line = line_at(trace, row) or (backward_call_at(trace, row) if phase == "backward" else "")
        if name:  # which says where it belongs
            module, line, operator = "", "", ""
        elif not operator and (frame := _TORCH_FRAME.search(stack.partition("\n")[0])) is not None:
            operator = frame[1] if frame[2] == "forward" else frame[2]  # PyTorch's function that allocated: "linear"
        kind = Category(category_code).name.lower()
        pattern = NUMBER.sub("#", name or module)
        alike[name != "", pattern, -negative, kind, phase, line, operator].append((name, module, count))
    groups = []
    for (_, _, nbytes, category, phase, line, operator), members in alike.items():
        names, modules, counts_of = zip(*members, strict=True)
        texts_of = (ranged(names), category, phase, operator, ranged(modules), line)
        groups.append(TensorGroup(*texts_of, sum(counts_of), nbytes))
    return tuple(sorted(groups, key=lambda group: -group.nbytes))


CODE = "code"
"""The key of a trace's notes that has the text of lines by their names."""


@dataclass(frozen=True, slots=True)
class Level:
    """One quantity over a run: at the start, its peak, at the end; -1 if not read."""

    of: str
    start_bytes: int
    peak: Peak
    end_bytes: int

    @property
    def left_bytes(self) -> int | None:
        """What the run did not free (negative: it freed more than it allocated)."""
        is_read = self.start_bytes >= 0 and self.end_bytes >= 0
        return self.end_bytes - self.start_bytes if is_read else None


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device: its levels (allocated first), and who held the peak of *allocated*, if known.

    `at` has "phase", "module" and "line" of the operation that made the peak, as far as known. `tensors` are what
    was alive then, if there is anything to call it by.
    """

    device: Device
    levels: tuple[Level, ...]
    shares: tuple[Breakdown, ...]
    at: Mapping[str, str]
    tensors: tuple[TensorGroup, ...] = ()

    def level(self, of: str) -> Level | None:
        """The level named `of`."""
        return next((level for level in self.levels if level.of == of), None)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. `devices` has the one with the largest peak first.

    `provenance` is "measured", "simulated" (on a simulated GPU, where values and times mean nothing) or "predicted".
    `code` has the text of lines, as far as it was recorded.
    """

    name: str
    engine: str
    duration_s: float
    devices: tuple[DeviceSummary, ...]
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...]
    provenance: str = "measured"
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_times(self) -> bool:
        """Whether its seconds mean anything: only where they were measured."""
        return self.provenance == "measured"

    def to_pandas(self) -> Any:
        """One row per device and quantity, sizes in bytes, times in seconds."""
        import pandas

        rows = []
        for of_device, level in ((one, level) for one in self.devices for level in one.levels):
            low, high, time_ns = level.peak.low_bytes, level.peak.high_bytes, level.peak.time_ns
            row = {"device": of_device.device.label, "of": level.of, "start_bytes": level.start_bytes}
            row |= {"peak_low_bytes": low, "peak_high_bytes": high if high < UNBOUNDED else np.nan}
            row |= {"peak_time_s": time_ns / 1e9 if time_ns >= 0 and self.has_times else np.nan}
            row |= {"end_bytes": level.end_bytes, "left_bytes": level.left_bytes}
            rows.append(row | {"provenance": self.provenance})
        return pandas.DataFrame(rows)


def summary(trace: Trace, name: str = "") -> Summary:
    """Summarize a trace."""
    devices = [_of_device(trace, device) for device in trace.made_by.devices]
    devices.sort(key=lambda one: -one.levels[0].peak.low_bytes)
    notes = [str(note) for note in trace.notes.get("notes", ())]
    for device in trace.made_by.devices:
        prefix = "" if device.index == CPU else f"{device.label}: "
        notes += [prefix + leak.text for leak in leaks(trace, device.index)]
    if holders := named_bytes(trace.notes.get(HOLDERS)):
        named = ", ".join(f"{one_line(path, 60)} ({format_bytes(count)})" for path, count in holders)
        notes.append(f"By its size, what grew is held by {named}.")
    if (host := host_at_end(trace)) is not None:
        notes.append(host.text)
    notes += filter(None, [short_host(trace)])
    code = {str(line): str(text) for line, text in trace.noted(CODE).items()}
    for label, by_line in sources_of(trace).items():
        code |= {f"{label}:{number}": text for number, text in by_line.items()}
    duration_s, engine = trace.made_by.duration_ns / 1e9, trace.made_by.engine
    return Summary(name, engine, duration_s, tuple(devices), trace.gaps, tuple(notes), trace.provenance, code)


def has_raised(trace: Trace) -> bool:
    """Whether the cell ended with an error; in files of early versions only a sentence says so."""
    sentences = trace.notes.get("notes", ()) if "raised" not in trace.notes else ()
    return trace.notes.get("raised") is True or any(str(one).startswith("The cell raised") for one in sentences)


def _of_device(trace: Trace, device: Device) -> DeviceSummary:
    samples = trace.samples
    levels = [_level(trace, device, "allocated")]
    if device.index != CPU:
        levels.append(_level(trace, device, "reserved"))
        used_at = device_peak(trace, device.index)
        if used_at is not None:
            mine = (samples.device == device.index) & (samples.used_bytes >= 0)
            start, end = samples.used_bytes[mine][[0, -1]].tolist() if mine.any() else (-1, -1)
            levels.append(Level("device used", start, used_at, end))
    host = samples.of(CPU, "own_bytes")
    if len(host):  # samples: a lower bound of the peak
        at = int(host.own_bytes.argmax())
        seen = Peak(ByteRange(int(host.own_bytes[at]), UNBOUNDED), int(host.time_ns[at]), -1, "samples")
        levels.append(Level("host RSS", int(host.own_bytes[0]), seen, int(host.own_bytes[-1])))
    highest, blocks = levels[0].peak, trace.blocks
    known = {"category": blocks.category > 0, "phase": blocks.phase > 0}
    known |= {"module": blocks.module >= 0, "line": blocks.line >= 0, "tensor": blocks.name >= 0}
    try:
        named = [by for by, column in known.items() if column.any()]
        shares = tuple(breakdown(trace, device.index, by, at=highest) for by in named)
        is_known = any(column.any() for by, column in known.items() if by != "phase") or (blocks.op >= 0).any()
        tensors = tensors_at(trace, device.index, highest) if is_known else ()
    except MemlabError:
        shares, tensors = (), ()  # the peak is known but its events are not, so what held it is unknown
    place: dict[str, str] = {}
    if highest.row >= 0:
        block = int(trace.events.block[highest.row])
        if blocks.phase.any():
            place["phase"] = Phase(int(blocks.phase[block])).name.lower()
        texts = {column: trace.text(column, int(getattr(blocks, column)[block])) for column in ("module", "line")}
        texts["line"] = texts["line"] or line_at(trace, highest.row)
        if not texts["line"] and place.get("phase") == "backward":
            texts["line"] = backward_call_at(trace, highest.row)
        place |= {column: text for column, text in texts.items() if text}
    return DeviceSummary(device, tuple(levels), shares, place, tensors)


def _level(trace: Trace, device: Device, of: str) -> Level:
    """If early rows were dropped, the events begin later and only the counter has the level at the start.

    A run that did not end left samples and no events.
    """
    line = timeline(trace, device.index, of)
    if trace.made_by.engine == UNFINISHED:
        seen = getattr(trace.samples, f"{of}_bytes")[trace.samples.device == device.index]
        start, end = seen[[0, -1]].tolist() if len(seen) else (-1, -1)
        return Level(of, start, peak(trace, device.index, of, line), end)
    bounded = (one for one in trace.made_by.bounded if one.device == device.index)
    was_dropped = any(one.is_exact and one.begin_ns == 0 for one in bounded)
    counter = int(getattr(device, f"start_{of}_bytes"))
    start = counter if was_dropped and counter >= 0 else line.start_bytes
    return Level(of, start, peak(trace, device.index, of, line), line.end_bytes)
