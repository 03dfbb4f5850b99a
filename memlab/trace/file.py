"""Traces on disk: a header and checksummed chunks of plain columns and JSON. Nothing in a file is ever executed.

Layout, all little-endian: MAGIC, u32 format version, then chunks of [4-byte tag, u64 length, u32 crc32, payload]. The
payload of COLS is u32 length of a JSON description, the description, and the columns' bytes one after another; HEAD and
TEXT are JSON; DONE is empty and comes last. A file without DONE was cut off (a killed kernel, a full disk): complete chunks
are read, and the trace says so. `save` writes a temporary file and renames it, so a file under its own name is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from memlab.errors import TraceError
from memlab.trace import columns
from memlab.trace.columns import Blocks, Category, Columns, Kind, MarkKind, Phase
from memlab.trace.trace import TEXT_COLUMNS, Bounded, Device, Gap, MadeBy, Trace

MAGIC = b"memlab\r\n\x1a\0"
VERSION = 2
PARTIAL = ".partial"
"""The suffix of a file that is being written during a run."""

_CHUNK = struct.Struct("<4sQI")
_TABLES: dict[str, type[Columns]] = {
    "events": columns.Events,
    "blocks": Blocks,
    "marks": columns.Marks,
    "samples": columns.Samples,
    "recategorised": columns.Recategorised,
}
_MAX_JSON = 1 << 28
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """A temporary file next to `target`, renamed to it if the block succeeds, else removed; OSError propagates."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=target.name[:100] + ".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0o022)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp makes private files; use ordinary permissions
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def saving(target: Path) -> Iterator[BinaryIO]:
    """The same for users' files: TraceError if it cannot be written."""
    try:
        with atomic_file(target) as file:
            yield file
    except OSError as error:
        raise TraceError(f"cannot save to {str(target)!r}: {error.strerror or error}. Choose another place.") from None


def save(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write `trace` to `path` atomically; an existing file is replaced only by a complete one."""
    target = savable(path)
    with saving(target) as file:
        TraceWriter(file).write_trace(trace)
    return target


def dumps(trace: Trace) -> bytes:
    """The content of the file that `save` would write."""
    content = io.BytesIO()
    TraceWriter(content).write_trace(trace)
    return content.getvalue()


def loads(content: bytes, name: str = "bytes") -> Trace:
    """Read the output of `dumps`; TraceError if it is damaged."""
    return _TraceReader(io.BytesIO(content), name, len(content)).trace()


def savable(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, links resolved; TraceError if none can or should be written."""
    try:
        target = Path(path).expanduser().resolve()
        is_folder, is_there = target.is_dir(), target.exists()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise TraceError(f"not a place to save to: {path!r:.200} ({error}). Name a file.") from None
    if is_folder or not target.parent.is_dir():
        what = "that is a folder" if is_folder else f"there is no folder {str(target.parent)!r}"
        raise TraceError(f"cannot save to {str(target)!r}: {what}; name a file in a folder that exists.")
    if is_there and not target.is_file():  # a device, a pipe: replacing it would do harm
        raise TraceError(f"cannot save to {str(target)!r}: that is no ordinary file. Choose another name.")
    return target


class TraceWriter:
    """Appends chunks to an open file; each is readable as soon as it is flushed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._texts_written = dict.fromkeys(TEXT_COLUMNS, 0)
        file.write(MAGIC + struct.pack("<I", VERSION))

    def write_trace(self, trace: Trace) -> None:
        """Write a finished trace, and the mark that the file is complete."""
        self.head(trace.made_by, trace.first_row, trace.notes)
        self.texts(trace.texts)
        for name in _TABLES:
            self.table(name, getattr(trace, name))
        self.done()

    def head(self, made_by: MadeBy, first_row: int = 0, notes: Mapping[str, Any] | None = None) -> None:
        """Write the header; a later one replaces an earlier one."""
        facts = {"made_by": dataclasses.asdict(made_by), "first_row": first_row, "notes": dict(notes or {})}
        self._chunk(b"HEAD", [json.dumps(facts).encode()])

    def texts(self, texts: Mapping[str, tuple[str, ...]]) -> None:
        """Write the strings not yet written."""
        new = {column: list(strings[self._texts_written[column] :]) for column, strings in texts.items()}
        self._texts_written.update({column: len(strings) for column, strings in texts.items()})
        self._chunk(b"TEXT", [json.dumps(new).encode("utf-8", "surrogatepass")])

    def table(self, name: str, rows: Columns) -> None:
        """Append rows to a table."""
        description = json.dumps({"table": name, "rows": len(rows), "columns": list(rows.DTYPES.items())}).encode()
        arrays = [array.view("u1").data for array in rows.arrays().values()]
        self._chunk(b"COLS", [struct.pack("<I", len(description)), description, *arrays])

    def done(self) -> None:
        """Mark the file as complete."""
        self._chunk(b"DONE", [])

    def _chunk(self, tag: bytes, parts: list[bytes | memoryview]) -> None:
        check = 0
        for part in parts:
            check = zlib.crc32(part, check)
        self._file.write(_CHUNK.pack(tag, sum(len(part) for part in parts), check))
        for part in parts:
            self._file.write(part)


class PartialFile:
    """The file of an active run: it survives a killed kernel and is removed at the end of the run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(f"{os.fspath(path)}{PARTIAL}")
        try:
            self._file = self.path.open("wb")
        except OSError as error:
            raise TraceError(f"cannot write {str(self.path)!r}: {error.strerror}. Choose another file.") from None
        self.writer = TraceWriter(self._file)

    def flush(self) -> None:
        """Flush to the operating system, so that the data survives this process."""
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file: the run is saved under its own name, or not wanted."""
        with contextlib.suppress(OSError):  # on a full disk: what is not written yet goes with the file
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; a missing end is named in its gaps, a damaged or foreign file raises TraceError."""
    try:
        source = Path(path)
        is_file, is_folder, exists = source.is_file(), source.is_dir(), source.exists()
    except (TypeError, ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"not the name of a file: {str(path)!r:.200} ({reason}). Name a file that exists.") from None
    if is_folder:
        raise TraceError(f"{str(source)!r} is a folder. Name a file in it.")
    if exists and not is_file:
        raise TraceError(f"{str(source)!r} is a pipe or a device, not a file. Copy what it gives into a file first.")
    if not is_file:
        hint = Path(f"{source}{PARTIAL}")
        more = f" Its process died while it ran: {str(hint)!r} has what is left." if hint.is_file() else ""
        raise TraceError(f"there is no file {str(source)!r}.{more}")
    with _opened(source) as reader:
        return reader.trace()


def load_head(path: Path) -> tuple[float, dict[str, Any]]:
    """When a run began, in seconds of the Unix clock, and its notes; its columns are not read."""
    with _opened(path) as reader:
        return reader.start_and_notes()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_TraceReader]:
    try:
        with path.open("rb") as file:
            yield _TraceReader(file, path.name, path.stat().st_size)
    except OSError as error:
        raise TraceError(f"cannot read {str(path)!r}: {error.strerror or error}.") from None


