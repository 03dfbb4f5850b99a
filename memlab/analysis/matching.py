"""Which lines of two cells are the same: by their text, as a changed cell moves the lines below the change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher

Sources = Mapping[str, Mapping[int, str]]
"""Label of a source -> number of a line -> its text."""
_MANY = 2000  # lines; from there on the matcher may leave out what occurs often, or it would take long


@dataclass(frozen=True, slots=True)
class Matched:
    """The names of lines of each run -> the names that both go by; `texts` has the code behind these."""

    of_a: Mapping[str, str] = field(default_factory=dict)
    of_b: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def matched(a: Sources, b: Sources) -> Matched:
    """Common names for the lines of two runs.

    A line that both have is "cell:3", or "cell:3 → 5" where it has moved; one that is in one alone, with other code of that number
    in the other, "cell:3 (a)" or "cell:3 (b)".

    >>> found = matched({"cell": {1: "x = f()", 2: "y = x"}}, {"cell": {1: "x = g()", 2: "", 3: "y = x"}})
    >>> dict(found.of_a), dict(found.of_b)
    ({'cell:1': 'cell:1 (a)', 'cell:2': 'cell:2 → 3'}, {'cell:1': 'cell:1 (b)', 'cell:2': 'cell:2 (b)', 'cell:3': 'cell:2 → 3'})
    """
    of_a: dict[str, str] = {}
    of_b: dict[str, str] = {}
    texts: dict[str, str] = {}
    for label in {**a, **b}:
        first, second = a.get(label, {}), b.get(label, {})
        pairs = _pairs(first, second)
        for number, text in first.items():
            of_a[f"{label}:{number}"] = name = _name(label, number, pairs.get(number), second, "a")
            texts[name] = text.strip()
        moved = {other: number for number, other in pairs.items()}
        for number, text in second.items():
            is_paired = number in moved
            name = _name(label, moved[number], number, {}, "") if is_paired else _name(label, number, None, first, "b")
            of_b[f"{label}:{number}"] = name
            texts.setdefault(name, text.strip())
    return Matched(of_a, of_b, texts)


def _name(label: str, number: int, other: int | None, others: Mapping[int, str], side: str) -> str:
    if other is not None:
        return f"{label}:{number}" if number == other else f"{label}:{number} → {other}"
    return f"{label}:{number} ({side})" if number in others else f"{label}:{number}"


def _pairs(a: Mapping[int, str], b: Mapping[int, str]) -> dict[int, int]:
    """Numbers in `a` -> numbers in `b` of lines with the same text, in order."""
    first, second = sorted(a), sorted(b)
    texts = [a[one].strip() for one in first], [b[one].strip() for one in second]
    matcher = SequenceMatcher(None, *texts, autojunk=max(len(first), len(second)) > _MANY)
    found = {}
    for block in matcher.get_matching_blocks():
        for step in range(block.size):
            found[first[block.a + step]] = second[block.b + step]
    return found
