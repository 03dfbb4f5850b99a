"""The CUDA probe: the trace of one track, from the shared recorder and marker; and shapes, on request.

The peak is exact to the byte: allocator history has every event, the allocator's rules give each block's true size, and
the allocator's counters confirm it at the end (and at a new maximum). No counter is reset. ROCm works the same way.

Limits: see `history.Recorder`. Memory of the driver and of other processes causes no events; NVML reads it.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from typing import Any

import numpy as np
import torch

from memlab import torch_internals
from memlab.probes.bounded_log import BoundedLog
from memlab.probes.categories import assemble, with_shapes
from memlab.probes.counters import cuda_counters
from memlab.probes.history import RING_ENTRIES, DeviceHistory, Position, Recorder
from memlab.probes.marks import marker
from memlab.probes.rows import DeviceRows, part_without_stacks, reserved_row
from memlab.probes.tensor_labels import LabelColumns, LiveTensors, TensorLabel, tensor_labels
from memlab.torch_internals import dispatch
from memlab.torch_internals.objects import function_or_itself
from memlab.trace.columns import Category, Events, Kind
from memlab.trace.trace import Bounded, Device, Gap, MadeBy, Trace

recorder = Recorder()
"""The recorder of this process."""

ENGINE = "CUDA allocator history"
MAX_NOTES = 4_000_000
_SLOWER = Gap("shapes", "--shapes: a dispatch mode was on in the measured thread; operators took a few times longer")
Tensor, Parameter = torch.Tensor, torch.nn.Parameter


def is_possible() -> bool:
    """Whether this PyTorch has CUDA (or ROCm) and a device; initializes nothing."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()


class CudaProbe:
    """Measures the allocator of every visible device from `start` to `stop`."""

    def __init__(self, entries: int = RING_ENTRIES) -> None:
        self.entries = entries
        self.owner = threading.get_ident()
        self.start_ns = self.end_ns = self._labels_from_ns = 0
        self._begin: dict[int, Position] = {}
        self._openings: dict[int, Events] = {}
        self._first_mark = 0
        self._counters: dict[int, dict[str, int]] = {}

    def start(self, live: LiveTensors | None = None) -> None:
        """Start, without initializing CUDA; `live`: the caller has just labeled everything."""
        tensor_labels.acquire()
        try:
            recorder.acquire(self.entries)
        except BaseException:
            tensor_labels.release()
            raise
        try:
            marker.quiet = recorder.quiet_moment
            if live is None and self.used_cuda:
                live = tensor_labels.label_everything()
            self._labels_from_ns = time.time_ns() if live is None else live.time_ns
            del live  # it keeps tensors alive
            for history in recorder.devices:
                self._begin[history.device] = history.position
                self._openings[history.device] = history.opening_now()
                self._counters[history.device] = cuda_counters(history.device)
            self._first_mark = marker.log.count()
            self.start_ns = time.time_ns()
        except BaseException:
            self.discard()
            raise

    def stop(self) -> Trace:
        """Stop, restore everything, and return the trace."""
        self.end_ns = self.end_ns or time.time_ns()
        try:
            recorder.read()
            if self.used_cuda:
                made: set[int] = set()  # the addresses of blocks made since the start and alive now
                for history in recorder.devices:
                    opening = self._openings.get(history.device)
                    before = set() if opening is None else set(opening.block.tolist())
                    held = history.blocks.held.items()
                    made.update(address for address, live in held if live.block not in before)
                tensor_labels.label_keys(made)
            return self.build_trace()
        finally:
            self.discard()

    def discard(self) -> None:
        """Stop without a trace."""
        try:
            recorder.release()
        finally:
            if not recorder.users:
                marker.quiet = None
            tensor_labels.release()

    @property
    def used_cuda(self) -> bool:
        """Whether CUDA is initialized: before that no cell has used it."""
        return recorder.is_open

    def new_maximum(self, device: int) -> int | None:
        """PyTorch's peak counter, if this run has set a new maximum: exactly the peak so far."""
        peak = cuda_counters(device)["peak_allocated"]
        before = self._counters.get(device)
        return peak if before is None or peak > before["peak_allocated"] else None

    def build_trace(self) -> Trace:
        """The trace of what was recorded."""
        tracks = [self._device_rows(history) for history in recorder.devices]
        start = DeviceRows.joined([opening for opening, _ in tracks])
        run = DeviceRows.joined([rows for _, rows in tracks])
        run = run.rows(np.argsort(run.events.time_ns, kind="stable"))  # rows of one device keep their order
        since_start = np.maximum(run.events.time_ns - self.start_ns, 0)
        joined = DeviceRows.joined([start, DeviceRows(run.events.replace(time_ns=since_start), run.stack)])
        events = _dense_blocks(joined.events)
        made = np.flatnonzero(events.kind == Kind.ALLOC)
        stack = np.full(int(events.block.max(initial=-1)) + 1, -1)
        stack[events.block[made]] = joined.stack[made]
        births = {"stack": stack, "line": np.array([*recorder.stacks.line_of, -1])[stack]}
        return assemble(
            events,
            births,
            {"stack": tuple(recorder.stacks.texts), "line": tuple(recorder.stacks.lines)},
            self._made_by(),
            len(start.events),
            marker.columns(self.start_ns, self.end_ns, self.owner, self._first_mark),
            self.start_ns,
            self._labels_from_ns,
            torch_internals.blas_workspace_sizes({torch.cuda.get_device_capability(one.device)[0] for one in recorder.devices}),
        )  # fmt: skip

    def _device_rows(self, history: DeviceHistory) -> tuple[DeviceRows, DeviceRows]:
        """The state when the track began, and the rows since, as far as the recorder still has them."""
        first = self._begin.get(history.device, Position()).rows
        opening = self._openings.get(history.device)
        if opening is None or first < history.dropped:
            opening = Events.joined([reserved_row(history.opening_reserved, history.device), history.opening])
        rows = DeviceRows.joined(history.parts_after(first))
        # PyTorch's clock may go back from one snapshot to the next.
        rows = DeviceRows(rows.events.replace(time_ns=np.maximum.accumulate(rows.events.time_ns)), rows.stack)
        return part_without_stacks(opening), rows

    def _made_by(self) -> MadeBy:
        """The devices and their counters, lost ranges, and differences between history and counters."""
        devices, bounded, differences = [], [], []
        for history in recorder.devices:
            index, end = history.device, cuda_counters(history.device)
            start = self._counters.get(index, dict.fromkeys(end, 0))
            levels: dict[str, int] = {}
            for name in ("allocated", "reserved", "peak_allocated", "peak_reserved"):
                levels |= {f"start_{name}_bytes": start[name], f"end_{name}_bytes": end[name]}
            for name in ("num_ooms", "num_alloc_retries"):
                # If the user reset a count meanwhile, only what came after that.
                levels[name] = end[name] - start[name] if end[name] >= start[name] else end[name]
            properties = torch.cuda.get_device_properties(index)
            devices.append(Device(index, properties.name, properties.total_memory, **levels))
            for lost in history.losses_since(self._begin.get(index, Position())):
                begin_ns, end_ns = max(lost.begin_ns - self.start_ns, 0), lost.end_ns - self.start_ns
                peaks = (lost.peak_allocated_bytes, lost.peak_reserved_bytes)
                bounded.append(Bounded(index, begin_ns, end_ns, lost.lost_events, *peaks))
            followed = history.blocks.allocated_bytes
            if followed != end["allocated"]:
                said = f"the history comes to {followed} bytes allocated, PyTorch's counter to {end['allocated']}"
                differences.append(Gap("counters differ", f"cuda:{index}: {said}"))
        gaps = [*recorder.gaps.values()]
        unread = sum(one.lost_events for one in bounded if not one.is_exact)
        gone = sum(one.lost_events for one in bounded if one.is_exact)
        if unread:
            why = "were not read (history is a bounded ring): there the peak is a range"
            gaps.append(Gap("bounded", f"about {unread:,} allocations and frees {why}"))
        if gone:
            why = "were dropped to bound host memory; their peaks are known"
            gaps.append(Gap("dropped", f"the first {gone:,} rows {why}"))
        return MadeBy(
            engine=ENGINE,
            devices=tuple(devices),
            versions={
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cuda": str(torch.version.cuda or ""),
            },
            started_at_s=self.start_ns / 1e9,
            duration_ns=self.end_ns - self.start_ns,
            gaps=(*gaps, *differences),
            bounded=tuple(bounded),
        )


