"""The data of a run's figure: few points, all of them measured, including the extremes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.analysis.breakdown import ROUNDING
from memlab.analysis.peak import Peak, peak
from memlab.analysis.timeline import Timeline, lives, timeline
from memlab.trace.columns import Array, Category, Phase
from memlab.trace.spans import phases
from memlab.trace.trace import CPU, Device, Trace

LAYERS = ("parameter", "buffer", "optimizer", "gradient", "activation", "input", "temporary", "other", ROUNDING)
"""All layers in stacking order: long-lived ones at the bottom."""

_LAYER_OF_CATEGORY = np.array([LAYERS.index(category.name.lower()) for category in Category], "u1")
_ROUNDING = LAYERS.index(ROUNDING)


@dataclass(frozen=True, slots=True, eq=False)
class Areas:
    """The bytes of each layer over time, as step functions; `layers` has those that are ever above 0, in order."""

    time_ns: Array
    layers: Mapping[str, Array]

    @property
    def total_bytes(self) -> Array:
        """The sum of the layers: the allocated curve."""
        return sum(self.layers.values(), np.zeros(len(self.time_ns), np.int64))

    def at(self, index: Array) -> Areas:
        """The same at selected times."""
        return Areas(self.time_ns[index], {name: level[index] for name, level in self.layers.items()})

    def edges(self) -> dict[str, Array]:
        """The upper edge of each layer when they are stacked."""
        tops = np.cumsum(np.reshape([*self.layers.values()], (len(self.layers), len(self.time_ns))), axis=0)
        return dict(zip(self.layers, tops, strict=True))


def has_categories(trace: Trace, device: int) -> bool:
    """Whether any block of this device has a category."""
    if not trace.blocks.category.any() and not len(trace.recategorised):
        return False
    events = trace.events
    mine = events.block[(events.device == device) & (events.block >= 0)]
    return bool(trace.blocks.category[mine].any() or np.isin(trace.recategorised.block, mine).any())


def areas(trace: Trace, device: int, line: Timeline | None = None) -> Areas:
    """The layers at every step of `line`, by default every change of what one device has allocated."""
    line = line or timeline(trace, device)
    stops = np.maximum(line.row, trace.first_row - 1)  # rows, ascending; -1 is the start
    born, died = lives(trace, device)
    known_in = np.where(born >= 0, born, died)  # where the allocation was not seen, only the free tells
    block = np.flatnonzero(known_in < len(trace.events))
    size = np.zeros(len(born), np.int64)
    size[block] = trace.events.requested_bytes[known_in[block]]
    layer = _LAYER_OF_CATEGORY[trace.blocks.category]
    change = np.zeros((len(stops) + 1) * len(LAYERS))  # sums of whole numbers below 2**53 are exact

    def add(row: Array, to: Array, count: Array) -> None:
        change[:] += np.bincount(np.searchsorted(stops, row) * len(LAYERS) + to, count, len(change))

    came = block[born[block] >= 0]
    add(born[came], layer[came], size[came])
    if len(changes := trace.recategorised):  # moved from layer to layer while a block lives
        changes = changes.rows(np.lexsort((changes.row, changes.block)))
        changes = changes.rows((born[changes.block] >= 0) & (changes.row <= died[changes.block]))
        moved, after = changes.block, _LAYER_OF_CATEGORY[changes.category]
        before = np.where(np.diff(moved, prepend=-1) != 0, layer[moved], np.roll(after, 1))
        row = np.maximum(changes.row, born[moved])
        add(row, before, -size[moved])
        add(row, after, size[moved])
        layer[moved] = after  # of several changes of a block the last stays
    add(died[block], layer[block], -size[block])
    levels = np.cumsum(change.reshape(-1, len(LAYERS))[:-1], axis=0).astype(np.int64).T
    levels[_ROUNDING] = line.bytes - levels.sum(axis=0)
    return Areas(line.time_ns, {name: level for name, level in zip(LAYERS, levels, strict=True) if level.any()})


BINS = 140
_FEWEST_BINS = 40
_MOST_STEPS = 500  # more corners than that are visual noise, and 30 bytes each in the PNG that JupyterLab saves
_VISIBLE = 1 / 200  # of the height
_HIDDEN = 1 / 10  # of the height
_MANY = 1 / 2  # of the time bins: if fewer hide a dip, the curve itself shows the dips
_MOST_SAMPLES = 80
_PHASE_BINS = 100
_FAR_ABOVE = 1.5  # a sampled curve this many times higher than PyTorch's would flatten it
_MOST_MIXED = 1 / 2  # of the bins: if more have no phase for three quarters of their time, a strip shows one by chance
BUDGET = "budget_bytes"
"""The key of a trace's notes that has the budget of a run."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A named curve: seconds and bytes. A step curve holds its value until the next point; samples are joined."""

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

    The first curve is *allocated*: every step, or the highest level in each of equal time bins, and then `lowest` has
    the lowest level of each. `areas` splits it by category at its own times, where categories are known. `phases` has the
    code of the phase that filled most of each of its equal time bins; `lost` are intervals (seconds) with missing
    events: lost unread, or dropped to bound memory. Without `has_times` (predicted, or on a simulated GPU) a second is one
    event: `source` says why. Where phases change faster than can be drawn `phases` is empty, and `phase_shares` has how much of
    the run each takes, by its code. `budget_bytes` is 0 without one.
    """

    device: Device
    duration_s: float
    curves: tuple[Curve, ...]
    peak: Peak
    phases: Array
    lost: tuple[tuple[float, float], ...]
    start_bytes: int
    lowest: Curve | None = None
    areas: Areas | None = None
    has_times: bool = True
    source: str = ""
    phase_shares: Mapping[int, float] = field(default_factory=dict)
    budget_bytes: int = 0

    @property
    def in_scale(self) -> tuple[Curve, ...]:
        """PyTorch's curves, and what the driver reports unless it is so high that it would flatten the others.

        Host memory, most of it Python and its libraries, would.
        """
        held = max(curve.top_bytes for curve in self.curves if curve.is_stair)
        low = (one for one in self.curves if one.is_stair or (one.name != "rss" and one.top_bytes <= _FAR_ABOVE * held))
        return tuple(low)

    @property
    def top_bytes(self) -> int:
        """The highest value of the curves in scale."""
        return max(curve.top_bytes for curve in self.in_scale)


def curves(trace: Trace, device: Device, bins: int = BINS) -> Curves:
    """The curves of one device, with at most one point per time bin."""
    has_times = trace.has_times
    source = "" if has_times else trace.remark or trace.provenance
    trace = trace if has_times else in_order(trace)
    line = timeline(trace, device.index)
    time_ns, shown = moments(line, bins)
    held = None
    if has_categories(trace, device.index):
        held = areas(trace, device.index, _only(line, shown))
        edges = np.array([*held.edges().values()])
        steps = np.abs(np.diff(edges, axis=1)) > _VISIBLE * edges.max(initial=0) if len(edges) else np.zeros(0, bool)
        if (count := int(steps.sum())) > _MOST_STEPS:  # they move too much to be distinguished
            time_ns, fewer = moments(_only(line, shown), max(bins * _MOST_STEPS // count, _FEWEST_BINS))
            shown, held = shown[fewer], held.at(fewer)
        held = dataclasses.replace(held, time_ns=time_ns)
    allocated = Curve("allocated", time_ns / 1e9, line.bytes[shown], True)
    drawn = [allocated]
    if device.index == CPU:
        drawn += _sampled(trace, CPU, "rss", "own_bytes")
    else:
        reserved = timeline(trace, device.index, "reserved")
        time_ns, shown = moments(reserved, bins // 2)
        drawn.append(Curve("reserved", time_ns / 1e9, reserved.bytes[shown], True))
        # Between few samples there would be a line over events that nobody saw.
        drawn += _sampled(trace, device.index, "used", "used_bytes") if has_times else []
    phases, shares = _phases(trace, line.end_ns, min(bins, _PHASE_BINS))
    budget = trace.notes.get(BUDGET)
    lost = [b for b in trace.made_by.bounded if b.device == device.index and b.end_ns > b.begin_ns]
    return Curves(
        device=device,
        duration_s=max(trace.made_by.duration_ns, line.end_ns) / 1e9,
        curves=tuple(drawn),
        peak=peak(trace, device.index, "allocated", line),
        phases=phases,
        lost=tuple((b.begin_ns / 1e9, b.end_ns / 1e9) for b in lost),
        start_bytes=line.start_bytes,
        lowest=_lowest(line, allocated),
        areas=held,
        has_times=has_times,
        source=source,
        phase_shares=shares,
        budget_bytes=budget if type(budget) is int else 0,
    )


def in_order(trace: Trace) -> Trace:
    """The same with the number of events so far in place of nanoseconds, a billion for each: where time means nothing."""
    events, marks, made_by = trace.events, trace.marks, trace.made_by
    count = np.maximum(np.arange(len(events)) - trace.first_row + 1, 0) * 1_000_000_000

    def moment(time_ns: Array) -> Array:
        rows: Array = np.searchsorted(events.time_ns[trace.first_row :], time_ns, side="right") * 1_000_000_000
        return rows

    bounded = tuple(
        dataclasses.replace(one, begin_ns=int(moment(np.array(one.begin_ns))), end_ns=int(moment(np.array(one.end_ns))))
        for one in made_by.bounded
    )
    return dataclasses.replace(
        trace,
        events=events.replace(time_ns=count),
        marks=marks.replace(time_ns=np.maximum(marks.row - trace.first_row, 0) * 1_000_000_000),
        samples=trace.samples.replace(time_ns=moment(trace.samples.time_ns)),
        made_by=dataclasses.replace(made_by, duration_ns=int(count[-1]) if len(count) else 0, bounded=bounded),
    )


def moments(line: Timeline, bins: int) -> tuple[Array, Array]:
    """The times to draw and the step shown at each: all steps, or the highest of each bin, and the end.

    With more steps than bins the times are evenly spaced, so they need not be stored: each bin shows its highest level
    from its start. No peak is lost; it may be drawn up to one bin early.
    """
    last = len(line.bytes) - 1
    if last < bins:
        return np.append(line.time_ns, line.end_ns), np.append(np.arange(last + 1), last)
    return np.linspace(0, line.end_ns, bins + 1), np.append(_extremes(line, bins, np.argmax), last)


def _extremes(line: Timeline, bins: int, of: Callable[[Array], Any]) -> Array:
    """One step per bin: the one `of` picks among those in it; in an empty bin, the previous one."""
    edges = np.linspace(0, line.end_ns, bins + 1)[1:-1].astype(line.time_ns.dtype)
    cuts = [0, *np.searchsorted(line.time_ns, edges).tolist(), len(line.bytes)]
    return np.array([a + int(of(line.bytes[a:b])) if a < b else max(a - 1, 0) for a, b in itertools.pairwise(cuts)])


def _only(line: Timeline, shown: Array) -> Timeline:
    return Timeline(line.time_ns[shown], line.bytes[shown], line.row[shown], line.end_ns)


def _lowest(line: Timeline, highest: Curve) -> Curve | None:
    """The lowest level in each bin where the curve shows the highest, if that hides many dips."""
    bins = len(highest.bytes) - 1
    if len(line.bytes) <= bins:
        return None
    low = np.append(line.bytes[_extremes(line, bins, np.argmin)], line.bytes[-1])
    high = highest.bytes
    around = np.minimum(high[1:-1], np.minimum(high[:-2], high[2:]))  # a slope is no dip
    is_hidden = around - low[1:-1] > _HIDDEN * highest.top_bytes
    return Curve("lowest", highest.time_s, low, True) if is_hidden.mean() > _MANY else None


def _sampled(trace: Trace, device: int, name: str, column: str) -> list[Curve]:
    mine = trace.samples.of(device, column)
    if not len(mine):
        return []
    step = -(-len(mine) // _MOST_SAMPLES)
    level = getattr(mine, column)
    highest = [start + int(level[start : start + step].argmax()) for start in range(0, len(mine), step)]
    return [Curve(name, mine.time_ns[highest] / 1e9, level[highest], False)]


def _phases(trace: Trace, end_ns: int, bins: int) -> tuple[Array, dict[int, float]]:
    """The phase that filled most of each time bin, sampled at 16 points per bin; if that is chance, the share of each phase."""
    marks, nothing = trace.marks, np.zeros(0, "u1")
    if not len(marks):
        return nothing, {}
    phase = phases(marks, trace.texts["mark"])
    looks = phase.at((np.arange(bins * 16) + 0.5) / (bins * 16) * end_ns).reshape(bins, 16)
    votes = np.stack([(looks == code).sum(axis=1) for code in Phase])
    if (votes.max(axis=0) < 12).mean() > _MOST_MIXED:
        return nothing, {int(code): float((looks == code).mean()) for code in Phase if code and (looks == code).any()}
    return votes.argmax(axis=0).astype("u1"), {}
