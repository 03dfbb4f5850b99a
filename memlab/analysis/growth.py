"""What each cell of a notebook did not free, and which cells hold more each time they are run.

A cell grows if what one run left under a name still exists when the next run ends, which left as much again under the same
name; or if what it replaces under a name gets larger from run to run, four times in a row. A name that is replaced, emptied
in between, or changes its size at random does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memlab.analysis.peak import Peak
from memlab.units import UNBOUNDED, KiB

MIN_GROWTH_BYTES = 16 * KiB
"""The smallest growth per run that is flagged: kept scalars do not matter."""
_REPLACED_RUNS = 4
_OUTPUT = re.compile(r"_oh\b|_i?\d+\b|_{1,3}(?![\w])")
_NAME = re.compile(r"[^\W\d]\w*")
_COLUMNS = [
    "cell", "text", "again", "device", "before_bytes", "peak_low_bytes", "peak_high_bytes", "after_bytes",
    "left_bytes", "still_bytes", "names", "grows", "duration_s", "status", "tracked",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Left:
    """A storage that exists at the end of a cell and not at its start; `path` is "" where its name was not searched.

    `died` is the index of the entry during which it was freed, None while it exists.
    """

    path: str
    device: str
    nbytes: int
    category: str = "other"
    died: int | None = None

    @property
    def root(self) -> str:
        """The variable behind the path: "losses" for "losses[17]", "Out" for all that IPython keeps of results."""
        if _OUTPUT.match(self.path):
            return "Out"
        named = _NAME.match(self.path)
        is_variable = named is not None and self.path[named.end() : named.end() + 1] in ("", ".", "[")
        return named[0] if named is not None and is_variable else self.path.split(" -> ")[0]

    def is_there_after(self, index: int) -> bool:
        """Whether it still existed when entry `index` ended."""
        return self.died is None or self.died > index


@dataclass(frozen=True, slots=True)
class LevelAfterRun:
    """Allocated bytes of one device over a cell; `peak` is None where it is unknown."""

    device: str
    before_bytes: int
    after_bytes: int
    peak: Peak | None = None

    @property
    def left_bytes(self) -> int:
        """What the cell did not free; negative where it freed more than it allocated."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One executed cell. `number` is its execution count, `cell` identifies its text, `again` counts earlier runs.

    `left` is what it did not free, as far as Python sees it; if the search would have taken too long `is_whole` is False,
    and a later cell may be charged. `notes` say what was not seen.
    """

    index: int
    number: int
    text: str
    cell: str
    again: int
    duration_s: float
    status: str
    is_tracked: bool
    levels: tuple[LevelAfterRun, ...]
    left: tuple[Left, ...]
    is_whole: bool = True
    notes: tuple[str, ...] = ()

    def unnamed_bytes(self, device: str) -> int:
        """What the cell did not free on a device beyond `left`: rounding, and what Python does not see."""
        seen = sum(one.nbytes for one in self.left if one.device == device and one.is_there_after(self.index))
        level = next((level.left_bytes for level in self.levels if level.device == device), 0)
        return max(level - seen, 0)


@dataclass(frozen=True, slots=True)
class Growth:
    """A cell that leaves more under one name each time it is run: `bytes_per_run`, over the last `runs` runs.

    `still_bytes` is what still exists of what those runs left under the name.
    """

    cell: str
    number: int
    text: str
    name: str
    device: str
    bytes_per_run: int
    runs: int
    still_bytes: int


@dataclass(frozen=True)
class Accounts:
    """The ledger as a value: the entries, oldest first, and which cells grow."""

    entries: tuple[Entry, ...]
    growths: tuple[Growth, ...]
    is_on: bool
    notes: tuple[str, ...] = ()

    def to_pandas(self) -> Any:
        """One row per cell and device: sizes in bytes, the peak as low and high (missing where unknown)."""
        import pandas

        grows = {(growth.cell, growth.device): growth.name for growth in self.growths}
        rows = []
        for entry, level in ((one, level) for one in self.entries for level in one.levels):
            mine = [one for one in entry.left if one.device == level.device]
            low, high = level.peak.bytes if level.peak is not None else (None, None)
            row = {"cell": entry.number, "text": entry.text, "again": entry.again, "device": level.device}
            row |= {"before_bytes": level.before_bytes, "peak_low_bytes": low}
            row |= {"peak_high_bytes": None if high == UNBOUNDED else high, "after_bytes": level.after_bytes}
            row |= {"left_bytes": level.left_bytes, "still_bytes": sum(one.nbytes for one in mine if one.died is None)}
            row["names"] = ", ".join(dict.fromkeys(one.root for one in mine if one.path))
            row |= {"grows": grows.get((entry.cell, level.device), ""), "duration_s": entry.duration_s}
            rows.append(row | {"status": entry.status, "tracked": entry.is_tracked})
        frame = pandas.DataFrame(rows, columns=_COLUMNS)
        return frame.astype({"peak_low_bytes": float, "peak_high_bytes": float})

    def left_to_pandas(self) -> Any:
        """One row per storage that a cell left."""
        import pandas

        names = ["cell", *(field.name for field in dataclasses.fields(Left))]
        rows = [(entry.number, *dataclasses.astuple(one)) for entry in self.entries for one in entry.left]
        return pandas.DataFrame(rows, columns=names)


# --- growth ---------------------------------------------------------------------------------------------------------

_Named = list[tuple[int, Left]]
"""(index of the entry, storage) left under one name on one device."""


def growing(entries: Sequence[Entry]) -> tuple[Growth, ...]:
    """Which cells grow when they are run again, and under which name, the largest first."""
    runs: dict[str, list[Entry]] = {}
    named: dict[tuple[str, str], _Named] = {}
    for entry in entries:
        runs.setdefault(entry.cell, []).append(entry)
        for one in entry.left:
            if one.path:
                named.setdefault((one.device, one.root), []).append((entry.index, one))
    found = []
    for same in runs.values():
        last, numbers = same[-1], [run.index for run in same]
        for device, name in dict.fromkeys((one.device, one.root) for one in last.left if one.path):
            left = named[device, name]
            added = _added(left, numbers) or _replaced(left, numbers)
            if added and min(added) >= MIN_GROWTH_BYTES:
                each = round(sum(added) / len(added))
                still = sum(one.nbytes for index, one in left if one.died is None and index in numbers)
                found.append(Growth(last.cell, last.number, last.text, name, device, each, len(added), still))
    return tuple(sorted(found, key=lambda growth: -growth.bytes_per_run))


def _added(named: _Named, runs: list[int]) -> list[int]:
    """What each of the last runs left under the name, as far back as the next run did not free it; [] for fewer than two."""
    added: list[int] = []
    following = runs[-1]
    for run in reversed(runs):
        mine = [one for index, one in named if index == run]
        left = sum(one.nbytes for one in mine if one.is_there_after(run))
        stays = sum(one.nbytes for one in mine if one.is_there_after(following))
        if not left or stays < 0.5 * left:
            break
        added.append(left)
        following = run
    return added if len(added) > 1 else []


def _replaced(named: _Named, runs: list[int]) -> list[int]:
    """The increase under the name after each of the last runs, where it is steady."""
    after = []
    for run in runs[-_REPLACED_RUNS:]:
        after.append(sum(one.nbytes for index, one in named if index <= run and one.is_there_after(run)))
    steps = [later - earlier for earlier, later in itertools.pairwise(after)]
    is_steady = len(steps) == _REPLACED_RUNS - 1 and min(steps) >= 0.5 * max(steps)
    return steps if is_steady else []
