"""One measurement from start to stop: the probes that run, the sampler, and the one Trace at the end.

Unless a device is given, the one that the cell uses is measured. If CUDA is available, history is on and, until the first CUDA
tensor appears, the CPU is tracked as well; a cell that never uses CUDA is measured on the CPU, and CUDA stays uninitialized.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch

from memlab.errors import ProbeError
from memlab.probes import cuda
from memlab.probes.child_processes import ChildProcesses
from memlab.probes.counters import AcceleratorCounters, Nvml
from memlab.probes.cpu import CpuProbe
from memlab.probes.history import RING_ENTRIES
from memlab.probes.host import HostMemory
from memlab.probes.line_marks import EdgeClock, Lines
from memlab.probes.marks import ENGINE_CODE, marker
from memlab.probes.sampler import Reading, Sample, Sampler, SampleReader, slow_every
from memlab.probes.storage_tracker import StorageTracker
from memlab.probes.tensor_labels import tensor_labels
from memlab.trace.columns import Blocks, Events, Samples
from memlab.trace.trace import CPU, Bounded, Device, Gap, MadeBy, Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What to measure: a device type, or None for whatever the cell uses; an index, or None for all of them."""

    type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, device: str | torch.device | None) -> Target:
        """Read "cpu", "cuda:1", "mps" ...; None or "auto" leaves it to the cell. ProbeError if there is no such device."""
        if device is None or str(device) == "auto":
            return cls()
        try:
            parsed = torch.device(device)
        except (RuntimeError, TypeError):
            raise ProbeError(f"not a device: {str(device)[:60]!r}. Say cpu, cuda, cuda:1, mps or xpu.") from None
        if parsed.type == "cpu":
            return cls("cpu")
        if parsed.type == "cuda":
            count = torch.cuda.device_count() if cuda.is_possible() else 0
        else:
            current = torch.accelerator.current_accelerator()
            count = torch.accelerator.device_count() if current is not None and current.type == parsed.type else 0
        index = parsed.index or 0
        if count <= index:
            here = f"{count} of them" if count else "none"
            raise ProbeError(f"cannot measure {parsed.type}:{index}: this machine and PyTorch have {here}.")
        return cls(parsed.type, parsed.index)


_MODES = (StorageTracker.__torch_dispatch__, StorageTracker._higher_order, cuda.ShapeLog.__torch_dispatch__)
MEASURING_FRAMES = frozenset({ENGINE_CODE, *(function.__code__ for function in _MODES)})
"""The code that stands between a line of the user's and the operator or the backward that it calls, while a measurement runs."""


