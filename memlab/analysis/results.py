"""Whether two results agree: equal bit for bit, close, different, or not checked; and how far off they are.

It reads what `memlab.session.results` notes (plain JSON, perhaps from a file that nobody vouches for) and compares values.

Limits: of a result above 1 MiB only a digest, some statistics and a sample of its values are kept. So where such a one is
not equal, the largest difference found is a lower bound, and "close" is said of the sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from memlab.analysis.noted import Mapped, Nothing, Numbers, Series, Text, Value
from memlab.trace.columns import Array

Verdict = Literal["equal", "close", "different", "not checked"]
CLOSE = 1e-3
"""Up to this share of the largest value results are close. Another order of sums in float32 moves a few trained steps by 1e-6 to
1e-4; what computes in 8 or 11 bits (bfloat16, float16) is off by more than 1e-3, and is called different, with the figure."""
_ORDER: tuple[Verdict, ...] = ("equal", "close", "not checked", "different")
_SHA256 = re.compile("[0-9a-f]{64}")
_WHAT = {Nothing: "None", Text: "a text", Numbers: "numbers", Series: "a list", Mapped: "a dict"}


@dataclass(frozen=True, slots=True)
class ResultCheck:
    """What comparing two results came to. `largest_difference` is absolute, `relative` that share of the largest value around it.

    Both are None where no number tells how far off the results are; with `is_bound` they are so far off at least. `why` says in a
    sentence what was compared, or why nothing was; `where` is the part that is farthest off; `notes` what else is to be known.
    """

    verdict: Verdict
    why: str
    short: str = ""
    largest_difference: float | None = None
    relative: float | None = None
    is_bound: bool = False
    where: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"results {self.short}: {self.why}" if self.verdict == "not checked" else f"results {self.short}"


@dataclass(frozen=True, slots=True)
class Part:
    """What came of one part of the results: of `where`."""

    where: str
    verdict: Verdict
    why: str = ""
    difference: float | None = None
    relative: float | None = None
    is_bound: bool = False
    notes: tuple[str, ...] = ()


def not_checked(why: str, short: str) -> ResultCheck:
    """Nothing was compared; `short` are a few words for it."""
    return ResultCheck("not checked", why, f"not checked ({short})")


def check(a: Value, b: Value, tolerance: float = CLOSE, notes: tuple[str, ...] = ()) -> ResultCheck:
    """Compare two results; close is what is no farther apart than `tolerance` times the largest value around it."""
    parts = list(_compared(a, b, "", tolerance))
    worst = max(parts, key=lambda one: (_ORDER.index(one.verdict), one.relative is None, one.relative or 0.0))
    apart = [one for one in parts if one.relative is not None]
    farthest = max(apart, key=lambda one: (one.relative or 0.0, one.difference or 0.0), default=None)
    relative = None if farthest is None or worst.verdict == "equal" else farthest.relative
    is_bound = any(one.is_bound for one in parts if one.verdict != "equal")
    return ResultCheck(
        verdict=worst.verdict,
        why=_why(worst, parts),
        short=_short(worst, relative, is_bound),
        largest_difference=0.0 if worst.verdict == "equal" else farthest.difference if farthest else None,
        relative=0.0 if worst.verdict == "equal" else relative,
        is_bound=is_bound,
        where=worst.where,
        notes=tuple(dict.fromkeys([*notes, *(note for one in parts for note in one.notes)])),
    )


def _why(worst: Part, parts: list[Part]) -> str:
    off = sum(one.verdict != "equal" for one in parts)
    if worst.verdict == "equal":
        return f"all {len(parts)} parts are the same bit for bit" if len(parts) > 1 else "the same bit for bit"
    which = f"{off} of {len(parts)} parts differ; " if len(parts) > 1 else ""
    return f"{which}{worst.where or 'the result'}: {worst.why}"


def _short(worst: Part, relative: float | None, is_bound: bool) -> str:
    """As `results ...` ends in a sentence."""
    least = "at least " if is_bound else ""
    if worst.verdict == "equal":
        return "equal bit for bit"
    if worst.verdict == "close":
        return f"close ({least}{share(relative)} of the largest value apart)" if relative else "close (not bit for bit)"
    if worst.verdict == "not checked":
        return "not checked (too large)"
    if relative is None or worst.relative is None or math.isinf(relative):
        return f"differ ({worst.why})"
    return f"differ by {least}{share(relative)} of the largest value"


def share(relative: float) -> str:
    """A share as text: percents, or a power of ten where it is small.

    >>> share(0.0123), share(3.14159e-6), share(1.13)
    ('1.2 %', '3.1e-06', '113 %')
    """
    if relative < 1e-3:
        return f"{relative:.1e}" if relative else "0"
    return f"{100 * relative:.2g} %" if relative < 0.1 else f"{min(100 * relative, 1e9):,.0f} %"


# --- part by part ----------------------------------------------------------------------------------------------------


def _compared(a: Value, b: Value, where: str, tolerance: float) -> Iterator[Part]:
    if isinstance(a, Numbers) and isinstance(b, Numbers):
        yield _numbers(a, b, where, tolerance)
    elif isinstance(a, Text) and isinstance(b, Text):
        same = (a.sha256, a.of) == (b.sha256, b.of)
        yield Part(where, "equal" if same else "different", "" if same else f"the {a.of}s differ")
    elif isinstance(a, Series) and isinstance(b, Series):
        if len(a.items) != len(b.items):
            yield Part(where, "different", f"{len(a.items)} and {len(b.items)} items")
        for index, (one, other) in enumerate(zip(a.items, b.items, strict=False)):
            yield from _compared(one, other, f"{where}[{index}]", tolerance)
        if not a.items and not b.items:
            yield Part(where, "equal")
    elif isinstance(a, Mapped) and isinstance(b, Mapped):
        yield from _mapped(a.items, b.items, where, tolerance)
    elif type(a) is type(b):
        yield Part(where, "equal")
    else:
        yield Part(where, "different", f"{_WHAT[type(a)]} and {_WHAT[type(b)]}")


def _mapped(a: Mapping[Any, Value], b: Mapping[Any, Value], where: str, tolerance: float) -> Iterator[Part]:
    if alone := [key for key in (*a, *b) if (key in a) != (key in b)]:
        yield Part(where, "different", f"only one has {alone[0]!r:.80}")
    for key, one in a.items():
        place = f"{where}[{key!r:.80}]" if where else f"{key}"[:80]
        if key in b and key == "digest" and _is_digest(one) and _is_digest(b[key]):
            yield _digests(one, b[key], place)
        elif key in b:
            yield from _compared(one, b[key], place, tolerance)
    if not a and not b:
        yield Part(where, "equal")


def _is_digest(value: Value) -> bool:
    return isinstance(value, Text) and value.text is not None and _SHA256.fullmatch(value.text) is not None


def _digests(a: Value, b: Value, where: str) -> Part:
    """Of what was digested before it was noted, as a job's parameters are: it tells of equal or not, and never how far off."""
    if a == b:
        return Part(where, "equal")
    return Part(where, "close", "not all that was digested is the same bit for bit", is_bound=True)


