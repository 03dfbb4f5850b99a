"""Names that only the process of a run knows, stored with it: of what grew, and of what was held when memory ran out."""

from __future__ import annotations

import contextlib
from typing import Any

from memlab.analysis.oom.explain import grouped
from memlab.api.oom import OomExplained, holder_of
from memlab.api.run import Run
from memlab.references.live_storages import live_storages
from memlab.trace.trace import ERROR, HOLDERS

SEARCH_S = 1.0
_LASTING = ("parameter", "buffer", "optimizer")
_SIMILAR = (0.5, 1.5)


def keep_names(run: Run, explained: OomExplained | None) -> bool:
    """Store the names with the run; whether there are any."""
    if explained is not None:
        named = [[one.path, one.nbytes] for one in explained.explanation.named]
        run.note(ERROR, {**run.trace.notes.get(ERROR, {}), "held": named})
    elif holders := _holders_of_growth(run):
        run.note(HOLDERS, holders)
    else:
        return False
    return True


def _holders_of_growth(run: Run) -> list[list[Any]]:
    """[name, bytes] of the variables that hold as many storages and bytes as a leak of the run gathered; the largest first.

    Names are matched by these two numbers. It never raises: a run without names is better than none.
    """
    with contextlib.suppress(Exception):
        found = run.leaks()
        if not found:
            return []
        alive = live_storages(run.devices[0].device.label, budget_s=SEARCH_S).storages
        holders = tuple(holder_of(one) for one in alive if one.path)
        low, high = _SIMILAR
        return [
            [one.path, one.nbytes]
            for one in grouped(holders)
            for leak in found
            if one.category not in _LASTING
            and low * leak.total_bytes <= one.nbytes <= high * leak.total_bytes
            and (leak.kind == "growing" or one.count >= low * (leak.iterations - leak.since + 1))
        ][:3]
    return []
