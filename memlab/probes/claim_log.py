"""The log of claims: which storages had which label at which moments, kept as identities and never as tensors."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

import numpy as np

from memlab.seams import dispatch
from memlab.trace.columns import Array, Category

MAX_KEPT = 4_000_000
"""So many (storage, moment) pairs are kept in different snapshots; the oldest go first."""

TensorBase = dispatch.TensorBase


@dataclass(frozen=True, slots=True)
class Label:
    """What a storage is for: a category, the path of the module it belongs to, its name, dtype and shape ("" unknown)."""

    category: Category
    module: str = ""
    name: str = ""
    dtype: str = ""
    shape: str = ""


@dataclass(slots=True, eq=False)
class Snapshot:
    """These storages had these labels, at each of these times (nanoseconds of the Unix clock)."""

    keys: list[int]
    labels: list[int]
    times_ns: array[int] = field(default_factory=lambda: array("q"))

    def moments(self, begin_ns: int, end_ns: int) -> Array:
        """Its times between these."""
        times = np.array(self.times_ns, np.int64)
        return times[(times >= begin_ns) & (times <= end_ns)]

    def columns(self, times: Array) -> Array:
        """Rows of time, key and label: every pair at each of these times."""
        repeated = np.repeat(times, len(self.keys))
        return np.stack([repeated, *(np.tile(np.array(one, np.int64), len(times)) for one in (self.keys, self.labels))])


@dataclass(frozen=True, slots=True, eq=False)
class ClaimColumns:
    """Claims in order of time: moment, storage key, number of the label in `labels`."""

    time_ns: Array
    key: Array
    label: Array
    labels: tuple[Label, ...]


class ClaimLog:
    """Takes notes from any thread; gives them as columns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._labels: dict[Label, int] = {}
        self._snapshots: list[Snapshot] = []
        self._latest: dict[Any, Snapshot] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    def label(self, category: Category, module: str, name: str, tensor: Any) -> int:
        """The number of a label; dtype and shape are those of the tensor."""
        label = Label(category, module, name, *_described(tensor))
        return self._labels.setdefault(label, len(self._labels))

    def note(self, source: Any, pairs: Iterable[tuple[Any, int]]) -> None:
        """These tensors had these labels now."""
        keys, labels = [], []
        for tensor, label in pairs:
            key = storage_key(tensor)
            if key:
                keys.append(key)
                labels.append(label)
        self.note_keys(source, keys, labels)

    def note_keys(self, source: Any, keys: list[int], labels: list[int]) -> None:
        """The same with keys. What is as it was the last time costs a moment more, and no list."""
        now = time_ns()
        latest = self._latest.get(source)
        if latest is None or latest.keys != keys or latest.labels != labels:
            latest = self._latest[source] = Snapshot(keys, labels)
            with self._lock:
                self._snapshots.append(latest)
                self._drop_oldest()
        latest.times_ns.append(now)

    def _drop_oldest(self) -> None:
        if len(self._snapshots) % 64 == 0 and sum(len(one.keys) for one in self._snapshots) > MAX_KEPT:
            del self._snapshots[: len(self._snapshots) // 2]
            self._latest.clear()

    def columns(self, begin_ns: int, end_ns: int) -> ClaimColumns:
        """The claims of a stretch of time."""
        with self._lock:
            snapshots, labels = list(self._snapshots), tuple(self._labels)
        moments = [one.moments(begin_ns, end_ns) for one in snapshots]
        pairs = sum(len(one.keys) * len(times) for one, times in zip(snapshots, moments, strict=True))
        share = min(1.0, MAX_KEPT / max(pairs, 1))  # of a very long run the newest moments of each
        parts = [
            one.columns(times[-math.ceil(share * len(times)) :]) for one, times in zip(snapshots, moments, strict=True)
        ]
        time, key, label = np.concatenate([np.empty((3, 0), np.int64), *parts], axis=1)
        order = np.argsort(time, kind="stable")
        return ClaimColumns(time[order], key[order], label[order], labels)


def storage_key(tensor: Any) -> int:
    """What the events of a trace have as the address of a tensor's storage; 0 for what holds no memory of its own."""
    try:
        if tensor.is_cpu:
            return id(TensorBase.untyped_storage(tensor))
        storage = TensorBase.untyped_storage(tensor)
        return 0 if tensor.is_meta else int(storage.data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def _described(tensor: Any) -> tuple[str, str]:
    try:
        shape = str(tuple(tensor.shape))
    except RuntimeError:  # a lazy parameter has none yet
        shape = ""
    return str(tensor.dtype).removeprefix("torch."), shape
