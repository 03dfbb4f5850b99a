"""The pretend probe of one track: what the log of pretend CUDA saw, made into a Trace of the card.

Its events carry what was requested; `memlab.allocator.replay.settle` makes of it what an allocator hands out. The notes of
the trace keep what `settle` and the extras need beside the events: where the cache was emptied, operators of interest, uses
on other streams, and the assumptions.

Limits: those of `pretend`; each that applied to a run is an assumption or a gap of its trace.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
import time
from typing import Any

import numpy as np
import torch

from memlab.errors import PredictionError
from memlab.predictor.pretend import PretendCuda
from memlab.probes.assembled import assembled
from memlab.probes.claims import claims
from memlab.probes.marks import marker
from memlab.trace.columns import Array, Events, Kind
from memlab.trace.trace import Device, Gap, MadeBy, Trace

ENGINE = "pretend CUDA"
NOTES = "pretend"
"""The key in the notes of a trace that has what is no event."""

DEVICE = 0


class PretendProbe:
    """Follows what happens on the pretend card from `start` to `stop`; the PretendCuda must be on."""

    def __init__(self, pretend: PretendCuda) -> None:
        self.owner = threading.get_ident()
        self.pretend = pretend
        self.log = pretend.log
        self.start_ns = self.end_ns = self._claims_from_ns = 0
        self._first = 0
        self._before = self._lengths()

    def start(self) -> None:
        """Begin: what is alive on the card is adopted."""
        if not self.pretend.is_on:
            raise PredictionError("pretend CUDA is not on: start the probe inside of `with PretendCuda(card):`.")
        marker.acquire()
        claims.acquire()
        try:
            self._claims_from_ns = time.time_ns()
            claims.look_around()
            self.log.settle_deaths()
            self._first, self._before = len(self.log), self._lengths()
            marker.clocks = (*marker.clocks, self.log.mark)
        except BaseException:
            self._release()
            raise
        self.start_ns = time.time_ns()

    def _release(self) -> None:
        marker.clocks = tuple(clock for clock in marker.clocks if clock != self.log.mark)
        claims.release()
        marker.release()

    def stop(self) -> Trace:
        """End, leave everything as it was, and return what happened."""
        self.log.settle_deaths()
        self.end_ns = self.end_ns or time.time_ns()
        try:
            claims.look_around()
            return self._trace()
        finally:
            self._release()

    # --- the trace ----------------------------------------------------------------------------------------------------

    def _trace(self) -> Trace:
        columns = self.log.columns()
        chosen = _since(columns, self._first)
        first_row = chosen.adopted
        rows = columns["kind"][chosen.row].copy()
        rows[:first_row] = Kind.ADOPT
        time_ns = np.maximum(columns["time_ns"][chosen.row] - self.start_ns, 0)
        events = Events(
            time_ns=np.where(np.arange(len(rows)) < first_row, 0, time_ns),
            kind=rows,
            block=chosen.number[columns["block"][chosen.row]],
            requested_bytes=columns["nbytes"][chosen.row],
            allocated_bytes=columns["nbytes"][chosen.row],
            device=np.full(len(rows), DEVICE),
            stream=columns["stream"][chosen.row],
            address=columns["key"][chosen.row],
        )
        marks = marker.columns(self.start_ns, self.end_ns, self.owner)
        births = self.log.births.columns(columns["birth"][chosen.block_of])
        texts = dict(zip(("op", "dtype", "shape"), map(tuple, self.log.births.tables), strict=True))
        from_ns = self._claims_from_ns
        trace = assembled(events, births, texts, self._made_by(), first_row, marks, self.start_ns, from_ns)
        return dataclasses.replace(trace, notes={NOTES: self._notes(chosen)})

    def _lengths(self) -> tuple[int, int, int, int]:
        """How much the log has of what is no event."""
        log = self.log
        return len(log.emptied), len(log.out_of_memory), len(log.recorded_streams), len(log.operators)

    def _notes(self, chosen: _Chosen) -> dict[str, Any]:
        """What is no event, with the rows of the trace that it came before."""
        log, shift = self.log, chosen.adopted - self._first
        emptied, full, streams, operators = self._before
        return {
            "emptied": [row + shift for row in log.emptied[emptied:]],
            "out_of_memory": [[row + shift, *asked] for row, *asked in log.out_of_memory[full:]],
            "recorded_streams": [
                [row + shift, int(chosen.number[block]), stream]
                for row, block, stream in log.recorded_streams[streams:]
            ],
            "operators": [
                [
                    one.row + shift,
                    one.name,
                    one.stream,
                    one.in_backward,
                    [list(shape) for shape in one.shapes],
                    one.dtype,
                ]
                for one in log.operators[operators:]
            ],
            "assumptions": [[text, count] for text, count in self.pretend.assumptions.items()],
        }

    def _made_by(self) -> MadeBy:
        card = self.pretend.card
        text = "nothing ran on a card: what libraries take is modelled, values are assumed, times are those of the rehearsal"
        return MadeBy(
            engine=ENGINE,
            devices=(Device(DEVICE, card.name, int(card.total_bytes)),),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            started_at_s=self.start_ns / 1e9,
            duration_ns=self.end_ns - self.start_ns,
            gaps=(Gap("predicted", text),),
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """Which rows of the log are in the trace: blocks alive at the start first; `number` is a block's number in the trace."""

    row: Array
    adopted: int
    number: Array
    block_of: Array


def _since(columns: dict[str, Array], first: int) -> _Chosen:
    """The rows from `first` on, and before them the births of what was alive there."""
    kind, block = columns["kind"], columns["block"]
    earlier = np.arange(len(kind)) < first
    died = block[earlier & (kind == Kind.FREE)]
    alive = np.flatnonzero(earlier & (kind == Kind.ALLOC) & ~np.isin(block, died))
    row = np.concatenate([alive, np.arange(first, len(kind))]).astype(np.int64)
    block_of = block[row][columns["kind"][row] == Kind.ALLOC].astype(np.int64)
    number = np.full(len(columns["birth"]) + 1, -1, np.int64)
    number[block_of] = np.arange(len(block_of))
    return _Chosen(row, len(alive), number, block_of)
