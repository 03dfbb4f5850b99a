"""A PyTorch memory snapshot made into a Trace: history as somebody else recorded it, on any machine.

A snapshot holds the state at its end and the entries that led there. They are undone one by one to find the state at
the start; from there the books are followed forward as for a measured cell, so that *allocated* and *reserved* are exact.

Limits: of blocks that were there before the first entry and went during the history only the request is known; they
are taken as rounded up (a gap says how many). A snapshot has no marks, and operators, shapes and names only if
memlab wrote it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memlab.allocator import Books, Settings
from memlab.errors import TraceError
from memlab.probes.rewind import Start, rewind
from memlab.probes.rows import KIND_OF_ACTION, Part, columns_of, held_rows, part_of, reserved_row
from memlab.probes.stacks import Stacks
from memlab.probes.stillness import collector_paused
from memlab.trace.columns import Array, Blocks, Category, Events, Kind, Phase, Recategorised, deltas
from memlab.trace.snapshot import CATEGORIES, Snapshot, read
from memlab.trace.trace import Bounded, Device, Gap, MadeBy, Trace

ENGINE = "PyTorch snapshot"

_CATEGORY_OF = {name: category for category, name in CATEGORIES.items()} | {"optimizer": Category.OPTIMIZER}
_PHASE_OF = {phase.name.lower(): phase for phase in Phase}


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a snapshot file; TraceError with one line where it is none."""
    with collector_paused():
        return trace_of(read(path), Path(path).name)


def trace_of(found: Snapshot, name: str = "snapshot") -> Trace:
    """The trace that a snapshot tells of; TraceError where it tells of what cannot be."""
    try:
        return _trace_of(found, name)
    except (KeyError, IndexError, ValueError, OverflowError) as error:
        # The books bear surprises that PyTorch can cause; what is left are entries that somebody made up.
        kind = type(error).__name__
        raise TraceError(f"{name!r:.200} is no memory snapshot: its entries contradict each other ({kind}).") from None


def _trace_of(found: Snapshot, name: str) -> Trace:
    stacks, devices = Stacks(), []
    next_block = 0
    for index, entries in enumerate(found.traces):
        segments = [segment for segment in found.segments if segment["device"] == index]
        if not entries and not segments:
            continue
        device = _Device(index, [e for e in entries if e["action"] in KIND_OF_ACTION])
        if _has_sizes(found, device.entries):
            _as_written(device, _opening_rows(found, index), stacks, next_block)
        else:
            _followed(device, segments, Settings.from_snapshot(found.settings), stacks, next_block)
        next_block += device.blocks
        devices.append(device)
    return _Assembly(found, name, stacks, devices).trace()


@dataclass(slots=True)
class _Device:
    """One device of a snapshot: its entries, and the rows made of them (times of the Unix clock)."""

    index: int
    entries: list[dict[str, Any]]
    opening: Events = field(default_factory=Events.empty)
    rows: Part = field(default_factory=lambda: Part(Events.empty(), np.empty(0, "<i4")))
    made_by: dict[int, dict[str, Any]] = field(default_factory=dict)  # block -> the entry of its allocation
    first_block: int = 0
    blocks: int = 0
    guessed: int = 0
    surprises: int = 0


# --- any snapshot: undo, then follow -------------------------------------------------------------------------------------


def _followed(
    device: _Device, segments: Sequence[Mapping[str, Any]], settings: Settings, stacks: Stacks, block: int
) -> None:
    start: Start = rewind(segments, device.entries, settings)
    books = Books.from_snapshot(start.segments, settings, block)
    device.opening = Events.joined(
        [reserved_row(books.reserved_bytes, device.index), held_rows(books.held, device.index)]
    )
    columns = columns_of(device.entries, stacks)
    followed = books.follow(columns.kinds, columns.addresses, columns.sizes, columns.streams)
    part = part_of(device.index, columns, followed)
    device.rows = Part(part.events.replace(time_ns=np.maximum.accumulate(part.events.time_ns)), part.stack)
    made = np.flatnonzero(part.events.kind == Kind.ALLOC)
    rows, blocks = followed.row[made].tolist(), part.events.block[made].tolist()
    device.made_by = {block: device.entries[row] for row, block in zip(rows, blocks, strict=True)}
    device.first_block, device.blocks = block, books.next_block - block
    device.guessed, device.surprises = start.guessed, books.surprises


# --- a snapshot that memlab wrote: every size is in it ---------------------------------------------------------------------


