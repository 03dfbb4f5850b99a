"""The live storages of a CUDA device, here a simulated one: to the byte what PyTorch's allocator counts."""

from __future__ import annotations

import gc

import pytest
import torch
from notebook import notebook  # noqa: F401

from memlab.api.who import who
from memlab.references.live_storages import live_storages, storages

pytestmark = pytest.mark.simulated


def left() -> int:
    """What is allocated before the test begins, which no tensor may hold."""
    gc.collect()
    return torch.cuda.memory_allocated() - sum(one.nbytes for one in storages("cuda"))


@pytest.fixture(autouse=True)
def warm():
    """cuBLAS takes a workspace at the first product of each thread, which no tensor holds."""
    ones = torch.ones(512, 512, device="cuda", requires_grad=True)
    torch.nn.functional.linear(ones @ ones, ones, ones[0]).sum().backward()
    torch.cuda.synchronize()


TRAINING = """
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.BatchNorm1d(256, track_running_stats=False), torch.nn.ReLU(), torch.nn.Linear(256, 128),
    ).cuda()
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.ones(512, 128, device="cuda"), torch.zeros(512, 128, device="cuda")
    losses = []
    for step in range(3):
        opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean(0)
        loss.sum().backward()
        opt.step()
    losses = [((model(x) - y) ** 2).mean(0).exp() for _ in range(4)]
"""


def test_bytes_are_those_that_the_allocator_counts(notebook):
    before = left()
    notebook.run("x = torch.ones(1 << 18, device='cuda')")
    notebook.run("y = [x[128:].exp() for _ in range(3)]\nz = {'a': torch.ones(512, dtype=torch.int8, device='cuda')}")
    found = live_storages("cuda")
    assert found.total_bytes + before == torch.cuda.memory_allocated()
    assert {one.path for one in found.storages} >= {"x", "y[0]", "y[1]", "y[2]", "z['a']"}


def test_a_training_to_the_byte_after_rounding_block_by_block_and_with_its_graphs(notebook):
    before = left()
    notebook.run(TRAINING)
    gc.collect()
    found = live_storages("cuda:0")
    rounded = sum(-(-one.nbytes // 512) * 512 for one in found.storages)
    assert rounded + before == torch.cuda.memory_allocated()
    assert found.is_complete
    assert not [one for one in found.storages if not one.path]
    by = found.group("category")
    model, opt = notebook.value("model"), notebook.value("opt")
    params = list(model.parameters())
    assert by["parameter"].nbytes == sum(p.nbytes for p in params)
    assert by["gradient"].nbytes == sum(p.grad.nbytes for p in params)
    state = [value for one in opt.state.values() for value in one.values()]
    assert by["optimizer"].nbytes == sum(t.nbytes for t in state)
    assert by["activation"].nbytes > 4 * 512 * 256 * 4
    blocks = {
        block["address"]: block["requested_size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert all(blocks[one.address] == one.nbytes for one in found.storages)
    saved = [one for one in found.storages if one.path.startswith("losses[2].grad_fn -> ")]
    assert sum(one.nbytes for one in saved) >= 512 * 256 * 4
    before = torch.cuda.memory_allocated()
    notebook.run("del losses[2]")
    assert before - torch.cuda.memory_allocated() >= sum(one.nbytes for one in saved)


def test_nothing_is_kept_and_nothing_is_allocated(notebook):
    notebook.run("x = torch.ones(1 << 18, device='cuda', requires_grad=True)\nloss = x.exp().sum()")
    counts = torch.cuda.memory_stats()
    live_storages(), storages(), notebook.paths("x"), who()
    now = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.current"):
        assert now[name] == counts[name]
    notebook.run("del x, loss")
    assert torch.cuda.memory_allocated() == counts["allocated_bytes.all.current"] - 2 * (1 << 20) - 512


def test_who_says_how_far_it_is_from_the_counter(notebook):
    notebook.run("x = torch.ones(100, device='cuda')")
    gc.collect()
    found = who(device="cuda")
    counted = torch.cuda.memory_allocated()
    assert counted > found.total_bytes
    assert "PyTorch counts" in str(found)
    assert "allocated on cuda:0" in str(found)


def test_a_tensor_freed_while_another_stream_uses_it_is_no_storage(notebook):
    notebook.run("""
        x = torch.ones(1 << 18, device='cuda')
        x.record_stream(torch.cuda.Stream())
    """)
    key = notebook.key("x")
    notebook.run("del x")
    assert key not in {one.key for one in storages()}