class Measurement:
    """Runs the probes of one track. `start` and `stop` run in the working thread, `on_tick` in the sampler's."""

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
        self.start_ns = 0
        has_cuda = target.type in (None, "cuda") and cuda.is_possible()
        self._cuda = cuda.CudaProbe(entries) if has_cuda else None
        self._cpu = CpuProbe(shapes) if target.type in (None, "cpu") else None
        self._shapes = cuda.ShapeLog() if shapes and has_cuda else None
        other = None if has_cuda else torch.accelerator.current_accelerator()
        is_measured = other is not None and other.type != "cuda" and target.type in (None, other.type)
        self._other = OtherProbe(other.type) if other is not None and is_measured else None
        self._probes: list[Any] = [probe for probe in (self._cpu, self._other, self._cuda) if probe is not None]
        tracker = self._cpu.tracker if self._cpu is not None else None
        self._reader = SampleReader(
            lambda: time.time_ns() - self.start_ns,
            HostMemory(),
            accelerator=self._other.counters if self._other else None,
            host_allocated=(lambda: tracker.current_bytes) if tracker is not None else None,
        )
        self._sampler = Sampler(self._reader, self._tick, rate_hz)
        self._reader.slow_every = slow_every(rate_hz)
        self.children = ChildProcesses()

    def start(self, frame: FrameType | None = None) -> None:
        """Start everything; `frame` is the user's, for the lines."""
        self._reader.nvml = Nvml.open() if self._cuda is not None else None
        self.start_ns = time.time_ns()
        started, live = [], None
        tensor_labels.acquire()
        try:
            # Once for all probes; not if only CUDA is measured, and is not initialized.
            if self._cpu is not None or torch.cuda.is_initialized():
                live = tensor_labels.label_everything()
            for probe in self._probes:
                probe.start(live)
                started.append(probe)
            live = None  # it keeps tensors alive
            self.start_ns = time.time_ns()  # one start time for all of them, and for the samples
            for probe in self._probes:
                probe.start_ns = self.start_ns
            if self._cuda is not None and self._cpu is not None:
                marker.at_module = (*marker.at_module, self._retire_tracker)
            self._sampler.start()
            if self._shapes is not None:
                self._shapes.start()
            if self._lines is not None:
                moment = self._cpu.tracker.mark if self._cpu is not None else time.time_ns
                # The time of a line mark is later than everything before it.
                clock = moment if self._cuda is None else EdgeClock(moment, lambda: cuda.recorder.is_open)
                self._lines.start(frame or sys._getframe(1), clock, self._event_times, moment)
        except BaseException as error:
            live = None  # the traceback references this frame, and those of the probes
            traceback.clear_frames(error.__traceback__)
            self._stop_watching()
            for probe in reversed(started):
                with contextlib.suppress(Exception):
                    probe.discard()
            self._close()
            raise

    def stop(self) -> Trace:
        """Stop everything, and return the trace of the device that was used."""
        try:
            self._stop_watching()
            for probe in self._probes:
                probe.end_ns = time.time_ns()  # stopping is not part of the run
            self._reader.calls = 0  # so that the last sample includes NVML
            self._sampler.stop()
        finally:
            try:
                trace = self._stop_probes()
            finally:
                self._close()
        return self._complete(trace)

    def _stop_watching(self) -> None:
        for one in (self._lines, self._shapes):
            if one is not None:
                try:
                    with contextlib.suppress(Exception):
                        one.stop()
                except KeyboardInterrupt:
                    one.stop()
                    raise

    def _stop_probes(self) -> Trace:
        """Stop every probe, even if one fails (the first failure is raised); return the trace of the device that was used.

        If that is CUDA, the others make no trace.
        """
        chosen: Trace | None = None
        is_final = False
        failures: list[BaseException] = []
        for probe in (self._cuda, self._other, self._cpu):
            if probe is None:
                continue
            try:
                if chosen is not None and (is_final or probe is self._other):
                    probe.discard()
                    continue
                chosen = probe.stop()
                if probe is self._cuda:
                    is_inexact = any(not one.is_exact for one in chosen.made_by.bounded)
                    has_run = len(chosen.events) > chosen.first_row or is_inexact
                    is_final = has_run or self.target.type == "cuda"
                else:
                    is_final = self._other is not None and self._other.was_used
            except BaseException as error:
                failures.append(error)
        if failures:
            raise failures[0]
        assert chosen is not None
        return chosen

    def _close(self) -> None:
        marker.at_module = tuple(call for call in marker.at_module if call != self._retire_tracker)
        if self._reader.nvml is not None:
            self._reader.nvml.close()
        tensor_labels.release()

    def _complete(self, trace: Trace) -> Trace:
        """Add the samples of the trace's devices, gaps of sampler and NVML, shapes and lines."""
        is_cuda = trace.made_by.engine == cuda.ENGINE
        gaps = list(self._reader.nvml.gaps) if self._reader.nvml is not None and is_cuda else []
        if self._sampler.reason:
            gaps.append(Gap("sampler", self._sampler.reason))
        samples = Samples(**self._sampler.columns())
        samples = samples.rows(np.isin(samples.device, [CPU, *trace.device_indices]))
        samples = samples.replace(time_ns=np.minimum(samples.time_ns, trace.made_by.duration_ns))
        if self.target.index is not None:  # one device on the list; the events of others stay, unnamed
            devices = tuple(device for device in trace.made_by.devices if device.index == self.target.index)
            trace = dataclasses.replace(trace, made_by=dataclasses.replace(trace.made_by, devices=devices))
        trace = dataclasses.replace(trace, samples=samples).with_gaps(*gaps)
        for one in (self._shapes if is_cuda else None, self._lines):
            try:
                trace = one.into(trace, self.start_ns) if one is not None else trace
            except Exception as error:  # a run without them is better than no run
                trace = trace.with_gaps(Gap("lines", f"lines or shapes could not be made out ({error!r:.200})"))
        return trace

    def _retire_tracker(self) -> None:
        """Called before the forward of a module: stop the CPU tracker once the cell uses CUDA."""
        if self._cpu is not None and self._cpu.tracker.saw_accelerator and self._cpu.tracker.retire():
            marker.at_module = tuple(call for call in marker.at_module if call != self._retire_tracker)
            # What it still sees dies in a trace that nobody asks for: marks need not be told to it.
            marker.clocks = tuple(clock for clock in marker.clocks if clock != self._cpu.tracker.mark)

    def _event_times(self) -> np.ndarray:
        times = [self._cpu.tracker.columns()["time_ns"]] if self._cpu is not None else []
        if self._cuda is not None:
            cuda.recorder.read()
            times += [part.events.time_ns for history in cuda.recorder.devices for part in history.parts]
        return np.concatenate([np.empty(0, np.int64), *times])

    def _tick(self, sample: Sample) -> None:
        marker.log.collect()
        self.children.tick(sample.time_ns)
        if self._shapes is not None:
            self._shapes.log.collect()
        if self.on_tick is not None:
            self.on_tick(sample)

    @property
    def uses_accelerator(self) -> bool:
        """Whether this measures an accelerator, as far as known by now."""
        if self._other is not None:
            return self.target.type is not None
        if self._cuda is None or not self._cuda.used_cuda:
            return False
        return self._cpu is None or self._cpu.tracker.saw_accelerator or not self._cpu.tracker.events

    @property
    def capacity_bytes(self) -> int | None:
        """The total memory of the measured device, if it can be read without initializing anything."""
        if self._cuda is not None:
            index = self.target.index or 0
            return torch.cuda.get_device_properties(index).total_memory if torch.cuda.is_initialized() else None
        return HostMemory().read().total_bytes if self._other is None else None

    def peak_so_far(self, reading: Reading) -> tuple[int, bool]:
        """The peak of *allocated* up to a reading, and whether it is exact; otherwise it is the highest reading."""
        if reading.device == CPU and self._cpu is not None:
            return self._cpu.tracker.peak_bytes, not self._cpu.tracker.resized
        if reading.device != CPU and self._cuda is not None:
            counter = self._cuda.new_maximum(reading.device)
            if counter is not None:
                return counter, True
        return max(reading.allocated_bytes, 0), False


