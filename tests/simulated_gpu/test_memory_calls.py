"""CUDA's calls for memory, made directly: ranges that are not there are refused, and nothing crashes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from memlab.units import GiB, MiB

pytestmark = pytest.mark.simulated
INVALID_VALUE, ALREADY_REGISTERED, NOT_SUPPORTED = 1, 712, 801
SIZE = 3 * MiB
TYPE_MANAGED = 3
HANDLE_FABRIC = 8


class PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


@pytest.fixture
def cuda() -> Iterator[ctypes.CDLL]:
    loaded = ctypes.CDLL("libcudart.so.13")
    yield loaded
    loaded.cudaGetLastError()  # else PyTorch would raise it at its next launch


def number(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


@pytest.fixture
def block(cuda) -> Iterator[int]:
    """The address of SIZE bytes."""
    address = ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(address), number(SIZE)) == 0
    yield address.value or 0
    cuda.cudaFree(address)


class Properties(ctypes.Structure):
    """Which memory cuMemCreate is to make."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


@pytest.fixture
def expandable(cuda) -> Iterator[int]:
    """The address of 20 MiB in two pieces that are mapped into a larger range of addresses, as in an expandable segment."""
    driver, address, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    wanted = Properties(type=1, location_type=1)
    torch.cuda.init()
    assert driver.cuMemAddressReserve(ctypes.byref(address), number(2 * GiB), number(0), number(0), number(0)) == 0
    for start in (0, 10 * MiB):
        place = ctypes.c_ulonglong(address.value + start)
        assert driver.cuMemCreate(ctypes.byref(handle), number(10 * MiB), ctypes.byref(wanted), number(0)) == 0
        assert driver.cuMemMap(place, number(10 * MiB), number(0), handle, number(0)) == 0
        assert driver.cuMemRelease(handle) == 0
    yield address.value
    assert driver.cuMemUnmap(address, number(20 * MiB)) == 0
    assert driver.cuMemAddressFree(address, number(2 * GiB)) == 0


def calls(cuda: ctypes.CDLL) -> list[Callable[[int, int], int]]:
    """Calls on a range of memory."""
    host = ctypes.create_string_buffer(64 * MiB)
    own = ctypes.addressof(host)
    return [
        lambda at, size: cuda.cudaMemset(ctypes.c_void_p(at), 0, number(size)),
        lambda at, size: cuda.cudaMemset(ctypes.c_void_p(at), 7, number(size)),
        lambda at, size: cuda.cudaMemcpy(ctypes.c_void_p(at), host, number(min(size, len(host))), 1),
        lambda at, size: cuda.cudaMemcpy(host, ctypes.c_void_p(at), number(min(size, len(host))), 2),
        lambda at, size: cuda.cudaMemcpyAsync(ctypes.c_void_p(at), host, number(min(size, len(host))), 1, None),
        lambda at, size: cuda.cudaMemcpy2DAsync(
            ctypes.c_void_p(at), number(size // 2), ctypes.c_void_p(own), number(MiB), number(MiB // 2), number(3), 1, None
        ),
    ]  # fmt: skip


def test_ranges_within_an_allocation(cuda, block):
    for call in calls(cuda)[:-1]:
        assert call(block, SIZE) == call(block + SIZE - 5, 5) == call(block + SIZE, 0) == 0


def test_ranges_beyond_an_allocation(cuda, block):
    for call in calls(cuda):
        assert call(block, SIZE + 2) == call(block + SIZE, 2) == INVALID_VALUE


def test_a_freed_allocation_and_no_address(cuda):
    address = ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(address), number(SIZE)) == cuda.cudaFree(address) == 0
    for call in calls(cuda):
        assert call(address.value or 0, SIZE) == call(0, SIZE) == INVALID_VALUE


def test_expandable_segments_end_where_they_are_mapped(cuda, expandable):
    for call in calls(cuda)[:-1]:
        assert call(expandable, 20 * MiB) == 0
        assert call(expandable, 20 * MiB + 1) == call(expandable + GiB, 1) == INVALID_VALUE


def test_there_is_no_memory_for_a_fabric():
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong()
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    wanted = Properties(type=1, location_type=1, handle_types=HANDLE_FABRIC)
    assert driver.cuMemCreate(ctypes.byref(handle), number(2 * MiB), ctypes.byref(wanted), number(0)) == NOT_SUPPORTED
    assert torch.cuda.mem_get_info()[0] == free


def test_sizes_that_wrap_around(cuda, block):
    most = 2**64 - 1
    assert cuda.cudaMemset(ctypes.c_void_p(block), 0, number(most)) == INVALID_VALUE
    assert cuda.cudaHostRegister(ctypes.c_void_p(0x10000), number(most), 0) == INVALID_VALUE
    rows = (number(2**40), ctypes.c_void_p(block), number(2**40), number(1), number(2**40), 3, None)
    assert cuda.cudaMemcpy2DAsync(ctypes.c_void_p(block), *rows) == INVALID_VALUE
    assert ctypes.CDLL("libcuda.so.1").cuMemsetD32Async(ctypes.c_void_p(block), 1, number(2**62), None) == INVALID_VALUE


def test_rows_wider_than_their_pitch(cuda, block):
    rows = (number(10), ctypes.c_void_p(block), number(10), number(11), number(1), 3, None)
    assert cuda.cudaMemcpy2DAsync(ctypes.c_void_p(block + MiB), *rows) == INVALID_VALUE


def test_managed_memory_is_the_hosts_and_counts_on_the_device(cuda):
    there = torch.empty(4, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    address, attributes = ctypes.c_void_p(), PointerAttributes()
    assert cuda.cudaMallocManaged(ctypes.byref(address), number(SIZE), 1) == 0
    ctypes.memset(address, 7, SIZE)
    there.add_(1)
    assert cuda.cudaMemcpy(ctypes.c_void_p(there.data_ptr()), address, number(4), 4) == 0
    assert ctypes.string_at(address, 4) == bytes(there.tolist()) == b"\7\7\7\7"
    assert cuda.cudaPointerGetAttributes(ctypes.byref(attributes), address) == 0
    assert (attributes.type, attributes.device) == (TYPE_MANAGED, 0)
    assert attributes.host_pointer == attributes.device_pointer == address.value
    device = number(1)  # the first one: {type 1, id 0} by value
    assert cuda.cudaMemPrefetchAsync(address, number(SIZE), device, 0, None) == 0
    assert cuda.cudaMemPrefetchAsync(address, number(2 * SIZE), device, 0, None) == INVALID_VALUE
    assert free - torch.cuda.mem_get_info()[0] == 4 * MiB
    assert cuda.cudaFree(address) == 0
    assert torch.cuda.mem_get_info()[0] == free
