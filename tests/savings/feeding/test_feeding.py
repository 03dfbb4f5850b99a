"""How batches come: what waits where, what is read, and that every batch arrives to the bit."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import multiprocessing
import time
import warnings
from pathlib import Path

import pytest
import torch
from jobbing import prepared, tried
from torch import nn

from memlab.errors import DoesNotApply, MemlabError
from memlab.savings import techniques
from memlab.savings.feeding.files import BATCHES, SAMPLES, Pack, wide_rows
from memlab.savings.feeding.loader import PREFETCH, WORKERS
from memlab.savings.feeding.pictures import photographs
from memlab.savings.feeding.source import source
from memlab.workloads.job import Job
from memlab.workloads.nested import tensors_in

ON_CARDS = ("pin_memory", "non_blocking", "prefetch", "preprocess_on_card")
ANYWHERE = ("loader_workers", "memory_mapped_data", "pack_small_files", "resize_once", "host_reads")


class Odd(nn.Module):
    """Inputs of all sorts: a number, nothing, a dict of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, words, others, factor):
        return self.embedding(words["words"]).sum(1) * factor + others[0].sum()


def odd():
    model = Odd()
    inputs = {"words": torch.randint(9, (3, 5))}, [torch.empty(0), "a name"], torch.tensor(2.0)
    return model, torch.optim.SGD(model.parameters(), 0.1), (*inputs, torch.randn(3, 4)), nn.functional.mse_loss


@pytest.mark.parametrize("name", ON_CARDS)
def test_what_is_about_a_card_refuses_the_cpu(name: str) -> None:
    with pytest.raises(DoesNotApply, match="runs on the CPU"):
        prepared(wide_rows, name)


@pytest.mark.parametrize("name", [one for one in ANYWHERE if one != "resize_once"])
@pytest.mark.parametrize("as_habit", [False, True])
def test_odd_batches_arrive_whole(name: str, as_habit: bool) -> None:
    names, habits = ((), (name,)) if as_habit else ((name,), ())
    assert tried(odd, *names, habits=habits).same(tried(odd))


@pytest.mark.parametrize("name", ["loader_workers", "memory_mapped_data", "pack_small_files"])
def test_with_pieces_of_the_batch(name: str) -> None:
    """A source is where batches come from; who cuts them into pieces stays in charge."""
    job = prepared(wide_rows, name)
    pieces = list(run_with_feed(job))
    assert [tuple(one.shape for one in batch) for _, batch in pieces] == [((128, 4096), (128,))]


def run_with_feed(job: Job):
    with contextlib.ExitStack() as stack:
        for context in job.around:
            stack.enter_context(context())
        yield from job.feed()


def test_several_at_once() -> None:
    assert tried(wide_rows, "loader_workers", "memory_mapped_data").same(tried(wide_rows))
    with pytest.raises(MemlabError, match="what the dataset is read from"):
        techniques.ordered(["memory_mapped_data", "pack_small_files"])


# --- workers ----------------------------------------------------------------------------------------------------------


def test_workers_times_prefetch_batches_wait() -> None:
    job = prepared(odd, "loader_workers", steps=2)
    waiting: list[int] = []
    job.run(lambda done: waiting.append(settled(source(job)) - done))
    assert waiting == [WORKERS * PREFETCH] * 2
    assert f"{WORKERS * PREFETCH} batches" in job.notes[0]


def settled(feed) -> int:
    """How many batches the workers have made when they make no more."""
    end, count, since = time.monotonic() + 60, -1, 0
    while since < 10 and time.monotonic() < end:
        time.sleep(0.05)
        now = feed.made.value
        since = since + 1 if now == count and now >= WORKERS * PREFETCH else 0
        count = now
    return count


def test_workers_end_with_the_run_and_after_an_error() -> None:
    job = prepared(odd, "loader_workers", steps=3)
    for _ in range(2):  # and it can be run again
        job.run()
        assert not multiprocessing.active_children()

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(stop)
    gc.collect()
    assert not multiprocessing.active_children()


# --- the last batch ---------------------------------------------------------------------------------------------------


def with_norm(samples: int):
    def make():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        batch = torch.randn(samples, 8), torch.randn(samples, 8)
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.functional.mse_loss

    return make


def test_a_last_batch_of_one_stops_batchnorm() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        tried(with_norm(4), habits=["drop_last"])
    tried(with_norm(4), "drop_last")


def test_the_last_batch_is_the_smaller_one_in_each_run() -> None:
    job, sizes = prepared(with_norm(12), habits=["drop_last"], steps=3), []
    forward = job.forward
    job.forward = lambda x: sizes.append(len(x)) or forward(x)
    job.run()
    job.run()
    assert sizes == [12, 12, 4] * 2


def test_the_peak_is_that_of_a_full_batch() -> None:
    ragged, whole = tried(wide_rows, habits=["drop_last"]), tried(wide_rows, "drop_last")
    assert abs(ragged.share(whole)) < 0.001


# --- files ------------------------------------------------------------------------------------------------------------