class OtherProbe:
    """MPS, XPU and other accelerators: their counters at the start and the end; in between there are only samples."""

    def __init__(self, device_type: str) -> None:
        self.counters = AcceleratorCounters(device_type)
        self.was_used = False
        self.start_ns = self.end_ns = 0

    def start(self, live: object = None) -> None:
        """Read the counters."""
        self._start = self.counters.read()
        self.start_ns = time.time_ns()

    def discard(self) -> None:
        """Nothing to release."""

    def stop(self) -> Trace:
        """Read them again."""
        end, duration_ns = self.counters.read(), (self.end_ns or time.time_ns()) - self.start_ns
        self.was_used = end != self._start or bool(end.allocated_bytes)
        levels = {}
        for when, reading in (("start", self._start), ("end", end)):
            for name, value in dataclasses.asdict(reading).items():
                levels[f"{when}_{name}"] = -1 if value is None else value
        kind = self.counters.device_type
        text = f"{kind} has counters and no history: between samples a peak may have been higher"
        made_by = MadeBy(
            engine="accelerator counters",
            devices=(Device(0, kind, **levels),),
            versions={"torch": torch.__version__},
            started_at_s=self.start_ns / 1e9,
            duration_ns=duration_ns,
            gaps=(Gap("counters only", text), *self.counters.gaps),
            bounded=(Bounded(0, 0, duration_ns, 0),),
        )
        return Trace(Events.empty(), Blocks.empty(), made_by)
