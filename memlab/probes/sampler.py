"""The live sampler: a thread that reads counters at a steady rate, and the reader that it calls.

It only draws the curve: what happens between two ticks is not seen, so no peak is ever taken from here when a probe
knows better. It prints nothing, raises nothing into the user's code and knows no view.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memlab.errors import ProbeError
from memlab.probes.counters import NOT_READ, AcceleratorCounters, cuda_counters, cuda_devices
from memlab.probes.host import HostMemory
from memlab.probes.nvml import Nvml
from memlab.trace import CPU, Samples

MAX_RATE_HZ = 20.0
MAX_ROWS = 500_000
_MAX_ERRORS = 20
_MAX_FAILURES = 10
_SLOW_HZ = 2.0
_COLUMNS = tuple(Samples.DTYPES)
_BUCKET = 32


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of one device (or of the host, device -1) at one tick; -1 is a counter not read at this tick."""

    device: int
    allocated_bytes: int = NOT_READ
    reserved_bytes: int = NOT_READ
    used_bytes: int = NOT_READ
    own_bytes: int = NOT_READ
    available_bytes: int = NOT_READ


@dataclass(frozen=True, slots=True)
class Sample:
    """One tick: nanoseconds since the start, and a reading for each device and the host."""

    time_ns: int
    readings: tuple[Reading, ...]


