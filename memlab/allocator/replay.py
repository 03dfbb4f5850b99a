"""A trace of requests, settled: what the caching allocator of a card would have made of them.

A predicted trace knows what was asked, when and on which stream. `settle` asks the simulated allocator for it and gives
the trace that a measurement would have given: addresses, allocated bytes, segments, and the end where memory runs out.

What the program did beside asking and letting go is told by the notes of a pretend trace (`REQUESTS`), or by rows: a row
SEGMENT_FREE of 0 bytes means that it emptied the cache there, a row OOM that an allocation failed there and it went on (it
is asked for again here), a row FREE_PENDING that another stream still used a block. The result has rows for all of it, so
that it can be settled again, for another card. Rows of other devices pass through.

Limits: the program is not run again, so that what it would have done otherwise on this card is not known: where it failed
to allocate and this card has room, the trace goes on as if it had failed, and a note says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memlab.allocator.blocks import Block
from memlab.allocator.caching import CachingAllocator
from memlab.allocator.oom import OutOfMemory
from memlab.allocator.rules import Settings
from memlab.errors import MemlabError
from memlab.trace.columns import Blocks, Category, Events, Kind

if TYPE_CHECKING:
    from memlab.trace.trace import Device, Trace

DEVICE = 0
NOTE = "allocator"
"""Where the notes of a settled trace say for which memory it was settled, and the text of the out-of-memory that ended it."""

REQUESTS = "pretend"
"""Where the notes of a pretend trace (`memlab.predictor.probe`) have what is no event, with the rows that it came before:
"emptied" [row], "out_of_memory" [[row, bytes, stream]], "recorded_streams" [[row, block, stream]], "operators" [[row, ...]]."""

_BORN = (int(Kind.ADOPT), int(Kind.ALLOC))
_PHASE_OTHER = 0
_ROWS_NOW = ("emptied", "out_of_memory", "recorded_streams")

Row = tuple[int, int, int, int, int, int, int, int]
"""The columns of Events."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Extra:
    """An allocation that the trace does not have and the device would: inserted before `row`, freed before `until_row`.

    `until_row` None means that it is kept. Rows count the events of the trace to settle. `source_text` becomes the name
    of the block: what it is, and how that is known.
    """

    row: int
    requested_bytes: int
    stream: int = 0
    until_row: int | None = None
    category: int = Category.OTHER
    source_text: str = ""


def settle(
    trace: Trace, total_bytes: int, conf: str | Settings = "", context_bytes: int = 0, extras: Iterable[Extra] = ()
) -> Trace:
    """The trace as the caching allocator of a device of `total_bytes` would have made it, in the torch of the trace.

    What comes after an allocation that does not fit is cut, marks and samples too.
    """
    extras = tuple(extras)
    for extra in extras:
        _check(extra, len(trace.events))
    if bool((trace.events.device == DEVICE).sum()) and DEVICE not in trace.device_indices:
        raise MemlabError(f"the trace has no facts about device {DEVICE}: it has {list(trace.device_indices)}")
    rows: list[Row] = []
    clock = _Clock()

    def on_event(kind: Kind, address: int, size: int, stream: int) -> None:
        # Of an out-of-memory the address is what the driver had free, and Events want that as the allocated bytes.
        asked, allocated = (size, address) if kind == Kind.OOM else (0, size)
        rows.append((clock.now_ns, int(kind), -1, asked, allocated, DEVICE, stream, address))

    version = trace.made_by.versions.get("torch", "")
    allocator = CachingAllocator(total_bytes, conf, context_bytes, on_event=on_event, torch_version=version)
    allocator.waits_for_events = True  # the rows say when another stream was done
    run = _Run(trace, allocator, extras, rows, clock)
    run.go()
    return run.trace()


def _check(extra: Extra, rows: int) -> None:
    if not 0 <= extra.row <= rows or (extra.until_row is not None and not extra.row <= extra.until_row <= rows):
        raise MemlabError(f"an extra must lie within the {rows} rows of the trace, got {extra}")
    if extra.requested_bytes <= 0:
        raise MemlabError(f"an extra must ask for bytes, got {extra}")


@dataclass(slots=True)
class _Clock:
    """The time of the row that is being asked for."""

    now_ns: int = 0


