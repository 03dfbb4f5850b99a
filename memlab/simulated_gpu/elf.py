"""What ELF files ask for and offer: imported symbols with their version nodes, needed libraries, defined symbols.

Only the sections that hold this are read, through mmap: a library of a gigabyte costs no more than its symbol table. A
damaged file raises SimulatedGpuError with one line.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memlab.errors import SimulatedGpuError

_IDENTITY = b"\x7fELF\x02\x01"
"""The magic, 64 bits, little endian."""
_X86_64 = 62
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERSION = struct.Struct("<H")
_NEED = struct.Struct("<HHIII")
_NEED_ENTRY = struct.Struct("<IHHII")

_SYMTAB, _DYNAMIC_SECTION, _DYNSYM = 2, 6, 11
_VERSION_NEEDS, _VERSIONS = 0x6FFFFFFE, 0x6FFFFFFF
_TAG_NEEDED, _TAG_RPATH, _TAG_RUNPATH = 1, 15, 29
_GLOBAL, _WEAK = 1, 2
_HIDDEN = 2
_UNVERSIONED = 2
"""Version indices below this one stand for "local" and "global without a version"."""
_MOST_SECTIONS = 1 << 20


@dataclass(frozen=True, slots=True)
class Linkage:
    """What a shared object needs: its imports (symbol to version node, "" for none), libraries, and where it looks first."""

    imports: dict[str, str]
    needed: tuple[str, ...]
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    start: int
    size: int
    link: int


def linkage(path: Path) -> Linkage:
    """The imports of a shared object, the libraries it needs, and its RPATH or RUNPATH."""
    file = _Reader(path)
    needed, searched = file.libraries()
    return Linkage(file.imports(), needed, searched)


def defined(path: Path) -> frozenset[str]:
    """The symbols that an object file or a shared object offers to others."""
    return _Reader(path).defined()


class _Reader:
    """An ELF file, mapped into memory as long as this object lives, and its sections."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with self._path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # mmap refuses an empty file
            raise self._damaged("it is empty") from None
        except OSError as error:
            raise SimulatedGpuError(f"cannot read {str(self._path)!r}: {error.strerror or error}.") from None
        self._sections = self._read_sections()

    def _damaged(self, why: str) -> SimulatedGpuError:
        return SimulatedGpuError(f"{str(self._path)!r} is not a complete ELF file for x86-64: {why}.")

    def _read_sections(self) -> list[_Section]:
        if self._data[: len(_IDENTITY)] != _IDENTITY:
            raise self._damaged("it does not begin as one")
        if len(self._data) < _HEADER.size:
            raise self._damaged("its header is cut off")
        _, machine, _, _, _, start, _, _, _, _, size, count, _ = _HEADER.unpack_from(self._data)
        if machine != _X86_64:
            raise self._damaged(f"it is for machine type {machine}")
        if start == 0 or size != _SECTION.size:
            raise self._damaged("it has no section headers")
        if count == 0:  # too many for 16 bits: the first section has the number
            first = self._part(start, size, "its section headers")
            count = _SECTION.unpack(first)[5]
        if count > _MOST_SECTIONS:
            raise self._damaged(f"it claims to have {count} sections")
        headers = _SECTION.iter_unpack(self._part(start, size * count, "its section headers"))
        return [_Section(kind, at, length, link) for _, kind, _, _, at, length, link, *_ in headers]

    def _part(self, start: int, size: int, what: str) -> bytes:
        if start + size > len(self._data):
            raise self._damaged(f"{what} are cut off")
        return self._data[start : start + size]

    def _find(self, kind: int) -> _Section | None:
        return next((section for section in self._sections if section.kind == kind), None)

    def _strings_of(self, section: _Section) -> _Section:
        if not 0 < section.link < len(self._sections):
            raise self._damaged("a table has no strings")
        return self._sections[section.link]

    def _text(self, strings: _Section, offset: int) -> str:
        start, end = strings.start + offset, strings.start + strings.size
        stop = self._data.find(b"\0", start, end) if offset < strings.size else -1
        if stop < 0:
            raise self._damaged("a name lies outside of its strings")
        return self._data[start:stop].decode("utf-8", "replace")

    def _records(self, section: _Section, layout: struct.Struct, what: str) -> Iterator[tuple[int, ...]]:
        return layout.iter_unpack(self._part(section.start, section.size // layout.size * layout.size, what))

    def libraries(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The DT_NEEDED entries, and the folders of DT_RPATH or DT_RUNPATH."""
        section = self._find(_DYNAMIC_SECTION)
        if section is None:
            return (), ()
        strings = self._strings_of(section)
        entries = list(self._records(section, _DYNAMIC, "its dynamic entries"))
        needed = [self._text(strings, value) for tag, value in entries if tag == _TAG_NEEDED]
        paths = [self._text(strings, value) for tag, value in entries if tag in (_TAG_RPATH, _TAG_RUNPATH)]
        return tuple(needed), tuple(folder for path in paths for folder in path.split(":") if folder)

    def imports(self) -> dict[str, str]:
        """The undefined dynamic symbols, each with its version node."""
        section = self._find(_DYNSYM)
        if section is None:
            return {}
        strings, nodes, table = self._strings_of(section), self._nodes(), self._find(_VERSIONS)
        records = () if table is None else self._records(table, _VERSION, "its versions")
        versions = [version for (version,) in records]
        found = {}
        for index, (name, _, _, place, _, _) in enumerate(self._records(section, _SYMBOL, "its symbols")):
            if place == 0 and name:
                version = versions[index] & 0x7FFF if index < len(versions) else 0
                found[self._text(strings, name)] = nodes.get(version, "") if version >= _UNVERSIONED else ""
        return found

    def defined(self) -> frozenset[str]:
        """The global or weak symbols that have a place; those of the dynamic table where there is one."""
        section = self._find(_DYNSYM) or self._find(_SYMTAB)
        if section is None:
            return frozenset()
        strings = self._strings_of(section)
        return frozenset(
            self._text(strings, name)
            for name, info, other, place, _, _ in self._records(section, _SYMBOL, "its symbols")
            if place and name and info >> 4 in (_GLOBAL, _WEAK) and other & 3 != _HIDDEN
        )

    def _nodes(self) -> dict[int, str]:
        """Version index to node, of the nodes that other libraries must have."""
        section = self._find(_VERSION_NEEDS)
        if section is None:
            return {}
        strings = self._strings_of(section)
        table = self._part(section.start, section.size, "its version needs")
        nodes: dict[int, str] = {}
        for entry in _chain(table, 0, _NEED):
            for one in _chain(table, entry[0] + entry[4], _NEED_ENTRY):
                nodes[one[3]] = self._text(strings, one[4])
        return nodes


def _chain(table: bytes, start: int, layout: struct.Struct) -> Iterator[tuple[int, ...]]:
    """The records of a list, each with its place in front; a record's last field is the distance to the next one."""
    while start + layout.size <= len(table):
        record = layout.unpack_from(table, start)
        yield (start, *record)
        if not record[-1]:
            return
        start += record[-1]