def _has_sizes(found: Snapshot, entries: Sequence[Mapping[str, Any]]) -> bool:
    allocs = (entry for entry in entries if entry["action"] == "alloc")
    return found.extra.get("version") == 1 and all("allocated_size" in entry for entry in allocs)


def _opening_rows(found: Snapshot, index: int) -> int:
    for facts in _tables(found.extra, "devices"):
        if facts.get("index") == index:
            return _whole(facts, "opening_rows", 0)
    return 0


def _as_written(device: _Device, opening_rows: int, stacks: Stacks, block: int) -> None:
    rows: list[tuple[int, ...]] = []
    stack: list[int] = []
    held: dict[int, tuple[int, int, int, bool]] = {}  # address -> block, requested, allocated, pending
    device.first_block = block
    entries = device.entries
    for at, entry in enumerate(entries):
        kind, address, size = KIND_OF_ACTION[entry["action"]], entry["addr"], entry["size"]
        facts = (-1, 0, size)
        if kind == Kind.OOM:
            facts, address = (-1, size, address), 0
        elif kind == Kind.ALLOC:
            facts = (block, size, entry["allocated_size"])
            held[address] = (*facts, not entry["allocated_size"])
            device.made_by[block] = entry
            block += 1
        elif kind in (Kind.FREE, Kind.FREE_PENDING):
            if kind == Kind.FREE_PENDING and _completes(entries, at, address):
                continue  # requested and completed at once is one row
            known, asked, allocated, pending = held.pop(address, (-1, size, 0, False))
            if known < 0:
                device.surprises += 1
                continue
            if kind == Kind.FREE_PENDING:
                held[address] = (known, asked, 0, True)
                asked = 0
            facts = (known, asked, 0 if pending else allocated)
        opens = kind == Kind.ALLOC and len(rows) < opening_rows
        rows.append(
            (entry["time_us"] * 1000, Kind.ADOPT if opens else kind, *facts, device.index, entry["stream"], address)
        )
        stack.append(stacks.index(entry["frames"]))
    events = Events(*np.array(rows, np.int64).reshape(-1, 8).T)
    device.blocks = block - device.first_block
    device.opening = events.rows(slice(0, opening_rows))
    device.rows = Part(events.rows(slice(opening_rows, None)), np.array(stack[opening_rows:], "<i4"))


def _completes(entries: Sequence[Mapping[str, Any]], at: int, address: int) -> bool:
    after = entries[at + 1] if at + 1 < len(entries) else {"action": ""}
    return after["action"] == "free_completed" and after["addr"] == address


# --- all devices together --------------------------------------------------------------------------------------------------


