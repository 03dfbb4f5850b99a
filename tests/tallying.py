"""What the tests of the tally share: a tally that always stops, and the curve its columns draw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.probes.tally import Tally
from memlab.trace import Kind

KB = 1000 * 4  # the bytes of 1000 floats


@contextmanager
def tally(**options: Any) -> Iterator[Tally]:
    probe = Tally(itertools.count().__next__, **options)
    probe.start()
    try:
        yield probe
    finally:
        probe.stop()


def rise(work: Callable[[], Any]) -> tuple[int, int]:
    """What `work` adds at its peak, and what it leaves alive."""
    with tally() as probe:
        result = work()
    del result
    assert not [
        one for one in probe.overlooked.unseen if "older" not in one
    ]  # PyTorch itself keeps a nested tensor as a dummy
    return probe.peak_bytes - probe.base_bytes, probe.current_bytes - probe.base_bytes


def curve(columns: dict[str, Any]) -> np.ndarray:
    return np.cumsum(np.where(columns["kind"] == Kind.FREE, -1, 1) * columns["nbytes"])


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **kwargs or {})
