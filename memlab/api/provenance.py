"""Where figures come from that are read in this process now, without a trace: measured, simulated or predicted."""

from __future__ import annotations

from collections.abc import Iterable

from memlab import simulated_gpu
from memlab.prediction import child
from memlab.trace.trace import SIMULATED_GPU


def provenance_here(devices: Iterable[str]) -> str:
    """Where figures of these devices ("cpu", "cuda:0") come from: "measured", "simulated" or "predicted"."""
    if not any(device.startswith("cuda") for device in devices):
        return "measured"
    if child.current() is not None:
        return "predicted"
    return "simulated" if simulated_gpu.is_simulated() else "measured"


def remark_here(devices: Iterable[str]) -> str:
    """What has to stand with figures of these devices: that the GPU is simulated, else ""."""
    return SIMULATED_GPU if provenance_here(devices) == "simulated" else ""