def test_mapped_data_leave_the_memory() -> None:
    before, after = tried(wide_rows, habits=["memory_mapped_data"]), tried(wide_rows, "memory_mapped_data")
    batch = sum(one.nbytes for one in tensors_in(wide_rows()[2]))
    assert before.peak_bytes - after.peak_bytes >= (BATCHES - 1) * batch
    assert before.share(after) > 0.8 and before.same(after)


@pytest.mark.parametrize("name", ["memory_mapped_data", "pack_small_files"])
def test_no_file_is_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for names, habits in [((name,), ()), ((), (name,))]:
        job = prepared(odd, *names, habits=habits)
        job.run()
        del job
        gc.collect()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("records", [[], [b""], [b"a", b"", b"bc" * 500, b"d"]])
def test_a_pack_gives_back_its_records(tmp_path: Path, records: list[bytes]) -> None:
    Pack.write(tmp_path / "pack", iter(records))
    pack = Pack(tmp_path / "pack")
    assert len(pack) == len(records)
    backwards = range(len(records) - 1, -1, -1)
    assert list(pack.read(iter(backwards))) == records[::-1]


def test_small_files_are_opened_one_by_one_and_fill_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    many, one = prepared(odd, habits=["pack_small_files"]), prepared(odd, "pack_small_files")
    assert opened(many, monkeypatch) >= 4 * SAMPLES * many.steps  # two parts are tensors of numbers, two hold the rest
    assert opened(one, monkeypatch) == one.steps
    held = {folder: sum(file.stat().st_blocks for file in folder.iterdir()) for folder in tmp_path.iterdir()}
    small, packed = sorted(held.values(), reverse=True)
    assert packed < small / 4


def opened(job: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    count, usual = 0, io.open

    def counting(file, *args, **kwargs):
        nonlocal count
        count += "memlab-" in str(file)
        return usual(file, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", counting)
        patch.setattr(builtins, "open", counting)
        job.run()
    return count


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_small_pictures_take_a_quarter() -> None:
    before, after = tried(photographs, habits=["resize_once"]), tried(photographs, "resize_once")
    assert before.share(after) > 0.6 and before.same(after)
    with pytest.raises(DoesNotApply, match="pictures"):
        prepared(wide_rows, "resize_once")


# --- on a card --------------------------------------------------------------------------------------------------------


def on_card(make, *names: str, habits=(), steps: int = 2) -> Job:
    job = Job("cuda", steps)
    techniques.prepare(job, make, names, habits)
    return job


def card_peak(make, *names: str, habits=()) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    on_card(make, *names, habits=habits, steps=3).run()
    gc.collect()
    return torch.cuda.max_memory_allocated() - before


def light():
    """A large input and hardly a network."""
    model = nn.Linear(4096, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(3000, 4096), torch.randn(3000, 1)), (
        nn.functional.mse_loss
    )  # fmt: skip


INPUT_BYTES = 3000 * 4096 * 4


@pytest.mark.fakegpu
def test_one_more_batch_on_the_card_when_it_is_fetched_ahead() -> None:
    card_peak(light)  # cuBLAS takes its workspace once
    plain, pinned, ahead = card_peak(light), card_peak(light, "pin_memory"), card_peak(light, "prefetch")
    assert abs(pinned - plain) < 0.01 * plain
    assert INPUT_BYTES <= ahead - pinned < 1.05 * INPUT_BYTES


@pytest.mark.fakegpu
def test_normalising_on_the_card_takes_one_more_batch_there() -> None:
    card_peak(light)
    host, card = card_peak(light, habits=["preprocess_on_card"]), card_peak(light, "preprocess_on_card")
    assert 0.99 * INPUT_BYTES <= card - host < 1.05 * INPUT_BYTES  # a gradient is not there yet


@pytest.mark.fakegpu
def test_pinned_blocks_are_rounded_up_to_powers_of_two() -> None:
    torch.cuda.init()
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    job = on_card(light, "pin_memory")
    batch = source(job).next()
    taken = torch.cuda.host_memory_stats()["active_bytes.current"] - before
    assert batch[0].is_pinned() and batch[1].is_pinned()
    assert 1.3 * INPUT_BYTES < (1 << 26) <= taken < (1 << 26) + (1 << 16)  # 46.9 MiB take 64


@pytest.mark.fakegpu
def test_reads_in_the_loop_wait_for_the_card() -> None:
    assert waits(on_card(odd, "host_reads", steps=3)) == 0
    assert waits(on_card(odd, habits=["host_reads"], steps=3)) == 2 * 3


@pytest.mark.fakegpu
def test_copies_from_pinned_memory_are_not_waited_for() -> None:
    assert waits(on_card(odd, "pin_memory", steps=2)) > 0
    assert waits(on_card(odd, "non_blocking", steps=2)) == 0


def waits(job: Job) -> int:
    """How often torch says that it waited for the card."""
    job.run()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            job.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in said)


@pytest.mark.fakegpu
def test_all_of_them_go_together() -> None:
    job = on_card(light, "loader_workers", "pin_memory", "non_blocking", "prefetch", "preprocess_on_card", "host_reads")
    job.run()
    assert job.batch[0].is_cuda and source(job).waiting == () and not multiprocessing.active_children()
