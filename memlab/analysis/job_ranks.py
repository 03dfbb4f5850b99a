"""The ranks of one distributed job side by side, from one trace each: peaks, steps, what failed first, and what grows.

Ranks are aligned on optimizer steps. A rank that was killed left samples: its figures are lower bounds, and count for the worst
rank alone. Times of several machines are compared as their clocks have them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.analysis.breakdown import breakdown
from memlab.analysis.host_at_end import HostAtEnd, host_at_end
from memlab.analysis.iterations import step_ends
from memlab.analysis.leak import Leak, Leaks, leaks, named_bytes
from memlab.analysis.oom.moment import Moment, last_moment
from memlab.analysis.peak import Peak, peak
from memlab.analysis.timeline import highest, timeline
from memlab.errors import MemlabError
from memlab.trace.columns import Array
from memlab.trace.trace import CPU, ERROR, HOLDERS, RANK, STEPS_BEFORE, UNFINISHED, Device, Trace
from memlab.units import ByteRange, KiB, format_bytes, number_of, one_line

ENDED, RAISED, TERMINATED, CUT_OFF = "ended", "raised", "terminated", "cut off"
SHARES = ("category", "module")
_LEAST_GAP_S = 0.2
"""A process may have lived that long after its last sample: two of them."""
_LOST_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|\bpeer\b|\bnccl|processgroup|tcpstore|timed? ?out|DistBackend"
    r"|DistNetwork|DistStore|rendezvous|got signal: 15",
    re.IGNORECASE,
)
"""What the ranks say that wait for one that has failed."""
_MOST_STEPS = 1 << 40
_FEWEST_STEPS, _MIN_RISE, _MIN_RISE_BYTES = 9, 0.1, 64 * KiB


@dataclass(frozen=True, slots=True, eq=False)
class RankSteps:
    """The optimizer steps of a rank, counted from 1: the highest level of *allocated* in each, and that at its end.

    Where `is_seen` is False the levels come from samples, and may have been higher.
    A rank that failed has the step that it did not finish as its last.
    """

    number: Array
    peak_bytes: Array
    end_bytes: Array
    is_seen: Array
    finished: int = 0

    @classmethod
    def none(cls) -> RankSteps:
        """No steps."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, np.zeros(0, bool))

    @classmethod
    def joined(cls, parts: Sequence[RankSteps]) -> RankSteps:
        """The steps of consecutive measurements."""
        names = ("number", "peak_bytes", "end_bytes", "is_seen")
        columns: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in parts]) for name in names}
        return cls(**columns, finished=max(one.finished for one in parts))


