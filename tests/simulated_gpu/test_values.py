"""Values read back: what the host copied in, until the next kernel and the last 128 MiB of it; everything else is zeros."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from processes import REPOSITORY, ran
from torch import nn

from memlab.units import KiB, MiB

pytestmark = pytest.mark.simulated
SIZES = [1, 4 * KiB - 1, 64 * KiB + 1, 10 * MiB, 128 * MiB]


def some(size: int) -> torch.Tensor:
    """Bytes none of which is zero."""
    return torch.arange(size).remainder_(255).add_(1).to(torch.uint8)


def launch() -> None:
    torch.empty(1, device="cuda").add_(1)


@pytest.fixture(autouse=True)
def nothing_known():
    launch()


@pytest.mark.parametrize("size", SIZES)
def test_what_the_host_copied_in_comes_back_until_the_next_kernel(size):
    x = some(size)
    on_device = x.cuda()
    assert torch.equal(on_device.cpu(), x) and torch.equal(on_device.cpu(), x)
    launch()
    assert not on_device.cpu().any()


def test_a_single_copy_of_more_than_128_mib_is_zeros():
    assert not some(128 * MiB + 1).cuda().cpu().any()


def test_of_many_copies_the_last_come_back():
    x = some(50 * MiB)
    first, second, third = (x.cuda() for _ in range(3))
    assert torch.equal(third.cpu(), x)
    assert not first.cpu().any() and not second.cpu().any()


def test_parts_are_known_and_the_rest_is_zeros():
    buffer = torch.empty(MiB, dtype=torch.uint8, device="cuda")
    expected = torch.zeros(MiB, dtype=torch.uint8)
    for start, size in ((5, 100), (4000, 9000), (50, 200), (300_000, 200_000), (305_000, 1)):
        piece = some(size)
        buffer[start : start + size].copy_(piece)
        expected[start : start + size] = piece
    assert torch.equal(buffer.cpu(), expected)
    assert torch.equal(buffer.clone().cpu(), expected)
    assert torch.equal(buffer[4100:310_000].cpu(), expected[4100:310_000])


def test_a_copy_on_the_device_brings_its_bytes_along():
    x, unknown = some(10 * MiB), torch.empty(10 * MiB, dtype=torch.uint8, device="cuda")
    there = x.cuda()
    again = there.clone()
    assert torch.equal(copy.deepcopy(again).cpu(), x)
    again.copy_(unknown)
    assert not again.cpu().any() and torch.equal(there.cpu(), x)


@pytest.mark.parametrize("work", ["matmul", "convolution", "graph"])
def test_a_librarys_work_is_a_launch_too(work):
    x = some(100).cuda()
    a = torch.empty(4, 3, 8, 8, device="cuda")
    if work == "matmul":
        torch.mm(a[0, 0], a[0, 0], out=a[0, 1])
    elif work == "convolution":
        nn.functional.conv2d(a, torch.empty(5, 3, 3, 3, device="cuda"))
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a + a
        x = some(100).cuda()
        graph.replay()
    assert not x.cpu().any()


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_a_reused_block_has_no_stale_bytes(size):
    """Of another type they would be NaN or indexes out of range."""
    old = torch.full((size,), -1, dtype=torch.int32).cuda()
    del old
    logits = torch.randn(size, device="cuda")
    assert logits.cpu().abs().max() == 0
    assert torch.topk(logits, 5).indices.tolist() == [0] * 5


def test_a_state_dict_is_saved_and_loaded():
    model = nn.Linear(100, 100)
    file = io.BytesIO()
    torch.save(model.cuda().state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    again = nn.Linear(100, 100, device="cuda")
    again.load_state_dict(loaded)
    for ours, theirs in zip(again.state_dict().values(), loaded.values(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_batches_come_from_pinned_memory():
    data = torch.utils.data.TensorDataset(torch.arange(64).reshape(16, 4))
    batches = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    rows = [row for (batch,) in batches for row in batch.to("cuda", non_blocking=True).tolist()]
    assert rows == torch.arange(64).reshape(16, 4).tolist()


def test_threads_may_copy_while_others_launch():
    failures: list[str] = []

    def work(number: int) -> None:
        x = torch.full((100_000,), number, dtype=torch.uint8)
        for turn in range(200):
            read = x.cuda(non_blocking=True).clone().cpu()
            if not set(read.unique().tolist()) <= {0, number}:
                failures.append(f"{number}: {read.unique()}")
            if turn % 10 == 0:
                launch()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


HOST_MEMORY = """
import copy, re, sys, torch
def held():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
piece = torch.ones(int(sys.argv[1]) // 4)
torch.empty(1, device="cuda").add_(1)
before = held()
parts = torch.nn.ParameterList([torch.nn.Parameter(piece.cuda()) for _ in range((2 << 30) // int(sys.argv[1]))])
most = held()
copied = copy.deepcopy(parts)
most = max(most, held())
cloned = [part.clone() for part in parts]
most = max(most, held())
torch.empty(1, device="cuda").add_(1)
print(torch.cuda.memory_allocated() >> 30, (most - before) >> 20, (held() - before) >> 20)
"""


@pytest.mark.parametrize("piece", [64 * MiB, MiB])
def test_host_memory_stays_small(piece):
    """Two GiB, shard by shard straight to the device, and two copies of it."""
    status, out, err = ran(REPOSITORY, "-c", HOST_MEMORY, str(piece))
    assert status == 0, err[-2000:]
    allocated_gib, most_mib, after_mib = map(int, out.split())
    assert allocated_gib == 6 and most_mib < 200 and after_mib < 30
