"""`torch.cuda`'s figures of memory, answered by the allocator that runs along."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from memlab.predictor.pretend.log import Log

LOOKED = "the code asked how much memory is in use: on another card it may do something else"


class Memory:
    """The functions of `torch.cuda.memory`, by name."""

    def __init__(self, card: Any, log: Log, assume: Callable[[str], None]) -> None:
        self.card, self.log, self._assume = card, log, assume

    def _allocator(self) -> Any:
        self._assume(LOOKED)
        self.log.settle_deaths()
        return self.log.allocator

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes allocated now."""
        return int(self._allocator().allocated_bytes)

    def max_memory_allocated(self, device: Any = None) -> int:
        """The most since the last reset."""
        return int(self._allocator().peak_allocated_bytes)

    def memory_reserved(self, device: Any = None) -> int:
        """Bytes reserved now."""
        return int(self._allocator().reserved_bytes)

    def max_memory_reserved(self, device: Any = None) -> int:
        """The most since the last reset."""
        return int(self._allocator().peak_reserved_bytes)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """What the driver would call free, and the whole."""
        allocator = self._allocator()
        return int(allocator.free_bytes), int(allocator.total_bytes)

    def memory_stats(self, device: Any = None) -> Any:
        """The statistics of the allocator."""
        return OrderedDict(sorted(self._allocator().memory_stats().items()))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Peaks begin anew."""
        self.log.settle_deaths()
        self.log.allocator.reset_peaks()

    def empty_cache(self) -> None:
        """Cached segments go back."""
        self.log.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """The allocator takes no more than this share of the card."""
        self.log.allocator.set_memory_fraction(fraction)

    def names(self) -> dict[str, Any]:
        """What `torch.cuda` and `torch.cuda.memory` are to have."""
        own = {
            name: getattr(self, name)
            for name in (
                "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info",
                "memory_stats", "reset_peak_memory_stats", "empty_cache", "set_per_process_memory_fraction",
            )
        }  # fmt: skip
        return own | {
            "memory_cached": self.memory_reserved,
            "max_memory_cached": self.max_memory_reserved,
            "reset_max_memory_allocated": self.reset_peak_memory_stats,
            "reset_max_memory_cached": self.reset_peak_memory_stats,
            "reset_accumulated_memory_stats": lambda *args: self.log.allocator.reset_accumulated(),
            "memory_snapshot": lambda *args, **kwargs: [],
            "list_gpu_processes": lambda *args, **kwargs: "no processes are running",
            "_record_memory_history": nothing,
            "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": [[]]},
            "_dump_snapshot": nothing,
        }

    def accelerator_names(self) -> dict[str, Any]:
        """The same for `torch.accelerator.memory`."""
        wanted = (
            "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
            "reset_peak_memory_stats", "empty_cache", "reset_accumulated_memory_stats",
        )  # fmt: skip
        known = self.names()
        return {name: known[name] for name in wanted} | {"get_memory_info": self.mem_get_info}


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""
