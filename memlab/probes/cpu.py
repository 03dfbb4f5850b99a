"""The CPU probe: the trace of one track, from a `StorageTracker` of its own and the shared marker."""

from __future__ import annotations

import platform
import threading
import time
from typing import Any

import numpy as np
import torch

from memlab.probes.categories import assemble
from memlab.probes.ddp_buckets import begin_with_buckets
from memlab.probes.marks import marker
from memlab.probes.storage_tracker import StorageTracker
from memlab.probes.tensor_labels import LiveTensors, tensor_labels
from memlab.torch_internals import sharded
from memlab.trace.columns import Events
from memlab.trace.trace import CPU, Bounded, Device, Gap, MadeBy, Trace

ENGINE = "CPU tensor tracker"


class CpuProbe:
    """Measures the storages that operators of this thread make on the CPU, from `start` to `stop`."""

    def __init__(self, shapes: bool = False) -> None:
        self.owner = threading.get_ident()
        self.start_ns = self.end_ns = self._labels_from_ns = 0
        self.tracker = StorageTracker(shapes=shapes)
        self._buckets: list[sharded.HiddenBuckets] = []

    def start(self, live: LiveTensors | None = None) -> None:
        """Start; `live`: the caller has just labeled everything."""
        tensor_labels.acquire()
        try:
            live = live or tensor_labels.label_everything()
            self._labels_from_ns = live.time_ns
            self._buckets = [sharded.HiddenBuckets.of(one, live.tensors) for one in sharded.data_parallel_modules()]
            self.tracker.start(live.tensors)
            marker.clocks = (*marker.clocks, self.tracker.mark)
        except BaseException:
            self.discard()
            raise
        self.start_ns = time.time_ns()

    def stop(self) -> Trace:
        """Stop, restore everything, and return the trace."""
        self.end_ns = self.end_ns or time.time_ns()
        try:
            tensor_labels.label_at_end()
            self.tracker.stop()
            return self.build_trace()
        finally:
            self.discard()

    def discard(self) -> None:
        """Stop without a trace."""
        try:
            self.tracker.stop()
        finally:
            marker.clocks = tuple(clock for clock in marker.clocks if clock != self.tracker.mark)
            tensor_labels.release()

    def build_trace(self) -> Trace:
        """The trace of what was recorded."""
        columns = self.tracker.columns()
        unknown = self._with_buckets(columns)
        first_row, rows = columns["first_row"], len(columns["kind"])
        events = Events(
            time_ns=np.maximum(columns["time_ns"] - self.start_ns, 0) * (np.arange(rows) >= first_row),
            kind=columns["kind"],
            block=columns["block"],
            requested_bytes=columns["nbytes"],
            allocated_bytes=columns["nbytes"],
            device=np.full(rows, CPU),
            stream=np.zeros(rows),
            address=columns["key"],
        )
        lost, until_ns = self.tracker.lost
        bounded = []
        if lost:  # the peak is known
            bounded.append(Bounded(CPU, 0, max(until_ns - self.start_ns, 0), lost, 0, 0))
        if self.tracker.resized or unknown:  # no row is missing, but some sizes are unknown
            bounded.append(Bounded(CPU, 0, 0, self.tracker.resized + len(unknown)))
        made_by = MadeBy(
            engine=ENGINE,
            devices=(Device(CPU, platform.processor() or platform.machine() or "CPU"),),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            started_at_s=self.start_ns / 1e9,
            duration_ns=self.end_ns - self.start_ns,
            gaps=(*self.tracker.gaps(), *unknown),
            bounded=tuple(bounded),
        )
        births = {name: columns[name] for name in ("op", "dtype", "shape")}
        marks = marker.columns(self.start_ns, self.end_ns, self.owner)
        since = self._labels_from_ns
        return assemble(events, births, columns["texts"], made_by, first_row, marks, self.start_ns, since)

    def _with_buckets(self, columns: dict[str, Any]) -> list[Gap]:
        """Let the buckets of each DistributedDataParallel that was there before begin with the run; else a gap."""
        gaps = []
        for before in self._buckets:
            module, there, older = before.module(), before.rebuilt or before.first, self.tracker.older
            later = sharded.HiddenBuckets.of(module).rebuilt if module is not None and not before.rebuilt else ()
            if before.live_sizes.intersection((*there, *later)):
                continue
            # Rows that were dropped chose what to keep without these buckets. That they were rebuilt may be said late.
            is_known = not self.tracker.lost[0] and (
                begin_with_buckets(columns, there, older, later if module is not None else None)
                or (bool(later) and begin_with_buckets(columns, later, older, ()))
            )
            if there and not is_known:
                text = f"{sum(there)} bytes of gradients, made before the run, count from when they are written to."
                gaps.append(Gap("gradient buckets", f"Buckets of DistributedDataParallel, {text}"))
        return gaps
