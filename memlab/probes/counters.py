"""Memory counters that PyTorch keeps by itself: the CUDA caching allocator's, and those of other accelerators.

Reading never creates anything: no backend is initialised and no CUDA context is made. It does not reset, sum up or
interpret a counter, and it knows neither processes nor the driver (`memlab.probes.nvml` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab import seams
from memlab.trace import Gap

CUDA_COUNTERS = (
    "allocated",
    "reserved",
    "peak_allocated",
    "peak_reserved",
    "alloc_count",
    "free_count",
    "num_ooms",
    "num_alloc_retries",
)
NOT_READ = -1


def cuda_counters(device: int) -> dict[str, int]:
    """The caching allocator's counters of one device: bytes for the first four, counts for the others.

    All zero while CUDA is not initialised (nothing can be allocated then), all -1 where the allocator in use keeps no
    counters (a pluggable allocator).
    """
    if not torch.cuda.is_initialized():
        return dict.fromkeys(CUDA_COUNTERS, 0)
    try:
        stats = seams.cuda_stats(device)
    except RuntimeError:
        return dict.fromkeys(CUDA_COUNTERS, NOT_READ)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    blocks = stats["allocation"]["all"]
    return {
        "allocated": allocated["current"],
        "reserved": reserved["current"],
        "peak_allocated": allocated["peak"],
        "peak_reserved": reserved["peak"],
        "alloc_count": blocks["allocated"],
        "free_count": blocks["freed"],
        "num_ooms": stats["num_ooms"],
        "num_alloc_retries": stats["num_alloc_retries"],
    }


def cuda_devices() -> tuple[int, ...]:
    """The visible devices on which this process already has a CUDA context; empty while CUDA is not initialised."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(device for device in range(torch.cuda.device_count()) if has_context(device))


def has_context(device: int) -> bool:
    """Whether asking the CUDA runtime about the device would find a context rather than make one (some 500 MiB)."""
    if not torch.cuda.is_initialized():
        return False
    # HIP may work without what CUDA calls a context: memory that PyTorch holds on the device says as much.
    return seams.has_primary_context(device) or cuda_counters(device)["reserved"] > 0


def runtime_memory(device: int) -> tuple[int, int] | None:
    """Free and total bytes of the device as the CUDA (or HIP) runtime says; None where asking would make a context."""
    if not has_context(device):
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes, total_bytes


@dataclass(frozen=True, slots=True)
class CounterReading:
    """One reading of an accelerator's counters; None is a counter that this backend does not offer."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


_STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
}
_WORDS = {
    "allocated_bytes": "memory allocated now",
    "reserved_bytes": "memory reserved now",
    "peak_allocated_bytes": "the exact peak allocated (the sampled one is a lower bound)",
    "peak_reserved_bytes": "the exact peak reserved (the sampled one is a lower bound)",
}
# MPS has no peaks of its own, and its second function also counts what Metal's frameworks hold beside the allocator.
_MPS_FUNCTIONS = {"allocated_bytes": "current_allocated_memory", "reserved_bytes": "driver_allocated_memory"}
_MPS_RESERVED = Gap(
    "mps reserved",
    "reserved memory on mps is what the Metal driver has given this process; it includes what Metal's own frameworks "
    "hold, not only PyTorch's allocator",
)


class AcceleratorCounters:
    """The counters of an accelerator other than CUDA (mps, xpu or any that `torch.accelerator` knows).

    They come from `torch.accelerator` where it serves the backend, else from the backend's own module. What neither
    offers reads None and is named in `gaps`.
    """

    __slots__ = ("_gaps", "device_type")

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._gaps: dict[str, Gap] = {}

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the readings so far could not see."""
        return tuple(self._gaps.values())

    def read(self, index: int = 0) -> CounterReading:
        """Read all counters once; all None, without a gap, while the backend is not initialised."""
        if not self._is_initialized():
            return CounterReading()
        found = self._statistics(index)
        if self.device_type == "mps":
            found = self._mps_functions(missing=set(_STATISTICS) - set(found)) | found
        for name in _STATISTICS.keys() - found.keys():
            self._note(name)
        return CounterReading(**found)

    def _statistics(self, index: int) -> dict[str, int]:
        stats = _attempt(lambda: self._memory_stats(index)) or {}
        return {name: int(stats[key]) for name, key in _STATISTICS.items() if key in stats}

    def _memory_stats(self, index: int) -> Mapping[str, int]:
        backend = _backend(self.device_type)
        if self.device_type != "mps" and hasattr(backend, "memory_stats"):
            return backend.memory_stats(index)
        return torch.accelerator.memory_stats(index) if _current_accelerator() == self.device_type else {}

    def _mps_functions(self, missing: set[str]) -> dict[str, int]:
        found = {}
        for name in missing & _MPS_FUNCTIONS.keys():
            value = _attempt(getattr(torch.mps, _MPS_FUNCTIONS[name], None))
            if value is not None:
                found[name] = int(value)
        if "reserved_bytes" in found:
            self._gaps["mps reserved"] = _MPS_RESERVED
        return found

    def _is_initialized(self) -> bool:
        backend = _backend(self.device_type)
        if hasattr(backend, "is_initialized"):
            return bool(backend.is_initialized())
        # mps has nothing to ask; reading its counters makes the Metal device object at most, no memory pool.
        return self.device_type == _current_accelerator()

    def _note(self, name: str) -> None:
        gap = f"{self.device_type} {name.removesuffix('_bytes').replace('_', ' ')}"
        text = f"PyTorch {torch.__version__} has no counter on {self.device_type} for {_WORDS[name]}"
        self._gaps.setdefault(name, Gap(gap, text))


def _backend(device_type: str) -> Any:
    return getattr(torch, device_type, None)


def _current_accelerator() -> str | None:
    accelerator = _attempt(torch.accelerator.current_accelerator)
    return accelerator.type if accelerator is not None else None


def _attempt(read: Callable[[], Any] | None) -> Any:
    # A backend that does not serve a counter says so by whatever error its author chose.
    if read is None:
        return None
    try:
        return read()
    except Exception:
        return None
