"""Writes a Trace as a PyTorch memory snapshot, the pickle that the viewer at pytorch.org/memory_viz opens.

What the viewer's own unpickler needs: protocol 4 at most (Python 3.14 would write 5), only plain containers, texts and
numbers, addresses below 2**53. What was there when the trace begins is written as allocations at its start, so that it
is coloured and named like everything else; keys that PyTorch does not know (`allocated_size`, `module`, `name`, ...) carry
what `snapshot_read` needs to give the same trace back.

Limits: segments that were there at the start are known to a trace by their total only: those are made as large as the
blocks in them, and what is left of the total is one cached segment. Marks and samples have no place in a snapshot.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memlab.errors import TraceError
from memlab.trace.columns import Blocks, Category, Kind, Phase
from memlab.trace.file import savable
from memlab.trace.ground import Ground
from memlab.trace.trace import Trace
from memlab.trace.whole import whole

PROTOCOL = 4
CATEGORIES = {
    Category.OTHER: "unknown",
    Category.PARAMETER: "parameter",
    Category.BUFFER: "buffer",
    Category.GRADIENT: "gradient",
    Category.ACTIVATION: "activation",
    Category.OPTIMIZER: "optimizer_state",
    Category.INPUT: "input",
    Category.TEMPORARY: "temporary",
}
"""The names of torch.profiler's categories where it has the same ones (torch/cuda/_memory_viz.py)."""

_CACHED_AT = 1 << 44
"""Where the segment is put of which nobody knows the address: above all that drivers give out, below 2**53."""
_MADE_UP_AT = 1 << 45
"""Where blocks are put that have no addresses."""
_SMALL_SEGMENT = 2 << 20
_NO_FRAMES: list[dict[str, Any]] = []
_ACTIONS = {
    Kind.SEGMENT_ALLOC: "segment_alloc",
    Kind.SEGMENT_FREE: "segment_free",
    Kind.SEGMENT_MAP: "segment_map",
    Kind.SEGMENT_UNMAP: "segment_unmap",
}


