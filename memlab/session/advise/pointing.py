"""The line with which a report points to `memlab.advise`. It is asked at the end of every cell, so it loads little."""

from __future__ import annotations

from collections.abc import Mapping

from memlab.analysis.pointer import is_large, pointer
from memlab.session.run import Run


def pointer_of(run: Run, shares: Mapping[str, int] | None = None, of: str = "the peak") -> str:
    """The line for a run, "" where nothing large applies, or it could not be run again.

    `shares` has who held the memory by category, where that is not the run's own peak, and `of` says of what.
    """
    try:
        held = _at_the_peak(run) if shares is None else shares
        if not is_large(held) or not (run.again or _is_trial(run)):
            return ""
        return pointer(held, _counts(from_outside=bool(run.again)), f"memlab.advise(memlab.runs[{run.name!r}])", of)
    except Exception:  # a report is shown whatever becomes of this line
        return ""


def _at_the_peak(run: Run) -> Mapping[str, int]:
    found = run.summary.devices[0].shares if run.devices else ()
    return next((one.shares for one in found if one.by == "category"), {})


def _is_trial(run: Run) -> bool:
    """Whether it is of a workload that memlab can make again."""
    noted = run.trace.notes.get("trial")
    return isinstance(noted, dict) and bool(noted.get("size"))


def _counts(from_outside: bool) -> dict[str, int]:
    """How many techniques can be tried on each category."""
    from memlab.savings import techniques  # late: most reports need none of them

    counts: dict[str, int] = {}
    for one in techniques.values():
        can = one.outside is not None if from_outside else (one.apply is not None or one.before is not None)
        if one.kind == "saving" and can and one.equality.kind != "changes":
            for name in one.attacks:
                counts[name] = counts.get(name, 0) + 1
    return counts
