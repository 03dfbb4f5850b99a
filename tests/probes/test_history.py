"""Reading history without a device: finding one's place in the ring, states between losses, who lost what."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from memlab.allocator import BlockTracker, LiveBlock, Settings
from memlab.probes import history
from memlab.probes.history import DeviceHistory, Lost, Position
from memlab.probes.rows import (
    DeviceRows,
    Stacks,
    Tail,
    columns_of,
    held_rows,
    part_without_stacks,
    resync_rows,
    state_after,
    unread,
    users_line,
)
from memlab.torch_internals.frames import OWN_FILES
from memlab.trace import Events, Kind
from memlab.trace.columns import deltas


def loop(times: int) -> list[dict[str, Any]]:
    """The entries of a loop that allocates and frees the same block: three each time."""
    actions = ("alloc", "free_requested", "free_completed")
    return [
        {"action": action, "addr": 512, "size": 100, "stream": 0, "time_us": 10 * turn + step}
        for turn in range(times)
        for step, action in enumerate(actions)
    ]


def shifted(entries: list[dict[str, Any]], by_us: int) -> list[dict[str, Any]]:
    return [{**entry, "time_us": entry["time_us"] + by_us} for entry in entries]


@pytest.mark.parametrize("shift_us", [0, 1, -1, 10, -500, 1_000_000])
@pytest.mark.parametrize("dropped", [0, 3, 60])
@pytest.mark.parametrize("read", [90, 91, 92, 150])
def test_the_place_in_a_ring_that_repeats_itself_is_found_whatever_the_clock_says(read, dropped, shift_us):
    entries = loop(50)
    tail = Tail.of(entries[:read])
    new = entries[read:]
    happened = tuple(sum(entry["action"] == action for entry in new) for action in ("alloc", "free_requested"))
    ring = shifted(entries[dropped:], shift_us)
    assert unread(ring, tail, happened, happened) == read - dropped


def test_where_counters_and_ring_were_not_read_at_once_the_nearest_in_time_is_taken():
    entries = loop(50)
    tail = Tail.of(entries[:90])
    assert unread(shifted(entries, 1), tail, (15, 15), (25, 25)) == 90


def test_a_place_that_is_no_longer_there():
    entries = loop(50)
    assert unread(entries[93:], Tail.of(entries[:90]), (19, 19), (19, 19)) is None
    assert unread([], Tail.of(entries), (0, 0), (0, 0)) is None
    other = [{**entry, "addr": 1024} for entry in entries]
    assert unread(other, Tail.of(entries[:90]), (20, 20), (20, 20)) is None


def test_without_a_tail_all_is_new():
    assert unread(loop(3), Tail(), (3, 3), (3, 3)) == 0
    assert Tail.of([]) == Tail()


def test_entries_that_change_nothing_are_left_out():
    entries = [{"action": "snapshot", "addr": 0, "size": 5, "stream": 0, "time_us": 1}, *loop(1)]
    entries.append({"action": "oom", "device_free": 77, "size": 9, "stream": 0, "time_us": 99})
    columns = columns_of(entries, Stacks())
    assert columns.kinds.tolist() == [Kind.ALLOC, Kind.FREE_PENDING, Kind.FREE, Kind.OOM]
    assert columns.addresses.tolist() == [512, 512, 512, 77]


def part(*rows: tuple[Kind, int, int], time_ns: int = 0) -> DeviceRows:
    """Rows of (kind, block, allocated), a nanosecond apart."""
    kinds, blocks, sizes = zip(*rows, strict=True)
    nothing = np.zeros(len(rows), np.int64)
    times = time_ns + np.arange(len(rows))
    return part_without_stacks(Events(times, kinds, blocks, sizes, sizes, nothing, nothing, nothing + 7))


def device(*parts: DeviceRows, opening: Events | None = None) -> DeviceHistory:
    one = DeviceHistory(0, BlockTracker(), Events.empty() if opening is None else opening, 0)
    one.parts.extend(parts)
    return one


def test_a_state_between_rows():
    first = part((Kind.SEGMENT_ALLOC, -1, 4096), (Kind.ALLOC, 0, 512), (Kind.ALLOC, 1, 1024), (Kind.ALLOC, 2, 2048))
    second = part((Kind.FREE, 0, 512), (Kind.FREE_PENDING, 1, 1024))
    alive, reserved = state_after(Events.empty(), [first, second])
    assert alive.block.tolist() == [1, 2]
    assert alive.allocated_bytes.tolist() == [0, 2048], "a block that waits for another stream is not allocated"
    assert set(alive.kind.tolist()) == {Kind.PREEXISTING}
    assert reserved == 4096


@pytest.mark.parametrize(
    ("then", "now", "stays"),
    [
        (LiveBlock(3, 500, 512), LiveBlock(9, 500, 512), True),
        (LiveBlock(3, 500, 512), LiveBlock(9, 400, 512), False),
        (LiveBlock(3, 500, 512), LiveBlock(9, 500, 512, stream=4), False),
        (LiveBlock(3, 500, 512), LiveBlock(9, 500, 512, pending=True), False),
        (LiveBlock(3, 500, 512, pending=True), LiveBlock(9, 500, 512), False),
    ],
)
def test_rows_that_lead_from_one_state_to_another(then, now, stays):
    old = BlockTracker(Settings(), {64: then, 4096: LiveBlock(4, 1, 512)}, reserved_bytes=4096, next_block=9)
    fresh = BlockTracker(Settings(), {64: now, 8192: LiveBlock(10, 1, 1024)}, reserved_bytes=8192, next_block=11)
    rows = resync_rows(old, fresh, 0, 5)
    before = sum(held.allocated_bytes for held in old.held.values() if not held.pending)
    assert before + int(deltas(rows, "allocated").sum()) == fresh.allocated_bytes
    assert old.reserved_bytes + int(deltas(rows, "reserved").sum()) == fresh.reserved_bytes
    assert (fresh.held[64].block == 3) is stays
    assert len(set(rows.block[rows.kind == Kind.PREEXISTING].tolist())) == (1 if stays else 2)


def test_books_made_again_from_rows():
    opening = held_rows([(5, LiveBlock(0, 10, 512, 3))], 0)
    one = DeviceHistory(0, BlockTracker(next_block=8), opening, 100, [part((Kind.ALLOC, 7, 1024))])
    books = one.blocks_by_rows()
    assert {address: held.block for address, held in books.held.items()} == {5: 0, 7: 7}
    assert (books.allocated_bytes, books.reserved_bytes, books.next_block) == (1536, 100, 8)


def test_rows_that_are_let_go_leave_their_peaks_and_the_state(monkeypatch):
    monkeypatch.setattr(history, "MAX_ROWS", 2)
    one = device(
        part((Kind.ALLOC, 0, 512), (Kind.ALLOC, 1, 4096), (Kind.FREE, 1, 4096), time_ns=10),
        part((Kind.ALLOC, 2, 512), (Kind.FREE, 0, 512), time_ns=20),
        part((Kind.ALLOC, 3, 512), time_ns=30),
    )
    one.drop_oldest()
    assert [len(kept.events) for kept in one.parts] == [1]
    assert [(lost.peak_allocated_bytes, lost.end_row, lost.lost_events) for lost in one.losses] == [
        (4608, 3, 3),
        (1024, 5, 2),
    ]
    assert (one.losses[0].begin_ns, one.losses[0].end_ns) == (10, 12)
    assert one.opening.block.tolist() == [2]
    assert one.position == Position(6, 2)


def test_losses_belong_to_the_tracks_that_were_open():
    one = device()
    unread = Lost(1, 2, 5)
    one.losses.append(unread)
    begin = Position(rows=100, losses=1)
    earlier = Lost(0, 1, 9, 7, 7, end_row=60)  # freed after the track began, allocated before it
    own = Lost(3, 4, 9, 7, 7, end_row=130)
    late = Lost(5, 6, 5)
    one.losses += [earlier, own, late]
    assert one.losses_since(begin) == [own, late]
    assert one.losses_since(Position()) == [unread, earlier, own, late]


def test_a_recorder_that_never_came_to_cuda_has_nothing():
    one = history.Recorder()
    one.read()
    one.quiet_moment("optimizer")
    assert (one.is_open, one.devices, one.entries_read) == (False, [], 0)


@pytest.mark.parametrize("folder", ["/home/ann/memlab", "/home/ann/memlab/work", "/home/ann/torch_lab"])
def test_a_users_file_in_a_folder_that_is_named_as_the_package_is_the_users(folder):
    names: dict[str, Any] = {"users_line": users_line, "sys": sys}
    exec(compile("\nfound = users_line(sys._getframe())", f"{folder}/train.py", "exec"), names)
    assert names["found"] == f"{folder}/train.py:2"
    stacks = Stacks()
    frames = [
        {"filename": f"{OWN_FILES}probes/cuda.py", "line": 7, "name": "probe"},
        {"filename": f"{folder}/train.py", "line": 2, "name": "step"},
    ]
    stacks.indices([frames])
    assert list(stacks.lines) == [f"{folder}/train.py:2"]
