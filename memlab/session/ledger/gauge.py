"""What the allocators' own counters say before, during and after a cell; nothing is initialised and no counter is reset.

On CUDA the peak of a cell is exact when it passed the earlier maximum. Else it lies between the highest of a few readings a
second and that maximum. Other accelerators have readings alone, and the CPU has no counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from memlab.analysis.peak import UNKNOWN_BYTES, Peak
from memlab.probes.counters import NOT_READ, AcceleratorCounters, cuda_counters, cuda_devices
from memlab.probes.sampler import Sample, Sampler

POLLS_HZ = 4.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One device's counters; `moves` counts allocations and frees, `peak_bytes` is -1 where there is no such counter."""

    allocated_bytes: int = 0
    peak_bytes: int = 0
    moves: int = 0


Readings = Mapping[str, Reading]
"""Device ("cuda:0") -> its counters."""
_NOTHING = Reading()


def readings() -> dict[str, Reading]:
    """The counters of every accelerator that this process uses."""
    found = {f"cuda:{device}": _cuda(device) for device in cuda_devices()}
    found = {device: reading for device, reading in found.items() if reading.allocated_bytes >= 0}
    return found or _others()


def _cuda(device: int) -> Reading:
    counters = cuda_counters(device)
    return Reading(counters["allocated"], counters["peak_allocated"], counters["alloc_count"] + counters["free_count"])


def _others() -> dict[str, Reading]:
    current = None if torch.backends.cuda.is_built() else torch.accelerator.current_accelerator()
    if current is None or current.type in ("cuda", "cpu"):
        return {}
    seen = AcceleratorCounters(current.type).read()
    if seen.allocated_bytes is None:
        return {}
    peak_bytes = NOT_READ if seen.peak_allocated_bytes is None else seen.peak_allocated_bytes
    return {f"{current.type}:0": Reading(seen.allocated_bytes, peak_bytes, seen.allocated_bytes)}


def have_moved(before: Readings, after: Readings) -> bool:
    """Whether anything was allocated or freed between two readings."""
    devices = before.keys() | after.keys()
    return any(before.get(one, _NOTHING).moves != after.get(one, _NOTHING).moves for one in devices)


def peak_between(before: Reading, after: Reading, polled_bytes: int = 0) -> Peak:
    """The peak of a cell, from the counters around it and the highest reading in it."""
    seen = max(before.allocated_bytes, after.allocated_bytes, polled_bytes)
    if after.peak_bytes > before.peak_bytes >= 0 and after.peak_bytes >= seen:
        return Peak(
            after.peak_bytes, after.peak_bytes, -1, -1, "PyTorch's counter, which rose above its earlier maximum"
        )
    if after.peak_bytes == before.peak_bytes >= seen:
        return Peak(seen, after.peak_bytes, -1, -1, "readings, and PyTorch's counter, which did not rise")
    return Peak(max(seen, after.peak_bytes), UNKNOWN_BYTES, -1, -1, "readings")


class Polls:
    """The highest readings while a cell runs, taken by a thread that ends with it; none where there is nothing to read."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}
        self._sampler: Sampler | None = None

    def start(self) -> None:
        """Begin, if there is an accelerator in use."""
        if readings():
            self._sampler = Sampler(self._read, rate_hz=POLLS_HZ, max_rows=1)
            self._sampler.start()

    def stop(self) -> Mapping[str, int]:
        """End the thread; device -> the most bytes that were read."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        return self.highest

    def _read(self) -> Sample:
        for device, reading in readings().items():
            self.highest[device] = max(self.highest.get(device, 0), reading.allocated_bytes)
        return Sample(0, ())
