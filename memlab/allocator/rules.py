"""The sizes of PyTorch's caching allocator: rounding, pools, splitting.

They are those of c10/cuda/CUDACachingAllocator.cpp, 2.11 to 2.15. The figures are named after the constants there;
`Settings` are those of PYTORCH_CUDA_ALLOC_CONF that change a size.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memlab.units import MiB

MIN_BLOCK = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
SMALL_SIZE = 1 * MiB
"""kSmallSize: the largest (rounded) size that is taken from the small pool."""
SMALL_SEGMENT = 2 * MiB
"""kSmallBuffer: the segment size of the small pool, and the page size of its expandable segments."""
LARGE_SEGMENT = 20 * MiB
"""kLargeBuffer: the segment size of the large pool for requests below 10 MiB, unless `large_segment_size_mb` is set."""
MIN_LARGE_ALLOC = 10 * MiB
"""kMinLargeAlloc: from this size on a request gets a segment of its own size."""
ROUND_LARGE = 2 * MiB
"""kRoundLarge: the size of such segments is a multiple of it."""
UNLIMITED = 1 << 62
"""`max_split_size` where none was set: every block may be split."""
INTERVALS = 16
"""kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB, ... 32 GiB and above."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that decide the sizes of blocks, and when segments are allocated and released.

    The last three are not in a snapshot, and `BlockTracker` does not need them.
    """

    max_split_size: int = UNLIMITED
    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    max_non_split_rounding_size: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0

    @classmethod
    def from_snapshot(cls, settings: Mapping[str, Any]) -> Settings:
        """Read the `allocator_settings` of a PyTorch memory snapshot."""
        limit = int(settings.get("max_split_size", -1))
        by_interval = settings.get("roundup_power2_divisions") or {}
        divisions = tuple(int(by_interval[key]) for key in sorted(by_interval, key=int))
        return cls(
            max_split_size=limit if 0 <= limit < UNLIMITED else UNLIMITED,
            expandable_segments=bool(settings.get("expandable_segments", False)),
            roundup_power2_divisions=divisions if len(divisions) == INTERVALS else (0,) * INTERVALS,
        )

    def divisions(self, size: int) -> int:
        """How many steps there are between two powers of two for requests of about this size; 0 or 1: no such steps."""
        interval = max(size, 1).bit_length() - 1 - (MiB.bit_length() - 1)
        return self.roundup_power2_divisions[min(max(interval, 0), INTERVALS - 1)]

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

    def fits(self, block: int, size: int) -> bool:
        """Whether a free block may serve `size` (rounded) bytes: oversize blocks are kept for oversize requests.

        L2896-2905 of get_free_block: one that is refused ends the search.
        """
        if size < self.max_split_size:
            return block < self.max_split_size
        return block < size + self.max_non_split_rounding_size

    def segment_size(self, size: int) -> int:
        """What is asked of the driver for `size` (rounded) bytes (get_allocation_size, L3700).

        >>> [Settings().segment_size(n * MiB) // MiB for n in (1, 2, 10, 11)]
        [2, 20, 10, 12]
        """
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE


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


def release(torch_version: str) -> tuple[int, int]:
    """The release of a version of PyTorch, by which rules are chosen; 2.12 for an empty text.

    >>> release("2.14.1+cu130"), release("")
    ((2, 14), (2, 12))
    """
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    return (int(found[1]), int(found[2])) if found else (2, 12)


class Ties(enum.Enum):
    """Which of several free blocks of equal size is used: it depends on the version of PyTorch.

    The sources number blocks (registration_counter, BlockComparator...): each block, or each segment, or none; ties are
    broken by the lowest address. Measured with 2.10.0, 2.11.0, 2.12.1, 2.13.0 and 2.14.1 on a simulated device (2.10, whose builds
    are for CUDA 12, on one that was adapted to it).
    """

    AGE = "the block object made first"
    SEGMENT = "of the segment made first, the lowest address"
    ADDRESS = "the lowest address"

    @classmethod
    def of(cls, torch_version: str) -> Ties:
        """The rule of a version; that of 2.12 for an empty text.

        >>> [Ties.of(version).name for version in ("2.10.0", "2.12.1+cu130", "2.13.0", "2.14.0", "")]
        ['ADDRESS', 'AGE', 'SEGMENT', 'SEGMENT', 'AGE']
        """
        version = release(torch_version)
        return cls.ADDRESS if version < (2, 12) else cls.AGE if version < (2, 13) else cls.SEGMENT