@dataclass(frozen=True, slots=True)
class HeldAtFailure:
    """What a rank held when it failed: bytes of *allocated*, by category and by module, and by name where names were searched.

    Empty shares mean that it is unknown.
    """

    allocated_bytes: int
    shares: Mapping[str, Mapping[str, int]]
    named: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """One rank: where it ran, its peaks, what held the peak by category and module, its steps, and how it ended.

    `began_s` and `ended_s` are seconds of the Unix clock; a rank whose `ending` is "cut off" lived until some time between
    `ended_s` and `ended_by_s`. `holders` are names of what grows, `host` is the host at the last sample of one that was cut off.
    """

    rank: int
    world_size: int
    name: str
    files: tuple[str, ...]
    device: Device | None
    provenance: str
    peak: ByteRange
    reserved: ByteRange | None
    shares: Mapping[str, Mapping[str, int]]
    steps: RankSteps
    began_s: float
    ended_s: float
    ended_by_s: float
    ending: str
    error: str = ""
    ran_out: bool = False
    held: HeldAtFailure | None = None
    leaks: Leaks = field(default_factory=Leaks)
    holders: tuple[tuple[str, int], ...] = ()
    gaps: tuple[str, ...] = ()
    host: HostAtEnd | None = None

    @property
    def is_partial(self) -> bool:
        """Whether its file ends before the rank did."""
        return self.ending == CUT_OFF

    @property
    def is_failed(self) -> bool:
        """Whether it raised, or was ended by a signal."""
        return self.ending != ENDED

    @property
    def has_times(self) -> bool:
        """Whether its seconds mean anything: only where they were measured."""
        return self.provenance == "measured"


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity over the ranks: the worst, the median and the lowest.

    `is_bound`: the worst is that of a rank that was cut off, and may have been higher.
    """

    name: str
    worst_bytes: int
    worst_rank: int
    median_bytes: int
    lowest_bytes: int
    lowest_rank: int
    is_bound: bool = False

    @property
    def spread_bytes(self) -> int:
        """The worst minus the lowest."""
        return self.worst_bytes - self.lowest_bytes


@dataclass(frozen=True, slots=True)
class RankGrowth:
    """Memory that grows over the steps of some ranks; `steady` is how many others were seen not to grow, `unknown` the rest."""

    ranks: tuple[int, ...]
    steady: int
    unknown: int
    bytes_per_step: int
    text: str
    holders: tuple[tuple[str, int], ...] = ()

    @property
    def sentence(self) -> str:
        """Which ranks grow, by what and where, and what the others do."""
        steady, unknown = number_of(self.steady, "other"), self.unknown
        rest = [f"not on {steady}"] if self.steady and unknown else []
        rest += [f"unknown of {unknown}"] if unknown else []
        only = "Only on" if self.steady and not unknown else "On"
        who = f"{only} {ranks_text(self.ranks)}" if rest or self.steady else "On all ranks"
        held = ", ".join(f"{one_line(path, 60)} ({format_bytes(count)})" for path, count in self.holders[:3])
        where = f" At the end it was held by {held}." if held else ""
        return f"{', '.join([who, *rest])}: {self.text[:1].lower()}{self.text[1:]}{where}"


@dataclass(frozen=True, slots=True)
class JobRanks:
    """All ranks of a job that left something, in order; and the numbers of those that are missing."""

    ranks: tuple[RankRun, ...]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.ranks[0].name

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self.ranks[0].world_size

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that left no file."""
        there = {one.rank for one in self.ranks}
        return tuple(number for number in range(self.world_size) if number not in there)

    @property
    def provenance(self) -> str:
        """Whether the figures are "measured", "simulated" or "predicted"."""
        found = {one.provenance for one in self.ranks}
        return next(one for one in ("simulated", "predicted", "measured") if one in found)

    def __getitem__(self, rank: int) -> RankRun:
        for one in self.ranks:
            if one.rank == rank:
                return one
        raise MemlabError(f"rank {rank!r:.20} left no file; there are {ranks_text([one.rank for one in self.ranks])}.")

    @property
    def peak(self) -> Spread:
        """The peak of *allocated* over the ranks."""
        return self._spread("peak allocated", {one.rank: one.peak.low for one in self.ranks})

    @property
    def reserved(self) -> Spread | None:
        """The peak of *reserved* over the ranks; None on the CPU."""
        known = {one.rank: one.reserved.low for one in self.ranks if one.reserved is not None}
        return self._spread("peak reserved", known) if known else None

    def by(self, by: str = "category") -> tuple[Spread, ...]:
        """What held the peaks, by "category" or "module": the largest difference between ranks first, then the largest.

        Each rank counts at its own peak; ranks whose holders are unknown are left out.
        """
        if by not in SHARES:
            raise MemlabError(f"ranks are compared by {' or '.join(SHARES)}, got {by!r:.40}.")
        known = [one for one in self.ranks if one.shares.get(by)]
        names = dict.fromkeys(name for one in known for name in one.shares[by])
        spreads = [self._spread(name, {one.rank: one.shares[by].get(name, 0) for one in known}) for name in names]
        return tuple(sorted(spreads, key=lambda one: (-one.spread_bytes, -one.worst_bytes)))

    def _spread(self, name: str, values: Mapping[int, int]) -> Spread:
        """Those of ranks that were cut off count for the worst alone, unless there are no others."""
        partial = {one.rank for one in self.ranks if one.is_partial}
        whole = {rank: count for rank, count in values.items() if rank not in partial} or values
        worst, lowest = max(values, key=values.__getitem__), min(whole, key=whole.__getitem__)
        median = round(statistics.median(whole.values()))
        return Spread(name, values[worst], worst, median, whole[lowest], lowest, worst in partial)

    @property
    def first_failed(self) -> RankRun | None:
        """The rank that failed first, by absolute time; of those that cannot be ordered, the one with an error of its own."""
        failed = [one for one in self.ranks if one.is_failed]
        if not failed:
            return None
        if len(failed) == len(self.ranks) and all(one.ending == TERMINATED for one in failed):
            return None
        until_s = min(one.ended_by_s for one in failed)
        if len(failed) == len(self.ranks) and all(one.is_partial and one.ended_s <= until_s for one in failed):
            return None  # all files end at the same time: the job still runs, or was killed as a whole
        return min((one for one in failed if one.ended_s <= until_s), key=lambda one: (_how_likely(one), one.ended_s))

    @property
    def growth(self) -> tuple[RankGrowth, ...]:
        """What grows over the steps, on which ranks, that of the fewest ranks first."""
        return tuple(sorted(_growth(self.ranks), key=lambda one: (len(one.ranks), -one.bytes_per_step)))

    def by_step(self, most: int = 240) -> tuple[Array, Array]:
        """Numbers of optimizer steps, at most so many, and per rank the highest *allocated* up to the next; NaN for no step."""
        stepped = [one.steps.number for one in self.ranks if len(one.steps.number)]
        if not stepped:
            return np.zeros(0, np.int64), np.zeros((len(self.ranks), 0))
        first, last = min(int(one[0]) for one in stepped), max(int(one[-1]) for one in stepped)
        stride = -(-(last - first + 1) // most)
        numbers = np.arange(first, last + 1, stride)
        levels = np.full((len(self.ranks), len(numbers)), -np.inf)
        for row, one in zip(levels, self.ranks, strict=True):
            np.maximum.at(row, (one.steps.number - first) // stride, one.steps.peak_bytes)
        return numbers, np.where(np.isinf(levels), np.nan, levels)

    def to_pandas(self) -> Any:
        """One row per rank: bytes, seconds (NaN on a simulated GPU), how it ended, and what held its peak by category."""
        import pandas

        began_s = min(one.began_s for one in self.ranks)
        categories = list(dict.fromkeys(name for one in self.ranks for name in one.shares.get("category", ())))
        rows = []
        for one in self.ranks:
            low, high = one.peak.numbers()
            row: dict[str, Any] = {"rank": one.rank, "device": one.device.label if one.device is not None else None}
            row |= {"peak_low_bytes": low, "peak_high_bytes": high, "steps": one.steps.finished, "ending": one.ending}
            row |= {"reserved_bytes": one.reserved.low if one.reserved is not None else None}
            times_s = (one.began_s - began_s, one.ended_s - began_s) if one.has_times else (np.nan, np.nan)
            row |= {"began_s": times_s[0], "ended_s": times_s[1], "error": one.error}
            row |= {f"{name}_bytes": one.shares["category"].get(name, 0) if one.shares else None for name in categories}
            rows.append(row | {"provenance": one.provenance, "files": ", ".join(one.files)})
        return pandas.DataFrame(rows).set_index("rank")


def rank_run(traces: Sequence[Trace], files: Sequence[str] = ()) -> RankRun:
    """One rank from its trace; or from several, of consecutive parts of its run."""
    last, facts = traces[-1], traces[-1].notes[RANK]
    peaks = [_highest(trace) for trace in traces]
    top = max(range(len(traces)), key=lambda at: peaks[at][1].low)
    trace, (device, at_peak) = traces[top], peaks[top]
    ending, error = _ending(last)
    began_s = traces[0].made_by.started_at_s
    has_run_out = error.get("out_of_memory") is True
    moment = last_moment(last) if has_run_out else None
    ended_s, ended_by_s = _ended(last, ending, moment)
    index = device.index if device is not None else CPU
    events_of = [one for one in traces if one.made_by.engine != UNFINISHED and index in one.device_indices]
    finding = [leaks(one, index) for one in events_of]
    has_reserved = device is not None and device.index != CPU
    return RankRun(
        rank=int(facts["rank"]),
        world_size=int(facts["world_size"]),
        name=str(last.notes.get("name", "")),
        files=tuple(files),
        device=device,
        provenance=last.provenance,
        peak=at_peak,
        reserved=peak(trace, index, "reserved").bytes if has_reserved else None,
        shares=_shares(trace, index, None) if ending != CUT_OFF or top < len(traces) - 1 else {},
        steps=RankSteps.joined([_steps(one, index, ending != ENDED) for one in traces]),
        began_s=began_s,
        ended_s=ended_s,
        ended_by_s=ended_by_s,
        ending=ending,
        error=str(error.get("text", "")),
        ran_out=has_run_out,
        held=_held(last, index, ending, moment, named_bytes(error.get("held"))) if ending != ENDED else None,
        leaks=next((one for one in reversed(finding) if one), finding[-1] if finding else Leaks()),
        holders=named_bytes(last.notes.get(HOLDERS)),
        gaps=tuple(dict.fromkeys(f"{gap.name}: {gap.text}" for one in traces for gap in one.gaps)),
        host=host_at_end(last),
    )


def _highest(trace: Trace) -> tuple[Device | None, ByteRange]:
    """The device with the largest peak of *allocated*, as in reports."""
    found = [(device, peak(trace, device.index).bytes) for device in trace.made_by.devices]
    return max(found, key=lambda one: one[1].low, default=(None, ByteRange.exact(0)))


def _ending(trace: Trace) -> tuple[str, Mapping[str, Any]]:
    error = trace.notes.get(ERROR)
    if trace.made_by.engine == UNFINISHED or any(gap.name == CUT_OFF for gap in trace.gaps):
        return CUT_OFF, {}
    if trace.notes.get("raised") is True:
        return RAISED, error if isinstance(error, dict) else {}
    return (TERMINATED, error) if isinstance(error, dict) else (ENDED, {})


def _ended(trace: Trace, ending: str, moment: Moment | None) -> tuple[float, float]:
    """The earliest and the latest time of the end; of a run that ran out of memory the time of the request."""
    began_s = trace.made_by.started_at_s
    if ending != CUT_OFF:
        ended_s = began_s + (moment.time_ns if moment is not None else trace.made_by.duration_ns) / 1e9
        return ended_s, ended_s
    times_s = np.unique(trace.samples.time_ns) / 1e9
    last_s = float(times_s[-1]) if len(times_s) else trace.made_by.duration_ns / 1e9
    pause_s = float(np.diff(times_s).max(initial=0.0))
    return began_s + last_s, began_s + last_s + max(2 * pause_s, _LEAST_GAP_S)


def _shares(trace: Trace, device: int, at: Peak | None) -> dict[str, Mapping[str, int]]:
    try:
        return {by: dict(breakdown(trace, device, by, at=at)) for by in SHARES}
    except MemlabError:  # the events around the peak were lost
        return {}


def _held(
    trace: Trace, device: int, ending: str, moment: Moment | None, named: tuple[tuple[str, int], ...]
) -> HeldAtFailure:
    """What was allocated when it failed: at the request that failed, else at the end, while the error kept its frames."""
    if ending == CUT_OFF:
        samples = trace.samples.of(device, "allocated_bytes")
        return HeldAtFailure(int(samples.allocated_bytes[-1]) if len(samples) else 0, {}, named)
    line = timeline(trace, device)
    row = moment.row if moment is not None and moment.device == device else int(line.row[-1])
    at = Peak(ByteRange.exact(line.at_row(row)), line.end_ns, row, "the failure")
    return HeldAtFailure(at.low_bytes, _shares(trace, device, at), named)


# --- steps ---------------------------------------------------------------------------------------------------------------


def _steps(trace: Trace, device: int, has_failed: bool) -> RankSteps:
    ends = step_ends(trace)
    before = trace.notes.get(STEPS_BEFORE, 0)
    first = before + 1 if isinstance(before, int) and 0 <= before < _MOST_STEPS else 1
    times_ns = trace.marks.time_ns[ends]
    line = timeline(trace, device)
    if has_failed and (not len(ends) or max(line.end_ns, trace.made_by.duration_ns) > times_ns[-1]):
        times_ns = np.append(times_ns, max(line.end_ns, trace.made_by.duration_ns))
    if not len(times_ns):
        return RankSteps.none()
    times_ns = np.maximum.accumulate(times_ns)  # files may say anything
    rows = np.append(np.maximum(trace.marks.row[ends], 0), np.full(len(times_ns) - len(ends), len(trace.events)))
    rows = np.maximum.accumulate(rows)
    index = np.searchsorted(line.row, rows, side="left")
    peaks = highest(line.bytes, np.append(0, index[:-1] - 1), index)
    at_end = line.bytes[index - 1]
    is_seen = (times_ns > trace.made_by.lost_until_ns(device)) & (len(line.row) > 1)
    samples = trace.samples.of(device, "allocated_bytes")
    if not is_seen.all() and len(samples):
        until = np.searchsorted(samples.time_ns, times_ns, side="right")
        sampled = highest(samples.allocated_bytes, np.append(0, np.maximum(until[:-1] - 1, 0)), np.maximum(until, 1))
        peaks = np.where(is_seen, peaks, np.maximum(sampled, peaks))
        at_end = np.where(is_seen, at_end, samples.allocated_bytes[np.maximum(until - 1, 0)])
    return RankSteps(np.arange(first, first + len(peaks)), peaks, at_end, is_seen, first - 1 + len(ends))


# --- what failed first, and what grows --------------------------------------------------------------------------------------


def _how_likely(one: RankRun) -> int:
    """The order of ranks that failed at about the same time: an error of its own, a kill, an error that follows from another."""
    if one.ending in (CUT_OFF, TERMINATED):
        return 2
    return 0 if one.ran_out else 3 if _LOST_A_PEER.search(one.error) else 1


def _growth(ranks: Sequence[RankRun]) -> Iterator[RankGrowth]:
    """Each place that grows, with the ranks on which it does."""
    growing: dict[tuple[str, str], list[tuple[RankRun, Leak]]] = {}
    for one in ranks:
        for leak in one.leaks:
            growing.setdefault((leak.kind, leak.places[0].text), []).append((one, leak))
    for found in growing.values():
        there = {one.rank for one, _ in found}
        steady = sum(one.rank not in there and bool(one.leaks.looked_at) for one in ranks)
        largest, leak = max(found, key=lambda pair: pair[1].total_bytes)
        numbers = tuple(sorted(there))
        unknown = len(ranks) - steady - len(numbers)
        yield RankGrowth(numbers, steady, unknown, leak.bytes_per_iteration, leak.text, largest.holders)
    for one in ranks:
        rise = _risen(one.steps) if one.is_partial else None
        if rise is not None:
            steady = sum(other is not one and bool(other.leaks.looked_at) and not other.leaks for other in ranks)
            steady += sum(other is not one and other.is_partial and _is_flat(other.steps) for other in ranks)
            (first, last), (low, high) = rise
            text = f"Rose from {format_bytes(low)} after step {first} to {format_bytes(high)} after step {last}, as samples saw it."
            text += " What holds it is unknown, as its file was cut off."
            each = (high - low) // (last - first)
            yield RankGrowth((one.rank,), steady, len(ranks) - 1 - steady, each, text)


def _risen(steps: RankSteps) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The steps and levels between which a rank rose, if the lowest level of each third of its steps is above that before."""
    ends = steps.end_bytes[: len(steps.number) - 1][1:]  # without warm-up and the step that was cut off
    if len(ends) < _FEWEST_STEPS:
        return None
    thirds = np.array_split(np.arange(len(ends)), 3)
    lowest = [third[int(ends[third].argmin())] for third in thirds]
    low, middle, high = (int(ends[at]) for at in lowest)
    if not low < middle < high or high - low < max(_MIN_RISE * int(steps.peak_bytes.max()), _MIN_RISE_BYTES):
        return None
    first, last = (int(steps.number[1 + at]) for at in (lowest[0], lowest[2]))
    return (first, last), (low, high)


def _is_flat(steps: RankSteps) -> bool:
    return len(steps.number) > _FEWEST_STEPS + 1 and _risen(steps) is None


def ranks_text(numbers: Iterable[int], limit: int = 6) -> str:
    """Ranks in words.

    >>> ranks_text([1]), ranks_text([0, 1, 2, 3, 7]), ranks_text(range(0, 512, 2))
    ('rank 1', 'ranks 0–3, 7', 'ranks 0, 2, 4, 6, 8, 10 and 250 more')
    """
    stretches = consecutive(numbers)
    texts, rest = [], sum(map(len, stretches[limit:]))
    for one in stretches[:limit]:
        texts.append(f"{one[0]}–{one[-1]}" if len(one) > 2 else ", ".join(map(str, one)))
    more = f" and {rest} more" if rest else ""
    return f"rank{'' if sum(map(len, stretches)) == 1 else 's'} {', '.join(texts)}{more}"


def consecutive(numbers: Iterable[int]) -> list[range]:
    """Numbers as stretches without holes."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