def save(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write `trace` to `path` as a snapshot, whole or not at all."""
    target = savable(path)
    content = pickle.dumps(snapshot(trace), protocol=PROTOCOL)
    try:
        with whole(target) as file:
            file.write(content)
    except OSError as error:
        raise TraceError(f"cannot save to {str(target)!r}: {error.strerror or error}. Choose another place.") from None
    return target


def snapshot(trace: Trace) -> dict[str, Any]:
    """The snapshot as plain values: segments as they are at the end, the entries of every device."""
    devices = [index for index in trace.device_indices if index >= 0]
    if not devices:
        raise TraceError("a memory snapshot shows CUDA devices, and this trace has none: save it as a .memlab file.")
    texts = _Texts(trace)
    written = {index: _Device(trace, index, texts) for index in devices}
    traces = [written[index].entries if index in written else [] for index in range(max(devices) + 1)]
    return {
        "segments": [segment for index in devices for segment in written[index].segments()],
        "device_traces": traces,
        "allocator_settings": _settings(trace),
        "external_annotations": [],
        "memlab": _about(trace, {index: device.opening_rows for index, device in written.items()}),
    }


def _about(trace: Trace, opening_rows: Mapping[int, int]) -> dict[str, Any]:
    """What PyTorch has no place for."""
    made_by = trace.made_by
    devices = [dataclasses.asdict(device) for device in made_by.devices if device.index >= 0]
    return {
        "version": 1,
        "engine": made_by.engine,
        "versions": {str(key): str(value) for key, value in made_by.versions.items()},
        "duration_ns": made_by.duration_ns,
        "devices": [{**d, "opening_rows": opening_rows[d["index"]]} for d in devices],
        "gaps": [dataclasses.asdict(gap) for gap in made_by.gaps],
        "bounded": [dataclasses.asdict(bounded) for bounded in made_by.bounded if bounded.device >= 0],
    }


def _settings(trace: Trace) -> dict[str, Any]:
    mapped = bool(np.isin(trace.events.kind, (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)).any())
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if mapped else "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": mapped,
        "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
    }


class _Texts:
    """What is known of blocks, as the keys of an entry; equal ones are the same object, so the pickle holds them once."""

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
        """The keys that say what a block is for."""
        columns, text = self.columns, self.trace.text
        category = Category(self.changes[block][-1][1] if block in self.changes else columns["category"][block])
        known = {"category": CATEGORIES[category], "frames": self.frames(block)}
        if columns["phase"][block]:
            known["phase"] = Phase(columns["phase"][block]).name.lower()
        for column in ("module", "name", "op", "dtype", "shape"):
            if words := text(column, columns[column][block]):
                known[column] = words
        parts = [str(known[column]) for column in ("name", "module", "op", "shape", "dtype") if column in known]
        known["user_metadata"] = ", ".join(dict.fromkeys(parts))  # newer viewers show it beside the frames
        return known

    def frames(self, block: int) -> list[dict[str, Any]]:
        """The stack of the block, else the one line that is known."""
        key = (self.columns["stack"][block], self.columns["line"][block])
        if key not in self.stacks:
            lines = self.trace.text("stack", key[0]).split("\n") if key[0] >= 0 else [self.trace.text("line", key[1])]
            self.stacks[key] = [_frame(line) for line in lines if line]
        return self.stacks[key]


def _frame(line: str) -> dict[str, Any]:
    """A frame from "file:12 function" or "file:12"; file names may have spaces and colons."""
    where, _, name = line.rpartition(" ") if not line.rpartition(":")[2].isdigit() else (line, "", "")
    filename, _, number = where.rpartition(":")
    if not number.isdigit():
        return {"filename": line, "line": 0, "name": ""}
    return {"filename": filename, "line": int(number), "name": name}


class _Device:
    """The entries of one device, and the state they lead to."""

    def __init__(self, trace: Trace, index: int, texts: _Texts) -> None:
        of_device = np.flatnonzero(trace.events.device == index)
        events = trace.events.rows(of_device)
        self.index, self.texts = index, texts
        self.row_in_trace = of_device.tolist()
        self.start_us = int(trace.made_by.started_at_s * 1e6)
        self.columns = {name: getattr(events, name).tolist() for name in events.DTYPES}
        self.columns["address"] = _with_addresses(self.columns)
        self.first = int(np.searchsorted(of_device, trace.first_row))
        self.mapped = bool(np.isin(events.kind, (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)).any())
        self.ground = Ground()
        self.cached_end = _CACHED_AT
        self.live: dict[int, tuple[int, int, int, bool]] = {}  # block -> address, size, requested, pending
        self.rows = 0
        self.row_of: dict[int, int] = {}  # row of the trace -> row of the trace that a reader of the file will have
        self.entries: list[dict[str, Any]] = []
        self._open()
        self.opening_rows = self.rows
        for row in range(self.first, len(events)):
            self._row(row)
        self._date_changes()

    # --- what was there at the start ------------------------------------------------------------------------------------

    def _open(self) -> None:
        kinds, sizes, addresses = (self.columns[name] for name in ("kind", "allocated_bytes", "address"))
        lumps = [row for row in range(self.first) if kinds[row] in _ACTIONS and not addresses[row]]
        total = sum(
            sizes[row] if kinds[row] in (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP) else -sizes[row] for row in lumps
        )
        opening = Ground.needed(kinds, addresses, sizes, self.columns["stream"])
        for start, end, stream in opening:
            self._segment("segment_map" if self.mapped else "segment_alloc", start, end - start, stream, self.start_us)
        self._cached(total - sum(end - start for start, end, _ in opening), self.start_us)
        for row in range(self.first):
            if row not in lumps:
                self._row(row)

    def _cached(self, change: int, time_us: int) -> None:
        """The part of *reserved* of which only the size is known grows or shrinks."""
        if change > 0:
            self._segment("segment_map" if self.mapped else "segment_alloc", self.cached_end, change, 0, time_us)
            self.cached_end += change
        elif -change <= self.cached_end - _CACHED_AT:
            self.cached_end += change
            if change:
                self._segment("segment_unmap", self.cached_end, -change, 0, time_us)

    # --- row by row -----------------------------------------------------------------------------------------------------

    def _row(self, row: int) -> None:
        kind, address, stream, size = (
            self.columns[name][row] for name in ("kind", "address", "stream", "allocated_bytes")
        )
        time_us = self.start_us + self.columns["time_ns"][row] // 1000
        self.row_of[self.row_in_trace[row]] = self.rows
        if kind == Kind.OOM:
            sizes = {"size": self.columns["requested_bytes"][row], "device_free": size}
            self._add({"action": "oom", **sizes, "stream": stream, "time_us": time_us, "frames": _NO_FRAMES})
        elif kind in _ACTIONS:
            comes = kind in (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
            if address:
                self._segment(_ACTIONS[kind], address, size, stream, time_us)
            else:
                self._cached(size if comes else -size, time_us)
        else:
            self._block(row, kind, address, stream, time_us)

    def _segment(self, action: str, address: int, size: int, stream: int, time_us: int) -> None:
        if action in ("segment_alloc", "segment_map"):
            self.ground.add(address, size, stream, mapped=action == "segment_map")
        else:
            self.ground.remove(address, size)
        where = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time_us}
        self._add({**where, "frames": _NO_FRAMES, "category": "unknown"})

    def _block(self, row: int, kind: int, address: int, stream: int, time_us: int) -> None:
        block, asked, size = (self.columns[name][row] for name in ("block", "requested_bytes", "allocated_bytes"))
        entry: dict[str, Any] = {"addr": address, "stream": stream, "time_us": time_us}
        if kind in (Kind.ADOPT, Kind.ALLOC):
            pending = kind == Kind.ADOPT and not size and asked > 0
            self.live[block] = (address, size or asked, asked, pending)
            self._add({"action": "alloc", "size": asked, **entry, "allocated_size": size, **self.texts.of(block)})
            return
        address, size, asked, pending = self.live.pop(block, (address, size, asked, False))
        entry |= {"addr": address, "size": asked, "frames": _NO_FRAMES, "category": "unknown"}
        if not pending:
            self._add({"action": "free_requested", **entry}, is_row=kind == Kind.FREE_PENDING)
        if kind == Kind.FREE:
            self._add({"action": "free_completed", **entry})
        else:
            self.live[block] = (address, size, asked, True)

    def _add(self, entry: dict[str, Any], is_row: bool = True) -> None:
        self.rows += is_row
        entry.setdefault("category", "unknown")
        self.entries.append({"compile_context": "N/A", "pool_id": (0, 0), "user_metadata": "", **entry})

    def _date_changes(self) -> None:
        """Write with a block whose category changes what it was first, and from which row on what."""
        at_birth = iter([entry for entry in self.entries if entry["action"] == "alloc"])
        kinds = self.columns["kind"]
        for row, block in enumerate(self.columns["block"]):
            if kinds[row] not in (Kind.ADOPT, Kind.ALLOC):
                continue
            entry = next(at_birth)
            if block in self.texts.changes:
                first = [0, CATEGORIES[Category(self.texts.columns["category"][block])]]
                later = [[self._later(row), CATEGORIES[Category(c)]] for row, c in self.texts.changes[block]]
                entry["categories"] = [first, *later]

    def _later(self, row: int) -> int:
        """The row of the file for a row of the trace, which may be another device's: the first of ours from there on."""
        at = int(np.searchsorted(self.row_in_trace, row))
        return self.row_of.get(self.row_in_trace[at], 0) if at < len(self.row_in_trace) else self.rows

    # --- the state at the end -------------------------------------------------------------------------------------------

    def segments(self) -> Iterator[dict[str, Any]]:
        """The segments at the end with their blocks, free ranges between them as inactive blocks."""
        live = sorted((*facts, block) for block, facts in self.live.items() if facts[1])
        addresses = [address for address, *_ in live]
        for start, end, stream, mapped in self.ground.segments():
            here = live[bisect_left(addresses, start) : bisect_left(addresses, end)]
            blocks = list(self._blocks_in(start, end, here))
            active = [block for block in blocks if block["state"] != "inactive"]
            handed_out = sum(b["size"] for b in active if b["state"] == "active_allocated")
            yield {
                "device": self.index, "address": start, "total_size": end - start, "stream": stream,
                "allocated_size": handed_out, "active_size": sum(b["size"] for b in active),
                "requested_size": sum(b["requested_size"] for b in active),
                "segment_type": "small" if end - start <= _SMALL_SEGMENT else "large", "segment_pool_id": (0, 0),
                "is_expandable": mapped, "frames": _NO_FRAMES, "blocks": blocks,
            }  # fmt: skip

    def _blocks_in(self, start: int, end: int, here: list[tuple[int, int, int, bool, int]]) -> Iterator[dict[str, Any]]:
        at = start
        for address, size, asked, pending, block in here:
            if address > at:
                yield _inactive(at, address - at)
            facts = {"address": address, "size": size, "requested_size": asked, "frames": self.texts.frames(block)}
            yield {**facts, "state": "active_pending_free" if pending else "active_allocated"}
            at = max(at, address + size)
        if at < end:
            yield _inactive(at, end - at)


def _inactive(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": _NO_FRAMES}


def _with_addresses(columns: Mapping[str, list[int]]) -> list[int]:
    """The addresses, made up where nobody knows them (a trace of pretend tensors that was not settled)."""
    of_blocks = [row for row, block in enumerate(columns["block"]) if block >= 0]
    if any(columns["address"][row] for row in of_blocks) or not of_blocks:
        return columns["address"]
    addresses, made_up, end = list(columns["address"]), {}, _MADE_UP_AT
    for row in of_blocks:
        block = columns["block"][row]
        if block not in made_up:
            made_up[block] = end
            end += -(-max(columns["allocated_bytes"][row], 1) // 512) * 512
        addresses[row] = made_up[block]
    return addresses