@dataclass(slots=True)
class _Run:
    """One replay: the rows written so far, which row of theirs each row of the trace became, and what is alive."""

    source: Trace
    allocator: CachingAllocator
    extras: tuple[Extra, ...]
    rows: list[Row]
    clock: _Clock
    begins: list[int] = field(default_factory=list)
    alive: dict[int, Block | None] = field(default_factory=dict)
    block_of: dict[Block, int] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    done_by_next_request: list[int] = field(default_factory=list)
    last_request: int = -1
    first_row: int = 0
    retries_before: int = 0
    out_of_memory: str = ""
    survived_elsewhere: int = 0

    def go(self) -> None:
        """Ask for everything in order, up to the first allocation that does not fit."""
        events = self.source.events
        columns = zip(*(column.tolist() for column in events.arrays().values()), strict=True)
        born = np.flatnonzero(np.isin(events.kind, _BORN) & (events.device == DEVICE))
        self.last_request = int(born.max(initial=-1)) + 1
        comes, goes = self._extras_by_row()
        beside = self._beside_by_row()
        try:
            for position, row in enumerate(columns):
                self._begin(position, row[0])
                for happening in beside.get(position, ()):
                    happening()
                self._insert(position, comes, goes)
                self._row(row)
            self._begin(len(events), self.clock.now_ns)
            for happening in beside.get(len(events), ()):
                happening()
            self._insert(len(events), comes, goes)
        except OutOfMemory as full:
            self.out_of_memory = str(full)
        if not self.start:
            self._note_start()

    def _extras_by_row(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        comes: dict[int, list[int]] = {}
        goes: dict[int, list[int]] = {}
        for number, extra in enumerate(self.extras):
            comes.setdefault(extra.row, []).append(number)
            if extra.until_row is not None:
                goes.setdefault(extra.until_row, []).append(number)
        return comes, goes

    def _beside_by_row(self) -> dict[int, list[Callable[[], None]]]:
        """What the notes have: uses by other streams, failures that the program survived, the cache emptied."""
        notes = self.source.notes.get(REQUESTS, {})
        found: dict[int, list[Callable[[], None]]] = {}
        for row, number, stream in notes.get("recorded_streams", ()):
            found.setdefault(row, []).append(partial(self._use, number, stream))
        for row, requested, stream in notes.get("out_of_memory", ()):
            found.setdefault(row, []).append(partial(self._fail_again, requested, stream))
        for row in notes.get("emptied", ()):
            found.setdefault(row, []).append(self._empty_cache)
        return found

    def _begin(self, position: int, time_ns: int) -> None:
        """Before a row of the source."""
        if position == self.source.first_row:
            self._note_start()
        self.begins.append(len(self.rows))
        if position >= self.source.first_row:
            self.clock.now_ns = max(self.clock.now_ns, time_ns)

    def _insert(self, position: int, comes: dict[int, list[int]], goes: dict[int, list[int]]) -> None:
        """Before a row: extras that go, extras that come (and go at once)."""
        base = len(self.source.blocks)
        leaving = goes.get(position, ())
        for number in leaving:
            if base + number in self.alive:
                self._free(base + number)
        for number in comes.get(position, ()):
            extra = self.extras[number]
            self._allocate(int(Kind.ALLOC), base + number, extra.requested_bytes, extra.stream)
            if number in leaving:
                self._free(base + number)

    def _note_start(self) -> None:
        allocator = self.allocator
        self.first_row, self.retries_before = len(self.rows), allocator.num_alloc_retries
        self.start = _levels(allocator)

    def _row(self, row: Row) -> None:
        _time_ns, kind, block, requested, size, device, stream, _address = row
        if device != DEVICE:
            self.rows.append(row)
        elif kind in _BORN:
            self._allocate(kind, block, requested, stream)
        elif kind == Kind.FREE:
            self._free(block)
        elif kind == Kind.FREE_PENDING:
            self._let_go(block)
        elif kind == Kind.OOM:
            self._fail_again(requested, stream)
        elif kind == Kind.SEGMENT_FREE and size == 0:
            self._empty_cache()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _empty_cache(self) -> None:
        self._write(int(Kind.SEGMENT_FREE), -1, 0, 0, 0, 0)
        self._watch(self.allocator.empty_cache)

    def _use(self, number: int, stream: int) -> None:
        self.allocator.record_stream(self.alive.get(number), stream)

    def _allocate(self, kind: int, number: int, requested: int, stream: int) -> None:
        if requested:
            self._complete()
        block = self._watch(lambda: self.allocator.malloc(requested, stream))
        self.alive[number] = block
        size, address = (0, 0) if block is None else (block.size, block.address)
        if block is not None:
            self.block_of[block] = number
        self._write(kind, number, requested, size, stream, address)

    def _free(self, number: int) -> None:
        """The end of a block: also the second half, where it waited for another stream."""
        if number not in self.alive:
            return  # it waited for another stream, and a synchronisation ended that already
        block = self.alive[number]
        if block is not None and block.is_allocated and block.uses:
            self._let_go(number)
            self.done_by_next_request.append(number)
            return
        del self.alive[number]
        if block is None:
            self._write(int(Kind.FREE), number, 0, 0, 0, 0)
            return
        was_allocated, size, address = block.is_allocated, block.size, block.address
        if was_allocated:
            self.allocator.free(block)
        else:
            self.allocator.complete(block)
        del self.block_of[block]
        allocated = size if was_allocated else 0
        self._write(int(Kind.FREE), number, block.requested_bytes, allocated, block.stream, address)

    def _complete(self) -> None:
        """Where only the notes tell of other streams, those are done by the next request, as the allocator has it."""
        numbers, self.done_by_next_request = self.done_by_next_request, []
        for number in numbers:
            self._free(number)

    def _let_go(self, number: int) -> None:
        block = self.alive[number]
        size, address, stream = (0, 0, 0) if block is None else (block.size, block.address, block.stream)
        if block is not None:
            self.allocator.record_stream(block, ~stream)
            self.allocator.free(block)
        self._write(int(Kind.FREE_PENDING), number, 0, size, stream, address)

    def _fail_again(self, requested: int, stream: int) -> None:
        """An allocation that failed where the trace was made; the program survived it if it asked for more afterwards."""
        self._complete()
        try:
            block = self._watch(lambda: self.allocator.malloc(requested, stream))
        except OutOfMemory:
            if len(self.begins) > self.last_request:
                raise
            return
        self.allocator.free(block)
        self.survived_elsewhere += 1

    def _watch(self, ask: Callable[[], _Answer]) -> _Answer:
        """Do something that may synchronise: blocks that waited for other streams are free before segments go."""
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
                    self._write(int(Kind.FREE), number, block.requested_bytes, 0, block.stream, 0)
                self.rows += later

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _write(self, kind: int, block: int, requested: int, allocated: int, stream: int, address: int) -> None:
        self.rows.append((self.clock.now_ns, kind, block, requested, allocated, DEVICE, stream, address))

    # --- the trace ----------------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """The source with the rows written, and everything that refers to rows referring to these."""
        source = self.source
        events = Events(*np.array(self.rows, np.int64).reshape(-1, 8).T)
        begins = np.array([*self.begins, len(events)], np.int64)
        marks = source.marks.rows(source.marks.row < len(begins) - 1) if self.out_of_memory else source.marks
        changes = source.recategorised.rows(source.recategorised.row < len(begins))
        samples = (
            source.samples.rows(source.samples.time_ns <= self.clock.now_ns) if self.out_of_memory else source.samples
        )
        return dataclasses.replace(
            source,
            events=events,
            first_row=self.first_row,
            marks=marks.replace(row=begins[np.minimum(marks.row, len(begins) - 1)]),
            recategorised=changes.replace(row=begins[np.minimum(changes.row, len(begins) - 1)]),
            samples=samples,
            made_by=self._made_by(),
            notes={**self._notes(begins.tolist()), NOTE: self._note()},
            **self._blocks_and_texts(),
        )

    def _blocks_and_texts(self) -> dict[str, Any]:
        if not self.extras:
            return {}
        names = list(dict.fromkeys(extra.source_text for extra in self.extras))
        known = self.source.texts["name"]
        count = len(self.extras)
        added = Blocks.unknown(
            count,
            category=np.array([extra.category for extra in self.extras], "u1"),
            phase=np.full(count, _PHASE_OTHER, "u1"),
            name=np.array([len(known) + names.index(extra.source_text) for extra in self.extras], "<i4"),
        )
        texts = {**self.source.texts, "name": (*known, *names)}
        return {"blocks": Blocks.joined([self.source.blocks, added]), "texts": texts}

    def _made_by(self) -> Any:
        made_by = self.source.made_by
        devices = tuple(self._device(facts) if facts.index == DEVICE else facts for facts in made_by.devices)
        duration_ns = self.clock.now_ns if self.out_of_memory else made_by.duration_ns
        return dataclasses.replace(made_by, devices=devices, duration_ns=duration_ns)

    def _device(self, facts: Device) -> Device:
        end = _levels(self.allocator)
        ooms = np.array([row[1] for row in self.rows[self.first_row :]]) == Kind.OOM
        levels: dict[str, Any] = {f"start_{name}": value for name, value in self.start.items()}
        levels |= {f"end_{name}": value for name, value in end.items()}
        return dataclasses.replace(
            facts,
            capacity_bytes=self.allocator.total_bytes,
            num_ooms=int(ooms.sum()),
            num_alloc_retries=self.allocator.num_alloc_retries - self.retries_before,
            **levels,
        )

    def _notes(self, begins: list[int]) -> dict[str, Any]:
        """The notes of the source; what of them is rows now is taken out."""
        notes = dict(self.source.notes)
        if REQUESTS in notes:
            own = {key: value for key, value in notes[REQUESTS].items() if key not in _ROWS_NOW}
            operators = [one for one in own.get("operators", ()) if one[0] < len(begins)]
            notes[REQUESTS] = own | {"operators": [[begins[one[0]], *one[1:]] for one in operators]}
        return notes

    def _note(self) -> dict[str, Any]:
        return {
            "total_bytes": self.allocator.total_bytes,
            "context_bytes": self.allocator.context_bytes,
            "out_of_memory": self.out_of_memory,
            "fitted_where_it_had_failed": self.survived_elsewhere,
        }


def _levels(allocator: CachingAllocator) -> dict[str, int]:
    return {
        "allocated_bytes": allocator.allocated_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "peak_allocated_bytes": allocator.peak_allocated_bytes,
        "peak_reserved_bytes": allocator.peak_reserved_bytes,
    }
