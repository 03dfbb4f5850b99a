"""The sizes of PyTorch's caching allocator: rounding, pools, splitting.

They are those of c10/cuda/CUDACachingAllocator.cpp, 2.11 to 2.15. The figures are named after the constants there;
`Settings` are those of PYTORCH_CUDA_ALLOC_CONF that change a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memlab.units import MiB

MIN_BLOCK = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
SMALL_SIZE = 1 * MiB
"""kSmallSize: the largest (rounded) size that is taken from the small pool."""
SMALL_SEGMENT = 2 * MiB
"""kSmallBuffer: what the small pool asks of the driver."""
_UNLIMITED = 1 << 62
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB, ... 32 GiB and above


@dataclass(frozen=True, slots=True)
class Settings:
    """Those settings of the allocator that decide how large a block becomes."""

    max_split_size: int = _UNLIMITED
    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS

    @classmethod
    def from_snapshot(cls, settings: Mapping[str, Any]) -> Settings:
        """Read the `allocator_settings` of a PyTorch memory snapshot."""
        limit = int(settings.get("max_split_size", -1))
        by_interval = settings.get("roundup_power2_divisions") or {}
        divisions = tuple(int(by_interval[key]) for key in sorted(by_interval, key=int))
        return cls(
            max_split_size=limit if 0 <= limit < _UNLIMITED else _UNLIMITED,
            expandable_segments=bool(settings.get("expandable_segments", False)),
            roundup_power2_divisions=divisions if len(divisions) == _INTERVALS else (0,) * _INTERVALS,
        )

    def divisions(self, size: int) -> int:
        """How many steps there are between two powers of two for requests of about this size; 0 or 1: no such steps."""
        interval = max(size, 1).bit_length() - 1 - (MiB.bit_length() - 1)
        return self.roundup_power2_divisions[min(max(interval, 0), _INTERVALS - 1)]

    def round(self, size: int) -> int:
        """What a request of `size` bytes is rounded up to.

        >>> Settings().round(1), Settings().round(513)
        (512, 1024)
        """
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.divisions(size)
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return round_to_power2_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def splits(self, block: int, size: int) -> bool:
        """Whether a free block of `block` bytes is split when `size` (rounded) bytes are taken of it."""
        rest = block - size
        if self.expandable_segments or size <= SMALL_SIZE:
            return rest >= MIN_BLOCK
        return size < self.max_split_size and rest > SMALL_SIZE


def round_to_power2_division(size: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two.

    >>> round_to_power2_division(1200, 4)
    1280
    """
    floor = 1 << (size.bit_length() - 1)
    if floor == size:
        return size
    step = floor // divisions
    return -(-size // step) * step if step else 2 * floor
