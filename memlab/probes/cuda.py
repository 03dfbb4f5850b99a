"""The CUDA probe: one track's view of the shared recorder and marker, made into a Trace.

The peak is exact to the byte: allocator history gives every event, the books what each really took, and the counters of
the allocator confirm it at the end (and at the peak, whenever the cell set a new maximum). No counter is reset.
ROCm builds of PyTorch use the same calls.

Limits: see `history.Recorder`; what the driver and other processes take is read by NVML and not part of these events.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
import time

import numpy as np
import torch

from memlab import seams
from memlab.probes.categories import categorised, with_workspaces
from memlab.probes.claims import claims
from memlab.probes.history import RING_ENTRIES, DeviceHistory, Lost, Position, Recorder
from memlab.probes.marks import MarkColumns, marker
from memlab.probes.rows import Part, held_rows, part_without_stacks, reserved_row
from memlab.trace.columns import Array, Blocks, Events, Kind
from memlab.trace.trace import Bounded, Device, Gap, MadeBy, Trace

recorder = Recorder()
"""The recorder of this process."""

ENGINE = "CUDA allocator history"


def is_possible() -> bool:
    """Whether this PyTorch has CUDA (or ROCm) and a device to use; initialises nothing."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()


def versions() -> dict[str, str]:
    """Who measured, with what."""
    return {"torch": torch.__version__, "python": platform.python_version(), "cuda": str(torch.version.cuda or "")}


class CudaProbe:
    """Measures the allocator of every visible device from `start` to `stop`."""

    def __init__(self, entries: int = RING_ENTRIES) -> None:
        self.entries = entries
        self.owner = threading.get_ident()
        self.start_ns = self.end_ns = self._claims_from_ns = 0
        self._begin: dict[int, Position] = {}
        self._openings: dict[int, Events] = {}
        self._first_mark = 0
        self._counters: dict[int, dict[str, int]] = {}

    def start(self) -> None:
        """Begin; CUDA is not initialised for it."""
        marker.acquire()
        claims.acquire()
        try:
            recorder.acquire(self.entries)
        except BaseException:
            claims.release()
            marker.release()
            raise
        try:
            self._note_beginning()
        except BaseException:
            self._release()
            raise

    def _note_beginning(self) -> None:
        marker.quiet = recorder.quiet_moment
        self._claims_from_ns = time.time_ns()
        if self.used_cuda:
            claims.look_around()
        self._begin = {history.device: history.position for history in recorder.devices}
        self._openings = {history.device: _opening(history) for history in recorder.devices}
        self._counters = {history.device: counters(history.device) for history in recorder.devices}
        marker.collect()
        self._first_mark = marker.count
        self.start_ns = time.time_ns()

    def stop(self) -> Trace:
        """End, leave everything as it was, and return what happened."""
        self.end_ns = self.end_ns or time.time_ns()
        try:
            if self.used_cuda:
                claims.look_around()
            recorder.read()
            return self._trace()
        finally:
            self._release()

    def _release(self) -> None:
        try:
            recorder.release()
        finally:
            if not recorder.users:
                marker.quiet = None
            claims.release()
            marker.release()

    @property
    def used_cuda(self) -> bool:
        """Whether CUDA is up: before that no cell has used it."""
        return recorder.is_open

    def new_maximum(self, device: int) -> int | None:
        """The counter's peak, if this run has set a new one; then it is exactly the peak so far."""
        peak = counters(device)["peak_allocated_bytes"]
        before = self._counters.get(device)
        return peak if before is None or peak > before["peak_allocated_bytes"] else None

    # --- the trace --------------------------------------------------------------------------------------------------

    def _trace(self) -> Trace:
        tracks = [self._device_rows(history) for history in recorder.devices]
        start = Part.joined([opening for opening, _ in tracks])
        run = _in_order(Part.joined([rows for _, rows in tracks]))
        run = dataclasses.replace(
            run, events=run.events.replace(time_ns=np.maximum(run.events.time_ns - self.start_ns, 0))
        )
        joined = Part.joined([start, run])
        events, stack = _dense_blocks(joined)
        marks = marker.columns(self.start_ns, self.end_ns, self.owner, self._first_mark)
        blocks, texts = self._blocks(events, stack, marks)
        trace = Trace(
            events,
            blocks,
            self._made_by(),
            first_row=len(start.events),
            marks=marks.table(events, len(start.events), self.start_ns),
            texts={**texts, "mark": marks.texts},
        )
        trace = categorised(trace, claims.log.columns(self._claims_from_ns, time.time_ns()), marks, self.start_ns)
        return with_workspaces(trace, seams.blas_workspace_sizes()).with_gaps(*claims.gaps(), *marks.gaps())

    def _device_rows(self, history: DeviceHistory) -> tuple[Part, Part]:
        """What was there when the track began, and the rows since; as far as the recorder still has them."""
        first = self._begin.get(history.device, Position()).rows
        parts = _after(history.parts, first - history.dropped)
        opening = self._openings.get(history.device)
        if opening is None or first < history.dropped:
            opening = Events.joined([reserved_row(history.opening_reserved, history.device), history.opening])
        return part_without_stacks(opening), _rising(Part.joined(parts))

    def _blocks(self, events: Events, stack: Array, marks: MarkColumns) -> tuple[Blocks, dict[str, tuple[str, ...]]]:
        count = int(events.block.max(initial=-1)) + 1
        blocks = Blocks.unknown(count)
        made = np.flatnonzero(events.kind == Kind.ALLOC)
        block, moment = events.block[made], events.time_ns[made] + self.start_ns
        columns = {name: getattr(blocks, name).copy() for name in ("phase", "module", "stack", "line")}
        phase, module = marks.steps()
        columns["phase"][block] = phase.at(moment)
        columns["module"][block] = module.at(moment)
        columns["stack"][block] = stack[made]
        lines = np.array([*recorder.stacks.line_of, -1], "<i4")
        columns["line"][block] = lines[stack[made]]
        texts = {"module": marks.texts, "stack": tuple(recorder.stacks.texts), "line": tuple(recorder.stacks.lines)}
        return blocks.replace(**columns), texts

    # --- who made it, and what it could not see ----------------------------------------------------------------------

    def _made_by(self) -> MadeBy:
        devices = tuple(self._device(history) for history in recorder.devices)
        bounded = tuple(self._bounded(lost) for history in recorder.devices for lost in self._own_losses(history))
        return MadeBy(
            engine=ENGINE,
            devices=devices,
            versions=versions(),
            started_at_s=self.start_ns / 1e9,
            duration_ns=self.end_ns - self.start_ns,
            gaps=(*recorder.gaps.values(), *_lost_gaps(bounded), *self._book_gaps()),
            bounded=bounded,
        )

    def _device(self, history: DeviceHistory) -> Device:
        end = counters(history.device)
        start = self._counters.get(history.device, dict.fromkeys(end, 0))
        properties = torch.cuda.get_device_properties(history.device)
        return Device(
            history.device,
            properties.name,
            properties.total_memory,
            **{f"start_{name}": start[name] for name in _LEVELS},
            **{f"end_{name}": end[name] for name in _LEVELS},
            num_ooms=_grown(start["num_ooms"], end["num_ooms"]),
            num_alloc_retries=_grown(start["num_alloc_retries"], end["num_alloc_retries"]),
        )

    def _own_losses(self, history: DeviceHistory) -> list[Lost]:
        return history.losses_since(self._begin.get(history.device, Position()))

    def _bounded(self, lost: Lost) -> Bounded:
        times = {"begin_ns": max(lost.begin_ns - self.start_ns, 0), "end_ns": lost.end_ns - self.start_ns}
        return Bounded(lost.device, lost_events=lost.lost_events, **times, **_peaks(lost))

    def _book_gaps(self) -> list[Gap]:
        """The books against the allocator's counters, now: any difference is said."""
        gaps = []
        for history in recorder.devices:
            now = counters(history.device)["allocated_bytes"]
            if history.books.allocated_bytes != now:
                books = f"the books say {history.books.allocated_bytes} bytes are allocated, PyTorch {now}"
                gaps.append(Gap("books differ", f"cuda:{history.device}: {books}"))
        return gaps


