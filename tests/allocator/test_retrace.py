"""Histories written by hand, retraced: what agrees is exact, and every kind of difference is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.retrace import EMPTY_CACHE, Device, retrace
from memlab.units import GiB, MiB

CARD = Device(GiB, 24 * MiB)
A, B = 0x7000_0000_0000, 0x6000_0000_0000  # the driver's addresses follow no order


def entry(action: str, at: int, size: int, stream: int = 0, note: str = "") -> dict[str, Any]:
    place = "device_free" if action == "oom" else "addr"
    return {"action": action, place: at, "size": size, "stream": stream, "user_metadata": note}


def history() -> list[dict[str, Any]]:
    """Two segments, a block that waits for another stream, a cache that is emptied, an OOM."""
    return [
        entry("snapshot", 0, 0),
        entry("segment_alloc", A, 20 * MiB),
        entry("alloc", A, 6 * MiB),
        entry("segment_alloc", B, 2 * MiB),
        entry("alloc", B, 100),
        entry("alloc", A + 6 * MiB, 5 * MiB),
        entry("free_requested", B, 100),
        entry("free_completed", B, 100),
        entry("free_requested", A, 6 * MiB),
        entry("alloc", A + 11 * MiB, 6 * MiB),
        entry("free_completed", A, 6 * MiB),
        entry("segment_free", B, 2 * MiB, note=f"{EMPTY_CACHE}1"),
        entry("alloc", A, 4 * MiB),
        entry("oom", 980 * MiB, 2 * GiB),
    ]


def test_an_honest_history_is_retraced_to_its_end():
    found = retrace(history(), CARD)
    assert (found.is_exact, found.difference, found.entries) == (True, "", 14)
    assert (found.requests, found.segment_events, found.ooms) == (6, 3, 1)
    assert found.allocated_bytes[5:13:2] == [11 * MiB + 512, 11 * MiB, 11 * MiB, 11 * MiB]
    assert (found.reserved_bytes[10], found.reserved_bytes[13]) == (22 * MiB, 20 * MiB)
    assert found.out_of_memory.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")


Change = Callable[[list[dict[str, Any]]], object]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda entries: entries[1].update(size=22 * MiB), "entry 2: segment_alloc of 20971520 bytes on stream 0x0, in PyTorch"),
        (lambda entries: entries[1].update(stream=5), "in PyTorch segment_alloc of 20971520 bytes on stream 0x5"),
        (lambda entries: entries.pop(3), "segment_alloc of 2097152 bytes on stream 0x0, in PyTorch nothing"),
        (lambda entries: entries.insert(9, entry("segment_free", B, 2 * MiB)), "nothing, in PyTorch segment_free of 2097152"),
        (lambda entries: entries[5].update(addr=A + 7 * MiB), "5242880 bytes lie -1,048,576 bytes from where"),
        (lambda entries: entries.pop(11), "entry 12: segment_free of 2097152 bytes on stream 0x0, in PyTorch nothing"),
        (lambda entries: entries[13].update(device_free=90 * MiB), "in PyTorch 94371840 free"),
        (lambda entries: entries[13].update(size=90 * MiB), "94371840 bytes fitted, PyTorch ran out of memory"),
        (lambda entries: entries.append(entry("alloc", A, 3 * GiB)), "3221225472 bytes did not fit"),
        (lambda entries: entries.append(entry("segment_free", B, 2 * MiB)), "nothing, in PyTorch segment_free"),
    ],
)  # fmt: skip
def test_a_difference_is_found(change: Change, difference: str):
    entries = history()
    change(entries)
    found = retrace(entries, CARD)
    assert not found.is_exact
    assert difference in found.difference


def test_pages_that_are_mapped_are_followed_as_well():
    entries = [
        entry("segment_map", B, 20 * MiB),
        entry("alloc", B, 15 * MiB),
        entry("segment_map", B + 20 * MiB, 20 * MiB),
        entry("alloc", B + 15 * MiB, 15 * MiB),
    ]
    assert retrace(entries, Device(GiB, 0, "expandable_segments:True")).is_exact
    assert (
        "lie"
        in retrace(
            [*entries[:3], entry("alloc", B + 20 * MiB, 15 * MiB)], Device(GiB, 0, "expandable_segments:True")
        ).difference
    )
