"""Tracks in tracks, and threads beside them: every one gets its own exact peak, and none pays for the others."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from probes.probed import MiB, take

from memlab.analysis.peak import peak
from memlab.analysis.timeline import timeline
from memlab.probes import history
from memlab.probes.cuda import CudaProbe, recorder
from memlab.trace import Kind, Trace

pytestmark = pytest.mark.simulated


@pytest.fixture(autouse=True)
def earlier_peak() -> Iterator[None]:
    torch.cuda.init()
    take(900)  # PyTorch's counter cannot help with any peak below
    torch.cuda.empty_cache()
    # In segments that something alive keeps: a block that is a little larger than what is asked for would be taken whole.
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    holes = [block["size"] for block in blocks if block["state"] == "inactive"]
    fill = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in holes]
    track.base_bytes = torch.cuda.memory_allocated()
    yield
    del fill
    torch.cuda.empty_cache()


class track:
    """A probe as a context; `trace` once it has ended. Figures are above what there was when the test began."""

    base_bytes = 0

    def __enter__(self) -> track:
        self.probe = CudaProbe()
        self.probe.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.trace: Trace = self.probe.stop()

    @property
    def peak_mebibytes(self) -> float:
        found = peak(self.trace, 0)
        assert found.is_exact
        assert not self.trace.gaps
        return self.above(found.low_bytes)

    @classmethod
    def above(cls, size: int) -> float:
        return (size - cls.base_bytes) / MiB


def test_inner_and_outer_each_have_their_own_peak():
    kept = [take(10)]
    with track() as outer:
        kept.append(take(100))
        with track() as first:
            take(30)
        kept.pop()
        with track() as second, track() as third:
            kept.append(take(7))
            take(40)
        kept.append(take(5))
    assert [one.peak_mebibytes for one in (outer, first, second, third)] == [140, 140, 57, 57]
    starts = [track.above(timeline(one.trace, 0).start_bytes) for one in (outer, first, second, third)]
    ends = [track.above(timeline(one.trace, 0).end_bytes) for one in (outer, first, second, third)]
    assert (starts, ends) == ([10, 110, 10, 10], [22, 110, 17, 17])
    assert first.trace.first_row > 0
    assert int((first.trace.events.kind == Kind.ALLOC).sum()) == 1


@pytest.mark.parametrize("seed", range(3))
def test_random_tracks_nested_and_overlapping_against_the_counters(seed):
    """PyTorch's peak counter is reset at every border of a track, so that it tells the peak of each stretch."""
    dice, held = random.Random(seed), []
    open_tracks: list[list] = []  # [track, highest counter so far]
    checked = []

    def border() -> None:
        highest = torch.cuda.max_memory_allocated()
        for entry in open_tracks:
            entry[1] = max(entry[1], highest)
        torch.cuda.reset_peak_memory_stats()

    def close(index: int) -> None:
        border()
        one, highest = open_tracks.pop(index)
        one.__exit__()
        line = timeline(one.trace, 0)
        checked.append(
            (int(line.bytes.max()), highest, one.trace.gaps, line.end_bytes == torch.cuda.memory_allocated())
        )

    for _ in range(400):
        what = dice.random()
        if what < 0.06 and len(open_tracks) < 4:
            border()
            open_tracks.append([track().__enter__(), 0])
        elif what < 0.12 and open_tracks:
            close(dice.randrange(len(open_tracks)))
        elif what < 0.6 or not held:
            held.append(torch.empty(dice.choice([100, 3000, MiB + 5, 5 * MiB]), dtype=torch.uint8, device="cuda"))
        else:
            held.pop(dice.randrange(len(held)))
    while open_tracks:
        close(-1)
    assert not recorder.users
    assert len(checked) > 8
    assert all(found == highest and not gaps and ends for found, highest, gaps, ends in checked), checked


def test_a_hundred_inner_tracks_read_every_entry_once():
    with track() as outer:
        read_by = []
        for size in range(100):
            with track() as inner:
                take(1 + size % 7)
                [torch.empty(100, device="cuda") for _ in range(20)]
            assert inner.peak_mebibytes >= 1 + size % 7
            assert len(inner.trace.events) < 100
            read_by.append(recorder.entries_read)
    events = len(outer.trace.events)
    growth = [later - earlier for earlier, later in itertools.pairwise(read_by)]
    assert max(growth) < 3 * 70, "later tracks read more than earlier ones"
    assert read_by[-1] < 2 * events
    assert outer.peak_mebibytes >= 7


def test_rows_that_were_let_go_belong_to_who_was_there(monkeypatch):
    monkeypatch.setattr(history, "MAX_ROWS", 300)
    with track() as outer:
        take(200)
        with track():
            pass
        for _ in range(6):
            with track() as inner:
                take(3)
                [torch.empty(100, device="cuda") for _ in range(100)]
    found = peak(inner.trace, 0)
    assert track.above(found.low_bytes) < 4, "an earlier peak is not the inner's"
    assert found.is_exact
    assert track.above(peak(outer.trace, 0).low_bytes) == 200
    assert peak(outer.trace, 0).is_exact
    assert "dropped" in [gap.name for gap in outer.trace.gaps]


def test_a_track_in_a_thread_beside_one_here():
    found = []

    def work() -> None:
        with track() as inner:
            take(60)
        found.append(inner)

    with track() as outer:
        kept = take(10)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        del kept
        take(20)
    assert (outer.peak_mebibytes, found[0].peak_mebibytes) == (70, 70)
    assert not recorder.users


def test_a_thread_that_allocates_while_tracks_begin_and_end():
    """No reading is at rest then; still no event is lost or read twice."""
    stop, failures, made = threading.Event(), [], [0]

    def churn() -> None:
        held: list[torch.Tensor] = []
        dice = random.Random(1)
        while not stop.is_set():
            held.append(torch.empty(dice.choice([1000, 40_000, 2 * MiB]), device="cuda"))
            made[0] += 1
            if len(held) > 10:
                del held[: dice.randrange(1, 10)]

    torch.cuda.reset_peak_memory_stats()
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        with track() as outer:
            for _ in range(30):
                before = made[0]
                with track() as inner:
                    take(4)
                    while made[0] < before + 50 and thread.is_alive():
                        time.sleep(0)
                inconsistencies = sum(one.blocks.inconsistencies for one in recorder.devices)
                lost = [one for one in inner.trace.made_by.bounded if not one.is_exact]
                failures += [inconsistencies] if inconsistencies else []
                low = int(timeline(inner.trace, 0).bytes.max())
                failures += [low] if not lost and low > torch.cuda.max_memory_allocated() else []
    finally:
        stop.set()
        thread.join()
    assert not failures
    found = peak(outer.trace, 0)
    assert found.low_bytes <= torch.cuda.max_memory_allocated() <= found.high_bytes
    kinds = outer.trace.events.kind
    assert int((kinds == Kind.ALLOC).sum()) > 1000