_LEVELS = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes")


def counters(device: int) -> dict[str, int]:
    """The allocator's counters of one device that a trace keeps, in bytes and counts."""
    stats = seams.cuda_stats(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return {
        "allocated_bytes": allocated["current"],
        "reserved_bytes": reserved["current"],
        "peak_allocated_bytes": allocated["peak"],
        "peak_reserved_bytes": reserved["peak"],
        "num_ooms": stats["num_ooms"],
        "num_alloc_retries": stats["num_alloc_retries"],
    }


def _grown(start: int, end: int) -> int:
    """By how much a count grew; where the user reset it on the way, what came after that."""
    return end - start if end >= start else end


def _peaks(lost: Lost) -> dict[str, int]:
    return {name: getattr(lost, name) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}


def _lost_gaps(bounded: tuple[Bounded, ...]) -> list[Gap]:
    unread = sum(b.lost_events for b in bounded if not b.is_exact)
    gone = sum(b.lost_events for b in bounded if b.is_exact)
    gaps = []
    if unread:
        text = f"about {unread:,} allocations and frees passed unread (history is a bounded ring): there the peak is a range"
        gaps.append(Gap("bounded", text))
    if gone:
        gaps.append(Gap("let go", f"the first {gone:,} rows were let go to bound host memory; their peaks are kept"))
    return gaps


def _opening(history: DeviceHistory) -> Events:
    """The rows for what is there now, as far as it was read."""
    reserved = reserved_row(history.books.reserved_bytes, history.device)
    return Events.joined([reserved, held_rows(history.books.held, history.device)])


def _after(parts: list[Part], rows: int) -> list[Part]:
    """The parts after so many rows; tracks begin between reads, so their beginning falls between parts."""
    for index, part in enumerate(parts):
        if rows <= 0:
            return parts[index:]
        rows -= len(part.events)
    return []


def _rising(part: Part) -> Part:
    """The same rows, with times that never go back: PyTorch's clock may, from one snapshot to the next."""
    times = np.maximum.accumulate(part.events.time_ns)
    return Part(part.events.replace(time_ns=times), part.stack)


def _in_order(part: Part) -> Part:
    """Rows of several devices, by time; rows of one device keep their order."""
    order = np.argsort(part.events.time_ns, kind="stable")
    return Part(part.events.rows(order), part.stack[order])


def _dense_blocks(part: Part) -> tuple[Events, Array]:
    """Number the blocks of the devices 0, 1, 2, ... in order of appearance."""
    events = part.events
    of_block = events.block >= 0
    key = events.block[of_block].astype(np.int64) * 256 + events.device[of_block]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    block = np.full(len(events), -1, "<i4")
    block[of_block] = rank[inverse]
    return events.replace(block=block), part.stack
