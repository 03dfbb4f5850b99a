"""A CUDA probe around a function, for the tests of the probe."""

from __future__ import annotations

from collections.abc import Callable

from memlab.probes.cuda import CudaProbe
from memlab.probes.history import RING_ENTRIES
from memlab.trace import Trace


def probed(body: Callable[[], object], entries: int = RING_ENTRIES) -> Trace:
    """The trace of what `body` does, also where it raises."""
    probe = CudaProbe(entries)
    probe.start()
    try:
        body()
    finally:
        trace = probe.stop()
    return trace
