"""One measurement from start to stop: which engines run, what the sampler reads meanwhile, and the one Trace at the end.

Which device is measured is decided by what the cell uses. Where CUDA can be used, history is armed and, until the first
CUDA tensor appears, the CPU is tallied as well; a cell that never comes to CUDA is a measurement of the CPU, and CUDA stays
uninitialised. A device can be forced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch

from memlab.errors import ProbeError
from memlab.probes import cuda
from memlab.probes.counters import AcceleratorCounters
from memlab.probes.cpu import CpuProbe
from memlab.probes.history import RING_ENTRIES
from memlab.probes.host import HostMemory
from memlab.probes.lines import EdgeClock, Lines
from memlab.probes.marks import marker
from memlab.probes.nvml import Nvml
from memlab.probes.sampler import Reader, Reading, Sample, Sampler, slow_every
from memlab.probes.shapes import Shapes
from memlab.probes.tally import Tally
from memlab.trace.columns import Blocks, Events, Samples
from memlab.trace.trace import CPU, Bounded, Device, Gap, MadeBy, Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What to measure: a device type, or None for what the cell will use; an index, or None for all of them."""

    type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, device: str | torch.device | None) -> Target:
        """Read "cpu", "cuda", "cuda:1", "mps", ...; None or "auto" leaves it to the cell."""
        if device is None or str(device) == "auto":
            return cls()
        try:
            parsed = torch.device(device)
        except (RuntimeError, TypeError):
            raise ProbeError(f"not a device: {str(device)[:60]!r}. Say cpu, cuda, cuda:1, mps or xpu.") from None
        target = cls(parsed.type, parsed.index if parsed.type != "cpu" else None)
        target.check()
        return target

    def check(self) -> None:
        """Refuse a device that this machine does not have."""
        if self.type == "cpu":
            return
        if self.type == "cuda":
            count = torch.cuda.device_count() if cuda.is_possible() else 0
        else:
            current = torch.accelerator.current_accelerator()
            count = torch.accelerator.device_count() if current is not None and current.type == self.type else 0
        if count <= (self.index or 0):
            here = f"{count} of them" if count else "none"
            raise ProbeError(f"cannot measure {self.type}:{self.index or 0}: this machine and PyTorch have {here}.")


