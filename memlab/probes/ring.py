"""The bounded ring of allocator history: up to which entry it was read, found again in a later snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memlab.probes.look import Counts

_LENGTH = 8  # so many entries in a row are compared to find the place up to which was read


@dataclass(frozen=True, slots=True)
class Tail:
    """The last entries that were read, where they had to stay in the ring; without them everything in it is new."""

    entries: tuple[tuple[Any, ...], ...] = ()
    time_us: int = 0

    @classmethod
    def of(cls, entries: Sequence[Mapping[str, Any]]) -> Tail:
        """The tail of what was just read."""
        if not entries:
            return cls()
        return cls(tuple(map(_identity, entries[-_LENGTH:])), entries[-1]["time_us"])


def _identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    # Without its time: PyTorch converts it from a cycle counter anew for each snapshot, and not always to the same.
    return entry["action"], entry.get("addr"), entry["size"], entry["stream"]


def unread(entries: Sequence[Mapping[str, Any]], tail: Tail, at_least: Counts, at_most: Counts) -> int | None:
    """The index of the first entry after those read before; None where they are no longer in the ring.

    Loops repeat themselves, so several places may look like the tail: as many allocations and frees as the counters
    tell must have come after it, and of places that are left the nearest in time is taken.
    """
    if not tail.entries:
        return 0
    size, after, found = len(tail.entries), 0, []
    for at in range(len(entries), size - 1, -1):
        if sum(at_least) <= after <= sum(at_most) and _ends_with(entries, at, tail.entries):
            found.append((abs(entries[at - 1]["time_us"] - tail.time_us), at))
        after += entries[at - 1]["action"] in ("alloc", "free_requested")
        if after > sum(at_most):
            break
    return min(found)[1] if found else None


def _ends_with(entries: Sequence[Mapping[str, Any]], end: int, tail: tuple[tuple[Any, ...], ...]) -> bool:
    return all(_identity(entries[end - len(tail) + i]) == tail[i] for i in range(len(tail)))
