"""What the tests of the tracker share: a tracker that always stops, and the curve its columns draw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.probes.storage_tracker import StorageTracker
from memlab.trace import Kind

KB = 1000 * 4  # the bytes of 1000 floats


@contextmanager
def tracker(**options: Any) -> Iterator[StorageTracker]:
    probe = StorageTracker(itertools.count().__next__, **options)
    probe.start()
    try:
        yield probe
    finally:
        probe.stop()


def rise(work: Callable[[], Any]) -> tuple[int, int]:
    """What `work` adds at its peak, and what it leaves alive."""
    with tracker() as probe:
        result = work()
    del result
    assert not [one for one in probe.unseen if "older" not in one]  # PyTorch itself keeps a nested tensor as a dummy
    return probe.peak_bytes - probe.base_bytes, probe.current_bytes - probe.base_bytes


def block_of(probe: StorageTracker, tensor: torch.Tensor) -> int:
    """The raw id of the block behind a tensor, -1 if it is not watched."""
    columns = probe.columns()
    rows = np.flatnonzero((columns["key"] == id(tensor.untyped_storage())) & (columns["kind"] != Kind.FREE))
    return int(columns["block_id"][columns["block"][rows[-1]]]) if len(rows) else -1


def curve(columns: dict[str, Any]) -> np.ndarray:
    return np.cumsum(np.where(columns["kind"] == Kind.FREE, -1, 1) * columns["nbytes"])


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **kwargs or {})