class Measurement:
    """Runs the engines for one track. `start` and `stop` belong to the thread that works; `tick` is the sampler's."""

    def __init__(
        self,
        target: Target,
        rate_hz: float = 10.0,
        entries: int = RING_ENTRIES,
        lines: Lines | None = None,
        shapes: bool = False,
    ) -> None:
        self.target, self._lines = target, lines
        self.on_tick: Callable[[Sample], None] | None = None
        self._cuda = cuda.CudaProbe(entries) if target.type in (None, "cuda") and cuda.is_possible() else None
        self._cpu = CpuProbe() if target.type in (None, "cpu") else None
        if shapes and self._cpu is not None:
            self._cpu.tally = Tally(shapes=True)
        self._shapes = Shapes() if shapes and self._cuda is not None else None
        other = _other_accelerator(target) if self._cuda is None else None
        self._other = OtherProbe(other) if other else None
        self._nvml: Nvml | None = None
        self._rate_hz = rate_hz
        self._sampler = Sampler(self._read, self._tick, rate_hz)
        self._reader: Reader | None = None
        self._outer_at_module: Callable[[], None] | None = None
        self.start_ns = 0

    # --- from start to stop -------------------------------------------------------------------------------------------

    def start(self, frame: FrameType | None = None) -> None:
        """Start the sampler first and the engines last, so that nothing of ours is measured.

        `frame` is where the user's code stands, for the lines.
        """
        self._nvml = Nvml.open() if self._cuda is not None else None
        accelerator = self._other.counters if self._other else None
        tally = self._cpu.tally if self._cpu is not None else None
        tallied = (lambda: tally.current_bytes) if tally is not None else None
        self.start_ns = time.time_ns()
        self._reader = Reader(
            lambda: time.time_ns() - self.start_ns,
            nvml=self._nvml,
            host=HostMemory(),
            accelerator=accelerator,
            host_allocated=tallied,
            slow_every=slow_every(self._rate_hz),
        )
        started = []
        try:
            for probe in self._probes():  # the CPU's first: it looks for what is alive, which takes its time
                probe.start()
                started.append(probe)
            self._begin_now()
            if self._cuda is not None and self._cpu is not None:
                self._outer_at_module, marker.at_module = marker.at_module, self._retire_tally
            self._sampler.start()
            if self._shapes is not None:
                self._shapes.start()
            if self._lines is not None:
                moment = self._cpu.tally.mark if self._cpu is not None else time.time_ns
                self._lines.start(frame or sys._getframe(1), self._line_clock(moment), self._event_times, moment)
        except BaseException:
            self._stop_watching()
            with contextlib.suppress(Exception):
                self._stop_all(reversed(started))
            self._close()
            raise

    def stop(self) -> Trace:
        """Stop everything, in the opposite order, and return the trace of the device that was used."""
        try:
            self._stop_watching()
            for probe in self._probes():
                probe.end_ns = time.time_ns()  # what stopping takes is not part of the run
            if self._reader is not None:
                self._reader.complete_next()
            self._sampler.stop()
        finally:
            try:
                traces = self._stop_all(reversed(self._probes()))
            finally:
                self._close()
        return self._complete(self._chosen(traces))

    def _stop_watching(self) -> None:
        """End what watches the user's code: lines and shapes."""
        for one in (self._lines, self._shapes):
            if one is not None:
                try:
                    with contextlib.suppress(Exception):
                        one.stop()
                except KeyboardInterrupt:
                    one.stop()
                    raise

    def _stop_all(self, probes: Iterable[Any]) -> list[Trace]:
        """Stop every one of them, also where one fails; the first failure goes out."""
        traces: list[Trace] = []
        failures: list[BaseException] = []
        for probe in probes:
            try:
                traces.append(probe.stop())
            except BaseException as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return traces

    def _probes(self) -> list[Any]:
        return [probe for probe in (self._cpu, self._other, self._cuda) if probe is not None]

    def _begin_now(self) -> None:
        """One beginning for all of them, and for the samples."""
        self.start_ns = time.time_ns()
        for probe in self._probes():
            probe.start_ns = self.start_ns

    def _close(self) -> None:
        if marker.at_module == self._retire_tally:
            marker.at_module = self._outer_at_module
        if self._nvml is not None:
            self._nvml.close()

    def _retire_tally(self) -> None:
        """Called before the forward of a module: take the tally off once the cell has come to CUDA."""
        if self._cpu is not None and self._cpu.tally.saw_accelerator and self._cpu.tally.retire():
            marker.at_module = self._outer_at_module

    # --- lines --------------------------------------------------------------------------------------------------------

    def _line_clock(self, moment: Callable[[], int]) -> Callable[[], int]:
        """The clock of line marks: later than all that happened before on the engines that are on."""
        return moment if self._cuda is None else EdgeClock(moment, lambda: cuda.recorder.is_open)

    def _event_times(self) -> np.ndarray:
        """When something happened so far, by the Unix clock."""
        times = [self._cpu.tally.columns()["time_ns"]] if self._cpu is not None else []
        if self._cuda is not None:
            cuda.recorder.read()
            times += [part.events.time_ns for history in cuda.recorder.devices for part in history.parts]
        return np.concatenate([np.empty(0, np.int64), *times])

    # --- while it runs ------------------------------------------------------------------------------------------------

    @property
    def uses_accelerator(self) -> bool:
        """Whether this measurement is of an accelerator, as far as can be told by now."""
        if self._other is not None:
            return self.target.type is not None
        if self._cuda is None or not self._cuda.used_cuda:
            return False
        return self._cpu is None or self._cpu.tally.saw_accelerator or not self._cpu.tally.events

    @property
    def capacity_bytes(self) -> int | None:
        """The whole memory of what is measured, as far as it can be had without initialising anything."""
        if self._cuda is not None:
            index = self.target.index or 0
            return torch.cuda.get_device_properties(index).total_memory if torch.cuda.is_initialized() else None
        return HostMemory().read().total_bytes if self._other is None else None

    def peak_so_far(self, reading: Reading) -> tuple[int, bool]:
        """The peak of *allocated* up to a reading, and whether it is exact: else it is the highest reading."""
        if reading.device == CPU:
            tally = self._cpu.tally if self._cpu is not None else None
            return (tally.peak_bytes, True) if tally is not None else (max(reading.allocated_bytes, 0), False)
        if self._cuda is not None:
            counter = self._cuda.new_maximum(reading.device)
            if counter is not None:
                return counter, True
        return max(reading.allocated_bytes, 0), False

    def _read(self) -> Sample:
        assert self._reader is not None
        return self._reader()

    def _tick(self, sample: Sample) -> None:
        marker.collect()
        if self.on_tick is not None:
            self.on_tick(sample)

    # --- the trace ------------------------------------------------------------------------------------------------------

    def _chosen(self, traces: list[Trace]) -> Trace:
        """The trace of the device that the cell used: CUDA if anything happened or lies there, else the CPU's."""
        by_engine = {trace.made_by.engine: trace for trace in traces}
        on_cuda = by_engine.get(cuda.ENGINE)
        if on_cuda is not None and (self.target.type == "cuda" or _has_run(on_cuda)):
            return on_cuda
        other = by_engine.get(OtherProbe.ENGINE)
        if other is not None and self._other is not None and self._other.was_used:
            return other
        rest = [trace for trace in traces if trace is not on_cuda and trace is not other]
        return (rest or traces)[0]

    def _complete(self, trace: Trace) -> Trace:
        """Add the samples of the devices that the trace is about, and what sampler and NVML could not see."""
        samples = Samples(**self._sampler.columns())
        wanted = {CPU, *trace.device_indices}
        keep = np.isin(samples.device, list(wanted))
        gaps = list(self._nvml.gaps) if self._nvml is not None and trace.made_by.engine == cuda.ENGINE else []
        if self._sampler.reason:
            gaps.append(Gap("sampler", self._sampler.reason))
        if self.target.index is not None:
            trace = _only(trace, self.target.index)
        samples = samples.rows(keep)
        samples = samples.replace(time_ns=np.minimum(samples.time_ns, trace.made_by.duration_ns))
        trace = dataclasses.replace(trace, samples=samples).with_gaps(*gaps)
        for one in (self._shapes if trace.made_by.engine == cuda.ENGINE else None, self._lines):
            try:
                trace = one.into(trace, self.start_ns) if one is not None else trace
            except Exception as error:  # a run without them is better than none
                trace = trace.with_gaps(Gap("lines", f"lines or shapes could not be made out ({error!r:.200})"))
        return trace


