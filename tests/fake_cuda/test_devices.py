"""What code finds when it asks for the device, and what its questions about memory are answered."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from fake_gpus import card

from memlab.fake_cuda import FakeCuda

MIB = 1 << 20


def test_there_is_one_card_as_described(fake):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.total_memory, properties.major) == ("Fake 8", 8 << 30, 8)
    assert torch.cuda.get_device_capability() == (8, 6) and torch.cuda.get_device_name("cuda") == "Fake 8"
    assert torch.cuda.is_bf16_supported() and torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "cuda" and torch.backends.cudnn.is_available()
    torch.cuda.synchronize(), torch.cuda.set_device(0), torch.cuda.manual_seed_all(1), torch.manual_seed(1)
    with torch.cuda.device(0), torch.random.fork_rng(devices=[0]):
        assert torch.ones(1, device="cuda").is_cuda


def test_memory_is_counted_as_the_allocator_does(fake):
    x = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 5 * MIB and torch.cuda.memory_reserved() == 20 * MIB
    y = torch.empty(3, device="cuda")
    assert torch.cuda.memory_allocated() == 5 * MIB + 512 and torch.cuda.memory_reserved() == 22 * MIB
    free, total = torch.cuda.mem_get_info()
    assert (total - free, total) == (22 * MIB, 8 << 30)
    del x, y
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 5 * MIB + 512
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    assert "CUDA Memory" in torch.cuda.memory_summary() or "memory" in torch.cuda.memory_summary().lower()
    assert fake.log.emptied == [4]
    assert any("in use" in text for text in fake.assumptions)


def test_streams_are_known_to_their_allocations(fake):
    side = torch.cuda.Stream()
    a = torch.empty(1024, device="cuda")
    with torch.cuda.stream(side) as nothing:
        b = torch.empty(1024, device="cuda")
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
    assert nothing is None and list(fake.log.columns()["stream"]) == [0, side.cuda_stream]
    torch.cuda.current_stream().wait_stream(side)
    b.record_stream(torch.cuda.current_stream())
    assert fake.log.recorded_streams == [(2, 1, 0)]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(), end.record(), end.synchronize()
    assert start.elapsed_time(end) > 0 and end.query()
    del a, b


def test_a_full_card_raises_as_on_cuda_and_code_can_go_on():
    with FakeCuda(card(64 * MIB)) as fake:
        batch, tried = 1024, []
        while True:
            try:
                tried.append(batch)
                x = torch.empty(batch, 64 << 10, dtype=torch.uint8, device="cuda")
                y = x.clone()
                break
            except torch.cuda.OutOfMemoryError as error:
                assert "CUDA out of memory. Tried to allocate" in str(error) and isinstance(error, RuntimeError)
                x = None
                batch //= 2
        assert tried == [1024, 512] and y.shape[0] == 512
        assert fake.log.allocator.num_ooms == len(fake.log.out_of_memory) == 1


def test_an_error_keeps_nothing_alive_that_cuda_would_not():
    with FakeCuda(card(64 * MIB)) as fake:
        weight = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        kept = None
        try:
            torch.cat([weight.clone(), torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")])
        except torch.cuda.OutOfMemoryError as error:
            kept = error
        fake.log.record_frees()
        assert fake.log.allocator.requested_bytes == 8 * MIB, "the arguments went, though the error lives"
        assert kept is not None


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_allocator_has_the_settings_of_the_process(conf):
    with FakeCuda(card(), conf) as fake:
        x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == (40 if conf else 30) * MIB
        del x
    assert fake.log.allocator.settings.expandable_segments == bool(conf)


def test_an_error_that_is_over_leaves_no_garbage(fake):
    """Non-reentrant checkpoints stop their second run by an error; a cycle would keep its frames until a collection."""
    gc.disable()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1)).cuda()
        x = torch.randn(16, 64, device="cuda", requires_grad=True)
        resting = torch.cuda.memory_allocated()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        torch.autograd.grad(y.sum(), x)
        del y
        assert torch.cuda.memory_allocated() == resting
        for wrong in (lambda a: a @ a, lambda a: torch.nn.functional.dropout(a, 2.0), lambda a: a + torch.ones(16, 64)):
            with pytest.raises((RuntimeError, ValueError)):
                wrong(x)
        kept = weakref.ref(x)
        del x
        assert kept() is None
    finally:
        gc.enable()
