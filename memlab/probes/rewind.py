"""Entries of allocator history undone, one by one from the end: the state before the first of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memlab.allocator import Settings
from memlab.allocator.rules import MIN_BLOCK
from memlab.trace.ground import Ground


@dataclass(frozen=True, slots=True)
class Start:
    """Segments as in a snapshot, as they were at the start; the size of `guessed` blocks is that of their request."""

    segments: list[dict[str, Any]]
    guessed: int


@dataclass(slots=True)
class _Block:
    """A block in use at some moment; `size` is None where nobody says what it really took."""

    requested: int
    size: int | None = None
    pending: bool = False
    is_guess: bool = False

    def measure(self, room: int, settings: Settings) -> int:
        """What the block took of the `room` up to the next block or the end of its segment.

        What is too small to be split off belongs to the block: no free range of that size can be left beside it.
        """
        if self.size is None:
            size = settings.round(self.requested)
            splits = size < room and settings.splits(room, size)
            self.size = size if splits else room
            # Where everything from 512 bytes on is split off, the size is certain; else up to 1 MiB more may be its own.
            self.is_guess = splits and not settings.splits(size + MIN_BLOCK, size)
        return min(self.size, room)


def rewind(segments: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], settings: Settings) -> Start:
    """The state of one device before `entries`, from its segments after them."""
    ground, live = _state(segments)
    # torch.profiler's snapshots have no requests for a free (torch/cuda/_memory_viz.py, _profile_to_snapshot).
    says_when_asked = any(entry["action"] == "free_requested" for entry in entries)
    for entry in reversed(entries):
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            live.pop(address, None)
        elif action == "free_completed":
            live[address] = _Block(entry["size"], pending=says_when_asked)
        elif action == "free_requested":
            live.setdefault(address, _Block(entry["size"])).pending = False
        elif action in ("segment_alloc", "segment_map"):
            ground.remove(address, entry["size"])
        elif action in ("segment_free", "segment_unmap"):
            ground.add(address, entry["size"], entry["stream"], mapped=action == "segment_unmap")
    start = list(_segments(ground, live, settings))
    return Start(start, sum(block.is_guess for block in live.values()))


def _state(segments: Sequence[Mapping[str, Any]]) -> tuple[Ground, dict[int, _Block]]:
    ground, live = Ground(), {}
    for segment in segments:
        ground.add(segment["address"], segment["total_size"], segment["stream"], mapped=segment["is_expandable"])
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                pending = block["state"] != "active_allocated"
                live[block["address"]] = _Block(block["requested_size"], block["size"], pending)
    return ground, live


def _segments(ground: Ground, live: Mapping[int, _Block], settings: Settings) -> Iterator[dict[str, Any]]:
    addresses = sorted(live)
    for start, end, stream, mapped in ground.segments():
        here = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
        ends = [*here[1:], end] if here else []
        blocks, at = [], start
        for address, limit in zip(here, ends, strict=True):
            block = live[address]
            size = block.measure(limit - address, settings)
            if address > at:
                blocks.append({"address": at, "size": address - at, "state": "inactive"})
            state = "active_pending_free" if block.pending else "active_allocated"
            blocks.append({"address": address, "size": size, "requested_size": block.requested, "state": state})
            at = address + size
        if at < end:
            blocks.append({"address": at, "size": end - at, "state": "inactive"})
        facts = {"address": start, "total_size": end - start, "stream": stream, "is_expandable": mapped}
        yield {**facts, "blocks": blocks}
