"""What a picture of a run shows: few points, none of them invented, and the extremes among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.analysis.peak import Peak, peak
from memlab.analysis.timeline import thinned, timeline
from memlab.trace.columns import Array, Phase
from memlab.trace.spans import resolve
from memlab.trace.trace import CPU, Device, Trace

_FAR_ABOVE = 3  # a sampled curve this many times higher than what PyTorch holds would only hide it


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A named curve: seconds and bytes. A stair holds its value until the next point; samples are joined."""

    name: str
    time_s: Array
    bytes: Array
    is_stair: bool

    @property
    def top_bytes(self) -> int:
        """The highest value."""
        return int(self.bytes.max())


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Everything a picture of one device needs.

    `phases` holds the code of the phase that filled most of each of its equal stretches of time; `lost` are the stretches
    (seconds) whose events are not all there: passed unread, or let go to bound memory.
    """

    device: Device
    duration_s: float
    curves: tuple[Curve, ...]
    peak: Peak
    phases: Array
    lost: tuple[tuple[float, float], ...]

    @property
    def in_scale(self) -> tuple[Curve, ...]:
        """What PyTorch holds, and what is sampled unless it is so high above that nothing else could be seen beside it."""
        held = max(curve.top_bytes for curve in self.curves if curve.is_stair)
        return tuple(curve for curve in self.curves if curve.is_stair or curve.top_bytes <= _FAR_ABOVE * held)

    @property
    def top_bytes(self) -> int:
        """The highest value of the curves in scale."""
        return max(curve.top_bytes for curve in self.in_scale)


def curves(trace: Trace, device: Device, bins: int = 150) -> Curves:
    """The curves of one device, with at most 4 points to each of `bins` stretches of time."""
    line = timeline(trace, device.index)
    drawn = [_stair("allocated", *thinned(line, bins))]
    if device.index != CPU:
        drawn.append(_stair("reserved", *thinned(timeline(trace, device.index, "reserved"), bins // 2)))
        drawn += _sampled(trace, device.index, "used", "used_bytes")
    drawn += _sampled(trace, CPU, "rss", "own_bytes") if device.index == CPU else []
    lost = [b for b in trace.made_by.bounded if b.device == device.index]
    return Curves(
        device=device,
        duration_s=max(trace.made_by.duration_ns, line.end_ns) / 1e9,
        curves=tuple(drawn),
        peak=peak(trace, device.index, "allocated", line),
        phases=_phases(trace, line.end_ns, bins),
        lost=tuple((b.begin_ns / 1e9, b.end_ns / 1e9) for b in lost),
    )


def _stair(name: str, time_ns: Array, level: Array) -> Curve:
    keep = np.concatenate(([True], np.diff(level[:-1]) != 0, [True])) if len(level) > 2 else np.ones(len(level), bool)
    return Curve(name, time_ns[keep] / 1e9, level[keep], True)


def _sampled(trace: Trace, device: int, name: str, column: str) -> list[Curve]:
    mine = trace.samples.rows((trace.samples.device == device) & (getattr(trace.samples, column) >= 0))
    if not len(mine):
        return []
    step = -(-len(mine) // 150)
    level = getattr(mine, column)
    highest = [start + int(level[start : start + step].argmax()) for start in range(0, len(mine), step)]
    return [Curve(name, mine.time_ns[highest] / 1e9, level[highest], False)]


def _phases(trace: Trace, end_ns: int, bins: int) -> Array:
    """Which phase filled most of each stretch; looked at in 16 places of each."""
    marks = trace.marks
    if not len(marks):
        return np.zeros(0, "u1")
    phase, _ = resolve(marks.time_ns, marks.kind.tolist(), marks.name.tolist(), trace.texts["mark"])
    looks = phase.at((np.arange(bins * 16) + 0.5) / (bins * 16) * end_ns).reshape(bins, 16)
    votes = np.stack([(looks == code).sum(axis=1) for code in Phase])
    return votes.argmax(axis=0).astype("u1")