def _dense_blocks(events: Events) -> Events:
    """Number the blocks of the devices 0, 1, 2, ... in order of appearance."""
    of_block = events.block >= 0
    key = events.block[of_block].astype(np.int64) * 256 + events.device[of_block]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    block = np.full(len(events), -1, "<i4")
    block[of_block] = rank[inverse]
    return events.replace(block=block)


class ShapeLog(dispatch.OperatorMode):
    """Logs time, address, shape and dtype of the storages that operators return on an accelerator; keeps no tensor alive.

    Only on request, as it makes operators a few times slower on the host. Memory that operators do not return, or that
    is allocated outside operators, has no shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log = BoundedLog(MAX_NOTES, 3)  # time, address, number of shape and dtype
        self._numbers: dict[tuple[Any, Any], int] = {}
        self._thread = 0

    def start(self) -> None:
        """Watch the operators of this thread, and of the backward that it starts."""
        self._thread = threading.get_ident()
        dispatch.push_mode(self)

    def stop(self) -> None:
        """Stop watching; only the thread that started can."""
        if self._thread == threading.get_ident():
            dispatch.remove_mode(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and log what it returns."""
        op = function_or_itself(func)  # saves a Python frame
        out = op(*args, **kwargs) if kwargs else op(*args)
        with contextlib.suppress(Exception):  # results that cannot be inspected stay without a shape
            self._look(out)
        return out

    def _look(self, out: Any) -> None:
        kind = type(out)
        if kind is tuple or kind is list:
            for item in out:
                self._look(item)
        elif (kind is Tensor or kind is Parameter) and out.device.type != "cpu":
            storage = out.untyped_storage()
            number = self._numbers.setdefault((out.shape, out.dtype), len(self._numbers))
            self.log.append((time.time_ns(), storage.data_ptr(), number))

    def into(self, trace: Trace, start_ns: int) -> Trace:
        """The trace with shape and dtype of the blocks that were seen, where it had none."""
        rows = self.log.columns()
        time_ns, address, number = rows[:, np.argsort(rows[0], kind="stable")]
        labels = tuple(
            TensorLabel(Category.OTHER, dtype=str(dtype).removeprefix("torch."), shape=str(tuple(shape)))
            for shape, dtype in self._numbers
        )
        return with_shapes(trace, LabelColumns(time_ns, address, number, labels), start_ns).with_gaps(_SLOWER)