class Reader:
    """Reads everything there is to read, once per call: the `read` of a Sampler.

    Host memory and PyTorch's counters are read at every call, NVML at every `slow_every`-th. Only CUDA devices on which
    the process has a context get a row. `clock_ns` gives nanoseconds since the start; `host_allocated` the bytes that a
    tally of CPU tensors counts.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int],
        *,
        nvml: Nvml | None = None,
        host: HostMemory | None = None,
        accelerator: AcceleratorCounters | None = None,
        host_allocated: Callable[[], int] | None = None,
        slow_every: int = 5,
    ) -> None:
        self._clock_ns = clock_ns
        self._nvml = nvml
        self._host = host
        self._accelerator = accelerator
        self._host_allocated = host_allocated
        self._slow_every = slow_every
        self._calls = 0

    def __call__(self) -> Sample:
        """Read once."""
        slow = self._calls % self._slow_every == 0
        self._calls += 1
        time_ns = self._clock_ns()
        readings = [self._cuda(device, slow) for device in cuda_devices()]
        if self._accelerator is not None:
            readings.append(self._other(self._accelerator))
        if self._host is not None or self._host_allocated is not None:
            readings.append(self._host_reading())
        return Sample(time_ns, tuple(readings))

    def complete_next(self) -> None:
        """Make the next call read NVML as well, whatever its turn: for the last sample of a run."""
        self._calls = 0

    def _cuda(self, device: int, slow: bool) -> Reading:
        counters = cuda_counters(device)
        allocated_bytes, reserved_bytes = counters["allocated"], counters["reserved"]
        if not slow or self._nvml is None:
            return Reading(device, allocated_bytes, reserved_bytes)
        seen = self._nvml.read(device)
        available_bytes = _minus(seen.total_bytes, seen.used_bytes)
        return Reading(
            device, allocated_bytes, reserved_bytes, _known(seen.used_bytes), _known(seen.own_bytes), available_bytes
        )

    def _other(self, accelerator: AcceleratorCounters) -> Reading:
        seen = accelerator.read(0)
        return Reading(0, _known(seen.allocated_bytes), _known(seen.reserved_bytes))

    def _host_reading(self) -> Reading:
        allocated_bytes = self._host_allocated() if self._host_allocated is not None else NOT_READ
        if self._host is None:
            return Reading(CPU, allocated_bytes)
        seen = self._host.read()
        return Reading(CPU, allocated_bytes, NOT_READ, seen.used_bytes, seen.rss_bytes, seen.available_bytes)


def _row(reading: Reading) -> tuple[int, ...]:
    memory = (reading.allocated_bytes, reading.reserved_bytes, reading.used_bytes)
    return (reading.device, *memory, reading.own_bytes, reading.available_bytes)


def slow_every(rate_hz: float) -> int:
    """How many ticks at this rate lie between two slow readings (NVML, about twice a second)."""
    return max(1, round(rate_hz / _SLOW_HZ))


def _known(count: int | None) -> int:
    return NOT_READ if count is None else count


def _minus(total_bytes: int | None, used_bytes: int | None) -> int:
    return NOT_READ if total_bytes is None or used_bytes is None else max(total_bytes - used_bytes, 0)


class Schedule:
    """Due times on a fixed grid: late work never shifts the grid, ticks that were missed are skipped and counted."""

    __slots__ = ("_period_s", "_start_s", "_tick", "late")

    def __init__(self, start_s: float, rate_hz: float) -> None:
        self._start_s = start_s
        self._period_s = 1.0 / rate_hz
        self._tick = 0
        self.late = 0

    def next_due_s(self, now_s: float) -> float:
        """When the next tick is due, given that the last one has just ended."""
        next_tick = max(self._tick + 1, int((now_s - self._start_s) / self._period_s) + 1)
        self.late += next_tick - self._tick - 1
        self._tick = next_tick
        return self._start_s + next_tick * self._period_s


class Rows:
    """Samples in one flat array of integers, thinned so that it stays below `max_rows` and keeps every extreme.

    One thread appends, any thread may copy: there is no lock, because a fork could leave one locked for ever.
    """

    __slots__ = ("_flat", "_max_items")

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._flat = array("q")
        self._max_items = max_rows * len(_COLUMNS)

    def append(self, sample: Sample) -> None:
        """Add a row for each reading of the sample."""
        flat = self._flat
        for reading in sample.readings:
            flat.extend((sample.time_ns, *_row(reading)))
        if len(flat) > self._max_items:
            self._flat = array("q", thinned(self._table()).tobytes())

    def columns(self) -> dict[str, np.ndarray]:
        """Name -> array, in the schema of `memlab.trace.Samples`."""
        table = self._table()
        return {name: table[:, i].astype(Samples.DTYPES[name]) for i, name in enumerate(_COLUMNS)}

    def __len__(self) -> int:
        return len(self._flat) // len(_COLUMNS)

    def _table(self) -> np.ndarray:
        copy = self._flat[:]
        whole = len(copy) - len(copy) % len(_COLUMNS)
        return np.array(copy[:whole], np.int64).reshape(-1, len(_COLUMNS))


def thinned(table: np.ndarray) -> np.ndarray:
    """Of every 32 rows of a device, those in which a counter is lowest or highest: about a third, none invented."""
    device = table[:, _COLUMNS.index("device")]
    kept = [rows[_extremes(table[rows])] for rows in (np.flatnonzero(device == d) for d in np.unique(device))]
    return table[np.sort(np.concatenate(kept))]


def _extremes(rows: np.ndarray) -> np.ndarray:
    """Row numbers to keep: for each bucket and each counter its first lowest and first highest value, and both ends."""
    buckets = -(-len(rows) // _BUCKET)
    padded = np.concatenate([rows, np.repeat(rows[-1:], buckets * _BUCKET - len(rows), axis=0)])
    counters = padded[:, 2:].reshape(buckets, _BUCKET, -1)
    # "Not read" is neither low nor high: it must not push a real minimum out.
    lows = np.where(counters == NOT_READ, np.iinfo(np.int64).max, counters).argmin(axis=1)
    highs = counters.argmax(axis=1)
    first = np.arange(buckets)[:, None] * _BUCKET
    found = np.concatenate([(first + lows).ravel(), (first + highs).ravel(), [0, len(rows) - 1]])
    return np.unique(np.minimum(found, len(rows) - 1))


class Sampler:
    """A daemon thread that calls `read` at `rate_hz` and hands each sample to `on_tick`.

    The first sample is taken at once, the last when it stops. An error in `read` skips the tick, one in `on_tick` keeps
    the sample; both are kept as text in `errors`. After ten errors in a row of `read` the sampler stops itself; after
    ten of `on_tick` it goes on without calling it; `reason` says so. In a child after a fork the thread is not there
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
        self._read = read
        self._on_tick = on_tick
        self._rate_hz = float(rate_hz)
        self._clock_s = clock_s
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._given_up = False
        self._rows = Rows(max_rows)
        self._schedule: Schedule | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._failures = {"read": 0, "on_tick": 0}
        self.errors: list[str] = []
        self.reason: str | None = None

    @property
    def late(self) -> int:
        """How many ticks were skipped because the one before took too long."""
        return self._schedule.late if self._schedule is not None else 0

    @property
    def running(self) -> bool:
        """Whether the thread is alive in this process."""
        return self._thread is not None and self._thread.is_alive() and self._pid == os.getpid()

    def columns(self) -> dict[str, np.ndarray]:
        """A copy of the samples so far, as the columns of `memlab.trace.Samples`."""
        return self._rows.columns()

    def start(self) -> None:
        """Start the thread, in a copy of the caller's context."""
        if self._thread is not None:
            raise ProbeError("this sampler was started before; make a new one for another stretch.")
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="memlab-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Take the last sample and end the thread; True when it has ended. Any thread may call it, any number of times.

        Called from the thread itself (in `on_tick`) it only asks. A thread stuck in `read` beyond the timeout is left
        behind with a reason: it ends when `read` returns, without another word.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return True
        self._stopping.set()
        if thread is threading.current_thread():
            return False
        thread.join(timeout_s)
        if thread.is_alive():
            self._given_up = True
            self.reason = f"the sampler was still busy {timeout_s:g} s after it was asked to stop, and was left behind"
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            self._schedule = Schedule(self._clock_s(), self._rate_hz)
            self._tick()
            while not self._stopping.is_set():
                now_s = self._clock_s()
                if not self._wait(max(self._schedule.next_due_s(now_s) - now_s, 0.0)):
                    self._tick()
            if not self._given_up:
                self._tick()
        except BaseException as error:  # a thread's last words would be printed into the cell
            self.reason = f"the sampler ended: {self._note('thread', error)}"

    def _tick(self) -> None:
        try:
            sample = self._read()
        except Exception as error:
            return self._failed("read", error)
        self._failures["read"] = 0
        if self._given_up:
            return None
        self._rows.append(sample)
        return self._tell(sample)

    def _tell(self, sample: Sample) -> None:
        if self._on_tick is None:
            return None
        try:
            self._on_tick(sample)
        except Exception as error:
            return self._failed("on_tick", error)
        self._failures["on_tick"] = 0
        return None

    def _failed(self, where: str, error: Exception) -> None:
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
