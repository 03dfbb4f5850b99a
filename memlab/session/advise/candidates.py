"""Which techniques are worth trying: those that attack what holds the peak, and can be switched on here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memlab.errors import MemlabError
from memlab.savings import Technique, techniques
from memlab.session.advise.subject import Subject
from memlab.session.run import Run

LEAST_SHARE = 0.03
"""Of the peak: what attacks a category that holds less is left out."""
OF_RESERVED = "reserved"


def candidates(
    subject: Subject, shares: Mapping[str, int], of: str, named: Iterable[str] | None, allow_changes: bool
) -> tuple[list[str], list[tuple[str, str]]]:
    """The techniques to try, and of the others that save memory why they are left out.

    `shares` has who held the peak, empty where nobody knows. Techniques that are `named` are tried whatever they are for.
    """
    chosen: list[str] = []
    left_out: list[tuple[str, str]] = []
    wanted = [techniques[name] for name in named] if named is not None else savings()
    for one in wanted:
        why = subject.why_not(one) or ("" if named is not None else _why_not(one, shares, of, allow_changes))
        if why:
            left_out.append((one.name, why))
        else:
            chosen.append(one.name)
    return list(dict.fromkeys(chosen)), left_out


def savings() -> list[Technique]:
    """Every technique that lowers a peak."""
    return [one for one in techniques.values() if one.kind == "saving"]


def _why_not(one: Technique, shares: Mapping[str, int], of: str, allow_changes: bool) -> str:
    if one.equality.kind == "changes" and not allow_changes:
        return "changes training: allow_changes=True tries it"
    if attacked(one, shares) or not shares:
        return ""
    if OF_RESERVED in one.attacks:
        return "" if of == "device" else "acts on reserved memory, and the peak of allocated is looked at"
    return f"acts on {', '.join(one.attacks)}, which hold{'s' if len(one.attacks) == 1 else ''} little of the peak"


def attacked(one: Technique, shares: Mapping[str, int]) -> bool:
    """Whether a category that it attacks holds a part of the peak."""
    total = sum(shares.values())
    return sum(shares.get(name, 0) for name in one.attacks) >= LEAST_SHARE * max(total, 1)


def shares_of(run: Run) -> dict[str, int]:
    """Who held the peak of *allocated*, by category; empty where its events are not known."""
    try:
        return dict(run.breakdown("category"))
    except MemlabError:
        return {}
