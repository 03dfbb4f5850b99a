"""A GPU that does not exist, for the unmodified CUDA build of PyTorch: bytes are real, values and times are not.

`memlab simulate --card "RTX 4060" -- COMMAND` runs a command on one.
"""

from __future__ import annotations

from memlab.simulated_gpu.machine import Machine, SimulatedDevice
from memlab.simulated_gpu.this_process import is_simulated

__all__ = ["Machine", "SimulatedDevice", "is_simulated"]
