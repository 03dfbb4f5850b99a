"""Compare the results of two runs: equal bit for bit, close, different, or not checked; and how far apart.

`read_result` reads what `memlab.api.results` wrote into the notes of a trace: plain JSON, perhaps from an untrusted
file, so neither sizes nor types are trusted.

Limits: of a result above 1 MiB only a digest, statistics and a sample are kept. Where such a result is not equal, the largest
difference found is a lower bound, and "close" holds for the sample.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from memlab.errors import TraceError
from memlab.trace.columns import Array
from memlab.units import MiB, number_of

VERSION = 1
MAX_DEPTH = 32
MAX_PARTS = 20_000
_MAX_BYTES = 5 * MiB  # per result: 1 MiB of float8 is stored as 4 MiB of float32
STORED = frozenset(("|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8)), "<c8", "<c16"))
"""The dtypes in which numbers are stored."""
Verdict = Literal["equal", "close", "different", "not checked"]
CLOSE = 1e-3
"""Results that differ by at most this share of the largest value are close. Another order of summation in float32 changes a few
trained steps by 1e-6 to 1e-4; computing in 8 or 11 bits (bfloat16, float16) changes them by more than 1e-3: different."""
_ORDER: tuple[Verdict, ...] = ("equal", "close", "not checked", "different")


# --- a result as it was written ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A tensor, array or number: all values, flat, or if it is too large (`is_whole` is False) a sample of them.

    `sha256` covers dtype, shape and every bit, "" if there was too much to read. `nans`, `largest` (finite) and `norm` are of
    all values, None if unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    values: Array
    is_whole: bool
    nans: int | None = None
    largest: float | None = None
    norm: float | None = None

    def sample(self, count: int) -> Array:
        """The first `count` values of a sample."""
        return self.values[positions(len(self.values), count)] if self.is_whole else self.values[:count]


@dataclass(frozen=True, slots=True)
class Fact:
    """A part that is either equal or not: the digest of a text, None, the length of a list, the keys of a dict."""

    kind: str
    value: Any = None
    text: str = ""


Path = tuple[Any, ...]
"""The indices and keys of a part of a result."""
Result = Mapping[Path, Numbers | Fact]


def read_result(note: Any) -> Result:
    """The parts of a result by path; TraceError if it is damaged."""
    if not isinstance(note, Mapping) or note.get("version") != VERSION:
        raise _damaged("it has no known form")
    found: dict[Path, Numbers | Fact] = {}
    ahead: list[tuple[Path, Any]] = [((), note.get("value"))]
    read = 0
    while ahead:
        path, node = ahead.pop()
        found[path], inner = _read_part(node)
        if len(path) > MAX_DEPTH or len(found) + len(inner) > MAX_PARTS:
            raise _damaged(f"it has more than {MAX_PARTS} parts or {MAX_DEPTH} levels")
        ahead += [((*path, step), item) for step, item in reversed(inner)]
        if isinstance(part := found[path], Numbers):
            read += part.values.nbytes
        if read > _MAX_BYTES:
            raise _damaged(f"it has {read} bytes of numbers")
    return found


def devices_of(note: Any) -> tuple[str, ...]:
    """The devices of the tensors in a result."""
    names = note.get("devices") if isinstance(note, Mapping) else ()
    return tuple(str(name)[:200] for name in names) if isinstance(names, list) else ()


def positions(count: int, wanted: int) -> Array:
    """The positions of a sample of `wanted` among `count` values: spread evenly, and its first n are a sample of n.

    >>> positions(1000, 4).tolist()
    [618, 236, 854, 472]
    """
    steps = np.arange(1, wanted + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # the golden section, mod 2**64
    return ((steps >> np.uint64(11)).astype("f8") / 2**53 * count).astype("i8")


def _damaged(what: str) -> TraceError:
    return TraceError(f"the recorded result cannot be read: {what}. Run it again.")


def _read_part(node: Any) -> tuple[Numbers | Fact, list[tuple[Any, Any]]]:
    """Read one part, and those inside it by index or key."""
    kind = node.get("kind") if isinstance(node, Mapping) else None
    items = node.get("items") if kind in ("list", "dict") else None
    if kind == "none":
        return Fact("None"), []
    if kind == "text":
        text = node.get("text")
        if text is not None and not isinstance(text, str):
            raise _damaged("a text is none")
        content = (text or "").encode("utf-8", "surrogatepass")
        digest = str(node.get("sha256"))[:64] if text is None else digest_of(content)
        return Fact("byte" if node.get("of") == "bytes" else "text", digest, text or ""), []
    if kind == "numbers":
        return _read_numbers(node), []
    if kind == "list" and isinstance(items, list):
        return Fact("a list", len(items)), list(enumerate(items[: MAX_PARTS + 1]))
    if kind == "dict" and isinstance(items, list):
        pairs = [one for one in items if isinstance(one, list) and len(one) == 2]
        if len(pairs) < len(items) or not all(isinstance(key, str | int | float | bool | None) for key, _ in pairs):
            raise _damaged("a dict has something else than keys and values")
        # 1, 1.0 and True are equal in Python, and three keys of JSON.
        named = [(key if isinstance(key, str) else (type(key).__name__, key), item) for key, item in pairs]
        return Fact("a dict", frozenset(step for step, _ in named)), named
    raise _damaged(f"a part is {kind!r:.40}")


def _read_numbers(node: Mapping[str, Any]) -> Numbers:
    shape, stored, data = node.get("shape"), node.get("stored"), node.get("data")
    is_shape = isinstance(shape, list) and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape)
    if not isinstance(shape, list) or not is_shape or max(math.prod(shape), *shape, 0) >= 1 << 60:
        raise _damaged(f"a shape is {shape!r:.60}")
    if not isinstance(stored, str) or stored not in STORED:
        raise _damaged(f"numbers are stored as {stored!r:.40}")
    try:
        content = base64.b64decode(node.get("sample", "") if data is None else data, validate=True)
    except (TypeError, ValueError):
        raise _damaged("numbers are no base64") from None
    if len(content) % np.dtype(stored).itemsize:
        raise _damaged(f"it has {len(content)} bytes of numbers")
    values = np.frombuffer(content, stored)
    if data is not None and len(values) != math.prod(shape):
        raise _damaged(f"{len(values)} values are there for the shape {shape!r:.60}")
    nans = node.get("nans")
    largest, norm = (
        value if isinstance(value := node.get(name), float) and math.isfinite(value) else None
        for name in ("largest", "norm")
    )
    return Numbers(
        dtype=str(node.get("dtype"))[:60],
        shape=tuple(shape),
        sha256=str(node.get("sha256") or "")[:64],
        values=values,
        is_whole=data is not None,
        nans=nans if type(nans) is int else None,
        largest=largest,
        norm=norm,
    )


def digest_of(content: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


# --- two results -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResultCheck:
    """The outcome of comparing two results. `largest_difference` is absolute, `relative` its share of the part's largest value.

    Both are None if no number says how far apart the results are; with `is_bound` they are lower bounds. `why` is a sentence on
    what was compared, or why nothing was; `where` is the part that differs most; `notes` are further remarks.
    """

    verdict: Verdict
    why: str = ""
    short: str = ""
    largest_difference: float | None = None
    relative: float | None = None
    is_bound: bool = False
    where: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"results {self.short}: {self.why}" if self.verdict == "not checked" else f"results {self.short}"


def not_checked(why: str, short: str) -> ResultCheck:
    """Nothing was compared; `short` is the reason in a few words."""
    return ResultCheck("not checked", why, f"not checked ({short})")


def check(a: Result, b: Result, tolerance: float = CLOSE, notes: tuple[str, ...] = ()) -> ResultCheck:
    """Compare two results; they are close if no value differs by more than `tolerance` times the largest of its part."""
    compared = (_compared(a[path], b[path], path, tolerance) for path in a if path in b)
    parts = [part for part in compared if part is not None] or [ResultCheck("equal")]
    worst = max(parts, key=lambda one: (_ORDER.index(one.verdict), one.relative is None, one.relative or 0.0))
    apart = max(parts, key=lambda one: (one.relative is not None, one.relative or 0.0, one.largest_difference or 0.0))
    off = [one for one in parts if one.verdict != "equal"]
    difference, relative = (apart.largest_difference, apart.relative) if off else (0.0, 0.0)
    is_bound = any(one.is_bound for one in off)
    # `short` completes a sentence that begins with "results".
    least = "at least " if is_bound else ""
    which = f"{len(off)} of {len(parts)} parts differ; " if len(parts) > 1 else ""
    why = f"{which}{worst.where or 'the result'}: {worst.why}"
    if worst.verdict == "equal":
        why = f"all {len(parts)} parts are the same bit for bit" if len(parts) > 1 else "the same bit for bit"
        short = "equal bit for bit"
    elif worst.verdict == "close":
        apart_by = f"{least}{share(relative)} of the largest value apart" if relative else "not bit for bit"
        short = f"close ({apart_by})"
    elif worst.verdict == "not checked":
        short = "not checked (too large)"
    elif relative is None or worst.relative is None or math.isinf(relative):
        short = f"differ ({worst.why})"
    else:
        short = f"differ by {least}{share(relative)} of the largest value"
    notes = tuple(dict.fromkeys([*notes, *(note for one in parts for note in one.notes)]))
    return ResultCheck(worst.verdict, why, short, difference, relative, is_bound, worst.where, notes)


def share(relative: float) -> str:
    """A share as text: percents, or a power of ten where it is small.

    >>> share(0.0123), share(3.14159e-6), share(1.13)
    ('1.2 %', '3.1e-06', '113 %')
    """
    if relative < 1e-3:
        return f"{relative:.1e}" if relative else "0"
    return f"{100 * relative:.2g} %" if relative < 0.1 else f"{min(100 * relative, 1e9):,.0f} %"


def _compared(a: Numbers | Fact, b: Numbers | Fact, path: Path, tolerance: float) -> ResultCheck | None:
    """Compare a part that both have; None for lists and dicts of equal length and keys: their parts are compared."""
    where = ""
    for step in path:
        key = step[1] if isinstance(step, tuple) else step
        where += f"{key}"[:80] if not where and not isinstance(step, int) else f"[{key!r:.80}]"
    if isinstance(a, Numbers) and isinstance(b, Numbers):
        return dataclasses.replace(_numbers(a, b, where, tolerance), where=where)
    if isinstance(a, Numbers) or isinstance(b, Numbers) or a.kind != b.kind:
        names = ("numbers" if isinstance(one, Numbers) else one.kind for one in (a, b))
        why = " and ".join({"text": "a text", "byte": "bytes"}.get(name, name) for name in names)
    elif a.value == b.value:
        return None if a.kind in ("a list", "a dict") and a.value else ResultCheck("equal", where=where)
    elif a.kind == "a list":
        why = f"{a.value} and {b.value} items"
    elif a.kind == "a dict":
        alone = min(a.value ^ b.value, key=repr)  # sorted: the order of a set differs from process to process
        why = f"only one has {alone if isinstance(alone, str) else alone[1]!r:.80}"
    elif path[-1:] == ("digest",) and all(re.fullmatch("[0-9a-f]{64}", one.text) for one in (a, b)):
        # A digest that was recorded as the result, as for the parameters of a job: equal or not, never how far apart.
        why = "not everything that was digested is the same bit for bit"
        return ResultCheck("close", why, is_bound=True, where=where)
    else:
        why = f"the {a.kind}s differ"
    return ResultCheck("different", why, where=where)


def _numbers(a: Numbers, b: Numbers, where: str, tolerance: float) -> ResultCheck:
    """Compare numbers: all values if both are whole, else a sample, whose largest difference is a lower bound."""
    here = f" in {where}" if where else ""
    same_dtype = a.dtype == b.dtype
    notes: tuple[str, ...] = () if same_dtype else (f"dtypes differ{here}: {a.dtype} and {b.dtype}",)
    if a.shape != b.shape:
        return ResultCheck("different", f"shapes {a.shape} and {b.shape}", notes=notes)
    same_nans = (f"{a.nans:,} NaN{here} at the same places count as equal",) if a.nans else ()
    if same_dtype and a.sha256 and a.sha256 == b.sha256:
        return ResultCheck("equal", notes=notes + same_nans)
    if a.nans != b.nans and a.nans is not None and b.nans is not None:
        return ResultCheck("different", f"{a.nans:,} and {b.nans:,} NaN", notes=notes)

    is_bound = not (a.is_whole and b.is_whole)
    count = min(len(a.values), len(b.values))
    first, second = (one.sample(count) if is_bound else one.values for one in (a, b))
    kept = f"; kept are {count:,} of {math.prod(a.shape):,} values" if is_bound else ""
    nan_a, nan_b = first != first, second != second
    if lonely := int(np.count_nonzero(nan_a != nan_b)):
        return ResultCheck("different", f"NaN at {number_of(lonely, 'place')} in one alone{kept}", notes=notes)
    first, second, notes = first[~nan_a], second[~nan_b], notes + same_nans
    is_inexact = {first.dtype.kind, second.dtype.kind} & {"f", "c"}
    apart = max(_apart(first, second), _least_apart(a, b) if is_bound else 0.0)
    # The largest finite value, which differences are divided by.
    finite = (np.abs(one[np.isfinite(one)].astype("c16")).max(initial=0.0) for one in (first, second))
    relative = apart / (max(*map(float, finite), a.largest or 0.0, b.largest or 0.0) or 1.0)
    has_digests = bool(same_dtype and a.sha256 and b.sha256)

    verdict: Verdict = "close" if relative <= tolerance else "different"
    if math.isinf(apart):
        why = "an infinity in one alone"
    elif not is_inexact and apart:
        off, most = int(np.count_nonzero(first != second)), "at least" if is_bound else "at most"
        verdict, why = "different", f"{off:,} of {len(first):,} whole numbers differ, by {apart:g} {most}"
    elif apart:
        how = f"{apart:.3g} apart at most, {share(relative)} of the largest value"
        why = f"at least {apart:.3g} apart" if is_bound else how
    elif is_bound and has_digests and not is_inexact:
        return ResultCheck("different", f"whole numbers differ{kept}, and these are equal", notes=notes)
    elif is_bound and not has_digests and (same_dtype or not count):
        return ResultCheck("not checked", f"too large to be read{kept}", is_bound=True, notes=notes)
    elif is_bound:
        why = "those that are kept are equal"
    elif same_dtype and not (is_inexact and _signs(first) != _signs(second)):
        return ResultCheck("equal", notes=notes)
    else:
        why = "0.0 in one and -0.0 in the other" if same_dtype else "dtypes differ"
    return ResultCheck(verdict, why + kept, "", apart, relative, is_bound, notes=notes)


def _signs(values: Array) -> bytes:
    return bytes(np.signbit(values.real) | np.signbit(values.imag))


def _apart(a: Array, b: Array) -> float:
    """The largest difference; equal infinities at the same place count as 0."""
    unequal = a != b
    if not unequal.any():
        return 0.0
    kinds = {a.dtype.kind, b.dtype.kind}
    wide = "c16" if "c" in kinds else "f8"
    with np.errstate(all="ignore"):
        apart = float(np.abs(a[unequal].astype(wide) - b[unequal].astype(wide)).max())
    if kinds & {"f", "c"}:
        return math.inf if math.isnan(apart) else apart
    return max(apart, 1.0)  # whole numbers, which float64 may round to the same


def _least_apart(a: Numbers, b: Numbers) -> float:
    """A lower bound of the largest difference, from the norms and largest values."""
    least = 0.0
    if a.norm is not None and b.norm is not None and (count := math.prod(a.shape)):
        # The norms are sums of rounded squares: differences within their own error say nothing.
        apart = abs(a.norm - b.norm)
        least = apart / math.sqrt(count) if apart > 1e-9 * max(a.norm, b.norm) else 0.0
    if a.largest is not None and b.largest is not None:
        least = max(least, abs(a.largest - b.largest))
    return least if math.isfinite(least) else 0.0
