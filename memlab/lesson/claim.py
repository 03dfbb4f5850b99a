"""What a lesson claims, held against two runs: a saving of at least a share of the peak, or, for a myth, none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memlab.errors import ClaimRefuted, MemlabError
from memlab.session.predict import Prediction
from memlab.session.run import Run
from memlab.units import format_bytes

LEAST_SAVING = 0.25
"""Of the peak: what is taught as a saving has to be unmistakable."""
MOST_OF_A_MYTH = 0.01
Measured = Run | int


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence with the figures in it, and what they are: "measured" or "predicted for a card"."""

    text: str
    source: str
    saved_share: float

    def __str__(self) -> str:
        return f"Claim holds ({self.source}): {self.text}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}


def saves(what: str, before: Measured, after: Measured, at_least: float = LEAST_SAVING, of: str = "allocated") -> Claim:
    """The claim that `what` takes at least this share from the peak; raises ClaimRefuted where it does not."""
    if not 0 < at_least < 1:
        raise MemlabError(f"at_least is a share between 0 and 1, got {at_least!r:.80}.")
    claim = _claimed(what, before, after, of)
    if claim.saved_share < at_least:
        raise ClaimRefuted(f"not so here ({claim.source}): {claim.text} At least {at_least:.0%} was claimed.")
    return claim


def saves_nothing(
    what: str, before: Measured, after: Measured, at_most: float = MOST_OF_A_MYTH, of: str = "allocated"
) -> Claim:
    """The claim that `what` does not move the peak by more than this share; raises ClaimRefuted where it does."""
    claim = _claimed(what, before, after, of)
    if abs(claim.saved_share) > at_most:
        raise ClaimRefuted(f"not so here ({claim.source}): {claim.text} At most {at_most:.0%} was claimed.")
    return claim


def _claimed(what: str, before: Measured, after: Measured, of: str) -> Claim:
    sources = {_source(one) for one in (before, after)} - {""}
    if len(sources) > 1:
        raise MemlabError(f"a claim compares two of a kind, got {' and '.join(sorted(sources))}.")
    was, now = _peak(before, of), _peak(after, of)
    if was <= 0:
        raise MemlabError(f"the run without {what} has a peak of {was} bytes: there is nothing to save.")
    share = (was - now) / was
    text = f"with {what} the peak of {of} is {format_bytes(now)} instead of {format_bytes(was)} ({0.0 - share:+.0%})."
    return Claim(text, sources.pop() if sources else "measured", share)


def _peak(of_run: Measured, of: str) -> int:
    if isinstance(of_run, Prediction) and of_run.fits == "no" and of in ("allocated", "reserved"):
        return sum(of_run.allocated_bytes if of == "allocated" else of_run.reserved_bytes) // 2  # needed, not given
    if isinstance(of_run, Run):
        return int(getattr(of_run, f"peak_{of}_bytes"))
    if isinstance(of_run, int) and not isinstance(of_run, bool):
        return of_run
    raise MemlabError(f"a claim compares runs, or numbers of bytes, got {type(of_run).__name__}.")


def _source(of_run: Measured) -> str:
    if isinstance(of_run, Prediction):
        return f"predicted for {of_run.card.name}"
    return f"measured on {of_run.devices[0].device.label}" if isinstance(of_run, Run) and of_run.devices else ""