class _TraceReader:
    """One reading of one file."""

    def __init__(self, file: io.BufferedIOBase, name: str, size: int) -> None:
        self.file, self.name, self.size = file, name, size
        self.head: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {column: [] for column in TEXT_COLUMNS}
        self.parts: dict[str, list[Columns]] = {table: [] for table in _TABLES}

    def trace(self) -> Trace:
        """The trace in the file; TraceError if it is damaged or foreign."""
        with self._refusing():
            return self._assembled(self._read_chunks())

    def start_and_notes(self) -> tuple[float, dict[str, Any]]:
        """The start of the run and its notes, from the header alone."""
        with self._refusing():
            self._read_chunks(with_columns=False)
            return float(self.head["made_by"]["started_at_s"]), dict(self.head.get("notes", {}))

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as error:
            raise TraceError(f"{self.name!r} is not a readable memlab trace: {error!s:.200}") from None

    def _read_chunks(self, with_columns: bool = True) -> bool:
        """Read all complete chunks; whether the last one marks the file as complete."""
        start = self.file.read(len(MAGIC) + 4)
        if not start.startswith(MAGIC) or len(start) < len(MAGIC) + 4:
            raise TraceError(f"{self.name!r} is not a memlab trace (it does not begin like one).")
        (version,) = struct.unpack("<I", start[len(MAGIC) :])
        if version > VERSION:
            raise TraceError(f"{self.name!r} has format {version}, this memlab reads up to {VERSION}: upgrade memlab.")
        if version < VERSION:
            raise TraceError(f"{self.name!r} has format {version}, from before memlab's first release: measure again.")
        is_whole = False
        while len(head := self.file.read(_CHUNK.size)) == _CHUNK.size:
            tag, length, check = _CHUNK.unpack(head)
            if length > self.size - self.file.tell():
                break
            is_whole = tag == b"DONE"
            if tag == b"COLS" and with_columns:
                self._take_columns(length, check)
            elif tag == b"HEAD" or (tag == b"TEXT" and with_columns):
                self._take_json(tag, length, check)
            else:
                self.file.seek(length, os.SEEK_CUR)
        if not self.head:
            raise TraceError(f"{self.name!r} ends before its header: nothing of the run was written.")
        return is_whole

    def _take_json(self, tag: bytes, length: int, check: int) -> None:
        if length > _MAX_JSON:
            raise TraceError(f"{self.name!r} has a text chunk of {length} bytes, more than any run writes.")
        payload = self.file.read(length)
        self._compare(zlib.crc32(payload), check)
        content = json.loads(payload.decode("utf-8", "surrogatepass"))
        if tag == b"HEAD":
            self.head = content
            return
        for column, strings in content.items():
            if not all(isinstance(text, str) for text in strings):
                raise TraceError(f"{self.name!r} holds something else than text in the table {column!r}.")
            self.texts[column].extend(strings)

    def _take_columns(self, length: int, check: int) -> None:
        start = self.file.read(4)
        (size,) = struct.unpack("<I", start)
        if size > length:
            raise TraceError(f"{self.name!r} is damaged near byte {self.file.tell()}.")
        text = self.file.read(size)
        description = json.loads(text)
        name, count = description["table"], int(description["rows"])
        table = _TABLES[name]
        if [tuple(column) for column in description["columns"]] != list(table.DTYPES.items()):
            raise TraceError(f"{self.name!r} has other columns than format {VERSION} knows in {name!r}.")
        row_bytes, room = sum(np.dtype(dtype).itemsize for dtype in table.DTYPES.values()), length - 4 - size
        if count < 0 or count * row_bytes != room:
            raise TraceError(f"{self.name!r} says {count} rows where there is room for {room // row_bytes}.")
        running = zlib.crc32(text, zlib.crc32(start))
        arrays = {column: np.empty(count, dtype) for column, dtype in table.DTYPES.items()}
        for array in arrays.values():
            self.file.readinto(array.view("u1").data)
            running = zlib.crc32(array.view("u1").data, running)
        self._compare(running, check)
        self.parts[name].append(table(**arrays))

    def _compare(self, found: int, expected: int) -> None:
        if found != expected:
            raise TraceError(f"{self.name!r} is damaged: a checksum differs near byte {self.file.tell()}.")

    def _assembled(self, is_whole: bool) -> Trace:
        tables: dict[str, Any] = {name: _TABLES[name].joined(parts) for name, parts in self.parts.items()}
        facts = self.head["made_by"]
        for name, kind in (("devices", Device), ("gaps", Gap), ("bounded", Bounded)):
            facts = {**facts, name: tuple(_typed(kind, item) for item in facts[name])}
        made_by: MadeBy = _typed(MadeBy, facts)
        if not is_whole:
            made_by = _with_unknown_end(made_by, tables, self.texts)
        for table, column, codes in _CODES:
            highest = int(getattr(tables[table], column).max(initial=0))
            if highest >= len(codes):
                raise TraceError(f"{table}.{column} holds the code {highest}, which means nothing.")
        events = tables["events"]
        if min(events.requested_bytes.min(initial=0), events.allocated_bytes.min(initial=0)) < 0:
            raise TraceError("events hold a negative size.")
        texts = {column: tuple(strings) for column, strings in self.texts.items()}
        if any(len(set(strings)) < len(strings) for strings in texts.values()):
            raise TraceError(f"{self.name!r} lists a text twice in one table.")
        notes = self.head.get("notes", {})
        if not isinstance(notes, dict):
            raise TraceError(f"{self.name!r} has notes that are no table of names and values.")
        first_row = min(int(self.head["first_row"]), len(events))
        return Trace(made_by=made_by, first_row=first_row, texts=texts, notes=notes, **tables)


