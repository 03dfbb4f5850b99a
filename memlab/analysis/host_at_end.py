"""Whether the host was running out of memory when a run was killed, or a child of it, from the samples that it left.

A killed process says nothing, and the host's out-of-memory killer leaves no other sign that every user can read. What
happened after the last sample is unknown, as is whether the run was killed at all, so an answer is "most likely" at best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memlab.trace.columns import Samples
from memlab.trace.trace import CPU, UNFINISHED, Trace
from memlab.units import format_bytes

WINDOW_S = 2.0
"""The rate is that of the last samples, over so long."""
UNSEEN_S = 1.0
"""A process is killed at most so long after its last sample, unless it was stopped before."""
LOW_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class HostAtEnd:
    """The last sample: bytes left and in all under the tightest limit, held by this process, and taken per second by all."""

    available_bytes: int
    total_bytes: int
    rss_bytes: int
    bytes_per_s: float

    @property
    def is_short(self) -> bool:
        """Whether less than 5 % was left, or what was left would have been gone within a second."""
        return self.available_bytes < max(LOW_SHARE * self.total_bytes, self.bytes_per_s * UNSEEN_S)

    @property
    def text(self) -> str:
        """What that says about the end, in a sentence or two."""
        left = f"{format_bytes(self.available_bytes)} of {format_bytes(self.total_bytes)} of host memory were left"
        if not self.is_short:
            return f"At its last sample {left}: if it was killed, most likely not for host memory."
        rate = f", {format_bytes(round(self.bytes_per_s))} fewer each second" if self.bytes_per_s >= 1 else ""
        held = f"this process held {format_bytes(self.rss_bytes)}"
        killer = "most likely by the host's out-of-memory killer"
        return f"At its last sample {left}{rate}; {held}: if it was killed, {killer}."


def host_at_end(trace: Trace) -> HostAtEnd | None:
    """The host at the last sample of a run that did not end; None for others, and where the host was not sampled."""
    rows = _host_samples(trace)
    if trace.made_by.engine != UNFINISHED or not len(rows):
        return None
    since = int(np.searchsorted(rows.time_ns, rows.time_ns[-1] - WINDOW_S * 1e9))
    taken_s = (int(rows.time_ns[-1]) - int(rows.time_ns[since])) / 1e9
    taken = int(rows.available_bytes[since]) - int(rows.available_bytes[-1])
    available = int(rows.available_bytes[-1])
    rate = max(taken, 0) / taken_s if taken_s >= WINDOW_S / 8 else 0.0
    return HostAtEnd(available, available + int(rows.used_bytes[-1]), int(rows.own_bytes[-1]), rate)


def short_host(trace: Trace) -> str:
    """How little of the host's memory was left at the lowest; "" of a run that did not raise, and where 5 % or more were left.

    One whose child was killed raises, and it may be the only one that was sampled.
    """
    rows = _host_samples(trace)
    if trace.notes.get("raised") is not True or not len(rows):
        return ""
    at = int(rows.available_bytes.argmin())
    available, used = int(rows.available_bytes[at]), int(rows.used_bytes[at])
    if available >= LOW_SHARE * (available + used):
        return ""
    left = f"{format_bytes(available)} of {format_bytes(available + used)}"
    held = format_bytes(int(rows.own_bytes[at]))
    return f"Host memory was short: at the lowest {left} were left, while this process held {held}."


def _host_samples(trace: Trace) -> Samples:
    """The samples that have read the host's memory."""
    samples = trace.samples
    return samples.rows((samples.device == CPU) & (samples.available_bytes >= 0) & (samples.used_bytes >= 0))
