"""What a card of this machine really takes, measured once and kept: `calibrate()` measures, `find` uses it from then on.

A fresh process makes a CUDA context, multiplies and convolves in the usual types, and says what it had of the device at
each stage. Kept are JSON files' worth of numbers in the user's configuration folder, by card, driver and PyTorch.

Limits: the context grows with the kernels that a program uses, so that what is kept is an interval: the bare context, and
the one after the common kernels. Where the driver does not tell processes apart (Windows, some containers) only what the whole
device has in use is known, and the interval begins at 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memlab.errors import PredictionError
from memlab.predictor.cards import Card
from memlab.trace.whole import whole
from memlab.units import format_bytes, one_line

VERSION = 1
LIMIT_S = 300.0
_MAX_FILE = 1 << 20
_MAX_KEPT = 200


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured of one card with one driver and one PyTorch."""

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
        context = f"{format_bytes(self.context_low_bytes)} to {format_bytes(self.context_high_bytes)}"
        return (
            f"{self.card} (driver {self.driver}, PyTorch {self.torch}): {format_bytes(self.total_memory_bytes)} usable, "
            f"context {context}, cuBLAS workspace {format_bytes(self.blas_workspace_bytes)}, "
            f"cuDNN workspace up to {format_bytes(self.convolution_workspace_bytes)}"
        )

    @property
    def key(self) -> tuple[str, str, str]:
        """A later measurement of the same replaces this one."""
        return self.card, self.driver, self.torch


def calibrate(device: int = 0) -> Calibration:
    """Measure a GPU of this machine in a fresh process, keep the result for predictions, and return it."""
    if not (torch.backends.cuda.is_built() and torch.cuda.is_available()):
        raise PredictionError("calibrate needs a GPU that PyTorch can use, and this machine has none.")
    measured = parsed(_measured_apart(device))
    keep(measured)
    return measured


def main(arguments: Sequence[str] = ()) -> int:
    """`python -m memlab calibrate [DEVICE]`: print what was measured, and where it is kept."""
    try:
        device = int(arguments[0]) if arguments else 0
        print(calibrate(device))
        print(f"kept in {path()}")
    except ValueError:
        print(f"calibrate takes the number of a device, got {arguments[0]!r:.80}.", file=sys.stderr)
        return 2
    except PredictionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measured_apart(device: int) -> dict[str, Any]:
    """The measurement in a process of its own: a context is measured by making one."""
    command = [sys.executable, "-m", "memlab.predictor.measure_card", str(device)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=_paths(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PredictionError(f"the calibration did not end well: {one_line(str(error))}") from None
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PredictionError(f"the calibration failed: {one_line(last)}") from None


def _paths() -> dict[str, str]:
    """The environment, with this memlab where the child looks for it first."""
    ours = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))}


# --- used by `find` ----------------------------------------------------------------------------------------------------------


def applied(card: Card) -> Card:
    """The card with what was measured on one like it, if that was done on this machine."""
    measured = _best(card, kept())
    if measured is None:
        return card
    source = f"measured here with driver {measured.driver}, PyTorch {measured.torch}"
    usable = measured.total_memory_bytes
    context = (min(measured.context_low_bytes, usable - 1), min(measured.context_high_bytes, usable - 1))
    return dataclasses.replace(
        card,
        total_bytes=max(card.total_bytes, usable),
        usable_bytes=usable,
        usable_high_bytes=usable,
        usable_source=source,
        context_bytes=context,
        context_source=source,
        assumptions=tuple(text for text in card.assumptions if "takes" not in text and "PyTorch sees" not in text),
    )


def own_card(name: str) -> Card | None:
    """A card that only a calibration on this machine knows, by the name that its driver reports."""
    measured = next((one for one in kept() if one.card.lower() == name.strip().lower()), None)
    if measured is None:
        return None
    capability = (measured.capability_major, measured.capability_minor)
    card = Card(measured.card, measured.total_memory_bytes, capability, multiprocessors=measured.multiprocessors)
    return applied(card)


def _best(card: Card, measured: Sequence[Calibration]) -> Calibration | None:
    """The measurement of such a card with this PyTorch, else the latest of one."""
    from memlab.predictor.cards import name_of

    fitting = [one for one in measured if one.card == card.name or name_of(one.card) == card.name]
    ours = [one for one in fitting if one.torch == torch.__version__]
    return max(ours or fitting, key=lambda one: one.measured_at_s, default=None)


# --- the file ----------------------------------------------------------------------------------------------------------------


def path() -> Path:
    """Where calibrations are kept: MEMLAB_CONFIG, else the folder that the system has for settings."""
    if own := os.environ.get("MEMLAB_CONFIG"):
        return Path(own) / "calibration.json"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "memlab" / "calibration.json"


_seen: dict[str, tuple[tuple[int, int], tuple[Calibration, ...]]] = {}


def kept() -> tuple[Calibration, ...]:
    """All that was ever measured here; a file that cannot be read is said in a warning and ignored."""
    try:
        where = path()
        facts = where.stat()
    except (OSError, RuntimeError):
        return ()
    state = (facts.st_mtime_ns, facts.st_size)
    known = _seen.get(str(where))
    if known is None or known[0] != state:
        try:
            known = (state, read(where))
        except PredictionError as error:
            warnings.warn(f"{error} It is ignored.", stacklevel=3)
            known = (state, ())
        _seen[str(where)] = known
    return known[1]


def read(where: Path) -> tuple[Calibration, ...]:
    """The calibrations in a file, none of which is trusted: PredictionError with one line where one is not as it should be."""
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
    """Add a calibration to the file, which is written whole or not at all; an unreadable one is kept beside, renamed."""
    where = path()
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        others = _readable(where)
        kept_now = [one for one in others if one.key != measured.key] + [measured]
        content = {"version": VERSION, "calibrations": [dataclasses.asdict(one) for one in kept_now[-_MAX_KEPT:]]}
        with whole(where) as file:
            file.write(json.dumps(content, indent=1).encode())
    except OSError as error:
        raise PredictionError(f"cannot keep the calibration in {str(where)!r}: {error.strerror or error}.") from None
    return where


def _readable(where: Path) -> tuple[Calibration, ...]:
    if not where.exists():
        return ()
    try:
        return read(where)
    except PredictionError:
        where.replace(where.with_name(f"{where.name}.unreadable"))
        return ()


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable(),
    "int": lambda value: type(value) is int and 0 <= value < 1 << 50,
}


def parsed(facts: Any) -> Calibration:
    """A calibration from plain values of anybody; PredictionError where one is out of range."""
    if not isinstance(facts, Mapping):
        raise PredictionError("a calibration is no table of values")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Calibration):
        value = facts.get(field.name)
        if not _CHECKS[str(field.type)](value):
            raise PredictionError(f"{field.name} of a calibration is {value!r:.80}")
        values[field.name] = value
    measured = Calibration(**values)
    if not 0 <= measured.context_low_bytes <= measured.context_high_bytes < measured.total_memory_bytes:
        raise PredictionError(f"the context of {measured.card!r} does not lie within its memory")
    return measured
