"""One rank of a job, from its trace; or from several, of consecutive parts of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memlab.analysis.breakdown import breakdown
from memlab.analysis.host_at_end import host_at_end
from memlab.analysis.iterations import step_ends
from memlab.analysis.job_ranks import CUT_OFF, ENDED, RAISED, SHARES, TERMINATED, HeldAtFailure, RankRun, RankSteps
from memlab.analysis.leak import Leaks, leaks, named_bytes
from memlab.analysis.oom.moment import Moment, last_moment
from memlab.analysis.peak import Peak, peak
from memlab.analysis.timeline import highest, timeline
from memlab.errors import MemlabError
from memlab.trace.trace import CPU, ERROR, HOLDERS, RANK, STEPS_BEFORE, UNFINISHED, Device, Trace
from memlab.units import ByteRange

_LEAST_GAP_S = 0.2
"""A process may have lived that long after its last sample: two of them."""
_MOST_STEPS = 1 << 40


def rank_run(traces: Sequence[Trace], files: Sequence[str] = ()) -> RankRun:
    """One rank from its trace; or from several, of consecutive parts of its run."""
    last, facts = traces[-1], traces[-1].notes[RANK]
    peaks: list[tuple[Device | None, ByteRange]] = []
    for trace in traces:  # the device with the largest peak of *allocated*, as in reports
        found = [(one, peak(trace, one.index).bytes) for one in trace.made_by.devices]
        peaks.append(max(found, key=lambda one: one[1].low, default=(None, ByteRange.exact(0))))
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


def _ending(trace: Trace) -> tuple[str, Mapping[str, Any]]:
    error = trace.noted(ERROR)
    if trace.made_by.engine == UNFINISHED or any(gap.name == CUT_OFF for gap in trace.gaps):
        return CUT_OFF, {}
    if trace.notes.get("raised") is True:
        return RAISED, error
    return TERMINATED if error else ENDED, error


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
        nothing = np.zeros(0, np.int64)
        return RankSteps(nothing, nothing, nothing, nothing > 0)
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
