"""Write a Trace as a PyTorch memory snapshot, the pickle that the viewer at pytorch.org/memory_viz opens.

The viewer's own unpickler needs: protocol 4 at most (Python 3.14 would write 5), only plain containers, texts and
numbers, addresses below 2**53. What existed when the trace begins is written as allocations at its start, so that it
is coloured and named like everything else; extra keys (`allocated_size`, `module`, `name`, ...) hold what `snapshot_read`
needs to restore the same trace.

Limits: of segments that existed at the start a trace has only the total: they are written as large as the blocks in them,
and the rest of the total is one cached segment. Marks and samples have no place in a snapshot.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memlab.errors import TraceError
from memlab.trace.address_ranges import AddressRanges
from memlab.trace.columns import Blocks, Category, Events, Kind, Phase
from memlab.trace.file import savable, saving
from memlab.trace.trace import Trace

_PROTOCOL = 4
CATEGORIES = {category: category.name.lower() for category in Category} | {
    Category.OTHER: "unknown",
    Category.OPTIMIZER: "optimizer_state",
}
"""The names of torch.profiler's categories where they match (torch/cuda/_memory_viz.py)."""

_CACHED_AT = 1 << 44
"""The address of segments whose address is unknown: above all that drivers use, below 2**53."""
_MADE_UP_AT = 1 << 45
"""The address of blocks without one."""
_SMALL_SEGMENT = 2 << 20
_NO_FRAMES: list[dict[str, Any]] = []
_SEGMENT_ACTIONS = {kind: kind.name.lower() for kind in Kind if kind.name.startswith("SEGMENT")}
_SEGMENT_COMES = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
_COMES = (Kind.PREEXISTING, Kind.ALLOC)


