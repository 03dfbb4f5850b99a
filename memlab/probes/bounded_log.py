"""A log of whole numbers in bounded memory, for what is noted while the user's code runs."""

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
    """Rows of `width` numbers: `thin` says which rows stay when there are more than `limit`.

    `append` takes a row as a tuple, from any thread. It is one call of C, so Ctrl-C cannot split it. There is no lock, because
    a fork could leave one locked for ever.
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
        """Move new rows from tuples to an array, which takes a quarter of the memory; cheap, to be called now and then."""
        with contextlib.suppress(IndexError):  # another thread collects as well
            new = islice(iter(self._new.popleft, ()), len(self._new))
            self._flat.extend(chain.from_iterable(new))  # one piece of C: no thread and no Ctrl-C gets in between
        if len(self._flat) > self._limit * self._width and self._thinner != os.getpid():
            self._thinner = os.getpid()  # a fork may leave that of its parent, whose thread is not there
            try:
                rows = self._rows(0)
                kept = np.ascontiguousarray(self._thin(rows), np.int64)
                fewer, dropped = array("q", kept.tobytes()), self._dropped + len(rows) - len(kept)
                self._flat[: rows.size], self._dropped = fewer, dropped  # no call in between: nobody sees half of it
            finally:
                self._thinner = 0

    def count(self) -> int:
        """How many rows there ever were."""
        self.collect()
        return self._dropped + len(self._flat) // self._width

    def columns(self, since: int = 0) -> Array:
        """The columns, without the first `since` of all rows that there ever were."""
        self.collect()
        flat, dropped = self._flat[:], self._dropped  # no call in between
        return np.array(flat[max(since - dropped, 0) * self._width :], np.int64).reshape(-1, self._width).T

    def _rows(self, first: int) -> Array:
        return np.array(self._flat[first * self._width :], np.int64).reshape(-1, self._width)
