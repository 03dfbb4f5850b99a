"""What is written while a run is active: its samples and optimizer steps, so that a killed process leaves something to read."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import torch

from memlab.probes.job_rank import job_rank
from memlab.probes.marks import marker
from memlab.probes.measurement import Measurement
from memlab.probes.sampler import Sample
from memlab.trace.columns import MarkKind, Marks, Samples
from memlab.trace.file import PartialFile
from memlab.trace.spans import OPTIMIZER, OPTIMIZER_WITH_CLOSURE
from memlab.trace.trace import CPU, RANK, UNFINISHED, Bounded, Device, MadeBy

_STEPS = (OPTIMIZER, OPTIMIZER_WITH_CLOSURE)


class Saver:
    """Writes the samples and the optimizer steps of a measurement to a file, which is removed when the whole run is saved."""

    HEAD_EVERY_NS = 1_000_000_000

    def __init__(self, path: Path, name: str, measurement: Measurement) -> None:
        self._file, self._name, self._next_head_ns = PartialFile(path), name, 0
        self._measurement, self._owner = measurement, threading.get_ident()
        self._marks_seen = marker.log.count()
        self._peaks: dict[int, int] = {}
        self._file.writer.texts({"mark": _STEPS})

    def tick(self, sample: Sample) -> None:
        """Append one sample, and the steps since the one before."""
        for reading in sample.readings:
            known, is_exact = self._measurement.peak_so_far(reading)
            if is_exact:
                self._peaks[reading.device] = known
        if sample.time_ns >= self._next_head_ns:
            self._write_head(sample)
            self._next_head_ns = sample.time_ns + self.HEAD_EVERY_NS
        if rows := [(sample.time_ns, *reading) for reading in sample.readings]:
            self._file.writer.table("samples", Samples(*np.array(rows, "i8").T))
        self._write_steps()
        self._file.flush()

    def _write_head(self, sample: Sample) -> None:
        """What is known so far; the peak of what was not written is a lower bound of the run's."""
        devices = []
        for index in (reading.device for reading in sample.readings):
            device = Device(index, "")
            if index != CPU and torch.cuda.is_initialized():
                properties = torch.cuda.get_device_properties(index)
                device = Device(index, properties.name, properties.total_memory)
            devices.append(device)
        unread = (Bounded(one.index, 0, sample.time_ns, 0, self._peaks.get(one.index, -1)) for one in devices)
        start_s, rank = self._measurement.start_ns / 1e9, job_rank()
        made_by = MadeBy(UNFINISHED, tuple(devices), {}, start_s, sample.time_ns, bounded=tuple(unread))
        self._file.writer.head(made_by, notes={"name": self._name, **({RANK: rank} if rank is not None else {})})

    def _write_steps(self) -> None:
        """The optimizer steps of the measured thread since the last time, as marks."""
        start_ns, since = self._measurement.start_ns, self._marks_seen
        self._marks_seen = marker.log.count()
        found = marker.columns(start_ns, time.time_ns(), self._owner, since)
        kinds = np.isin(found.kind, (int(MarkKind.PHASE_BEGIN), int(MarkKind.PHASE_END)))
        numbers = [_STEPS.index(text) if text in _STEPS else -1 for text in found.texts]
        name = np.array([*numbers, -1])[found.name] if len(found.name) else found.name
        chosen = kinds & (name >= 0)
        if chosen.any():
            time_ns = found.time_ns[chosen] - start_ns
            marks = Marks(np.zeros(len(time_ns), "i8"), time_ns, found.kind[chosen], name[chosen])
            self._file.writer.table("marks", marks)

    def close(self) -> None:
        """The whole run is saved: remove the file."""
        self._file.close()
