"""The probe of fake CUDA: its log as a Trace of the card, or of several of it.

Its events have the requested sizes; `memlab.allocator.replay.simulate` turns them into allocated ones, using what is not an
event from the notes. Limits: those of `fake_cuda`; each that applied is an assumption or a gap of the trace.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from memlab.errors import PredictionError
from memlab.fake_cuda import FakeCuda
from memlab.fake_cuda.assumed import facts
from memlab.prediction.torch_versions import HERE
from memlab.probes.categories import assemble
from memlab.probes.line_marks import Lines
from memlab.probes.marks import marker
from memlab.probes.tensor_labels import tensor_labels
from memlab.trace.columns import Array, Events, Kind
from memlab.trace.trace import PREDICTING, Device, Gap, MadeBy, Trace

NOTES = "pretend"
"""The key in the notes of a trace for what is not an event; part of the file format."""


class FakeCudaProbe:
    """Follows what happens on the fake GPU from `start` to `stop`; the FakeCuda must be on."""

    def __init__(self, fake: FakeCuda, lines: Lines | None = None) -> None:
        self._lines = lines
        self.owner = threading.get_ident()
        self.fake = fake
        self.log = fake.log
        self.start_ns = self.end_ns = self._labels_from_ns = 0
        self._first, self._before = 0, self._lengths()

    def start(self) -> None:
        """Start: whatever is alive on the card is preexisting."""
        if not self.fake.is_on:
            raise PredictionError("fake CUDA is not on: start the probe inside of `with FakeCuda(card):`.")
        tensor_labels.acquire()
        try:
            self._labels_from_ns = tensor_labels.label_everything().time_ns
            self.log.record_frees()
            self._first, self._before = len(self.log), self._lengths()
            marker.clocks = (*marker.clocks, self.log.mark)
            self.start_ns = time.time_ns()
            if self._lines is not None:
                times = lambda: self.log.columns()["time_ns"]  # noqa: E731
                self._lines.start(sys._getframe(1), self.log.mark, times, self.log.mark)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        marker.clocks = tuple(clock for clock in marker.clocks if clock != self.log.mark)
        tensor_labels.release()

    def stop(self) -> Trace:
        """Stop, restore everything, and return the trace."""
        if self._lines is not None:
            self._lines.stop()
        self.log.record_frees()
        self.end_ns = self.end_ns or time.time_ns()
        try:
            tensor_labels.label_at_end()
            return self._trace()
        finally:
            self._release()

    def _trace(self) -> Trace:
        columns, first = self.log.columns(), self._first
        kind, block = columns["kind"], columns["block"]
        earlier = np.arange(len(kind)) < first
        died = block[earlier & (kind == Kind.FREE)]
        alive = np.flatnonzero(earlier & (kind == Kind.ALLOC) & ~np.isin(block, died))
        row = np.concatenate([alive, np.arange(first, len(kind))]).astype(np.int64)
        is_before = np.arange(len(row)) < len(alive)
        block_of = block[row][kind[row] == Kind.ALLOC].astype(np.int64)
        number = np.full(len(columns["birth"]) + 1, -1, np.int64)  # of a block in the trace
        number[block_of] = np.arange(len(block_of))
        events = Events(
            time_ns=np.where(is_before, 0, np.maximum(columns["time_ns"][row] - self.start_ns, 0)),
            kind=np.where(is_before, Kind.PREEXISTING, kind[row]).astype(kind.dtype),
            block=number[block[row]],
            requested_bytes=columns["nbytes"][row],
            allocated_bytes=columns["nbytes"][row],
            device=columns["device"][block[row]],
            stream=columns["stream"][row],
            address=columns["key"][row],
        )
        marks = marker.columns(self.start_ns, self.end_ns, self.owner)
        births = self.log.births.columns(columns["birth"][block_of])
        texts = dict(zip(("op", "dtype", "shape"), map(tuple, self.log.births.tables), strict=True))
        made_by, from_ns = self._made_by(), self._labels_from_ns
        trace = assemble(events, births, texts, made_by, len(alive), marks, self.start_ns, from_ns)
        trace = dataclasses.replace(trace, notes={NOTES: self._notes(len(alive) - first, number)})
        return trace if self._lines is None else self._lines.into(trace, self.start_ns)

    def _lengths(self) -> tuple[int, ...]:
        log = self.log
        logged = log.emptied, log.out_of_memory, log.recorded_streams, log.operators, log.pools, log.cleared
        return tuple(len(one) for one in logged)

    def _notes(self, shift: int, number: Array) -> dict[str, Any]:
        """What is not an event, with the rows of the trace it precedes; `number` is a block's number there."""
        log = self.log
        emptied, full, streams, operators, pools, cleared = self._before
        found: dict[str, Any] = {
            "emptied": [row + shift for row in log.emptied[emptied:]],
            "out_of_memory": [
                [row + shift, *asked, *_other(device)] for row, *asked, device in log.out_of_memory[full:]
            ],
            "recorded_streams": [
                [row + shift, int(number[block]), stream] for row, block, stream in log.recorded_streams[streams:]
            ],
            "operators": [
                [one.row + shift, *one[1:4], [list(shape) for shape in one.shapes], one.dtype, *_other(one.device)]
                for one in log.operators[operators:]
            ],
            "assumptions": [[text, count] for text, count in self.fake.assumptions.items()],
            "assumed": facts(self.fake.assumed),
        }
        if log.pools[pools:]:
            found["pools"] = [
                [row + shift, what, pool, device, before - emptied]
                for row, what, pool, device, before in log.pools[pools:]
            ]
            found["cleared"] = [[row + shift, stream, device] for row, stream, device in log.cleared[cleared:]]
        groups = self.fake.groups
        if groups.job is not None:
            found["job"] = [groups.job.rank, groups.job.world_size, groups.job.local_world_size]
            found["groups"], found["peers"] = dict(groups.used), sorted(groups.peers)
            found["stages"] = list(groups.stages.items())
            columns = log.columns()
            size, stream_of = columns["nbytes"], columns["stream"]
            found["held"] = [
                [row + shift, int(size[row]), int(stream_of[row]), None if until is None else until + shift]
                for row, until in groups.held(columns["kind"], columns["block"])
                if row >= self._first
            ]
        return found

    def _made_by(self) -> MadeBy:
        card = self.fake.gpu
        here = {} if self.fake.torch_version == torch.__version__ else {HERE: torch.__version__}
        modelled = "what libraries take is modelled, values are assumed, times are unknown"
        return MadeBy(
            engine=PREDICTING,
            devices=tuple(Device(number, card.name, int(card.total_bytes)) for number in range(self.fake.devices)),
            versions={"torch": self.fake.torch_version, "python": platform.python_version(), **here},
            started_at_s=self.start_ns / 1e9,
            duration_ns=self.end_ns - self.start_ns,
            gaps=(Gap("predicted", f"nothing ran on a card: {modelled}"),),
        )


def _other(device: int) -> list[int]:
    """The number of a GPU in a note: cuda:0 is left out."""
    return [device] if device else []
