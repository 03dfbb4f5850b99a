"""The CPU probe of one track: the dispatch tally and the marks, made into a Trace.

Limits: see `tally.Tally`; every one that applied to a run is a gap of its trace.
"""

from __future__ import annotations

import platform
import threading
import time

import numpy as np
import torch

from memlab.probes.assembled import assembled
from memlab.probes.claims import claims
from memlab.probes.marks import marker
from memlab.probes.tally import Tally
from memlab.trace.columns import Events
from memlab.trace.trace import CPU, Bounded, Device, Gap, MadeBy, Trace

ENGINE = "CPU dispatch tally"


class CpuProbe:
    """Measures the storages that operators of this thread make on the CPU, from `start` to `stop`."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.start_ns = self.end_ns = self._claims_from_ns = 0
        self.tally = Tally()

    def start(self) -> None:
        """Begin: adopt what is alive, then watch."""
        marker.acquire()
        claims.acquire()
        try:
            self._claims_from_ns = time.time_ns()
            claims.look_around()
            self.tally.start()
            marker.clocks = (*marker.clocks, self.tally.mark)
        except BaseException:
            self._release()
            raise
        self.start_ns = time.time_ns()

    def _release(self) -> None:
        marker.clocks = tuple(clock for clock in marker.clocks if clock != self.tally.mark)
        claims.release()
        marker.release()

    def stop(self) -> Trace:
        """End, leave everything as it was, and return what happened."""
        self.end_ns = self.end_ns or time.time_ns()
        try:
            claims.look_around()
            self.tally.stop()
            return self._trace()
        finally:
            self._release()

    def _trace(self) -> Trace:
        columns = self.tally.columns()
        first_row = columns["first_row"]
        rows = len(columns["kind"])
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
        marks = marker.columns(self.start_ns, self.end_ns, self.owner)
        births = {name: columns[name] for name in ("op", "dtype", "shape")}
        texts, from_ns = columns["texts"], self._claims_from_ns
        return assembled(events, births, texts, self._made_by(), first_row, marks, self.start_ns, from_ns)

    def _made_by(self) -> MadeBy:
        lost, until_ns = self.tally.lost
        thinned = (Bounded(CPU, 0, max(until_ns - self.start_ns, 0), lost, 0, 0),) if lost else ()
        return MadeBy(
            engine=ENGINE,
            devices=(Device(CPU, platform.processor() or platform.machine() or "CPU"),),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            started_at_s=self.start_ns / 1e9,
            duration_ns=self.end_ns - self.start_ns,
            gaps=tuple(Gap(name, text) for name, text in self.tally.gaps()),
            bounded=thinned,
        )
