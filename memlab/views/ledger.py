"""The ledger as a page: one row per busy cell and device, and what grows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from memlab.analysis.growth import Accounts, Entry, Growth, Left, LevelAfterRun
from memlab.units import format_bytes, number_of, one_line
from memlab.views import theme
from memlab.views.page import Page, PageLines, Part
from memlab.views.table import Cell, Column, Table

ROWS_SHOWN = 30
_NAMES_SHOWN = 3
_FEW = 3  # runs of a cell that are alike, before they become one row
_LEAST_UNNAMED = 1 << 20
_EMPTY = "No cell yet: after %load_ext memlab each cell gets an entry."
_FREED_SINCE = (
    "Freed since: alive when its cell had ended, freed by a later one; not freed by its cell, and no longer alive."
)
_COLUMNS = (
    Column("cell"), Column("", limit=80, is_early=True), Column("device"), Column("before", "bytes"), Column("peak", "bytes"),
    Column("after", "bytes"), Column("not freed", "change"), Column("still alive", "bytes"),
    Column("what was not freed, by name", limit=400, wraps=True, is_early=True),
)  # fmt: skip


def ledger_page(accounts: Accounts) -> Page:
    """The latest cells that did something; the rest is counted."""
    busy = []  # if a cell left or freed something, or its peak exceeded both ends
    for entry in accounts.entries:
        for level in entry.levels:
            rose = level.peak is not None and level.peak.low_bytes > max(level.before_bytes, level.after_bytes)
            if level.left_bytes or rose or any(one.device == level.device for one in entry.left):
                busy.append((entry, level))
    numbers = {entry.index: entry.number for entry in accounts.entries}
    groups = _alike(busy)[-ROWS_SHOWN:]
    shown = [one for group in groups for one in group]
    rows = tuple(_row(group, numbers) for group in groups)
    quiet = len(accounts.entries) - len({entry.index for entry, _ in busy})
    earlier = len(busy) - len(shown)
    notes = [f"{number_of(earlier, 'earlier row')} not shown; .to_pandas() has all."] if earlier else []
    notes += [f"{number_of(quiet, 'cell')} freed everything and had no peak."] if quiet else []
    notes += [f"Cell {_number(entry.number)}: {one_line(note, 200)}." for entry, _ in shown for note in entry.notes]
    notes += [f"{one_line(note, 200)}." for note in accounts.notes]
    notes += [] if accounts.entries else [_EMPTY]
    notes += [_FREED_SINCE] if any("(freed since" in str(row[-1]) for row in rows) else []
    count = number_of(len(accounts.entries), "cell")
    parts: list[Part] = [Table("", _COLUMNS, rows)] if rows else []
    parts += [
        PageLines(tuple(map(_growth, accounts.growths)), colour=theme.WARNING),
        PageLines(tuple(dict.fromkeys(notes))),
    ]
    return Page(f"memlab ledger · {count}{'' if accounts.is_on else ' · off (%memledger on)'}", tuple(parts))


Busy = tuple[Entry, LevelAfterRun]
"""A cell that did something on a device."""


def _alike(busy: Sequence[Busy]) -> list[list[Busy]]:
    """Merge runs of one cell that follow each other and leave the same; fewer than three stay as they are."""
    groups: list[list[Busy]] = []
    for _, run in itertools.groupby(busy, lambda one: (one[0].text, one[0].status, one[1].device, one[1].left_bytes)):
        group = list(run)
        groups += [group] if len(group) >= _FEW else [[one] for one in group]
    return groups


def _row(group: Sequence[Busy], numbers: Mapping[int, int]) -> tuple[Cell, ...]:
    """One run of a cell on one device, or several that are alike: levels before the first, after the last, the highest peak."""
    (first, begin), (entry, level) = group[0], group[-1]
    mine = [one for of, _ in group for one in of.left if one.device == level.device]
    again = f" (run {entry.again + 1})" if entry.again else ""
    number = _number(entry.number)
    if len(group) > 1:
        again, number = f" ({len(group)} runs)", f"{_number(first.number)} … {number}"
    status = "" if entry.status == "ok" else f" ({one_line(entry.status, 40)})"
    text, peaks = one_line(entry.text, 40) + again + status, [of.peak.bytes for _, of in group if of.peak is not None]
    alive = sum(one.nbytes for one in mine if one.died is None) if mine else None
    left = sum(of.left_bytes for _, of in group)
    levels = (level.device, begin.before_bytes, max(peaks, default=None), level.after_bytes, left, alive)
    names = _names(entry, level, [one for one in entry.left if one.device == level.device], numbers)
    return number, text, *levels, f"each: {names}" if len(group) > 1 and names else names


def _number(number: int) -> str:
    """The execution count as notebooks write it; unknown for some interrupted cells."""
    return f"[{number or '?'}]"


def _names(entry: Entry, level: LevelAfterRun, mine: list[Left], numbers: Mapping[int, int]) -> str:
    """What a cell did not free, by variable, the largest first, and what has been freed since."""
    groups: dict[str, list[Left]] = {}
    for one in mine:
        if one.is_there_after(entry.index) and (one.path or one.died is None):
            groups.setdefault(one.root, []).append(one)
    ordered = sorted(groups.values(), key=lambda group: -sum(one.nbytes for one in group))
    parts = []
    for group in ordered[:_NAMES_SHOWN]:
        name = group[0].path if len(group) == 1 else group[0].root
        count = f" ({len(group)} tensors)" if len(group) > 1 else ""
        size, freed = format_bytes(sum(one.nbytes for one in group)), ""
        if all(one.died is not None for one in group):
            number = numbers.get(max(one.died for one in group if one.died is not None))
            freed = f" (freed since, in {_number(number)})" if number else " (freed since)"
        parts.append(f"{one_line(name, 60) or 'no name found'}{count} {size}{freed}")
    if len(ordered) > _NAMES_SHOWN:
        parts.append(number_of(len(ordered) - _NAMES_SHOWN, "more name"))
    unnamed = entry.unnamed_bytes(level.device)
    if unnamed >= _LEAST_UNNAMED:
        what = "rounding and what Python does not see" if entry.is_whole else "not inspected"
        parts.append(f"{what} {format_bytes(unnamed)}")
    return ", ".join(parts)


def _growth(growth: Growth) -> str:
    each, name = format_bytes(growth.bytes_per_run), one_line(growth.name, 60) or "an unnamed tensor"
    return (
        f"Cell {_number(growth.number)} grows when run again: {name} by {each} in each of the last {growth.runs} runs"
        f" ({growth.device}; {one_line(growth.text, 40)}); {format_bytes(growth.still_bytes)} of it is still alive."
    )