_CODES: tuple[tuple[str, str, Any], ...] = (
    ("events", "kind", Kind),
    ("blocks", "category", Category),
    ("blocks", "phase", Phase),
    ("marks", "kind", MarkKind),
    ("recategorised", "category", Category),
)
_SIMPLE: dict[str, Any] = {"int": int, "str": str, "float": (int, float)}


def _typed(kind: type, facts: dict[str, Any]) -> Any:
    """Build a dataclass from a file's values, checking their types."""
    for field in dataclasses.fields(kind):
        expected = _SIMPLE.get(str(field.type))
        value = facts.get(field.name, field.default)
        if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            raise TraceError(f"{kind.__name__}.{field.name} of the file is {value!r:.80}, not {field.type}.")
    return kind(**facts)


def _with_unknown_end(made_by: MadeBy, tables: dict[str, Any], texts: dict[str, list[str]]) -> MadeBy:
    """The trace of a file that was cut off: nothing is exact, since the missing part may have been higher.

    There is a block for every id in the events, without the texts that were cut off.
    """
    blocks, ids = tables["blocks"], tables["events"].block
    missing = max(int(ids.max(initial=-1)) + 1 - len(blocks), 0)
    blocks = Blocks.joined([blocks, Blocks.unknown(missing)])
    columns = {name: getattr(blocks, name) for name in Blocks.TEXTS}
    known = {name: np.where(column < len(texts[name]), column, -1) for name, column in columns.items()}
    tables["blocks"] = blocks.replace(**known)
    last = max((int(tables[name].time_ns[-1]) for name in ("events", "samples") if len(tables[name])), default=0)
    text = f"the run was cut off while it was written: known up to {last / 1e9:.2f} s after its start"
    unknown = tuple(Bounded(device.index, last, max(made_by.duration_ns, last), 0) for device in made_by.devices)
    gaps, bounded = (*made_by.gaps, Gap("cut off", text)), (*made_by.bounded, *unknown)
    return dataclasses.replace(made_by, gaps=gaps, bounded=bounded)
