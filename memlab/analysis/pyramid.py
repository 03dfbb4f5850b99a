"""A min-max pyramid: any window of a timeline of ten million events as about a thousand (low, high) pairs, at once."""

from __future__ import annotations

import numpy as np

from memlab.analysis.timeline import Timeline
from memlab.trace.columns import Array

_FACTOR = 16
_TOP = 4096


class Pyramid:
    """Levels of ever coarser extremes over a timeline; every cell of a level covers `_FACTOR` cells of the one below."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self._levels: list[tuple[Array, Array]] = [(line.bytes, line.bytes)]
        while len(self._levels[-1][0]) > _TOP:
            low, high = self._levels[-1]
            starts = np.arange(0, len(low), _FACTOR)
            self._levels.append((np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)))

    def window(self, begin_ns: float, end_ns: float, bins: int = 1000) -> tuple[Array, Array, Array]:
        """(time_ns, low, high) for begin <= time < end, at most `bins` of them; no extreme inside is lost.

        The first bin begins with the step that holds at `begin_ns`; at either end a bin may reach beyond the window.
        """
        times = self.line.time_ns
        # The keys need the dtype of the array: a float key would convert all of it, 100 ms at ten million.
        first = max(int(np.searchsorted(times, np.int64(begin_ns), side="right")) - 1, 0)
        last = max(int(np.searchsorted(times, np.int64(end_ns))), first + 1)
        level = self._level_for(last - first, bins)
        cell = _FACTOR**level
        low, high = self._levels[level]
        starts = np.unique(np.linspace(first // cell, -(-last // cell), bins + 1).astype(np.int64)[:-1])
        stop = min(-(-last // cell), len(low))
        starts = starts[starts < stop]
        at = np.minimum(starts * cell, len(times) - 1)
        return times[at], np.minimum.reduceat(low[:stop], starts), np.maximum.reduceat(high[:stop], starts)

    def _level_for(self, count: int, bins: int) -> int:
        level = 0
        while level + 1 < len(self._levels) and count // _FACTOR ** (level + 1) >= 2 * bins:
            level += 1
        return level
