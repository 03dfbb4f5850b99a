"""The live sampler: a thread that reads counters at a steady rate, and the reader that it calls.

It does not see what happens between two ticks: if a probe knows the peak, the samples only draw the curve.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.errors import ProbeError
from memlab.probes.bounded_log import BoundedLog
from memlab.probes.counters import NOT_READ, AcceleratorCounters, Nvml, cuda_counters, cuda_devices
from memlab.probes.host import HostMemory
from memlab.trace import CPU, Samples
from memlab.trace.columns import Array

MAX_RATE_HZ = 20.0
MAX_ROWS = 500_000
_MAX_ERRORS = 20
_MAX_FAILURES = 10
_SLOW_HZ = 2.0
_COLUMNS = tuple(Samples.DTYPES)
_BUCKET = 32


class Reading(NamedTuple):
    """The counters of one device (-1: the host) at one tick; -1 if a counter was not read."""

    device: int
    allocated_bytes: int = NOT_READ
    reserved_bytes: int = NOT_READ
    used_bytes: int = NOT_READ
    own_bytes: int = NOT_READ
    available_bytes: int = NOT_READ


@dataclass(frozen=True, slots=True)
class Sample:
    """One tick: nanoseconds since the start, and a reading per device and of the host."""

    time_ns: int
    readings: tuple[Reading, ...]


@dataclass(slots=True)
class SampleReader:
    """The `read` of a Sampler: host memory and PyTorch's counters at every call, NVML at every `slow_every`-th.

    Only CUDA devices on which the process has a context are read. `clock_ns` gives nanoseconds since the start,
    `host_allocated` the bytes of CPU tensors.
    """

    clock_ns: Callable[[], int]
    host: HostMemory
    nvml: Nvml | None = None
    accelerator: AcceleratorCounters | None = None
    host_allocated: Callable[[], int] | None = None
    slow_every: int = 5
    calls: int = 0

    def __call__(self) -> Sample:
        """Read everything."""
        is_slow = self.nvml is not None and self.calls % self.slow_every == 0
        self.calls += 1
        time_ns = self.clock_ns()
        readings = [self._cuda(device, is_slow) for device in cuda_devices()]
        if self.accelerator is not None:
            seen = self.accelerator.read(0)
            readings.append(Reading(0, _known(seen.allocated_bytes), _known(seen.reserved_bytes)))
        allocated = self.host_allocated() if self.host_allocated is not None else NOT_READ
        host = self.host.read()
        readings.append(Reading(CPU, allocated, NOT_READ, host.used_bytes, host.rss_bytes, host.available_bytes))
        return Sample(time_ns, tuple(readings))

    def _cuda(self, device: int, is_slow: bool) -> Reading:
        counters = cuda_counters(device)
        reading = Reading(device, counters["allocated"], counters["reserved"])
        if not is_slow or self.nvml is None:
            return reading
        seen = self.nvml.read(device)
        used, total = seen.used_bytes, seen.total_bytes
        available = None if used is None or total is None else max(total - used, 0)
        own, available = _known(seen.own_bytes), _known(available)
        return reading._replace(used_bytes=_known(used), own_bytes=own, available_bytes=available)


def slow_every(rate_hz: float) -> int:
    """The number of ticks between readings of NVML (half a second)."""
    return max(1, round(rate_hz / _SLOW_HZ))


def _known(count: int | None) -> int:
    return NOT_READ if count is None else count


def thinned(table: Array) -> Array:
    """Of every 32 rows of a device keep those with the lowest or highest value of a counter, and both ends: about a third."""
    device, kept = table[:, _COLUMNS.index("device")], []
    for one in np.unique(device):
        rows = np.flatnonzero(device == one)
        buckets = -(-len(rows) // _BUCKET)
        padded = np.append(rows, np.full(buckets * _BUCKET - len(rows), rows[-1]))
        counters = table[padded, 2:].reshape(buckets, _BUCKET, -1)
        # "Not read" is neither low nor high: it must not replace a real minimum.
        lows = np.where(counters == NOT_READ, np.iinfo(np.int64).max, counters).argmin(axis=1)
        first = np.arange(buckets)[:, None] * _BUCKET
        extremes = np.concatenate([first + lows, first + counters.argmax(axis=1)])
        kept += [padded[extremes.ravel()], rows[[0, -1]]]
    thin: Array = table[np.unique(np.concatenate(kept))]
    return thin


class Sampler:
    """A daemon thread that calls `read` at `rate_hz` and passes each sample to `on_tick`, first at once, last when it stops.

    Errors become texts in `errors`. After ten in a row in `read` the sampler stops; after ten in `on_tick` it no longer calls
    it; `reason` says so. `late` counts ticks that were skipped because one took too long. After a fork the child has no thread,
    and `stop` does nothing.
    """

    def __init__(
        self,
        read: Callable[[], Sample],
        on_tick: Callable[[Sample], object] | None = None,
        rate_hz: float = 10.0,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        if not isinstance(rate_hz, int | float) or not 0 < rate_hz <= MAX_RATE_HZ:
            raise ProbeError(f"the sampler's rate must be above 0 and at most {MAX_RATE_HZ:g} Hz, got {rate_hz!r}.")
        self._read, self._on_tick, self._period_s, self._clock_s = read, on_tick, 1.0 / rate_hz, clock_s
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._given_up = False
        self._rows = BoundedLog(max_rows, len(_COLUMNS), thinned)
        self.thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._failures = {"read": 0, "on_tick": 0}
        self.late = 0
        self.errors: list[str] = []
        self.reason: str | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive in this process."""
        return self.thread is not None and self.thread.is_alive() and self._pid == os.getpid()

    def columns(self) -> dict[str, Array]:
        """The samples so far, as the columns of `memlab.trace.Samples`."""
        return dict(zip(_COLUMNS, self._rows.columns(), strict=True))

    def start(self) -> None:
        """Start the thread, in a copy of the caller's context."""
        if self.thread is not None:
            raise ProbeError("this sampler was started before; make a new one for another stretch.")
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._run,), name="memlab-sampler", daemon=True)
        self.thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Take the last sample and end the thread; True when it has ended. Any thread may call it, also again.

        In the thread itself (in `on_tick`) it does not wait. A thread that is stuck in `read` is abandoned, with a `reason`, and
        ends when `read` returns.
        """
        thread = self.thread
        if thread is None or self._pid != os.getpid():
            return True
        self._stopping.set()
        if thread is threading.current_thread():
            return False
        thread.join(timeout_s)
        if thread.is_alive():
            self._given_up = True
            self.reason = f"the sampler was still busy {timeout_s:g} s after it was asked to stop, and still runs"
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            start_s, tick = self._clock_s(), 0
            self._tick()
            # Ticks lie on a fixed grid: late ones do not shift it, and those missed are skipped.
            while not self._stopping.is_set():
                now_s = self._clock_s()
                due = max(tick + 1, int((now_s - start_s) / self._period_s) + 1)
                self.late += due - tick - 1
                tick = due
                if not self._wait(max(start_s + tick * self._period_s - now_s, 0.0)):
                    self._tick()
            if not self._given_up:
                self._tick()
        except BaseException as error:  # the thread's traceback would be printed into the cell
            self.reason = f"the sampler ended: {self._note('thread', error)}"

    def _tick(self) -> None:
        where = "read"
        try:
            sample = self._read()
            if self._given_up:
                return
            for reading in sample.readings:
                self._rows.append((sample.time_ns, *reading))
            self._rows.collect()
            self._failures["read"] = 0
            if self._on_tick is not None:
                where = "on_tick"
                self._on_tick(sample)
                self._failures["on_tick"] = 0
        except Exception as error:
            text = self._note(where, error)
            self._failures[where] += 1
            if self._failures[where] < _MAX_FAILURES:
                return
            if where == "read":
                self.reason = f"the sampler stopped after {_MAX_FAILURES} errors in a row: {text}"
                self._given_up = True
                self._stopping.set()
            else:
                self.reason = f"the live view was left alone after {_MAX_FAILURES} errors in a row: {text}"
                self._on_tick = None

    def _note(self, where: str, error: BaseException) -> str:
        # Text, not the exception: its traceback would keep frames and with them tensors alive.
        try:
            text = f"{where}: {type(error).__name__}: {error}"[:300]
        except Exception:
            text = f"{where}: {type(error).__name__}"
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(text)
        return text
