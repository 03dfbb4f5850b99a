"""Counters: the CUDA allocator's against PyTorch's public ones, other accelerators with a fake backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memlab.probes.counters import (
    CUDA_COUNTERS,
    AcceleratorCounters,
    CounterReading,
    cuda_counters,
    cuda_devices,
    has_context,
    runtime_memory,
)
from memlab.units import MiB

STATS = {
    "allocated_bytes.all.current": 3,
    "allocated_bytes.all.peak": 5,
    "reserved_bytes.all.current": 7,
    "reserved_bytes.all.peak": 11,
}


def accelerator(monkeypatch: pytest.MonkeyPatch, device_type: str, stats: object) -> None:
    """Let torch.accelerator serve this device type; an exception as `stats` is raised."""

    def memory_stats(index: int) -> object:
        if isinstance(stats, Exception):
            raise stats
        return stats

    device = SimpleNamespace(type=device_type)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "memory_stats", memory_stats)


def test_nothing_is_asked_of_cuda_before_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("asked"))
    assert cuda_counters(0) == dict.fromkeys(CUDA_COUNTERS, 0)
    assert cuda_devices() == ()
    assert has_context(0) is False
    assert runtime_memory(0) is None


def test_an_allocator_without_counters_reads_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("memlab.torch_internals.cuda_stats", refuse)
    assert set(cuda_counters(0).values()) == {-1}


@pytest.mark.parametrize(("context", "reserved", "devices"), [(True, 0, (0,)), (False, 5, (0,)), (False, 0, ())])
def test_a_device_counts_once_it_has_a_context_or_holds_memory(
    monkeypatch: pytest.MonkeyPatch, context: bool, reserved: int, devices: tuple[int, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: context, raising=False)
    monkeypatch.setattr("memlab.probes.counters.cuda_counters", lambda device: {"reserved": reserved})
    assert cuda_devices() == devices


@pytest.mark.parametrize("device_type", ["npu", "mps"])
def test_all_counters_come_from_torch_accelerator(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    accelerator(monkeypatch, device_type, STATS)
    counters = AcceleratorCounters(device_type)
    assert counters.read() == CounterReading(3, 7, 5, 11)
    assert counters.gaps == ()


def test_mps_falls_back_to_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator(monkeypatch, "mps", NotImplementedError("mps has no DeviceAllocator"))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    counters = AcceleratorCounters("mps")
    assert counters.read() == CounterReading(3, 7)
    assert counters.read() == CounterReading(3, 7)
    assert {gap.name for gap in counters.gaps} == {"mps peak allocated", "mps peak reserved", "mps reserved"}
    assert len(counters.gaps) == 3


def test_xpu_is_read_from_its_own_module_once_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = AcceleratorCounters("xpu")
    assert counters.read() == CounterReading()
    assert counters.gaps == ()  # nothing to see is not the same as not seeing
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "memory_stats", lambda index: STATS)
    assert counters.read() == CounterReading(3, 7, 5, 11)


def test_a_backend_that_offers_nothing_names_each_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator(monkeypatch, "npu", RuntimeError("not implemented"))
    counters = AcceleratorCounters("npu")
    assert counters.read() == CounterReading()
    names = {"npu allocated", "npu reserved", "npu peak allocated", "npu peak reserved"}
    assert {gap.name for gap in counters.gaps} == names
    assert all(torch.__version__ in gap.text for gap in counters.gaps)


def test_another_accelerator_than_the_current_one_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator(monkeypatch, "cuda", STATS)
    assert AcceleratorCounters("npu").read() == CounterReading()
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_initialized=lambda: True), raising=False)
    assert AcceleratorCounters("npu").read() == CounterReading()


@pytest.mark.simulated
def test_the_counters_are_pytorchs_public_ones() -> None:
    held = [torch.empty(size * MiB, dtype=torch.uint8, device="cuda") for size in (3, 40, 1)]
    del held[1]
    counters = cuda_counters(0)
    stats = torch.cuda.memory_stats(0)
    assert counters["allocated"] == torch.cuda.memory_allocated(0) > 0
    assert counters["reserved"] == torch.cuda.memory_reserved(0)
    assert counters["peak_allocated"] == torch.cuda.max_memory_allocated(0) > counters["allocated"]
    assert counters["peak_reserved"] == torch.cuda.max_memory_reserved(0)
    assert counters["alloc_count"] == stats["allocation.all.allocated"] >= 3
    assert counters["free_count"] == stats["allocation.all.freed"] >= 1
    assert counters["num_ooms"] == stats["num_ooms"]
    assert counters["num_alloc_retries"] == stats["num_alloc_retries"]


@pytest.mark.simulated
def test_the_runtime_is_asked_where_a_context_exists() -> None:
    held = torch.empty(MiB, dtype=torch.uint8, device="cuda")
    assert cuda_devices() == (held.get_device(),)
    free_bytes, total_bytes = runtime_memory(0)
    assert 0 < free_bytes < total_bytes == torch.cuda.get_device_properties(0).total_memory