def save(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write `trace` to `path` as a snapshot, atomically."""
    target, content = savable(path), pickle.dumps(snapshot(trace), protocol=_PROTOCOL)
    with saving(target) as file:
        file.write(content)
    return target


def snapshot(trace: Trace) -> dict[str, Any]:
    """The snapshot as plain values: segments at the end, and the entries of every device."""
    made_by, texts = trace.made_by, _BlockTexts(trace)
    written = {
        device.index: _DeviceEntries(trace, device.index, texts) for device in made_by.devices if device.index >= 0
    }
    if not written:
        raise TraceError("a memory snapshot shows CUDA devices, and this trace has none: save it as a .memlab file.")
    mapped = _is_mapped(trace.events)
    return {
        "segments": [segment for device in written.values() for segment in device.segments()],
        "device_traces": [written[at].entries if at in written else [] for at in range(max(written) + 1)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if mapped else "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": mapped,
            "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
        },
        "external_annotations": [],
        "memlab": {  # fields that PyTorch does not have
            "version": 1,
            "engine": made_by.engine,
            "versions": {str(key): str(value) for key, value in made_by.versions.items()},
            "duration_ns": made_by.duration_ns,
            "devices": [
                {**dataclasses.asdict(device), "opening_rows": written[device.index].opening_rows}
                for device in made_by.devices
                if device.index in written
            ],
            "gaps": [dataclasses.asdict(gap) for gap in made_by.gaps],
            "bounded": [dataclasses.asdict(bounded) for bounded in made_by.bounded if bounded.device >= 0],
        },
    }


def _is_mapped(events: Events) -> bool:
    return bool(np.isin(events.kind, (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)).any())


class _BlockTexts:
    """Facts about blocks as keys of an entry; equal ones are the same object, so the pickle has them once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.columns = {name: getattr(trace.blocks, name).tolist() for name in Blocks.DTYPES}
        self.stacks: dict[tuple[int, int], list[dict[str, Any]]] = {}
        changes = trace.recategorised
        rows = zip(changes.block.tolist(), changes.row.tolist(), changes.category.tolist(), strict=True)
        self.changes: dict[int, list[tuple[int, int]]] = {}
        for block, row, category in sorted(rows, key=lambda change: change[1]):
            self.changes.setdefault(block, []).append((row, category))

    def of(self, block: int) -> dict[str, Any]:
        """The keys for the purpose of a block."""
        columns = self.columns
        category = Category(self.changes[block][-1][1] if block in self.changes else columns["category"][block])
        known = {"category": CATEGORIES[category], "frames": self.frames(block)}
        if columns["phase"][block]:
            known["phase"] = Phase(columns["phase"][block]).name.lower()
        for column in ("module", "name", "op", "dtype", "shape"):
            if words := self.trace.text(column, columns[column][block]):
                known[column] = words
        parts = [str(known[column]) for column in ("name", "module", "op", "shape", "dtype") if column in known]
        known["user_metadata"] = ", ".join(dict.fromkeys(parts))  # newer viewers show it next to the frames
        return known

    def frames(self, block: int) -> list[dict[str, Any]]:
        """The stack of the block, else its line."""
        key = stack, line = self.columns["stack"][block], self.columns["line"][block]
        if key not in self.stacks:
            lines = self.trace.text("stack", stack).split("\n") if stack >= 0 else [self.trace.text("line", line)]
            self.stacks[key] = [_frame(line) for line in lines if line]
        return self.stacks[key]


def _frame(line: str) -> dict[str, Any]:
    """Parse "file:12 function" or "file:12"; file names may have spaces and colons."""
    where, _, name = line.rpartition(" ") if not line.rpartition(":")[2].isdigit() else (line, "", "")
    filename, _, number = where.rpartition(":")
    if not number.isdigit():
        return {"filename": line, "line": 0, "name": ""}
    return {"filename": filename, "line": int(number), "name": name}


class _DeviceEntries:
    """The entries of one device, and the resulting state."""

    def __init__(self, trace: Trace, index: int, texts: _BlockTexts) -> None:
        of_device = np.flatnonzero(trace.events.device == index)
        events = trace.events.rows(of_device)
        self.index, self.texts = index, texts
        self.row_in_trace = of_device.tolist()
        self.start_us = int(trace.made_by.started_at_s * 1e6)
        self.columns = {name: getattr(events, name).tolist() for name in events.DTYPES}
        self._make_up_addresses()
        first = int(np.searchsorted(of_device, trace.first_row))
        self.comes = "segment_map" if _is_mapped(events) else "segment_alloc"
        self.ranges = AddressRanges()
        self.cached_end = _CACHED_AT
        self.live: dict[int, tuple[int, int, int, bool]] = {}  # block -> address, size, requested, pending
        self.rows = 0
        self.row_of: dict[int, int] = {}  # row of the trace -> row of the trace that a reader of the file will have
        self.entries: list[dict[str, Any]] = []
        self._open(first)
        self.opening_rows = self.rows
        for row in range(first, len(events)):
            self._row(row)
        self._date_changes()

    def _make_up_addresses(self) -> None:
        """Assign addresses to blocks without one (the trace of a dry run that was not simulated)."""
        address, size, blocks = (self.columns[name] for name in ("address", "allocated_bytes", "block"))
        of_blocks = [row for row, block in enumerate(blocks) if block >= 0]
        if any(address[row] for row in of_blocks):
            return
        made_up, end = dict[int, int](), _MADE_UP_AT
        for row in of_blocks:
            if blocks[row] not in made_up:
                made_up[blocks[row]] = end
                end += -(-max(size[row], 1) // 512) * 512
            address[row] = made_up[blocks[row]]

    def _open(self, first: int) -> None:
        """Write what existed at the start."""
        kinds, sizes, addresses = (self.columns[name] for name in ("kind", "allocated_bytes", "address"))
        opening = AddressRanges.needed(kinds, addresses, sizes, self.columns["stream"])
        for start, end, stream in opening:
            self._segment(self.comes, start, end - start, stream, self.start_us)
        lumps = [row for row in range(first) if kinds[row] in _SEGMENT_ACTIONS and not addresses[row]]
        total = sum(sizes[row] * (1 if kinds[row] in _SEGMENT_COMES else -1) for row in lumps)
        self._cached(total - sum(end - start for start, end, _ in opening), self.start_us)
        for row in range(first):
            if row not in lumps:
                self._row(row)

    def _cached(self, change: int, time_us: int) -> None:
        """Grow or shrink the part of *reserved* of which only the size is known."""
        if change > 0:
            self._segment(self.comes, self.cached_end, change, 0, time_us)
            self.cached_end += change
        elif change and -change <= self.cached_end - _CACHED_AT:
            self.cached_end += change
            self._segment("segment_unmap", self.cached_end, -change, 0, time_us)

    # --- row by row -----------------------------------------------------------------------------------------------------

    def _row(self, row: int) -> None:
        names = ("kind", "address", "stream", "allocated_bytes", "requested_bytes")
        kind, address, stream, size, asked = (self.columns[name][row] for name in names)
        place = {"stream": stream, "time_us": self.start_us + self.columns["time_ns"][row] // 1000}
        self.row_of[self.row_in_trace[row]] = self.rows
        if kind == Kind.OOM:
            self._add("oom", size=asked, device_free=size, **place)
        elif kind not in _SEGMENT_ACTIONS:
            self._block(self.columns["block"][row], kind, {"addr": address, **place}, size, asked)
        elif address:
            self._segment(_SEGMENT_ACTIONS[kind], address, size, **place)
        else:
            self._cached(size if kind in _SEGMENT_COMES else -size, place["time_us"])

    def _segment(self, action: str, address: int, size: int, stream: int, time_us: int) -> None:
        if action in ("segment_alloc", "segment_map"):
            self.ranges.add(address, size, stream, mapped=action == "segment_map")
        else:
            self.ranges.remove(address, size)
        self._add(action, addr=address, size=size, stream=stream, time_us=time_us)

    def _block(self, block: int, kind: int, place: dict[str, Any], size: int, asked: int) -> None:
        if kind in _COMES:
            pending = kind == Kind.PREEXISTING and not size and asked > 0
            self.live[block] = (place["addr"], size or asked, asked, pending)
            self._add("alloc", size=asked, **place, allocated_size=size, **self.texts.of(block))
            if block in self.texts.changes:  # the first category, and later ones by row: filled in at the end
                self.entries[-1]["categories"] = block
            return
        address, size, asked, pending = self.live.pop(block, (place["addr"], size, asked, False))
        place |= {"addr": address, "size": asked}
        if not pending:
            self._add("free_requested", is_row=kind == Kind.FREE_PENDING, **place)
        if kind == Kind.FREE:
            self._add("free_completed", **place)
        else:
            self.live[block] = (address, size, asked, True)

    def _add(self, action: str, *, is_row: bool = True, **entry: Any) -> None:
        self.rows += is_row
        defaults = {"frames": _NO_FRAMES, "category": "unknown", "compile_context": "N/A", "pool_id": (0, 0)}
        self.entries.append({"action": action, **defaults, "user_metadata": "", **entry})

    def _date_changes(self) -> None:
        for entry in self.entries:
            if "categories" in entry:
                block = entry["categories"]
                first = [0, CATEGORIES[Category(self.texts.columns["category"][block])]]
                later = [[self._later(row), CATEGORIES[Category(code)]] for row, code in self.texts.changes[block]]
                entry["categories"] = [first, *later]

    def _later(self, row: int) -> int:
        """The row of the file for a row of the trace; if that is another device's, the next one of ours."""
        at = bisect_left(self.row_in_trace, row)
        return self.row_of.get(self.row_in_trace[at], 0) if at < len(self.row_in_trace) else self.rows

    # --- the state at the end -------------------------------------------------------------------------------------------

    def segments(self) -> Iterator[dict[str, Any]]:
        """The segments at the end with their blocks, free ranges between them as inactive blocks."""
        live = sorted((*facts, block) for block, facts in self.live.items() if facts[1])
        addresses = [address for address, *_ in live]
        for start, end, stream, mapped in self.ranges.segments():
            blocks, at = list[dict[str, Any]](), start
            here = live[bisect_left(addresses, start) : bisect_left(addresses, end)]
            for address, size, asked, pending, block in [*here, (end, 0, 0, False, -1)]:
                if address > at:
                    free = {"address": at, "size": address - at, "requested_size": 0, "state": "inactive"}
                    blocks.append({**free, "frames": _NO_FRAMES})
                if block >= 0:
                    facts = {"address": address, "size": size, "requested_size": asked}
                    state = "active_pending_free" if pending else "active_allocated"
                    blocks.append({**facts, "state": state, "frames": self.texts.frames(block)})
                at = max(at, address + size)
            yield {
                "device": self.index, "address": start, "total_size": end - start, "stream": stream,
                "allocated_size": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
                "active_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
                "requested_size": sum(b["requested_size"] for b in blocks),
                "segment_type": "small" if end - start <= _SMALL_SEGMENT else "large", "segment_pool_id": (0, 0),
                "is_expandable": mapped, "frames": _NO_FRAMES, "blocks": blocks,
            }  # fmt: skip
