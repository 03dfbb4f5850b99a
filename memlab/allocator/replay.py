"""Replay the requests of a trace through the caching allocator of a given GPU.

A predicted trace has the requests, their order and streams. `simulate` sends them to the simulated allocator and returns
the trace a measurement would have given: addresses, allocated bytes, segments, and an end where memory runs out.

Whatever else the program did is in the notes of a dry run's trace (`REQUESTS`), or in rows: a row
SEGMENT_FREE of 0 bytes means that it emptied the cache there, a row OOM that an allocation failed there and it went on (it
is requested again here), a row FREE_PENDING that another stream still used a block. The result has rows for all of it, so
that it can be simulated again, for another GPU. Each GPU has an allocator of its own; rows of devices that are not simulated pass
through.

Limits: the program is not run again, so it cannot react to this GPU: where an allocation failed when it ran and would
succeed here, the trace continues as if it had failed, and a note says so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from memlab.allocator.blocks import Block
from memlab.allocator.caching import CachingAllocator
from memlab.allocator.out_of_memory import OutOfMemory
from memlab.allocator.private_pools import PrivatePools
from memlab.allocator.rules import Settings
from memlab.allocator.segments import Place
from memlab.errors import MemlabError
from memlab.trace.columns import Blocks, Category, Events, Kind
from memlab.trace.trace import CPU, Device, Trace

DEVICE = 0
NOTE = "allocator"
"""The note of a simulated trace with the memory it was simulated for, and the message of the OOM error that ended it."""

REQUESTS = "pretend"
"""Where the notes of a dry run (`memlab.prediction.probe`) keep what is not an event, with the row it preceded:
"emptied" [row], "out_of_memory" [[row, bytes, stream]], "recorded_streams" [[row, block, stream]], "operators" [[row, ...]].
Where it was on another GPU than cuda:0, what failed and operators end with its number. With private pools there is "pools"
[[row, what, pool, GPU, how often the cache had been emptied]]: what is a method of `PrivatePools`, or "empty"."""

_BORN = (int(Kind.PREEXISTING), int(Kind.ALLOC))
_ROWS_NOW = ("emptied", "out_of_memory", "recorded_streams")
_POOLS = PrivatePools
_ON_POOLS = {one.__name__: one for one in (_POOLS.keep, _POOLS.keep_whole, _POOLS.begin, _POOLS.end, _POOLS.release)}

Row = tuple[int, int, int, int, int, int, int, int]
"""The columns of Events."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Workspace:
    """An allocation that the device would make and the trace lacks: inserted before `row`, freed before `until_row`.

    With `until_row` None it is never freed. Rows count the events of the trace to simulate. `source_text` becomes the name
    of the block: what it is, and how that is known.
    """

    row: int
    requested_bytes: int
    stream: int = 0
    until_row: int | None = None
    category: int = Category.OTHER
    source_text: str = ""
    device: int = DEVICE


def simulate(
    trace: Trace,
    total_bytes: int,
    conf: str | Settings = "",
    context_bytes: int = 0,
    extras: Iterable[Workspace] = (),
    place: Place | None = None,
    devices: Iterable[int] = (DEVICE,),
) -> Trace:
    """The trace as the caching allocators of `devices` of `total_bytes` each would produce it, for the trace's torch version.

    `place` says where the driver puts segments, as for the allocator. Everything after an allocation that does not fit is
    dropped, marks and samples too.
    """
    extras, rows = tuple(extras), len(trace.events)
    for extra in extras:
        if not 0 <= extra.row <= rows or (extra.until_row is not None and not extra.row <= extra.until_row <= rows):
            raise MemlabError(f"a workspace must lie within the {rows} rows of the trace, got {extra}")
        if extra.requested_bytes <= 0:
            raise MemlabError(f"a workspace must ask for bytes, got {extra}")
    replay = _Replay(trace, extras, tuple(devices))
    version = trace.made_by.versions.get("torch", "")
    for device in replay.devices:
        if bool((trace.events.device == device).sum()) and device not in trace.device_indices:
            raise MemlabError(f"the trace has no facts about device {device}: it has {list(trace.device_indices)}")
        how: dict[str, Any] = {"torch_version": version, "place": place, "device": device}
        allocator = CachingAllocator(total_bytes, conf, context_bytes, on_event=replay.on_segment, **how)
        allocator.waits_for_events = True  # the rows say when another stream had finished
        replay.allocators[device] = allocator
    replay.go()
    return replay.trace()