class _Assembly:
    """The rows of all devices and what is known of their blocks, as one trace."""

    def __init__(self, found: Snapshot, name: str, stacks: Stacks, devices: list[_Device]) -> None:
        self.found, self.name, self.stacks, self.devices = found, name, stacks, devices
        self.texts: dict[str, dict[str, int]] = {column: {} for column in Blocks.TEXTS}

    def trace(self) -> Trace:
        opening = Events.joined([device.opening for device in self.devices])
        run = Part.joined([device.rows for device in self.devices])
        order = np.argsort(run.events.time_ns, kind="stable")
        events, stack = run.events.rows(order), run.stack[order]
        start_ns = int(events.time_ns[0]) if len(events) else 0
        events = events.replace(time_ns=np.maximum(events.time_ns - start_ns, 0))
        blocks = self._blocks(events, stack)
        recategorised = self._recategorised(order, len(opening))
        return Trace(
            Events.joined([opening.replace(time_ns=np.zeros(len(opening))), events]),
            blocks,
            self._made_by(start_ns, int(events.time_ns.max(initial=0))),
            first_row=len(opening),
            recategorised=recategorised,
            texts={column: tuple(table) for column, table in self.texts.items()},
        )

    def _text(self, column: str, words: str) -> int:
        table = self.texts[column]
        return table.setdefault(words, len(table)) if words else -1

    def _blocks(self, events: Events, stack: Array) -> Blocks:
        self.texts["stack"], self.texts["line"] = self.stacks.texts, self.stacks.lines
        count = sum(device.blocks for device in self.devices)
        columns = {name: getattr(Blocks.unknown(count), name).copy() for name in Blocks.DTYPES}
        made = np.flatnonzero(events.kind == Kind.ALLOC)
        columns["stack"][events.block[made]] = stack[made]
        columns["line"][events.block[made]] = np.array([*self.stacks.line_of, -1], "<i4")[stack[made]]
        for device in self.devices:
            for block, entry in device.made_by.items():
                categories = entry.get("categories") or [(0, entry.get("category", ""))]
                columns["category"][block] = _CATEGORY_OF.get(categories[0][1], Category.OTHER)
                columns["phase"][block] = _PHASE_OF.get(entry.get("phase", ""), Phase.OTHER)
                for name in ("module", "name", "op", "dtype", "shape"):
                    columns[name][block] = self._text(name, entry.get(name, ""))
        return Blocks(**columns)

    def _recategorised(self, order: Array, opening: int) -> Recategorised:
        """Categories that change in time, at the rows that the rows of one device have among those of all."""
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order)) + opening
        changes: list[tuple[int, int, int]] = []
        before = 0
        for device in self.devices:
            first, count = len(device.opening), len(device.rows.events)
            for block, entry in device.made_by.items():
                for row, category in (entry.get("categories") or [])[1:]:
                    at = before + min(max(row - first, 0), count)
                    where = int(place[at]) if at < before + count else opening + len(order)
                    changes.append((block, where, _CATEGORY_OF.get(category, Category.OTHER)))
            before += count
        return Recategorised(*np.array(changes, np.int64).reshape(-1, 3).T)

    def _made_by(self, start_ns: int, duration_ns: int) -> MadeBy:
        extra = self.found.extra
        engine = extra.get("engine")
        versions = extra.get("versions")
        versions = versions if type(versions) is dict else {}
        return MadeBy(
            engine=f"{engine:.200}, from a snapshot" if type(engine) is str else ENGINE,
            devices=tuple(self._device(device) for device in self.devices),
            versions={key[:80]: value[:80] for key, value in versions.items() if type(value) is str},
            started_at_s=start_ns / 1e9,
            duration_ns=max(_whole(extra, "duration_ns", 0), duration_ns),
            gaps=tuple(self._gaps()),
            bounded=self._bounded(),
        )

    def _device(self, device: _Device) -> Device:
        facts = next((f for f in _tables(self.found.extra, "devices") if f.get("index") == device.index), {})
        name = facts.get("name")
        name = name[:200] if type(name) is str else f"cuda:{device.index} of {self.name}"
        start = {of: int(deltas(device.opening, of).sum()) for of in ("allocated", "reserved")}
        change = {of: int(deltas(device.rows.events, of).sum()) for of in ("allocated", "reserved")}
        known = {f"start_{of}_bytes": start[of] for of in start}
        known |= {f"end_{of}_bytes": start[of] + change[of] for of in start}
        known["num_ooms"] = int((device.rows.events.kind == Kind.OOM).sum())
        return Device(device.index, name, **(known | _whole_numbers(Device, facts)))

    def _bounded(self) -> tuple[Bounded, ...]:
        """Stretches that a trace of memlab's had lost before it was saved."""
        found = [_whole_numbers(Bounded, facts, "device") for facts in _tables(self.found.extra, "bounded")]
        return tuple(
            Bounded(**facts) for facts in found if {"device", "begin_ns", "end_ns", "lost_events"} <= facts.keys()
        )

    def _gaps(self) -> list[Gap]:
        gaps = [Gap("snapshot", "read from a PyTorch snapshot: it has no phases, no lines of time and no counters")]
        for facts in _tables(self.found.extra, "gaps"):
            if type(facts.get("name")) is str and type(facts.get("text")) is str:
                gaps.append(Gap(facts["name"][:200], facts["text"][:1000]))
        guessed = sum(device.guessed for device in self.devices)
        surprises = sum(device.surprises for device in self.devices)
        if guessed:
            text = f"{guessed:,} blocks are older than the history and ended in it: taken as their requests rounded up"
            gaps.append(Gap("older blocks", text))
        if surprises:
            text = f"{surprises:,} entries do not add up (settings changed, private pools, entries lost): figures may be off"
            gaps.append(Gap("rules", text))
        return gaps


def _tables(extra: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = extra.get(name)
    return [item for item in value if type(item) is dict] if type(value) is list else []


def _whole_numbers(kind: type, facts: Mapping[str, Any], *more: str) -> dict[str, int]:
    """Those fields of a value that are numbers, as far as a file has them and they are possible ones."""
    names = [field.name for field in dataclasses.fields(kind) if str(field.type) == "int" and field.name != "index"]
    given = {name: facts[name] for name in (*names, *more) if name in facts}
    return {name: value for name, value in given.items() if type(value) is int and -1 <= value < 1 << 62}


def _whole(facts: Mapping[str, Any], name: str, default: int) -> int:
    value = facts.get(name, default)
    return value if type(value) is int and -1 <= value < 1 << 62 else default
