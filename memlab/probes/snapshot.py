"""A PyTorch memory snapshot, recorded on any machine, as a Trace.

A snapshot has the state at its end and the entries that led there. They are undone one by one to find the state at the
start; from there the blocks are followed as for a measured cell, so *allocated* and *reserved* are exact.

Limits: for blocks older than the first entry that were freed later only the requested size is known; it is rounded up (a
gap says how many). A snapshot has no marks; operators, shapes and names are there only if memlab wrote it.
"""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memlab.allocator import BlockTracker, Settings
from memlab.allocator.rules import MIN_BLOCK
from memlab.errors import TraceError
from memlab.probes.rows import KIND_OF_ACTION, DeviceRows, Stacks, columns_of, opening_rows, part_of, pause_gc
from memlab.trace.address_ranges import AddressRanges
from memlab.trace.columns import Array, Blocks, Category, Events, Kind, Phase, Recategorised, deltas
from memlab.trace.snapshot_read import Snapshot, read
from memlab.trace.snapshot_write import CATEGORIES
from memlab.trace.trace import Bounded, Device, Gap, MadeBy, Trace

ENGINE = "PyTorch snapshot"

_CATEGORY_OF = {name: category for category, name in CATEGORIES.items()} | {"optimizer": Category.OPTIMIZER}
_PHASE_OF = {phase.name.lower(): phase for phase in Phase}


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a snapshot file; TraceError with one line if it is not one."""
    with pause_gc():
        return trace_of(read(path), Path(path).name)


def trace_of(found: Snapshot, name: str = "snapshot") -> Trace:
    """The trace of a snapshot; TraceError if its entries contradict each other."""
    try:
        stacks, devices, next_block = Stacks(), [], 0
        for index, entries in enumerate(found.traces):
            segments = [segment for segment in found.segments if segment["device"] == index]
            if not entries and not segments:
                continue
            device = _DeviceSnapshot(index, [one for one in entries if one["action"] in KIND_OF_ACTION], next_block)
            allocs = (one for one in device.entries if one["action"] == "alloc")
            if found.extra.get("version") == 1 and all("allocated_size" in one for one in allocs):
                _as_written(device, found, stacks)
            else:
                _followed(device, segments, Settings.from_snapshot(found.settings), stacks)
            next_block = device.next_block
            devices.append(device)
        return _joined(found, name, stacks, devices)
    except (KeyError, IndexError, ValueError, OverflowError) as error:
        # What PyTorch can cause is counted as inconsistent; anything else is a forged entry.
        kind = type(error).__name__
        raise TraceError(f"{name!r:.200} is no memory snapshot: its entries contradict each other ({kind}).") from None


@dataclass(slots=True)
class _DeviceSnapshot:
    """One device of a snapshot: its entries, and the rows made of them (times of the Unix clock)."""

    index: int
    entries: list[dict[str, Any]]
    next_block: int
    opening: Events = field(default_factory=Events.empty)
    rows: DeviceRows = field(default_factory=lambda: DeviceRows.joined([]))
    made_by: dict[int, dict[str, Any]] = field(default_factory=dict)  # block -> the entry of its allocation
    guessed: int = 0
    inconsistencies: int = 0


def _followed(
    device: _DeviceSnapshot, segments: Sequence[Mapping[str, Any]], settings: Settings, stacks: Stacks
) -> None:
    """The rows of any snapshot: undo its entries, then follow them."""
    start, device.guessed = _rewound(segments, device.entries, settings)
    books = BlockTracker.from_snapshot(start, settings, device.next_block)
    device.opening = opening_rows(books, device.index)
    columns = columns_of(device.entries, stacks)
    followed = books.follow(columns.kinds, columns.addresses, columns.sizes, columns.streams)
    part = part_of(device.index, columns, followed)
    device.rows = DeviceRows(part.events.replace(time_ns=np.maximum.accumulate(part.events.time_ns)), part.stack)
    made = np.flatnonzero(part.events.kind == Kind.ALLOC)
    rows, blocks = followed.row[made].tolist(), part.events.block[made].tolist()
    device.made_by = {block: device.entries[row] for row, block in zip(rows, blocks, strict=True)}
    device.next_block, device.inconsistencies = books.next_block, books.inconsistencies


def _as_written(device: _DeviceSnapshot, found: Snapshot, stacks: Stacks) -> None:
    """The rows of a snapshot written by memlab, which has every size."""
    opening = _whole(_facts(found, device.index), "opening_rows", 0)
    rows: list[tuple[int, ...]] = []
    frames: list[Any] = []
    held: dict[int, tuple[int, int, int, bool]] = {}  # address -> block, requested, allocated, pending
    following = [*device.entries[1:], {"action": "", "addr": 0}]
    for entry, after in zip(device.entries, following, strict=False):
        kind, address, size = KIND_OF_ACTION[entry["action"]], entry["addr"], entry["size"]
        facts = (-1, 0, size)
        if kind == Kind.OOM:
            facts, address = (-1, size, address), 0
        elif kind == Kind.ALLOC:
            block, device.next_block = device.next_block, device.next_block + 1
            facts = (block, size, entry["allocated_size"])
            held[address] = (*facts, not entry["allocated_size"])
            device.made_by[block] = entry
            kind = Kind.PREEXISTING if len(rows) < opening else kind
        elif kind in (Kind.FREE, Kind.FREE_PENDING):
            if kind == Kind.FREE_PENDING and (after["action"], after["addr"]) == ("free_completed", address):
                continue  # requested and completed at once is one row
            known, asked, allocated, pending = held.pop(address, (-1, size, 0, False))
            if known < 0:
                device.inconsistencies += 1
                continue
            if kind == Kind.FREE_PENDING:
                held[address] = (known, asked, 0, True)
                asked = 0
            facts = (known, asked, 0 if pending else allocated)
        rows.append((entry["time_us"] * 1000, kind, *facts, device.index, entry["stream"], address))
        frames.append(entry["frames"])
    events = Events(*np.array(rows, np.int64).reshape(-1, 8).T)
    device.opening = events.rows(slice(0, opening))
    device.rows = DeviceRows(events.rows(slice(opening, None)), stacks.indices(frames)[opening:].astype("<i4"))


def _joined(found: Snapshot, name: str, stacks: Stacks, devices: list[_DeviceSnapshot]) -> Trace:
    opening = Events.joined([device.opening for device in devices])
    run = DeviceRows.joined([device.rows for device in devices])
    order = np.argsort(run.events.time_ns, kind="stable")
    run = run.rows(order)
    start_ns = int(run.events.time_ns[0]) if len(order) else 0
    events = run.events.replace(time_ns=np.maximum(run.events.time_ns - start_ns, 0))
    blocks, texts = _blocks(devices, events, run.stack, stacks)
    return Trace(
        Events.joined([opening.replace(time_ns=np.zeros(len(opening))), events]),
        blocks,
        _made_by(found, name, devices, start_ns, int(events.time_ns.max(initial=0))),
        first_row=len(opening),
        recategorised=_recategorised(devices, order, len(opening)),
        texts={column: tuple(table) for column, table in texts.items()},
    )


def _blocks(
    devices: list[_DeviceSnapshot], events: Events, stack: Array, stacks: Stacks
) -> tuple[Blocks, dict[str, dict[str, int]]]:
    texts: dict[str, dict[str, int]] = {column: {} for column in Blocks.TEXTS}
    texts["stack"], texts["line"] = stacks.texts, stacks.lines
    count = devices[-1].next_block if devices else 0
    columns = {name: getattr(Blocks.unknown(count), name).copy() for name in Blocks.DTYPES}
    made = np.flatnonzero(events.kind == Kind.ALLOC)
    columns["stack"][events.block[made]] = stack[made]
    columns["line"][events.block[made]] = np.array([*stacks.line_of, -1], "<i4")[stack[made]]
    for block, entry in (pair for device in devices for pair in device.made_by.items()):
        categories = entry.get("categories") or [(0, entry.get("category", ""))]
        columns["category"][block] = _CATEGORY_OF.get(categories[0][1], Category.OTHER)
        columns["phase"][block] = _PHASE_OF.get(entry.get("phase", ""), Phase.OTHER)
        for name in ("module", "name", "op", "dtype", "shape"):
            words, table = entry.get(name, ""), texts[name]
            columns[name][block] = table.setdefault(words, len(table)) if words else -1
    return Blocks(**columns), texts


def _recategorised(devices: list[_DeviceSnapshot], order: Array, opening: int) -> Recategorised:
    """Categories that change over time; rows of one device become rows among those of all devices."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) + opening
    changes: list[tuple[int, int, int]] = []
    before = 0
    for device in devices:
        first, count = len(device.opening), len(device.rows.events)
        for block, entry in device.made_by.items():
            for row, category in (entry.get("categories") or [])[1:]:
                at = before + min(max(row - first, 0), count)
                where = int(place[at]) if at < before + count else opening + len(order)
                changes.append((block, where, _CATEGORY_OF.get(category, Category.OTHER)))
        before += count
    return Recategorised(*np.array(changes, np.int64).reshape(-1, 3).T)


