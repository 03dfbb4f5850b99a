"""What the library CUB takes to sort, scan and select, by number of elements and compute capability.

Sizes of PyTorch 2.12.1 (CUDA 13.0) as seen on the C++ allocator. CUB lays its parts at multiples of 256 bytes and asks for 255
more. Limits: sorts of 16-bit keys take a table per multiprocessor that is only estimated here.
"""

from __future__ import annotations

from typing import Any

ALIGNED, SLACK = 256, 255
DIGITS = 256
SINGLE_TILE = 2048
"""Up to so many elements one thread block sorts alone, and asks for one byte."""


def aligned(nbytes: int) -> int:
    """The next multiple of 256."""
    return -(-nbytes // ALIGNED) * ALIGNED


def _sort_tile(key_bytes: int, capability: tuple[int, int]) -> int:
    """Elements per thread block of a radix sort with int64 values (cub/device/dispatch/tuning/tuning_radix_sort.cuh)."""
    if capability < (8, 0):
        return 2816
    if capability < (9, 0):
        return 3840 if key_bytes == 8 else 3072
    return 4608 if key_bytes == 8 else 5376


def sort_pairs(count: int, key_bytes: int, card: Any, bits: int | None = None, value_bytes: int = 8) -> int:
    """Temporary bytes of DeviceRadixSort::SortPairs."""
    capability = tuple(card.compute_capability)
    bits = 8 * key_bytes if bits is None else bits
    passes = max(-(-bits // 8), 1)
    swap = 0 if passes == 1 else aligned(count * key_bytes) + aligned(count * value_bytes)
    if key_bytes < 4:
        return swap + aligned((card.multiprocessors * 20 + 22) * DIGITS * 8) + SLACK
    tiles = -(-count // _sort_tile(key_bytes, capability))
    return passes * DIGITS * 8 + tiles * DIGITS * 4 + swap + aligned(4 * passes) + SLACK


def scan(count: int, element_bytes: int) -> int:
    """Temporary bytes of DeviceScan: a state per tile, and 32 more."""
    state, tile = (8, 1920) if element_bytes == 4 else (16, 896) if element_bytes == 8 else (16, 7680)
    return ALIGNED + aligned((32 + -(-count // tile)) * state) + SLACK


def select(count: int, capability: tuple[int, int]) -> int:
    """Temporary bytes of `unique_by_key` over int64 pairs."""
    if capability < (8, 0) or (8, 0) < capability < (9, 0):
        tile = 320
    else:
        tile = 1792 if capability == (8, 0) else 4608 if capability == (9, 0) else 3840
    return ALIGNED + aligned((32 + -(-count // tile)) * 16) + SLACK
