"""Read a PyTorch memory snapshot (a pickle) without executing anything: plain containers, strings and numbers only.

What `plain_pickle` builds may share and nest its parts without bound, so it is walked by its known structure and counted.

A snapshot that was recorded with `stacks="all"`, PyTorch's default, has C++ frames around the Python ones: those are
skipped wherever there are Python frames.

Limits: files above `MAX_BYTES` and more than `MAX_ITEMS` entries are refused, and memory use is bounded by the size of
the file; host memory (`host_traces`, since 2.15) and annotations are ignored.
"""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.errors import TraceError
from memlab.trace.plain_pickle import DAMAGED, Refused, load

MAX_BYTES = 1 << 30
"""Larger files are refused: a history of a million entries takes about 150 MB."""
MAX_ITEMS = 10_000_000
"""More entries and blocks than this are refused."""
MAX_FRAMES = 256
"""The maximum depth of a stack; the innermost frames are kept."""
MAX_CHARACTERS = 1 << 28
"""The limit of text in distinct stacks."""

# A pickle can reference one list or string any number of times, so that a megabyte may expand to terabytes: the output is
# limited by its size. The minimum bytes of an entry or block, and the frames that one byte may produce.
_BYTES_OF_ITEM = 8
_FRAMES_PER_BYTE = 8

_MAX_TEXT = 4096  # longer texts (file names, function names) are cut
_MAX_NUMBER = 1 << 62
_SIZES = ("size", "total_size", "requested_size", "allocated_size", "max_split_size")
_LIMITS = dict.fromkeys(_SIZES, 1 << 46)  # 64 TiB: sums of sizes stay within the 64 bits of a column


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The checked content of a file: `segments` and `traces` (one list of entries per device) as PyTorch names them.

    `extra` is what memlab adds to its own files, {} in all others.
    """

    segments: list[dict[str, Any]]
    traces: list[list[dict[str, Any]]]
    settings: Mapping[str, Any]
    extra: Mapping[str, Any]


def looks_like_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a pickle of protocol 2 to 5."""
    try:
        if not Path(path).is_file():  # opening a named pipe would block until something writes to it
            return False
        with Path(path).open("rb") as file:
            start = file.read(2)
    except (OSError, ValueError, TypeError):
        return False
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot; anything else, damaged or hostile, raises TraceError with one line."""
    try:
        source = Path(path)
        facts, shown = source.stat(), f"{str(path)!r:.200}"
        if not stat.S_ISREG(facts.st_mode) and not source.is_dir():
            raise TraceError(f"{shown} is a pipe or a device, not a file. Copy what it gives into a file first.")
        if facts.st_size > MAX_BYTES:
            sizes = f"{facts.st_size} bytes, a snapshot may have {MAX_BYTES} here"
            raise TraceError(f"{source.name!r} has {sizes}: record less history.")
        data = source.read_bytes()
    except (OSError, ValueError, TypeError) as error:
        raise TraceError(f"cannot read {str(path)!r:.200}: {getattr(error, 'strerror', None) or error}.") from None
    return parse(data, source.name)


def parse(data: bytes, name: str = "snapshot") -> Snapshot:
    """Read a snapshot from bytes; `name` is for errors."""
    collects = gc.isenabled()
    gc.disable()  # millions of small dicts, none of them garbage: the collector would traverse them ten times
    try:
        return _checked(load(data), len(data))
    except (Refused, *DAMAGED) as error:
        reason = error if isinstance(error, Refused) else "it is cut off or damaged."
        raise TraceError(f"{name!r:.200} is not a readable PyTorch memory snapshot: {reason}") from None
    finally:
        if collects:
            gc.enable()


# --- the structure of a snapshot -----------------------------------------------------------------------------------------------


class _Walk:
    """Walks the content of a file by its known structure, and stops beyond a number of items."""

    def __init__(self, size: int) -> None:
        self.items_left = self.limit = min(max(size // _BYTES_OF_ITEM, 64), MAX_ITEMS)
        self.frames_left = _FRAMES_PER_BYTE * max(size, 64)
        self.characters_left = MAX_CHARACTERS
        self.frames: dict[int, dict[str, Any]] = {}
        self.stacks: dict[int | tuple[int, ...], list[Mapping[str, Any]]] = {}

    def count(self, items: int = 0, frames: int = 0, characters: int = 0) -> None:
        """Count this many more entries."""
        self.items_left -= items
        self.frames_left -= frames
        self.characters_left -= characters
        if self.items_left < 0:
            shorter = "Record a shorter history."
            raise Refused(f"it repeats its parts to more than {self.limit} entries and blocks. {shorter}")
        if self.frames_left < 0:
            raise Refused("it repeats its stacks to more frames than a file of its size can have. Record it again.")
        if self.characters_left < 0:
            raise Refused(f"its stacks have more than {MAX_CHARACTERS} characters. Record a shorter history.")

    def tables(self, value: Any, what: str) -> list[dict[Any, Any]]:
        """A list of tables."""
        if not isinstance(value, list | tuple):
            raise Refused(f"its {what} are no list.")
        self.count(**{"frames" if what == "frames" else "items": len(value)})
        if any(type(item) is not dict for item in value):
            raise Refused(f"one of its {what} is no table.")
        return list(value)

    def frames_of(self, value: Any) -> list[Mapping[str, Any]]:
        """The frames of an entry, innermost first; stacks of the same frames are the same object, each frame checked once."""
        known = self.stacks.get(id(value))
        if known is None:
            frames = self.tables(value, "frames")[: 4 * MAX_FRAMES]
            key = tuple(map(id, frames))
            known = self.stacks.get(key)
            if known is None:
                for frame in frames:
                    if id(frame) not in self.frames:
                        texts = {name: _words(frame, name) for name in ("filename", "name")}
                        self.frames[id(frame)] = {**texts, "line": _number(frame, "line")}
                known = self.stacks[key] = list(python_frames([self.frames[one] for one in key]))[:MAX_FRAMES]
                self.count(characters=sum(len(frame["filename"]) + len(frame["name"]) for frame in known))
            self.stacks[id(value)] = known
        self.frames_left -= len(known)
        if self.frames_left < 0:
            self.count()
        return known


def python_frames(frames: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The frames without those of C++, if there are others: "<stdin>", "<ipython-input-1>" and "train.py" are Python's."""
    python = [frame for frame in frames if frame["filename"].endswith(".py") or frame["filename"].startswith("<")]
    return python or frames