def _made_by(found: Snapshot, name: str, devices: list[_DeviceSnapshot], start_ns: int, duration_ns: int) -> MadeBy:
    engine, versions = found.extra.get("engine"), found.extra.get("versions")
    versions = versions if type(versions) is dict else {}
    known = []
    for device in devices:
        facts = _facts(found, device.index)
        said = facts.get("name")
        label = said[:200] if type(said) is str else f"cuda:{device.index} of {name}"
        levels = {"num_ooms": int((device.rows.events.kind == Kind.OOM).sum())}
        for of in ("allocated", "reserved"):
            levels[f"start_{of}_bytes"] = start = int(deltas(device.opening, of).sum())
            levels[f"end_{of}_bytes"] = start + int(deltas(device.rows.events, of).sum())
        known.append(Device(device.index, label, **(levels | _whole_numbers(Device, facts))))
    # Ranges that a trace of memlab had lost before it was saved.
    lost = [_whole_numbers(Bounded, facts, "device") for facts in _tables(found.extra, "bounded")]
    needed = {"device", "begin_ns", "end_ns", "lost_events"}
    return MadeBy(
        engine=f"{engine:.200}, from a snapshot" if type(engine) is str else ENGINE,
        devices=tuple(known),
        versions={key[:80]: value[:80] for key, value in versions.items() if type(value) is str},
        started_at_s=start_ns / 1e9,
        duration_ns=max(_whole(found.extra, "duration_ns", 0), duration_ns),
        gaps=tuple(_gaps(found, devices)),
        bounded=tuple(Bounded(**facts) for facts in lost if needed <= facts.keys()),
    )


