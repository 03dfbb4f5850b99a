"""What the tests of the probes share: a probe around a function, and memory in MiB."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memlab.analysis.timeline import timeline
from memlab.probes.cpu import CpuProbe
from memlab.probes.cuda import CudaProbe
from memlab.probes.history import RING_ENTRIES
from memlab.trace import Trace

MiB = 1 << 20
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.simulated)]


def probed(body: Callable[[], object], entries: int = RING_ENTRIES, device: str = "cuda") -> Trace:
    """The trace of what `body` does, also where it raises."""
    probe = CpuProbe() if device == "cpu" else CudaProbe(entries)
    probe.start()
    try:
        body()
    finally:
        trace = probe.stop()
    return trace


def take(mebibytes: int, device: str | torch.device = "cuda") -> torch.Tensor:
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device=device)


def above_start(trace: Trace, size: int) -> float:
    """MiB above what there was when the track began."""
    return (size - timeline(trace, 0).start_bytes) / MiB


def gap_names(trace: Trace) -> list[str]:
    return [gap.name for gap in trace.gaps]