def _has_run(trace: Trace) -> bool:
    return len(trace.events) > trace.first_row or any(not b.is_exact for b in trace.made_by.bounded)


def _only(trace: Trace, index: int) -> Trace:
    """The trace with one device on its list; the events of others stay, unnamed."""
    devices = tuple(device for device in trace.made_by.devices if device.index == index)
    return dataclasses.replace(trace, made_by=dataclasses.replace(trace.made_by, devices=devices))


def _other_accelerator(target: Target) -> str | None:
    """The accelerator besides CUDA that this machine has, if it is asked for or left open."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type == "cuda" or target.type not in (None, current.type):
        return None
    return current.type


class OtherProbe:
    """MPS, XPU and other accelerators: their counters at the start and the end; in between the samples speak."""

    ENGINE = "accelerator counters"

    def __init__(self, device_type: str) -> None:
        self.counters = AcceleratorCounters(device_type)
        self.was_used = False
        self.start_ns = self.end_ns = 0

    def start(self) -> None:
        """Read the counters."""
        self._start = self.counters.read()
        self.start_ns = time.time_ns()

    def stop(self) -> Trace:
        """Read them again."""
        end, duration_ns = self.counters.read(), (self.end_ns or time.time_ns()) - self.start_ns
        self.was_used = end != self._start or bool(end.allocated_bytes)
        levels = {}
        for when, reading in (("start", self._start), ("end", end)):
            for name, value in dataclasses.asdict(reading).items():
                levels[f"{when}_{name}"] = -1 if value is None else value
        device = Device(0, self.counters.device_type, **levels)
        text = f"{self.counters.device_type} has counters and no history: between samples a peak may have been higher"
        made_by = MadeBy(
            self.ENGINE,
            (device,),
            {"torch": torch.__version__},
            self.start_ns / 1e9,
            duration_ns,
            (Gap("counters only", text), *self.counters.gaps),
            (Bounded(0, 0, duration_ns, 0),),
        )
        return Trace(Events.empty(), Blocks.empty(), made_by)
