"""A GPU that does not exist, for the unmodified CUDA build of PyTorch: bytes are real, values and times are not.

`memlab simulate --card "RTX 4060" -- COMMAND` runs a command on one; `current()` says in any process which machine it runs on.
"""

from __future__ import annotations

from memlab.simulated_gpu.machine import Machine, SimulatedDevice
from memlab.simulated_gpu.this_process import current, is_simulated

__all__ = ["Machine", "SimulatedDevice", "current", "is_simulated"]
