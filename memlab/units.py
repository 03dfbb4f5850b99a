"""Bytes and seconds to text, and text to bytes: binary units, always written out (KiB, MiB, GiB)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from memlab.errors import MemlabError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
# People type "2GB" for GiB, and GPU vendors and old PyTorch messages mean it so: both spellings are binary.
_SPELLINGS = {"": 1, "b": 1} | {
    spelling: size
    for letter, size in zip("kmgt", (KiB, MiB, GiB, TiB), strict=True)
    for spelling in (letter, f"{letter}b", f"{letter}ib")
}


def format_bytes(count: int) -> str:
    """Write a number of bytes with a binary unit and three or four significant digits.

    >>> format_bytes(1536 * MiB), format_bytes(512), format_bytes(-3 * KiB)
    ('1.50 GiB', '512 B', '-3.00 KiB')
    """
    if abs(count) < KiB:
        return f"{count} B"
    # Just below a unit, rounding would give 1024.0 of the smaller one.
    unit = next(name for name in ("TiB", "GiB", "MiB", "KiB") if abs(count) >= 0.99996 * _UNITS[name])
    value = count / _UNITS[unit]
    return f"{value:.2f} {unit}" if abs(value) < 99.995 else f"{value:.1f} {unit}"


UNBOUNDED = 1 << 62
"""The upper end of a `ByteRange` that nothing bounds; its negative is the lower end of one that nothing bounds below."""


class ByteRange(NamedTuple):
    """A number of bytes that lies between two bounds, both included; equal bounds mean that it is exact.

    A tuple, so that it unpacks, compares and is saved as `(low, high)`.

    >>> ByteRange.exact(3 * GiB), str(ByteRange(3 * GiB, 4 * GiB)), str(ByteRange(3 * GiB, UNBOUNDED))
    (ByteRange(low=3221225472, high=3221225472), '3.00 to 4.00 GiB', '≥ 3.00 GiB')
    """

    low: int
    high: int

    @classmethod
    def exact(cls, count: int) -> ByteRange:
        """A number of bytes that is known."""
        return cls(count, count)

    @property
    def is_exact(self) -> bool:
        """Whether both bounds are equal."""
        return self.low == self.high

    @property
    def middle(self) -> int:
        """Halfway between the bounds."""
        return (self.low + self.high) // 2

    @property
    def low_bytes(self) -> int:
        """The earlier name of `low`."""
        return self.low

    @property
    def high_bytes(self) -> int:
        """The earlier name of `high`."""
        return self.high

    def __add__(self, other: ByteRange) -> ByteRange:  # type: ignore[override]  # a range of bytes adds up
        low = -UNBOUNDED if min(self.low, other.low) <= -UNBOUNDED else self.low + other.low
        high = UNBOUNDED if max(self.high, other.high) >= UNBOUNDED else self.high + other.high
        return ByteRange(low, high)

    def __sub__(self, other: ByteRange) -> ByteRange:
        """The range of the difference, where nothing connects the two numbers."""
        return self + ByteRange(-other.high, -other.low)

    def numbers(self) -> tuple[float, float]:
        """Both bounds for a DataFrame: NaN where nothing bounds it."""
        low, high = (math.nan if abs(bound) >= UNBOUNDED else bound for bound in self)
        return low, high

    def at_least(self, floor: int) -> ByteRange:
        """The same, with no bound below `floor`."""
        return ByteRange(max(self.low, floor), max(self.high, floor))

    def __str__(self) -> str:
        low, high = format_bytes(self.low), format_bytes(self.high)
        if self.high >= UNBOUNDED:
            return "unknown" if self.low <= -UNBOUNDED else f"≥ {low}"
        if self.low <= -UNBOUNDED:
            return f"≤ {high}"
        if low == high:
            return low
        number, _, unit = low.rpartition(" ")
        return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def signed(count: int) -> str:
    """A change in bytes, with its sign.

    >>> signed(2048), signed(-2048), signed(0)
    ('+2.00 KiB', '−2.00 KiB', '0 B')
    """
    return "0 B" if not count else ("+" if count > 0 else "−") + format_bytes(abs(count))


def parse_bytes(text: str | int) -> int:
    """Read a positive size such as "2GiB", "1.5 GB" (also binary), "300 MiB" or a plain number of bytes.

    >>> parse_bytes("1.5 GiB"), parse_bytes("512")
    (1610612736, 512)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", str(text))
    unit = _SPELLINGS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise MemlabError(f"not a size: {str(text)[:80]!r}. Write a number and a unit, for example 2GiB or 300MiB.")
    count = round(float(match[1]) * unit)
    if not 0 < count < 1 << 60:
        raise MemlabError(f"a size must be above 0 and below 2**60 bytes, got {str(text)[:80]!r}.")
    return count


def format_seconds(seconds: float) -> str:
    """Write a duration with the unit that suits it.

    >>> format_seconds(0.00042), format_seconds(0.35), format_seconds(12.3), format_seconds(3725)
    ('0.42 ms', '350 ms', '12.3 s', '1:02:05')
    """
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"


def number_of(count: int, what: str) -> str:
    """A number with its noun.

    >>> number_of(1, "output"), number_of(2000, "output")
    ('1 output', '2,000 outputs')
    """
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def listed(names: Sequence[str], most: int) -> str:
    """Names in one line, so many of them: "a, b and 7 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def plain(text: str) -> str:
    """Replace unprintable characters by spaces, so that text cannot break a line or send terminal escapes."""
    return "".join(character if character.isprintable() else " " for character in text)


def one_line(text: str, limit: int = 300) -> str:
    """The same, and no longer than `limit` characters."""
    clean = plain(text[: 2 * limit])
    return clean if len(text) <= limit else clean[: limit - 1] + "…"


def sentence(text: str, limit: int = 200) -> str:
    """The same, and what is longer ends after a whole word."""
    clean = one_line(text, limit)
    return clean if len(text) <= limit or " " not in clean else clean[: clean.rindex(" ")].rstrip(" .,;:") + " …"