class _Replay:
    """The state of one replay: rows written, which of them each row of the source became, live blocks.

    `device` is the one that is at work, and `allocator` its allocator.
    """

    def __init__(self, source: Trace, extras: tuple[Workspace, ...], devices: tuple[int, ...]) -> None:
        self.source, self.extras, self.devices = source, extras, devices
        self.device = devices[0]
        self.allocators: dict[int, CachingAllocator] = {}
        self.device_of: dict[int, int] = {}
        self.rows: list[Row] = []
        self.now_ns = 0
        self.begins: list[int] = []
        self.alive: dict[int, Block | None] = {}
        self.block_of: dict[Block, int] = {}
        self.start: dict[int, dict[str, int]] = {}
        self.done_by_next_request: list[int] = []
        self.pools: list[list[Any]] = []
        born = np.flatnonzero(np.isin(source.events.kind, _BORN) & (source.events.device != CPU))  # on any GPU
        self.last_request = int(born.max(initial=-1)) + 1
        self.first_row = self.survived_elsewhere = 0
        self.retries_before: dict[int, int] = {}
        self.out_of_memory = ""

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator of the device that is at work."""
        return self.allocators[self.device]

    def on_segment(self, kind: Kind, address: int, size: int, stream: int) -> None:
        # For an OOM the address is what the driver had free, which Events have as the allocated bytes.
        asked, allocated = (size, address) if kind == Kind.OOM else (0, size)
        self._write(kind, -1, asked, allocated, stream, address)

    def go(self) -> None:
        """Replay all requests in order, up to the first that does not fit."""
        events, first_row = self.source.events, self.source.first_row
        columns = zip(*(column.tolist() for column in events.arrays().values()), strict=True)
        before = self._before_rows()
        try:
            for position, row in enumerate(itertools.chain(columns, (None,))):  # None: after the last
                if position == first_row:
                    self._note_start()
                self.begins.append(len(self.rows))
                if row is not None and position >= first_row:
                    self.now_ns = max(self.now_ns, row[0])
                for happening in before.get(position, ()):
                    happening()
                if row is not None:
                    self._row(row)
        except OutOfMemory as full:
            self.out_of_memory = str(full)
        if not self.start:
            self._note_start()

    def _before_rows(self) -> dict[int, list[Callable[[], None]]]:
        """Row -> what happens before it: workspaces freed, then events from the notes, then workspaces allocated."""
        found: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        numbered = list(enumerate(self.extras, len(self.source.blocks)))
        for number, extra in numbered:
            if extra.until_row not in (None, extra.row):
                found[extra.until_row].append(partial(self._free, number))
        notes = self.source.notes.get(REQUESTS, {})
        for row, number, stream in notes.get("recorded_streams", ()):
            found[row].append(partial(self._use, number, stream))
        for row, requested, stream, *device in notes.get("out_of_memory", ()):
            found[row].append(partial(self._fail_again, requested, stream, *device))
        in_order: list[tuple[int, float, Callable[..., None], Any]] = [
            (row, number, self._empty_cache, self.devices) for number, row in enumerate(notes.get("emptied", ()))
        ]
        in_order += [(row, before - 0.5, self._on_pool, rest) for row, *rest, before in notes.get("pools", ())]
        for row, _, change, rest in sorted(in_order, key=itemgetter(0, 1)):
            found[row].append(partial(change, *rest))
        for number, extra in numbered:
            request = Kind.ALLOC, number, extra.requested_bytes, extra.stream, extra.device
            found[extra.row].append(partial(self._allocate, *request))
            if extra.until_row == extra.row:
                found[extra.row].append(partial(self._free, number))
        return found

    def _note_start(self) -> None:
        self.first_row = len(self.rows)
        for device, allocator in self.allocators.items():
            self.retries_before[device], self.start[device] = allocator.num_alloc_retries, _levels(allocator)

    def _row(self, row: Row) -> None:
        _time_ns, kind, block, requested, size, device, stream, _address = row
        if device not in self.allocators:
            self.rows.append(row)
        elif kind in _BORN:
            self._allocate(kind, block, requested, stream, device)
        elif kind == Kind.FREE:
            self._free(block)
        elif kind == Kind.FREE_PENDING:
            self._free_pending(block)
        elif kind == Kind.OOM:
            self._fail_again(requested, stream, device)
        elif kind == Kind.SEGMENT_FREE and size == 0:
            self._empty_cache(device)

    # --- requests ---

    def _on_pool(self, what: str, pool: int, device: int) -> None:
        if device not in self.allocators:
            return
        self.device = device
        self.pools.append([len(self.rows), what, pool, device, 0])
        if what == "empty":
            self._watch(lambda: self.allocator.empty_cache(pool))
        else:
            _ON_POOLS[what](self.allocator.private, pool)

    def _empty_cache(self, *devices: int) -> None:
        for device in devices:
            self.device = device
            self._write(Kind.SEGMENT_FREE, -1, 0, 0, 0, 0)
            self._watch(self.allocator.empty_cache)

    def _use(self, number: int, stream: int) -> None:
        if number in self.alive:  # elsewhere nothing is followed
            self.allocators[self.device_of[number]].record_stream(self.alive[number], stream)

    def _allocate(self, kind: int, number: int, requested: int, stream: int, device: int) -> None:
        if requested:
            self._complete()
        self.device = self.device_of[number] = device
        block = self.alive[number] = self._watch(lambda: self.allocator.malloc(requested, stream))
        size, address = 0, 0
        if block is not None:
            self.block_of[block] = number
            size, address = block.size, block.address
        self._write(kind, number, requested, size, stream, address)

    def _free(self, number: int) -> None:
        """Free a block; also the second half of it, where it waited for another stream."""
        if number not in self.alive:
            return  # it waited for another stream, and a synchronization has already completed it
        block, self.device = self.alive[number], self.device_of[number]
        if block is None:
            del self.alive[number]
            self._write(Kind.FREE, number, 0, 0, 0, 0)
        elif block.is_allocated and block.uses:
            self._free_pending(number)
            self.done_by_next_request.append(number)
        else:
            del self.alive[number], self.block_of[block]
            size, address = block.size if block.is_allocated else 0, block.address
            (self.allocator.free if block.is_allocated else self.allocator.complete)(block)
            self._write(Kind.FREE, number, block.requested_bytes, size, block.stream, address)

    def _complete(self) -> None:
        """If only the notes mention other streams, those have finished by the next request, as in the allocator."""
        numbers, self.done_by_next_request = self.done_by_next_request, []
        for number in numbers:
            if self.allocators[self.device_of[number]].private.routes:
                self.done_by_next_request.append(number)  # no event is asked during a capture
            else:
                self._free(number)

    def _free_pending(self, number: int) -> None:
        block, self.device = self.alive[number], self.device_of[number]
        size, address, stream = (0, 0, 0) if block is None else (block.size, block.address, block.stream)
        if block is not None:
            self.allocator.record_stream(block, ~stream)
            self.allocator.free(block)
        self._write(Kind.FREE_PENDING, number, 0, size, stream, address)

    def _fail_again(self, requested: int, stream: int, device: int = DEVICE) -> None:
        """An allocation that failed when the trace was made; the program survived it if more requests follow."""
        if device not in self.allocators:
            return
        self._complete()
        self.device = device
        try:
            block = self._watch(lambda: self.allocator.malloc(requested, stream))
        except OutOfMemory:
            if len(self.begins) > self.last_request:
                raise
            return
        self.allocator.free(block)
        self.survived_elsewhere += 1

    def _watch(self, ask: Callable[[], _Answer]) -> _Answer:
        """Do something that may synchronize: blocks waiting for other streams become free before segments are released."""
        waiting, at = self.allocator.pending, len(self.rows)
        try:
            return ask()
        finally:
            if waiting and not self.allocator.pending:
                later = self.rows[at:]
                del self.rows[at:]
                for block in waiting:
                    number = self.block_of.pop(block)
                    del self.alive[number]
                    self._write(Kind.FREE, number, block.requested_bytes, 0, block.stream, 0)
                self.rows += later

    def _write(self, kind: int, block: int, requested: int, allocated: int, stream: int, address: int) -> None:
        self.rows.append((self.now_ns, int(kind), block, requested, allocated, self.device, stream, address))

    # --- the trace ---

    def trace(self) -> Trace:
        """The source with the new rows, and all references to rows renumbered."""
        source, made_by = self.source, self.source.made_by
        events = Events(*np.array(self.rows, np.int64).reshape(-1, 8).T)
        begins = np.array([*self.begins, len(events)], np.int64)
        last = len(begins) - 1
        marks, samples, duration_ns = source.marks, source.samples, made_by.duration_ns
        if self.out_of_memory:
            marks, samples = marks.rows(marks.row < last), samples.rows(samples.time_ns <= self.now_ns)
            duration_ns = self.now_ns
        changes = source.recategorised.rows(source.recategorised.row <= last)
        blocks, texts = source.blocks, source.texts
        if self.extras:
            names = list(dict.fromkeys(extra.source_text for extra in self.extras))
            added = Blocks.unknown(
                len(self.extras),
                category=np.array([extra.category for extra in self.extras]),
                name=np.array([len(texts["name"]) + names.index(extra.source_text) for extra in self.extras]),
            )
            blocks, texts = Blocks.joined([blocks, added]), {**texts, "name": (*texts["name"], *names)}
        devices = [self._facts(device) if device.index in self.devices else device for device in made_by.devices]
        return dataclasses.replace(
            source,
            events=events,
            blocks=blocks,
            texts=texts,
            first_row=self.first_row,
            marks=marks.replace(row=begins[np.minimum(marks.row, last)]),
            recategorised=changes.replace(row=begins[np.minimum(changes.row, last)]),
            samples=samples,
            made_by=dataclasses.replace(made_by, devices=tuple(devices), duration_ns=duration_ns),
            notes=self._notes(begins.tolist()),
        )

    def _facts(self, device: Device) -> Device:
        allocator = self.allocators[device.index]
        facts: dict[str, Any] = {f"start_{name}": value for name, value in self.start[device.index].items()}
        facts |= {f"end_{name}": value for name, value in _levels(allocator).items()}
        return dataclasses.replace(
            device,
            **facts,
            capacity_bytes=allocator.total_bytes,
            num_ooms=sum(row[1] == Kind.OOM and row[5] == device.index for row in self.rows[self.first_row :]),
            num_alloc_retries=allocator.num_alloc_retries - self.retries_before[device.index],
        )

    def _notes(self, begins: list[int]) -> dict[str, Any]:
        """The notes of the source, without those that became rows, plus a note about this replay."""
        notes = dict(self.source.notes)
        if REQUESTS in notes:
            own = {key: value for key, value in notes[REQUESTS].items() if key not in _ROWS_NOW}
            for name in {"operators", "cleared"} & own.keys():
                own[name] = [[begins[row], *rest] for row, *rest in own[name] if row < len(begins)]
            notes[REQUESTS] = own | ({"pools": self.pools} if self.pools else {})
        notes[NOTE] = {
            "total_bytes": self.allocator.total_bytes,
            "context_bytes": self.allocator.context_bytes,
            "out_of_memory": self.out_of_memory,
            "fitted_where_it_had_failed": self.survived_elsewhere,
        }
        return notes


def _levels(allocator: CachingAllocator) -> dict[str, int]:
    names = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
    return {name: getattr(allocator, name) for name in names}
