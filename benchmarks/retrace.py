"""A recorded history of PyTorch's allocator, asked of the simulated one again: do they decide alike?

The history holds what was asked and what the allocator did; only the requests are given to the simulation, and what it
does is held against the rest: every segment and page that comes or goes, in order and size, where every block lies, every
out-of-memory. Only where the driver puts a new segment is told: that is no decision of the allocator. This is the proof of
the simulation, on a simulated GPU and on a real GPU.

Limits: a history cannot tell a cache emptied by the user from one emptied by a retry; who records sets the user metadata
of the entries to `EMPTY_CACHE` plus a number (`torch.cuda.memory._set_memory_metadata`) while it empties the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlab.allocator.blocks import Block
from memlab.allocator.caching import CachingAllocator
from memlab.allocator.out_of_memory import OutOfMemory
from memlab.allocator.rules import Settings
from memlab.allocator.segments import Observer, Place
from memlab.trace.columns import Kind
from memlab.units import MiB

EMPTY_CACHE = "empty cache "
"""How the user metadata of entries begin that the user's `empty_cache` made."""

_SEGMENT_KINDS = {
    "segment_alloc": Kind.SEGMENT_ALLOC,
    "segment_free": Kind.SEGMENT_FREE,
    "segment_map": Kind.SEGMENT_MAP,
    "segment_unmap": Kind.SEGMENT_UNMAP,
}
_OTHER_STREAM = -1

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a history: all its memory, and what the driver (and others) had taken before the first entry."""

    total_bytes: int
    context_bytes: int
    conf: str | Settings = ""
    memory_fraction: float | None = None
    torch_version: str = ""

    def allocator(self, on_event: Observer | None = None, place: Place | None = None) -> CachingAllocator:
        """An allocator with nothing in it."""
        return CachingAllocator(
            self.total_bytes,
            self.conf,
            self.context_bytes,
            memory_fraction=self.memory_fraction,
            on_event=on_event,
            torch_version=self.torch_version,
            place=place,
        )


@dataclass(slots=True)
class Retraced:
    """How far the simulation went along, and the first thing it did otherwise ("" where there is none)."""

    allocator: CachingAllocator
    entries: int = 0
    requests: int = 0
    segment_events: int = 0
    ooms: int = 0
    difference: str = ""
    out_of_memory: str = ""
    """The text of the last one, as the simulation writes it."""
    reserved_bytes: list[int] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)
    """After every entry."""

    @property
    def is_exact(self) -> bool:
        """Whether the simulation did everything alike."""
        return not self.difference


class _Difference(Exception):
    """The simulation did something else."""


def retrace(entries: Sequence[Entry], device: Device) -> Retraced:
    """Ask the simulated allocator for what a history (from its first entry on) asked, until they differ."""
    walk = _Walk(device)
    try:
        for position, entry in enumerate(entries):
            walk.go(entry, entries[position + 1] if position + 1 < len(entries) else None)
        walk.at_the_end()
    except _Difference as difference:
        walk.found.difference = f"entry {walk.found.entries}: {difference}"
    return walk.found


class _Walk:
    def __init__(self, device: Device) -> None:
        self.moved: dict[int, int] = {}  # by how much, by MiB
        self.done: deque[tuple[Kind, int, int, int]] = deque()
        allocator = device.allocator(lambda *event: self.done.append(event), self._place)
        allocator.waits_for_events = True  # the history says when they were done
        self.found = Retraced(allocator)
        self.allocator = allocator
        self.held: dict[int, Block] = {}
        self.expected: list[Entry] = []
        self.emptied = ""

    def _place(self, size: int, stream: int) -> int | None:
        """Where the driver put the next segment; the simulation may not choose that."""
        new = [entry["addr"] for entry in self.expected if entry["action"] == "segment_alloc"]
        come = sum(event[0] == Kind.SEGMENT_ALLOC for event in self.done)
        return new[come] if come < len(new) else None

    def _native(self, address: int) -> int:
        """The address in PyTorch: of an expandable segment it is told by the pages that were mapped there."""
        return address + self.moved.get(address // MiB, 0)

    def go(self, entry: Entry, following: Entry | None) -> None:
        action = entry["action"]
        if action in _SEGMENT_KINDS:
            self._segment(entry)
        elif action == "alloc":
            self._alloc(entry)
        elif action == "oom":
            self._out_of_memory(entry)
        elif action == "free_requested":
            self._free(entry, following)
        elif action == "free_completed" and (block := self.held.pop(entry["addr"])) in self.allocator.pending:
            self.allocator.complete(block)
        self.found.entries += 1
        self.found.reserved_bytes.append(self.allocator.reserved_bytes)
        self.found.allocated_bytes.append(self.allocator.allocated_bytes)

    def _segment(self, entry: Entry) -> None:
        """Segments that come or go before an allocation are looked at with it, those of `empty_cache` at once."""
        self.expected.append(entry)
        metadata = entry.get("user_metadata", "")
        if metadata.startswith(EMPTY_CACHE):
            if metadata != self.emptied:
                self.emptied = metadata
                self.allocator.empty_cache()
            self._compare(self.done.popleft() if self.done else None)

    def _alloc(self, entry: Entry) -> None:
        self.found.requests += 1
        try:
            block = self.allocator.malloc(entry["size"], entry["stream"])
        except OutOfMemory:
            raise _Difference(f"{entry['size']} bytes did not fit, PyTorch found room") from None
        assert block is not None
        self._compare_all()
        if away := self._native(block.address) - entry["addr"]:
            raise _Difference(f"{entry['size']} bytes lie {away:+,} bytes from where PyTorch put them")
        self.held[entry["addr"]] = block

    def _out_of_memory(self, entry: Entry) -> None:
        self.found.requests += 1
        self.found.ooms += 1
        try:
            self.allocator.malloc(entry["size"], entry["stream"])
        except OutOfMemory as full:
            self.found.out_of_memory = str(full)
            kind, free, size, _stream = self.done.pop()
            if (kind, free, size) != (Kind.OOM, entry["device_free"], entry["size"]):
                raise _Difference(f"of {size} bytes, {free} free; in PyTorch {entry['device_free']} free") from None
            self._compare_all()
        else:
            raise _Difference(f"{entry['size']} bytes fitted, PyTorch ran out of memory")

    def _free(self, entry: Entry, following: Entry | None) -> None:
        block = self.held[entry["addr"]]
        at_once = following is not None and (following["action"], following["addr"]) == (
            "free_completed",
            entry["addr"],
        )
        if not at_once:
            self.allocator.record_stream(block, _OTHER_STREAM)
        self.allocator.free(block)

    def _compare_all(self) -> None:
        while self.expected or self.done:
            self._compare(self.done.popleft() if self.done else None)

    def _compare(self, done: tuple[Kind, int, int, int] | None) -> None:
        """What the simulation did against the first entry that waits."""
        entry = self.expected.pop(0) if self.expected else None
        expected = None if entry is None else (_SEGMENT_KINDS[entry["action"]], entry["size"], entry["stream"])
        if done is None or entry is None or (done[0], done[2], done[3]) != expected:
            mine = None if done is None else (done[0], done[2], done[3])
            raise _Difference(f"{_said(mine)}, in PyTorch {_said(expected)}")
        if done[0] == Kind.SEGMENT_MAP:
            for at in range(done[1] // MiB, (done[1] + done[2]) // MiB):
                self.moved[at] = entry["addr"] - done[1]
        if away := self._native(done[1]) - entry["addr"]:
            raise _Difference(f"{_said(expected)}: {away:+,} bytes from where PyTorch had it")
        self.found.segment_events += 1

    def at_the_end(self) -> None:
        if self.done or self.expected:
            self._compare_all()


def _said(event: tuple[Kind, int, int] | None) -> str:
    return "nothing" if event is None else f"{event[0].name.lower()} of {event[1]} bytes on stream {event[2]:#x}"
