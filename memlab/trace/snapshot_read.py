"""Reads a PyTorch memory snapshot (a pickle) without executing anything: plain containers, texts and numbers only.

What `plain_pickle` builds may share and nest its parts without end, so it is walked by its known shape and counted.

Limits: files above `MAX_BYTES` and more than `MAX_ITEMS` entries are refused; host memory (`host_traces`, since 2.15) and
annotations are not looked at.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.errors import TraceError
from memlab.trace.plain_pickle import DAMAGED, Refused, load

MAX_BYTES = 1 << 30
"""A file above this is refused: a history of a million entries takes about 150 MB."""
MAX_ITEMS = 10_000_000
"""More entries, blocks and frames than this, or than the file has bytes, are refused: lists that share their parts can
pretend to any number."""

_MAX_TEXT = 4096  # longer texts (file names, function names) are cut
_MAX_NUMBER = 1 << 62
_SIZES = ("size", "total_size", "requested_size", "allocated_size", "max_split_size")
_LIMITS = dict.fromkeys(_SIZES, 1 << 46)  # 64 TiB: sums of sizes stay within the 64 bits of a column


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a file holds, checked: `segments` and `traces` (one list of entries per device) as PyTorch names them.

    `extra` is what memlab adds to files it writes itself, {} in all others.
    """

    segments: list[dict[str, Any]]
    traces: list[list[dict[str, Any]]]
    settings: Mapping[str, Any]
    extra: Mapping[str, Any]