def _numbers(a: Numbers, b: Numbers, where: str, tolerance: float) -> Part:
    here = f" in {where}" if where else ""
    notes = [] if a.dtype == b.dtype else [f"dtypes differ{here}: {a.dtype} and {b.dtype}"]
    if a.shape != b.shape:
        return Part(where, "different", f"shapes {a.shape} and {b.shape}", notes=tuple(notes))
    if a.dtype == b.dtype and a.sha256 and a.sha256 == b.sha256:
        if a.nans:
            notes.append(f"{a.nans:,} NaN{here} at the same places count as equal")
        return Part(where, "equal", notes=tuple(notes))
    if a.values is not None and b.values is not None:
        return _values(a.values, b.values, where, tolerance, notes, a.dtype == b.dtype)
    return _samples(a, b, where, tolerance, notes)


def _values(a: Array, b: Array, where: str, tolerance: float, notes: list[str], same_dtype: bool) -> Part:
    """Every value of both is there."""
    here = f" in {where}" if where else ""
    if not _is_inexact(a, b):
        off = int(np.count_nonzero(a != b))
        if off:
            apart = max(float(np.abs(a.astype("f8") - b.astype("f8")).max()), 1.0)  # which float64 may round away
            why = f"{off:,} of {a.size:,} whole numbers differ, by {apart:g} at most"
            return Part(where, "different", why, apart, apart / _scale(a, b), notes=tuple(notes))
        return Part(where, "equal" if same_dtype else "close", "dtypes differ", 0.0, 0.0, notes=tuple(notes))
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    if lonely := int(np.count_nonzero(nan_a != nan_b)):
        return Part(where, "different", f"NaN at {lonely:,} places in one alone", notes=tuple(notes))
    if nan_a.any():
        notes.append(f"{int(nan_a.sum()):,} NaN{here} at the same places count as equal")
    a, b = a[~nan_a], b[~nan_a]
    apart = _apart(a, b)
    relative = apart / _scale(a, b) if apart else 0.0
    if not apart and same_dtype and a.dtype == b.dtype and np.array_equal(_signs(a), _signs(b)):
        return Part(where, "equal", notes=tuple(notes))
    if math.isinf(apart):
        why = "an infinity in one alone"
    elif apart:
        why = f"{apart:.3g} apart at most, {share(relative)} of the largest value"
    else:
        why = "0.0 in one and -0.0 in the other" if same_dtype else "dtypes differ"
    return Part(where, "close" if relative <= tolerance else "different", why, apart, relative, notes=tuple(notes))


