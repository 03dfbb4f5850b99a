"""The durations of optimizer steps, measured and unmeasured, and what measuring adds to one."""

from __future__ import annotations

import time
from collections import deque

from memlab.units import format_seconds

KEPT = 1000
"""So many of the last durations of each kind are kept."""
LEAST = 3
"""A median of fewer says nothing."""
_RECENT = 10


class StepTimes:
    """Times from the end of one optimizer step to the end of the next, in seconds."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._is_first = True
        self._kept: dict[bool, deque[float]] = {True: deque(maxlen=KEPT), False: deque(maxlen=KEPT)}
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def stepped(self, is_measured: bool) -> None:
        """A step has just ended. The first to be timed does not count: much is done once, in the first steps of a script."""
        now_s, before_s = time.perf_counter(), self._last_s
        self._last_s = now_s
        if before_s is None:
            return
        if not self._is_first:
            self._kept[is_measured].append(now_s - before_s)
        self._recent.append(now_s - before_s)
        self._is_first = False

    def interrupt(self) -> None:
        """What happens now belongs to no step: a measurement begins or ends."""
        self._last_s = None

    @property
    def recent_s(self) -> float | None:
        """The mean of the last few; None before the second step."""
        recent = tuple(self._recent)  # another thread asks
        return sum(recent) / len(recent) if recent else None

    @property
    def facts(self) -> dict[str, float | int | None]:
        """Medians in seconds, and how many steps they are of; None where there are too few."""
        import statistics  # it takes longer to import than all of memlab run

        facts: dict[str, float | int | None] = {}
        for name, is_measured in (("measured", True), ("unmeasured", False)):
            kept = self._kept[is_measured]
            facts[f"{name}_steps"] = len(kept)
            facts[f"{name}_s"] = statistics.median(kept) if len(kept) >= LEAST else None
        measured, bare = facts["measured_s"], facts["unmeasured_s"]
        facts["added_s"] = measured - bare if measured is not None and bare is not None else None
        return facts

    @property
    def text(self) -> str:
        """One sentence; "" if there were too few steps."""
        facts = self.facts
        measured, bare = facts["measured_s"], facts["unmeasured_s"]
        if measured is None:
            return ""
        took = f"A step took {format_seconds(measured)} while measured (median of {facts['measured_steps']})"
        if bare is None:
            return f"{took}; what measuring added is not known: --skip {LEAST + 2} leaves steps to compare with."
        others = f"{took}, {format_seconds(bare)} otherwise (of {facts['unmeasured_steps']})"
        if measured <= bare:
            return f"{others}: measuring added less than steps differ."
        return f"{others}: measuring added {format_seconds(measured - bare)} per step, {measured / bare:.2f} times."
