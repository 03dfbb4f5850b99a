"""Whether this process runs on a simulated GPU."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MEMLAB_SIMULATED_GPU"
LIBRARY = "libmemlab_simulated_gpu.so"


def is_simulated() -> bool:
    """Whether CUDA is a simulated machine's in this process: False before its library is loaded, which `import torch` does."""
    if not os.environ.get(VARIABLE):
        return False
    try:
        return LIBRARY in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        return False
