"""Whether this process runs on a simulated GPU."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import machine
from memlab.simulated_gpu.machine import Machine

VARIABLE = "MEMLAB_SIMULATED_GPU"
LIBRARY = "libmemlab_simulated_gpu.so"


def current() -> Machine | None:
    """The simulated machine of this process; None before its library is loaded, which `import torch` does, and without one."""
    return _described(os.environ[VARIABLE]) if is_simulated() else None


def is_simulated() -> bool:
    """Whether CUDA is a simulated machine's in this process, also if the machine's file is gone by now."""
    return bool(os.environ.get(VARIABLE)) and _is_loaded()


@functools.cache
def _described(where: str) -> Machine | None:
    try:
        return machine.read(Path(where))
    except SimulatedGpuError:  # the library said so too, and offers no device
        return None


def _is_loaded() -> bool:
    try:
        return LIBRARY in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        return False
