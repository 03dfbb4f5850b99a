"""The file of calibrations, one for each GPU that was measured on this machine. Reading it needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.errors import PredictionError
from memlab.units import ByteRange, format_bytes, one_line

VERSION = 1
_MAX_FILE = 1 << 20
_MAX_KEPT = 200


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements of one GPU with one driver and one PyTorch."""

    card: str
    capability_major: int
    capability_minor: int
    multiprocessors: int
    driver: str
    torch: str
    total_memory_bytes: int
    context_low_bytes: int
    context_high_bytes: int
    blas_workspace_bytes: int
    convolution_workspace_bytes: int
    measured_at_s: int

    def __str__(self) -> str:
        return (
            f"{self.card} (driver {self.driver}, PyTorch {self.torch}): {format_bytes(self.total_memory_bytes)} usable, "
            f"context {self.context_bytes}, cuBLAS workspace {format_bytes(self.blas_workspace_bytes)}, "
            f"cuDNN workspace up to {format_bytes(self.convolution_workspace_bytes)}"
        )

    @property
    def context_bytes(self) -> ByteRange:
        """Memory of the process outside the allocator: the bare context, and after the common kernels."""
        return ByteRange(self.context_low_bytes, self.context_high_bytes)


def path() -> Path:
    """The file of calibrations: in MEMLAB_CONFIG, else in the system's configuration folder."""
    if own := os.environ.get("MEMLAB_CONFIG"):
        return Path(own) / "calibration.json"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "memlab" / "calibration.json"


def kept() -> tuple[Calibration, ...]:
    """All calibrations of this machine; an unreadable file gives a warning and is ignored."""
    try:
        where = path()
        facts = where.stat()
    except (OSError, RuntimeError):
        return ()
    return _read_once(where, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=4)
def _read_once(where: Path, *state: int) -> tuple[Calibration, ...]:
    try:
        return read(where)
    except PredictionError as error:
        warnings.warn(f"{error} It is ignored.", stacklevel=4)
        return ()


def read(where: Path) -> tuple[Calibration, ...]:
    """The calibrations in an untrusted file: PredictionError with one line if one is invalid."""
    try:
        if where.stat().st_size > _MAX_FILE:
            raise ValueError(f"it has more than {format_bytes(_MAX_FILE)}")
        found = json.loads(where.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        entries = found.get("calibrations")
        if not isinstance(entries, list) or len(entries) > _MAX_KEPT:
            raise ValueError(f"it holds no list of at most {_MAX_KEPT} calibrations")
        return tuple(parsed(entry) for entry in entries)
    except (OSError, ValueError, RecursionError, PredictionError) as error:
        raise PredictionError(f"the calibration file {str(where)!r} cannot be used: {one_line(str(error))}.") from None


def keep(measured: Calibration) -> Path:
    """Add a calibration to the file, atomically; an unreadable file is renamed and kept."""
    where, before = path(), tuple[Calibration, ...]()
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        if where.exists():
            try:
                before = read(where)
            except PredictionError:
                where.replace(where.with_name(f"{where.name}.unreadable"))
        same = (measured.card, measured.driver, measured.torch)  # which it replaces
        others = [one for one in before if (one.card, one.driver, one.torch) != same]
        entries = [dataclasses.asdict(one) for one in [*others, measured][-_MAX_KEPT:]]
        from memlab.trace.file import atomic_file

        with atomic_file(where) as file:
            file.write(json.dumps({"version": VERSION, "calibrations": entries}, indent=1).encode())
    except OSError as error:
        raise PredictionError(f"cannot keep the calibration in {str(where)!r}: {error.strerror or error}.") from None
    return where


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable(),
    "int": lambda value: type(value) is int and 0 <= value < 1 << 50,
}


def parsed(facts: Any) -> Calibration:
    """A calibration from untrusted values; PredictionError if one is out of range."""
    if not isinstance(facts, Mapping):
        raise PredictionError("a calibration must be a table of values")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Calibration)}
    for name, kind in kinds.items():
        if not _CHECKS[kind](facts.get(name)):
            raise PredictionError(f"{name} of a calibration is {facts.get(name)!r:.80}")
    measured = Calibration(**{name: facts[name] for name in kinds})
    if not 0 <= measured.context_low_bytes <= measured.context_high_bytes < measured.total_memory_bytes:
        raise PredictionError(f"the context of {measured.card!r} does not lie within its memory")
    return measured