def _is_inexact(a: Array, b: Array) -> bool:
    return a.dtype.kind in "fc" or b.dtype.kind in "fc"


def _signs(a: Array) -> Array:
    return np.signbit(a.real) | np.signbit(a.imag) if a.dtype.kind == "c" else np.signbit(a)


def _apart(a: Array, b: Array) -> float:
    """The largest difference; infinities at the same place are none."""
    wide = "c16" if "c" in (a.dtype.kind, b.dtype.kind) else "f8"
    a, b = a.astype(wide), b.astype(wide)
    unequal = a != b
    if not unequal.any():
        return 0.0
    with np.errstate(all="ignore"):
        found = float(np.abs(a[unequal] - b[unequal]).max())
    return math.inf if math.isnan(found) else found


def _scale(a: Array, b: Array) -> float:
    """The largest finite value of both; the difference is told as a share of it."""
    finite = [np.abs(one[np.isfinite(one)].astype("c16")).max(initial=0.0) for one in (a, b)]
    return float(max(finite)) or 1.0


def _samples(a: Numbers, b: Numbers, where: str, tolerance: float, notes: list[str]) -> Part:
    """At least one of them is kept in part: what is found is a lower bound."""
    count = min(len(a.sample), len(b.sample))
    first, second = a.sample[:count], b.sample[:count]
    if a.nans != b.nans and a.nans is not None and b.nans is not None:
        return Part(where, "different", f"{a.nans:,} and {b.nans:,} NaN", notes=tuple(notes))
    seen = _values(first, second, where, tolerance, [], a.dtype == b.dtype)
    apart = max(seen.difference or 0.0, _least(a, b))
    scale = max(_scale(first, second), a.largest or 0.0, b.largest or 0.0)
    relative = max(apart / scale, 0.0)
    of = f"kept are {count:,} of {a.count:,} values"
    if seen.verdict == "different" or relative > tolerance:
        if seen.verdict == "different" and seen.difference is None:
            return Part(where, "different", f"{seen.why}; {of}", notes=tuple(notes))
        return Part(where, "different", f"at least {apart:.3g} apart; {of}", apart, relative, True, tuple(notes))
    if not (_is_inexact(first, second) or apart) and a.sha256 and b.sha256 and a.dtype == b.dtype:
        return Part(where, "different", f"whole numbers differ; {of}, and these are equal", notes=tuple(notes))
    if not (a.sha256 and b.sha256) and not apart and a.dtype == b.dtype:
        return Part(where, "not checked", f"{of}, and these are equal", is_bound=True, notes=tuple(notes))
    return Part(where, "close", f"at least {apart:.3g} apart; {of}", apart, relative, True, tuple(notes))


def _least(a: Numbers, b: Numbers) -> float:
    """How far off some value is at least, from the norms and the largest values of all."""
    found = [0.0]
    if a.norm is not None and b.norm is not None and a.count:
        apart = abs(a.norm - b.norm)
        # The norms are sums of rounded squares: what is within their own error tells nothing.
        found.append(apart / math.sqrt(a.count) if apart > 1e-9 * max(a.norm, b.norm) else 0.0)
    if a.largest is not None and b.largest is not None:
        found.append(abs(a.largest - b.largest))
    return max(one for one in found if math.isfinite(one))
