"""The sampler on a clock that the test turns: its grid, its errors, its end; rows, thinning, and what a tick reads."""

from __future__ import annotations

import contextvars
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memlab.errors import ProbeError
from memlab.probes import sampler as sampler_module
from memlab.probes.counters import CounterReading, DeviceReading
from memlab.probes.host import HostReading
from memlab.probes.sampler import Reading, Sample, Sampler, SampleReader, slow_every, thinned
from memlab.trace import CPU, Samples


class Clock:
    """Time that passes only while somebody waits; `wait` says "stop" when `ticks` waits are over."""

    def __init__(self, ticks: int = 5) -> None:
        self.now_s = 100.0
        self.ticks = ticks
        self.sampler: Sampler | None = None
        self.waited: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        self.now_s += timeout_s
        if len(self.waited) > self.ticks:
            assert self.sampler is not None
            self.sampler.stop()  # from the sampler's own thread: asks, and does not wait for itself
            return True
        return False


def sample(number: int = 0, *readings: Reading) -> Sample:
    return Sample(number, readings or (Reading(CPU, allocated_bytes=number),))


def counting() -> Callable[[], Sample]:
    numbers = iter(range(10_000_000))
    return lambda: sample(next(numbers))


def run(
    read: Callable[[], Sample],
    on_tick: Callable[[Sample], object] | None = None,
    ticks: int = 5,
    clock: Clock | None = None,
) -> Sampler:
    """Run a sampler to its end on a turned clock."""
    clock = clock or Clock(ticks)
    clock.sampler = Sampler(read, on_tick, clock_s=clock, wait=clock.wait)
    clock.sampler.start()
    clock.sampler.thread.join(60)
    assert not clock.sampler.running
    return clock.sampler


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """A gate that is opened at the end, so that no thread outlives its test."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_one_sample_at_once_one_each_tick_one_at_the_end() -> None:
    seen: list[int] = []
    done = run(counting(), lambda tick: seen.append(tick.time_ns), ticks=5)
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    assert done.columns()["time_ns"].tolist() == seen
    assert (done.errors, done.reason, done.late) == ([], None, 0)


def test_slow_ticks_are_skipped_and_counted_and_the_grid_stays() -> None:
    clock = Clock(ticks=4)
    durations = iter([0.0, 0.25, 0.05, 0.0, 0.0, 0.0])
    starts: list[float] = []

    def read() -> Sample:
        starts.append(round(clock.now_s - 100.0, 6))
        clock.now_s += next(durations)
        return sample()

    assert run(read, clock=clock).late == 2
    assert starts == [0.0, 0.1, 0.4, 0.5, 0.6, 0.7]


def test_the_schedule_does_not_drift() -> None:
    clock = Clock(ticks=36_000)

    def read() -> Sample:
        clock.now_s += 0.013  # each tick takes a little
        return sample()

    assert run(read, clock=clock).late == 0
    assert clock.now_s - 100.0 == pytest.approx(3600.1 + 0.013)


@pytest.mark.parametrize("rate", [0, -1, 20.5, float("nan"), float("inf"), "10", None])
def test_a_rate_out_of_range_is_refused_with_its_value(rate: object) -> None:
    with pytest.raises(ProbeError, match="at most 20 Hz, got") as refused:
        Sampler(counting(), rate_hz=rate)
    assert repr(rate) in str(refused.value)


def test_an_error_in_read_skips_the_tick() -> None:
    numbers = iter(range(100))

    def read() -> Sample:
        number = next(numbers)
        if number % 2:
            raise OSError(f"no luck with {number}")
        return sample(number)

    done = run(read, ticks=5)
    assert done.columns()["time_ns"].tolist() == [0, 2, 4, 6]
    assert done.errors == [f"read: OSError: no luck with {number}" for number in (1, 3, 5)]
    assert done.reason is None


def test_ten_errors_in_a_row_end_it_with_a_reason() -> None:
    done = run(lambda: [].pop(), ticks=1000)
    assert len(done.errors) == 10
    assert done.reason == "the sampler stopped after 10 errors in a row: read: IndexError: pop from empty list"
    assert done.stop() is True


def test_a_broken_view_does_not_stop_the_measuring() -> None:
    calls: list[int] = []

    def on_tick(tick: Sample) -> None:
        calls.append(tick.time_ns)
        raise ValueError("closed comm")

    done = run(counting(), on_tick, ticks=30)
    assert len(calls) == 10
    assert len(done.columns()["time_ns"]) == 32
    assert "live view was left alone" in done.reason


def test_errors_are_kept_as_text_and_at_most_twenty() -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    alive: list[weakref.ref[Nasty]] = []
    numbers = iter(range(1000))

    def read() -> Sample:
        error = Nasty()
        alive.append(weakref.ref(error))
        if next(numbers) % 2:
            raise error  # one whose text fails; its traceback would keep this frame alive
        return sample()

    done = run(read, ticks=100)
    gc.collect()
    assert done.errors == ["read: Nasty"] * 20
    assert not any(ref() for ref in alive)


def test_not_even_a_system_exit_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def read() -> Sample:
        raise KeyboardInterrupt

    done = run(read)
    assert "KeyboardInterrupt" in done.reason
    assert capfd.readouterr() == ("", "")


def test_the_thread_is_a_named_daemon_in_a_copy_of_the_context() -> None:
    place = contextvars.ContextVar("place")
    place.set("the cell")
    seen: list[tuple[str, bool, str]] = []

    def read() -> Sample:
        thread = threading.current_thread()
        seen.append((thread.name, thread.daemon, place.get()))
        place.set("changed in the copy")
        return sample()

    run(read, ticks=0)
    assert seen[0] == ("memlab-sampler", True, "the cell")
    assert place.get() == "the cell"


def test_stop_works_on_the_real_clock_from_any_thread_and_twice() -> None:
    ticked = threading.Event()
    live = Sampler(counting(), lambda tick: ticked.set(), rate_hz=20)
    assert live.stop() is True  # before it was started
    live.start()
    assert ticked.wait(10)
    other = threading.Thread(target=live.stop)
    other.start()
    other.join(10)
    assert live.stop() is True
    assert not live.running
    assert len(live.columns()["time_ns"]) >= 2
    with pytest.raises(ProbeError, match="started before"):
        live.start()


def test_a_reading_that_hangs_is_left_behind_and_says_nothing_later(held: threading.Event) -> None:
    started = threading.Event()
    told: list[Sample] = []

    def read() -> Sample:
        started.set()
        held.wait(10)
        return sample()

    stuck = Sampler(read, told.append)
    stuck.start()
    assert started.wait(10)
    assert stuck.stop(timeout_s=0.01) is False
    assert "still runs" in stuck.reason
    held.set()
    stuck.thread.join(10)
    assert (told, len(stuck.columns()["time_ns"])) == ([], 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_stop_and_read_it() -> None:
    ticked = threading.Event()
    live = Sampler(counting(), lambda tick: ticked.set())
    live.start()
    assert ticked.wait(10)
    child = os.fork()
    if child == 0:  # no pytest in the child, whatever happens
        fine = False
        try:
            fine = live.stop() and not live.running and len(live.columns()["time_ns"]) >= 1
        finally:
            os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert live.running
    live.stop()


def table(rows: int, devices: int = 2) -> np.ndarray:
    numbers = np.random.default_rng(7).integers(0, 1 << 40, (rows, 7))
    numbers[:, 0] = np.arange(rows)
    numbers[:, 1] = np.arange(rows) % devices - 1
    numbers[::3, 4] = -1  # not read at every tick
    return numbers


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 1000, 20_011])
def test_thinning_keeps_every_extreme_and_invents_nothing(rows: int) -> None:
    before = table(rows)
    after = thinned(before)
    assert set(map(tuple, after.tolist())) <= set(map(tuple, before.tolist()))
    assert np.all(np.diff(after[:, 0]) > 0)
    for device in np.unique(before[:, 1]):
        old, new = before[before[:, 1] == device], after[after[:, 1] == device]
        assert new[0].tolist() == old[0].tolist()
        assert new[-1].tolist() == old[-1].tolist()
        for column in range(2, 7):
            seen = old[old[:, column] >= 0, column]
            if len(seen):
                kept = new[new[:, column] >= 0, column]
                assert (kept.min(), kept.max()) == (seen.min(), seen.max())
    if rows > 1000:
        assert len(after) < 0.4 * rows


def test_rows_stay_bounded_and_keep_the_peak() -> None:
    sizes = [number % 977 for number in range(30_000)]
    sizes[12_345], sizes[23_456] = 10**12, 1
    numbers = iter(range(30_000))

    def read() -> Sample:
        number = next(numbers)
        seen = Reading(0, 500 + sizes[number], 2 * sizes[number], 3, 4, 6)
        return sample(number, seen, Reading(CPU, own_bytes=7))

    clock = Clock(ticks=29_998)
    clock.sampler = Sampler(read, clock_s=clock, wait=clock.wait, max_rows=2_000)
    clock.sampler.start()
    clock.sampler.thread.join(60)
    samples = Samples(**clock.sampler.columns())
    assert len(samples) <= 2_002
    gpu = samples.rows(samples.device == 0)
    at = gpu.time_ns.tolist().index(12_345)
    assert gpu.allocated_bytes.max() == gpu.allocated_bytes[at] == 500 + 10**12
    assert (gpu.time_ns[-1], gpu.used_bytes[-1], gpu.own_bytes[-1], gpu.available_bytes[-1]) == (29_999, 3, 4, 6)
    assert samples.own_bytes[-1] == 7 and samples.used_bytes[-1] == -1
    assert len(Samples(**Sampler(read).columns())) == 0


class Host:
    def read(self) -> HostReading:
        return HostReading(5, 60, 100)


class FakeNvml:
    def __init__(self) -> None:
        self.reads = 0

    def read(self, device: int) -> DeviceReading:
        self.reads += 1
        return DeviceReading(30 + self.reads, 100)


def test_nvml_is_read_slower_and_never_repeated_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "cuda_devices", lambda: (0,))
    monkeypatch.setattr(sampler_module, "cuda_counters", lambda device: {"allocated": 1, "reserved": 2})
    reader = SampleReader(iter(range(100)).__next__, Host(), nvml=FakeNvml(), slow_every=3)
    ticks = [reader().readings[0] for _ in range(5)]
    assert [tick.used_bytes for tick in ticks] == [31, -1, -1, 32, -1]
    assert [tick.available_bytes for tick in ticks] == [69, -1, -1, 68, -1]
    assert {(tick.allocated_bytes, tick.reserved_bytes, tick.own_bytes) for tick in ticks} == {(1, 2, -1)}
    reader.calls = 0
    assert reader().readings[0].used_bytes == 33


def test_a_tick_reads_host_tracker_and_accelerator() -> None:
    class Accelerator:
        def read(self, index: int) -> CounterReading:
            return CounterReading(7, None)

    reader = SampleReader(lambda: 42, Host(), accelerator=Accelerator(), host_allocated=lambda: 3)
    assert reader() == Sample(42, (Reading(0, 7), Reading(CPU, 3, -1, 40, 5, 60)))


@pytest.mark.parametrize(("rate", "ticks"), [(20, 10), (10, 5), (2, 1), (0.1, 1)])
def test_slow_readings_come_about_twice_a_second(rate: float, ticks: int) -> None:
    assert slow_every(rate) == ticks
