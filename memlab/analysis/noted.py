"""A noted result as values: numbers, texts, lists and dicts, read from plain JSON that nobody vouches for.

`value_of` builds them from the notes of a trace, which may come from a file: it takes nothing on trust, neither sizes nor types.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.errors import TraceError
from memlab.trace.columns import Array
from memlab.units import MiB

VERSION = 1
MAX_DEPTH = 32
MAX_PARTS = 20_000
_MAX_BYTES = 3 * MiB  # of one noted result: whole values and samples, with room for what later versions keep
STORED = frozenset(("|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8)), "<c8", "<c16"))
"""The forms in which numbers are kept."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """None."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text or bytes (`of`); `text` is None where it was too long to be kept."""

    of: str
    sha256: str
    text: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A tensor, array or number: `values` all of it, flat, or None where it is too large; then `sample` has some.

    `sha256` is that of dtype, shape and every bit, "" where that was too much to read. `nans`, `largest` (finite) and `norm` are of
    all values, None where they are not known.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    values: Array | None
    sample: Array
    nans: int | None = None
    largest: float | None = None
    norm: float | None = None

    @property
    def count(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Series:
    """A list or tuple."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A dict, or what is like one."""

    items: Mapping[Any, Value]


Value = Nothing | Text | Numbers | Series | Mapped


def positions(count: int, wanted: int) -> Array:
    """Where a sample of `wanted` values is taken among `count`: all over, and the first n of it are a sample of n.

    >>> positions(1000, 4).tolist()
    [618, 236, 854, 472]
    """
    steps = np.arange(1, wanted + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # the golden section, mod 2**64
    return ((steps >> np.uint64(11)).astype("f8") / 2**53 * count).astype("i8")


def value_of(note: Any) -> Value:
    """The result that was noted; TraceError where the note is none."""
    if not isinstance(note, Mapping) or note.get("version") != VERSION:
        raise _damaged("it has no known form")
    return _Reader().read(note.get("value"), 0)


def devices_of(note: Any) -> tuple[str, ...]:
    """The names of the devices whose tensors are in it."""
    names = note.get("devices") if isinstance(note, Mapping) else ()
    return tuple(str(name)[:200] for name in names) if isinstance(names, list) else ()


def _damaged(what: str) -> TraceError:
    return TraceError(f"the result that was noted cannot be read: {what}. Run it again.")


class _Reader:
    """One reading of one note, which counts what it takes."""

    def __init__(self) -> None:
        self.parts = self.bytes = 0

    def read(self, node: Any, depth: int) -> Value:
        self.parts += 1
        if depth > MAX_DEPTH or self.parts > MAX_PARTS:
            raise _damaged(f"it has more than {MAX_PARTS} parts or {MAX_DEPTH} levels")
        kind = node.get("kind") if isinstance(node, Mapping) else None
        if kind == "none":
            return Nothing()
        if kind == "text":
            return _text(node)
        if kind == "numbers":
            return self._numbers(node)
        items = node.get("items") if kind in ("list", "dict") else None
        if not isinstance(items, list):
            raise _damaged(f"a part is {kind!r:.40}")
        if kind == "list":
            return Series(tuple(self.read(item, depth + 1) for item in items))
        return Mapped(dict(self._pair(item, depth + 1) for item in items))

    def _pair(self, item: Any, depth: int) -> tuple[Any, Value]:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str | int | float | bool | None):
            raise _damaged("a dict has something else than keys and values")
        return item[0], self.read(item[1], depth)

    def _numbers(self, node: Mapping[str, Any]) -> Numbers:
        shape, stored = node.get("shape"), node.get("stored")
        if (
            not isinstance(shape, list)
            or len(shape) > 64
            or not all(type(size) is int and 0 <= size < 1 << 60 for size in shape)
        ):
            raise _damaged(f"a shape is {shape!r:.60}")
        if math.prod(shape) >= 1 << 60:
            raise _damaged(f"a shape is {shape!r:.60}")
        if not isinstance(stored, str) or stored not in STORED:
            raise _damaged(f"numbers are stored as {stored!r:.40}")
        values = self._array(node["data"], stored) if node.get("data") is not None else None
        if values is not None and len(values) != math.prod(shape):
            raise _damaged(f"{len(values)} values are there for the shape {shape!r:.60}")
        sample = self._array(node.get("sample", ""), stored)
        if values is not None:
            sample = values[positions(len(values), min(len(values), 4096))]
        return Numbers(
            str(node.get("dtype"))[:60],
            tuple(shape),
            str(node.get("sha256") or "")[:64],
            values,
            sample,
            nans if type(nans := node.get("nans")) is int else None,
            _number(node.get("largest")),
            _number(node.get("norm")),
        )

    def _array(self, text: Any, stored: str) -> Array:
        try:
            content = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise _damaged("numbers are no base64") from None
        self.bytes += len(content)
        dtype = np.dtype(stored)
        if self.bytes > _MAX_BYTES or len(content) % dtype.itemsize:
            raise _damaged(f"it has {self.bytes} bytes of numbers")
        return np.frombuffer(content, dtype)


def _text(node: Mapping[str, Any]) -> Text:
    text = node.get("text")
    if text is not None and not isinstance(text, str):
        raise _damaged("a text is none")
    found = digest_of(text.encode("utf-8", "surrogatepass")) if text is not None else str(node.get("sha256"))[:64]
    return Text(str(node.get("of", "text"))[:20], found, text)


def digest_of(content: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def _number(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None