def _gaps(found: Snapshot, devices: list[_DeviceSnapshot]) -> list[Gap]:
    gaps = [Gap("snapshot", "read from a PyTorch snapshot: it has no phases, no lines of time and no counters")]
    for facts in _tables(found.extra, "gaps"):
        if type(facts.get("name")) is str and type(facts.get("text")) is str:
            gaps.append(Gap(facts["name"][:200], facts["text"][:1000]))
    guessed = sum(device.guessed for device in devices)
    inconsistencies = sum(device.inconsistencies for device in devices)
    if guessed:
        text = "blocks are older than the history and ended in it: taken as their requests rounded up"
        gaps.append(Gap("older blocks", f"{guessed:,} {text}"))
    if inconsistencies:
        text = "entries do not add up (settings changed, private pools, entries lost): figures may be off"
        gaps.append(Gap("rules", f"{inconsistencies:,} {text}"))
    return gaps


# --- untrusted values of a file -----------------------------------------------------------------------------------------


def _tables(extra: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = extra.get(name)
    return [item for item in value if type(item) is dict] if type(value) is list else []


def _facts(found: Snapshot, index: int) -> dict[str, Any]:
    return next((facts for facts in _tables(found.extra, "devices") if facts.get("index") == index), {})


def _whole_numbers(kind: type, facts: Mapping[str, Any], *more: str) -> dict[str, int]:
    """The integer fields of a class for which the file has valid values."""
    names = [field.name for field in dataclasses.fields(kind) if str(field.type) == "int" and field.name != "index"]
    return {name: _whole(facts, name, 0) for name in (*names, *more) if _whole(facts, name, -2) > -2}


def _whole(facts: Mapping[str, Any], name: str, default: int) -> int:
    value = facts.get(name)
    return value if type(value) is int and -1 <= value < 1 << 62 else default


# --- entries undone, one by one from the end: the state before the first of them ------------------------------------------


@dataclass(slots=True)
class _SnapshotBlock:
    """A block in use; `size` is None if the snapshot does not have its allocated size."""

    requested: int
    size: int | None = None
    pending: bool = False
    is_guess: bool = False

    def measure(self, room: int, settings: Settings) -> int:
        """Set the size from the `room` up to the next block or the segment's end, including a remainder too small to split off."""
        if self.size is None:
            size = settings.round(self.requested)
            splits = size < room and settings.splits(room, size)
            self.size = size if splits else room
            # If remainders from 512 bytes on are split off, the size is certain; else it may have up to 1 MiB more.
            self.is_guess = splits and not settings.splits(size + MIN_BLOCK, size)
        return min(self.size, room)


def _rewound(
    segments: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], settings: Settings
) -> tuple[list[dict[str, Any]], int]:
    """The segments of one device before `entries`, from those after them; and the number of estimated block sizes."""
    ranges, live = AddressRanges(), dict[int, _SnapshotBlock]()
    for segment in segments:
        ranges.add(segment["address"], segment["total_size"], segment["stream"], mapped=segment["is_expandable"])
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                is_pending = block["state"] != "active_allocated"
                live[block["address"]] = _SnapshotBlock(block["requested_size"], block["size"], is_pending)
    # torch.profiler's snapshots have no requests for a free (torch/cuda/_memory_viz.py, _profile_to_snapshot).
    says_when_asked = any(entry["action"] == "free_requested" for entry in entries)
    for entry in reversed(entries):
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            live.pop(address, None)
        elif action == "free_completed":
            live[address] = _SnapshotBlock(entry["size"], pending=says_when_asked)
        elif action == "free_requested":
            live.setdefault(address, _SnapshotBlock(entry["size"])).pending = False
        elif action in ("segment_alloc", "segment_map"):
            ranges.remove(address, entry["size"])
        elif action in ("segment_free", "segment_unmap"):
            ranges.add(address, entry["size"], entry["stream"], mapped=action == "segment_unmap")
    addresses, before = sorted(live), []
    for start, end, stream, mapped in ranges.segments():
        here = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
        blocks, at = [], start
        for address, limit in zip(here, [*here[1:], end], strict=False):
            one = live[address]
            size = one.measure(limit - address, settings)
            if address > at:
                blocks.append({"address": at, "size": address - at, "state": "inactive"})
            state = "active_pending_free" if one.pending else "active_allocated"
            blocks.append({"address": address, "size": size, "requested_size": one.requested, "state": state})
            at = address + size
        if at < end:
            blocks.append({"address": at, "size": end - at, "state": "inactive"})
        facts = {"address": start, "total_size": end - start, "stream": stream, "is_expandable": mapped}
        before.append({**facts, "blocks": blocks})
    return before, sum(block.is_guess for block in live.values())