def looks_like_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a pickle of protocol 2 to 5."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(2)
    except (OSError, ValueError, TypeError):
        return False
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot; what is no snapshot, damaged or hostile raises TraceError with one line."""
    try:
        source = Path(path)
        size = source.stat().st_size
        if size > MAX_BYTES:
            raise TraceError(
                f"{source.name!r} has {size} bytes, a snapshot may have {MAX_BYTES} here: record less history."
            )
        data = source.read_bytes()
    except (OSError, ValueError, TypeError) as error:
        raise TraceError(f"cannot read {str(path)!r:.200}: {getattr(error, 'strerror', None) or error}.") from None
    return parse(data, source.name)


def parse(data: bytes, name: str = "snapshot") -> Snapshot:
    """The same from bytes; `name` is what the error calls them."""
    collects = gc.isenabled()
    gc.disable()  # millions of small tables, none of them garbage: the collector would look at them ten times over
    try:
        return _checked(load(data), min(len(data), MAX_ITEMS))
    except Refused as refusal:
        raise TraceError(f"{name!r:.200} is not a readable PyTorch memory snapshot: {refusal}") from None
    except DAMAGED:
        raise TraceError(
            f"{name!r:.200} is not a readable PyTorch memory snapshot: it is cut off or damaged."
        ) from None
    finally:
        if collects:
            gc.enable()


# --- the shape of a snapshot -----------------------------------------------------------------------------------------------


class _Walk:
    """Walks what a file holds by its known shape, and gives up beyond so many items."""

    def __init__(self, items: int) -> None:
        self.left = self.limit = items
        self.frames: dict[int, list[dict[str, Any]]] = {}

    def count(self, items: int) -> None:
        """So many items more."""
        self.left -= items
        if self.left < 0:
            raise Refused(f"it has more than {self.limit} entries, blocks and frames.")

    def tables(self, value: Any, what: str) -> list[dict[Any, Any]]:
        """A list of tables."""
        if not isinstance(value, list | tuple):
            raise Refused(f"its {what} are no list.")
        self.count(len(value))
        for item in value:
            if type(item) is not dict:
                raise Refused(f"one of its {what} is no table.")
        return list(value)

    def frames_of(self, value: Any) -> list[dict[str, Any]]:
        """The frames of an entry: shared between entries, so each list is looked at once."""
        known = self.frames.get(id(value))
        if known is None:
            known = [
                {"filename": _words(f, "filename"), "line": _number(f, "line"), "name": _words(f, "name")}
                for f in self.tables(value, "frames")
            ]
            self.frames[id(value)] = known
        return known


def _checked(found: Any, items: int) -> Snapshot:
    if type(found) is not dict or "segments" not in found or "device_traces" not in found:
        raise Refused("it has no segments and device_traces.")
    walk = _Walk(items)
    segments = [_segment(walk, segment) for segment in walk.tables(found["segments"], "segments")]
    traces = found["device_traces"]
    if not isinstance(traces, list | tuple) or len(traces) > 4096:
        raise Refused("its device_traces are no list of devices.")
    entries = [[_entry(walk, entry) for entry in walk.tables(trace, "entries")] for trace in traces]
    settings, extra = found.get("allocator_settings", {}), found.get("memlab", {})
    return Snapshot(segments, entries, _settings(settings), extra if type(extra) is dict else {})


def _segment(walk: _Walk, segment: dict[Any, Any]) -> dict[str, Any]:
    names = ("address", "total_size", "stream", "device")
    checked: dict[str, Any] = {name: _number(segment, name, 0) for name in names}
    checked["is_expandable"] = segment.get("is_expandable") is True
    address = checked["address"]
    blocks: list[dict[str, Any]] = []
    for block in walk.tables(segment.get("blocks", []), "blocks"):
        size = _number(block, "size")
        address = _number(block, "address", address)  # before 2.0 without addresses, the blocks are in order
        blocks.append(
            {
                "address": address,
                "size": size,
                "requested_size": _number(block, "requested_size", size),
                "state": _words(block, "state"),
                "frames": walk.frames_of(block.get("frames", ())),
            }
        )
        address += size
    return {**checked, "blocks": blocks}


_EXTRA_TEXTS = {"category", "module", "name", "op", "dtype", "shape", "phase"}


def _entry(walk: _Walk, entry: dict[str, Any]) -> dict[str, Any]:
    action = _words(entry, "action")
    checked: dict[str, Any] = {
        "action": action,
        "size": _number(entry, "size", 0),
        "stream": _number(entry, "stream", 0),
        "time_us": _number(entry, "time_us", 0),
        "addr": _number(entry, "device_free" if action == "oom" else "addr", 0),
        "frames": walk.frames_of(entry.get("frames", ())),
    }
    for name in entry.keys() & _EXTRA_TEXTS:
        checked[name] = _words(entry, name)
    if "allocated_size" in entry:
        checked["allocated_size"] = _number(entry, "allocated_size")
    if "categories" in entry:
        checked["categories"] = _changes(walk, entry["categories"])
    return checked


def _changes(walk: _Walk, changes: Any) -> list[tuple[int, str]]:
    """Rows and the categories that a block has from them on, as memlab writes them."""
    if type(changes) is not list or not all(type(change) is list and len(change) == 2 for change in changes):
        raise Refused("the categories of a block are no list of pairs.")
    walk.count(len(changes))
    table = [{"row": row, "category": category} for row, category in changes]
    return [(_number(change, "row"), _words(change, "category")) for change in table]


def _settings(settings: Any) -> dict[str, Any]:
    """The settings that change sizes; what they do not say is PyTorch's default."""
    if type(settings) is not dict:
        raise Refused("its allocator_settings are no table.")
    steps = settings.get("roundup_power2_divisions", {})
    steps = steps if type(steps) is dict and len(steps) <= 64 else {}
    return {
        "max_split_size": _number(settings, "max_split_size", -1, low=-1),
        "expandable_segments": settings.get("expandable_segments") is True,
        "roundup_power2_divisions": {
            key: _number(steps, key) for key in steps if type(key) is str and key.isascii() and key.isdigit()
        },
    }


def _number(table: Mapping[Any, Any], name: str, default: int | None = None, low: int = 0) -> int:
    value, limit = table.get(name, default), _LIMITS.get(name, _MAX_NUMBER)
    if type(value) is not int or not low <= value < limit:
        kind = "missing" if value is None else f"no number from {low} to 2**{limit.bit_length() - 1}"
        raise Refused(f"a {name!r} is {kind}.")
    return value


def _words(table: Mapping[Any, Any], name: str) -> str:
    value = table.get(name, "")
    if type(value) is not str:
        raise Refused(f"a {name!r} is no text.")
    return value[:_MAX_TEXT]