def _checked(found: Any, size: int) -> Snapshot:
    if type(found) is not dict or "segments" not in found or "device_traces" not in found:
        raise Refused("it has no segments and device_traces.")
    walk = _Walk(size)
    segments = [_segment(walk, segment) for segment in walk.tables(found["segments"], "segments")]
    traces = found["device_traces"]
    if not isinstance(traces, list | tuple) or len(traces) > 4096:
        raise Refused("its device_traces are no list of devices.")
    entries = [[_entry(walk, entry) for entry in walk.tables(trace, "entries")] for trace in traces]
    device = max((segment["device"] for segment in segments), default=-1)
    if device >= len(entries):
        raise Refused(f"it has a segment of device {device} and entries of {len(entries)} devices. Record it again.")
    # The settings that change sizes; missing ones have PyTorch's default.
    settings, extra = found.get("allocator_settings", {}), found.get("memlab", {})
    if type(settings) is not dict:
        raise Refused("its allocator_settings are no table.")
    steps = settings.get("roundup_power2_divisions", {})
    steps = steps if type(steps) is dict and len(steps) <= 64 else {}
    powers = [key for key in steps if type(key) is str and key.isascii() and key.isdigit()]
    checked = {
        "max_split_size": _number(settings, "max_split_size", -1, low=-1),
        "expandable_segments": settings.get("expandable_segments") is True,
        "roundup_power2_divisions": {key: _number(steps, key) for key in powers},
    }
    return Snapshot(segments, entries, checked, extra if type(extra) is dict else {})


def _segment(walk: _Walk, segment: dict[Any, Any]) -> dict[str, Any]:
    names = ("address", "total_size", "stream", "device")
    checked: dict[str, Any] = {name: _number(segment, name, 0) for name in names}
    address, blocks = checked["address"], list[dict[str, Any]]()
    for block in walk.tables(segment.get("blocks", []), "blocks"):
        size = _number(block, "size")
        address = _number(block, "address", address)  # before 2.0 without addresses, the blocks are in order
        facts = {"address": address, "size": size, "requested_size": _number(block, "requested_size", size)}
        frames = walk.frames_of(block.get("frames", ()))
        blocks.append({**facts, "state": _words(block, "state"), "frames": frames})
        address += size
    return {**checked, "is_expandable": segment.get("is_expandable") is True, "blocks": blocks}


_EXTRA_TEXTS = {"category", "module", "name", "op", "dtype", "shape", "phase"}


def _entry(walk: _Walk, entry: dict[str, Any]) -> dict[str, Any]:
    action = _words(entry, "action")
    if not action:
        raise Refused("one of its entries has no action. Record it again.")
    checked: dict[str, Any] = {  # inlined: there may be millions
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
    if "categories" in entry:  # (row, category from that row on), as memlab writes them
        changes = entry["categories"]
        if type(changes) is not list or not all(type(change) is list and len(change) == 2 for change in changes):
            raise Refused("the categories of a block are no list of pairs.")
        walk.count(items=len(changes))
        table = [{"row": row, "category": category} for row, category in changes]
        checked["categories"] = [(_number(change, "row"), _words(change, "category")) for change in table]
    return checked


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
