"""A log of integers in bounded memory, written while the user's code runs."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import deque
from collections.abc import Callable
from itertools import chain, islice

import numpy as np

from memlab.trace.columns import Array


def newer_half(rows: Array) -> Array:
    """The newer half of the rows."""
    return rows[len(rows) // 2 :]


class BoundedLog:
    """Rows of `width` numbers: `thin` chooses the rows to keep when there are more than `limit`.

    `append` takes a row as a tuple, from any thread. It is one call of C, so Ctrl-C cannot split it. There is no lock, because
    a fork could leave one locked forever.
    """

    def __init__(self, limit: int, width: int, thin: Callable[[Array], Array] = newer_half) -> None:
        self._limit, self._width, self._thin = limit, width, thin
        self._new: deque[tuple[int, ...]] = deque()
        self.append = self._new.append
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._new.clear()
        self._flat, self._dropped, self._thinner = array("q"), 0, 0

    def collect(self) -> None:
        """Move new rows from tuples to an array, which takes a quarter of the memory; cheap, to be called from time to time."""
        with contextlib.suppress(IndexError):  # another thread collects as well
            new = islice(iter(self._new.popleft, ()), len(self._new))
            self._flat.extend(chain.from_iterable(new))  # a single C call: neither a thread nor Ctrl-C can interrupt it
        if len(self._flat) > self._limit * self._width and self._thinner != os.getpid():
            self._thinner = os.getpid()  # a fork may inherit the parent's, whose thread does not exist
            try:
                rows = np.array(self._flat, np.int64).reshape(-1, self._width)
                kept = np.ascontiguousarray(self._thin(rows), np.int64)
                fewer, dropped = array("q", kept.tobytes()), self._dropped + len(rows) - len(kept)
                # No call in between: nothing can see half of it.
                self._flat[: rows.size], self._dropped = fewer, dropped
            finally:
                self._thinner = 0

    def count(self) -> int:
        """The number of rows ever appended."""
        self.collect()
        return self._dropped + len(self._flat) // self._width

    def columns(self, since: int = 0) -> Array:
        """The columns, without the first `since` of all rows ever appended."""
        self.collect()
        while True:
            dropped = self._dropped
            flat = self._flat[max(since - dropped, 0) * self._width :]
            if dropped == self._dropped:  # else another thread has dropped rows in between
                return np.array(flat, np.int64).reshape(-1, self._width).T
