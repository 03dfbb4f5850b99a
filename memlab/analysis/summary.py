"""What a run comes to: peaks, when and where, who held them, what was left behind, what was not seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.analysis.breakdown import Breakdown, breakdown
from memlab.analysis.leak import leaks
from memlab.analysis.peak import UNKNOWN_BYTES, Peak, device_peak, peak
from memlab.analysis.timeline import Timeline, timeline
from memlab.errors import MemlabError
from memlab.trace.columns import Phase
from memlab.trace.trace import CPU, Device, Gap, Trace

NAMELESS = "without a name"
"""What no object has: activations and temporaries, and what the allocator rounded."""


@dataclass(frozen=True, slots=True)
class Level:
    """One quantity over a run: at the start, its peak, at the end; -1 where it was not read."""

    of: str
    start_bytes: int
    peak: Peak
    end_bytes: int

    @property
    def left_bytes(self) -> int | None:
        """What the run left behind (negative: it gave back more than it took)."""
        if self.start_bytes < 0 or self.end_bytes < 0:
            return None
        return self.end_bytes - self.start_bytes


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device: its levels (allocated first), and who held the peak of *allocated*, where that is known.

    `at` tells of the operation that made the peak: its "phase", "module" and "line", as far as known.
    """

    device: Device
    levels: tuple[Level, ...]
    shares: tuple[Breakdown, ...]
    at: Mapping[str, str]

    def level(self, of: str) -> Level | None:
        """The level named `of`."""
        return next((level for level in self.levels if level.of == of), None)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. `devices` has the one with the largest peak first."""

    name: str
    engine: str
    duration_s: float
    devices: tuple[DeviceSummary, ...]
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...]

    def to_pandas(self) -> Any:
        """One row per device and quantity, sizes in bytes, times in seconds."""
        import pandas

        return pandas.DataFrame([_row(device, level) for device in self.devices for level in device.levels])


def summary(trace: Trace, name: str = "") -> Summary:
    """Take the figures of a trace."""
    devices = [device_summary(trace, device) for device in trace.made_by.devices]
    devices.sort(key=lambda one: -one.levels[0].peak.low_bytes)
    return Summary(
        name=name,
        engine=trace.made_by.engine,
        duration_s=trace.made_by.duration_ns / 1e9,
        devices=tuple(devices),
        gaps=trace.gaps,
        notes=(*(str(note) for note in trace.notes.get("notes", ())), *_leaks(trace)),
    )


def _leaks(trace: Trace) -> Iterator[str]:
    """What grows from one iteration of the run to the next, in a sentence each."""
    for device in trace.made_by.devices:
        for leak in leaks(trace, device.index):
            yield leak.text if device.index == CPU else f"{device.label}: {leak.text}"


def device_summary(trace: Trace, device: Device) -> DeviceSummary:
    """The figures of one device."""
    line = timeline(trace, device.index)
    at = peak(trace, device.index, "allocated", line)
    levels = [Level("allocated", _start(trace, device, line, "allocated"), at, line.end_bytes)]
    if device.index != CPU:
        levels += [_reserved(trace, device), *_used(trace, device)]
    levels += _resident(trace)
    return DeviceSummary(device, tuple(levels), _shares(trace, device, at), _where(trace, at))


def _start(trace: Trace, device: Device, line: Timeline, of: str) -> int:
    """The level at the start; where early rows were let go, the events begin later and only the counter tells."""
    let_go = any(b.device == device.index and b.is_exact and b.begin_ns == 0 for b in trace.made_by.bounded)
    counter: int = getattr(device, f"start_{of}_bytes")
    return counter if let_go and counter >= 0 else line.start_bytes


def _reserved(trace: Trace, device: Device) -> Level:
    line = timeline(trace, device.index, "reserved")
    return Level(
        "reserved", _start(trace, device, line, "reserved"), peak(trace, device.index, "reserved", line), line.end_bytes
    )


def _used(trace: Trace, device: Device) -> list[Level]:
    at = device_peak(trace, device.index)
    if at is None:
        return []
    mine = (trace.samples.device == device.index) & (trace.samples.used_bytes >= 0)
    used = trace.samples.used_bytes[mine]
    start, end = (int(used[0]), int(used[-1])) if len(used) else (-1, -1)
    return [Level("device used", start, at, end)]


def _resident(trace: Trace) -> list[Level]:
    """The kernel's resident memory, from samples: a lower bound of its peak."""
    mine = trace.samples.rows((trace.samples.device == CPU) & (trace.samples.own_bytes >= 0))
    if not len(mine):
        return []
    at = int(mine.own_bytes.argmax())
    seen = Peak(int(mine.own_bytes[at]), 1 << 62, int(mine.time_ns[at]), -1, "samples")
    return [Level("host RSS", int(mine.own_bytes[0]), seen, int(mine.own_bytes[-1]))]


def _shares(trace: Trace, device: Device, at: Peak) -> tuple[Breakdown, ...]:
    try:
        shares = (breakdown(trace, device.index, each, at=at) for each in _known(trace))
        return tuple(one if one.by != "tensor" else _named(trace, one) for one in shares)
    except MemlabError:
        return ()  # the peak is known and its events are not: then nobody can say who held it


def _named(trace: Trace, shares: Breakdown) -> Breakdown:
    """The shares of what has a name, and the rest as one."""
    names = set(trace.texts["name"])
    named = {name: count for name, count in shares.items() if name in names}
    rest = {NAMELESS: shares.total_bytes - sum(named.values())}
    ordered = sorted((named | rest).items(), key=lambda item: -item[1])
    return Breakdown(shares.by, shares.of, {name: count for name, count in ordered if count})


def _known(trace: Trace) -> list[str]:
    """By what the blocks of this trace can be told apart."""
    known = {
        "category": trace.blocks.category > 0,
        "phase": trace.blocks.phase > 0,
        "module": trace.blocks.module >= 0,
        "tensor": trace.blocks.name >= 0,
    }
    return [by for by, column in known.items() if column.any()]


def _where(trace: Trace, at: Peak) -> dict[str, str]:
    if at.row < 0:
        return {}
    block = int(trace.events.block[at.row])
    found = {}
    if trace.blocks.phase.any():
        found["phase"] = Phase(int(trace.blocks.phase[block])).name.lower()
    for column in ("module", "line"):
        text = trace.text(column, int(getattr(trace.blocks, column)[block]))
        if text:
            found[column] = text
    return found


def _row(device: DeviceSummary, level: Level) -> dict[str, Any]:
    return {
        "device": device.device.label,
        "of": level.of,
        "start_bytes": level.start_bytes,
        "peak_low_bytes": level.peak.low_bytes,
        "peak_high_bytes": level.peak.high_bytes if level.peak.high_bytes < UNKNOWN_BYTES else np.nan,
        "peak_time_s": level.peak.time_ns / 1e9 if level.peak.time_ns >= 0 else np.nan,
        "end_bytes": level.end_bytes,
        "left_bytes": level.left_bytes,
    }
