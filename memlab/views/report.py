"""The report of a run and of an out-of-memory error, as pages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memlab.analysis.breakdown import ELSEWHERE, Breakdown
from memlab.analysis.leak import short_line
from memlab.analysis.oom.explain import Explanation, Named, amount_text
from memlab.analysis.summary import DeviceSummary, Summary
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import UNBOUNDED, format_bytes, format_seconds, one_line
from memlab.views import theme
from memlab.views.page import Beside, Folded, Page, PageLines, Part
from memlab.views.table import Cell, Column, Table

_ROWS_SHOWN = {"category": 7, "phase": 5, "module": 5, "tensor": 5}
_NAME = 48
_OUTSIDE = "outside any module"
_LEVELS = (
    Column("", limit=_NAME), Column("peak", "bytes"), Column("at start", "bytes"), Column("at end", "bytes"),
    Column("not freed", "change"),
)  # fmt: skip
_WHEN = Column("when", "seconds")


def report(summary: Summary, pointer: str = "") -> Page:
    """The page of a run; `pointer` is a line with the next step."""
    held = ("allocated", "reserved")
    shown = [one for one in summary.devices if any(lv.peak.high_bytes > 0 for lv in one.levels if lv.of in held)]
    shown = shown or list(summary.devices[:1])
    source = (summary.provenance, format_seconds(summary.duration_s)) if summary.has_times else (SIMULATED_GPU,)
    facts = ("memlab", summary.name, *source, summary.engine)
    parts: list[Part] = [" · ".join(filter(None, facts))]
    for number, device in enumerate(shown):
        parts += [PageLines((), headline(device, summary.provenance))] if number else []
        parts.append(_levels(device, summary.has_times))
        # Categories imply phases.
        known = {share.by for share in device.shares}
        left_out = "phase" if "category" in known else ""
        parts.append(Beside(tuple(share_table(share) for share in device.shares if share.by != left_out)))
    title = headline(shown[0], summary.provenance) if shown else "No device was used."
    parts.append(PageLines(summary.notes, colour=theme.WARNING))
    if summary.gaps:
        parts.append(Folded("Not seen", PageLines(tuple(f"{gap.name}: {gap.text}" for gap in summary.gaps))))
    return Page(title, (*parts, *([pointer] if pointer else ())))


def headline(device: DeviceSummary, provenance: str) -> str:
    """The peak in one line: how much, in which phase, and on which line."""
    phase, module, line = (device.at.get(key, "") for key in ("phase", "module", "line"))
    phase, module = "" if phase == "other" else phase, one_line(module, 80)
    where = f"{phase} of {module}" if phase and module else phase or module
    place = ", ".join(filter(None, (f"in {where}" if where else "", _line(line) if line else "")))
    peak = f"{'Predicted peak' if provenance == 'predicted' else 'Peak'} {device.levels[0].peak.bytes} allocated"
    return f"{peak} {place}".rstrip()


def _line(line: str) -> str:
    text = re.sub(r"^line (\S+) of a cell$", r"cell line \1", short_line(line))
    return re.sub(r"^(?:cell |In)\[(\d+)\]:", r"cell [\1] line ", text)


def _levels(summary: DeviceSummary, has_times: bool) -> Table:
    """The figures of a device: one row each for allocated, reserved and used."""
    device, peak = summary.device, summary.levels[0].peak
    columns = (*_LEVELS[:2], _WHEN, *_LEVELS[2:]) if has_times else _LEVELS
    rows: list[tuple[Cell, ...]] = []
    for level in summary.levels:
        when = (level.peak.time_ns / 1e9 if level.peak.time_ns >= 0 else None,) if has_times else ()
        start, end = (count if count >= 0 else None for count in (level.start_bytes, level.end_bytes))
        rows.append((level.of, level.peak.bytes, *when, start, end, level.left_bytes))
    exactly = f"between {peak.low_bytes:,} and {peak.high_bytes:,} bytes"
    if peak.is_exact:
        exactly = f"{peak.low_bytes:,} bytes exactly"
    elif peak.high_bytes >= UNBOUNDED:
        exactly = f"at least {peak.low_bytes:,} bytes"
    notes = [f"Peak allocated: {exactly}, from {peak.source}."]
    troubles = {"ran out of memory": device.num_ooms, "released its cache and retried": device.num_alloc_retries}
    for what, count in troubles.items():
        if count:
            notes.append(f"The allocator {what} {'once' if count == 1 else f'{count} times'}.")
    capacity = f", {format_bytes(device.capacity_bytes)}" if device.capacity_bytes > 0 else ""
    return Table(f"{device.label} ({device.name}{capacity})", columns, tuple(rows), tuple(notes))


def share_table(share: Breakdown) -> Table:
    """The largest shares with bars, and the rest in one more row."""
    is_folded = share.by in ("tensor", "module")
    named = _folded(share) if is_folded else [(_called(share.by, name), count) for name, count in share.items()]
    total = max(share.total_bytes, 1)
    large = [one for one in named if one[1] * 200 >= total]  # no row for "0 %"
    shown = (large or named)[: _ROWS_SHOWN.get(share.by, 5)]
    rows: list[tuple[Cell, ...]] = [(name, count, count / total) for name, count in shown]
    if len(named) > len(shown):
        rest = share.total_bytes - sum(count for _, count in shown)
        rows.append((f"{len(named) - len(shown)} more", rest, rest / total))
    head = "largest tensors" if share.by == "tensor" else f"peak by {share.by}"
    colours = tuple(theme.CATEGORIES.get(name, "") if share.by == "category" else "" for name, _ in shown)
    columns = (Column(head, limit=2 * _NAME), Column("allocated", "bytes"), Column("share", "share"))
    return Table("", columns, tuple(rows), bar=1, colours=colours)


def _folded(share: Breakdown) -> list[tuple[str, int]]:
    """Merge equal layers (different index, same bytes) into one row; the largest first."""
    alike: dict[tuple[str, int], list[str]] = {}
    for name, count in share.items():
        alike.setdefault((re.sub(r"\d+", "#", name), count), []).append(name)
    groups = []
    for (_, count), names in alike.items():
        if len(names) < 3:
            groups += [(_called(share.by, name), count) for name in names]
            continue
        first, *_, last = sorted(names, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
        ends = f"{one_line(_called(share.by, first), 40)} … {one_line(last.rpartition(' of ')[2], 24)}"
        groups.append((f"{ends}: {len(names):,} × {format_bytes(count)}", count * len(names)))
    return sorted(groups, key=lambda group: -group[1])


def _called(by: str, name: str) -> str:
    """The name of a share; an unnamed tensor is called after the operator and line that made it."""
    if by == "line":
        return _line(name)
    if by == "module" and name == ELSEWHERE:
        return _OUTSIDE
    category, of, place = name.partition(" of ")
    if by == "tensor" and of and category in theme.CATEGORIES:
        where = _OUTSIDE if place == ELSEWHERE else f"of {_line(place) if ':' in place else place}"
        return one_line(f"unnamed {category} {where}", _NAME + 24)
    return one_line(name, _NAME)


_HOLDS = (Column("", limit=160), Column("", "bytes"), Column("", limit=300, wraps=True))


def oom_page(found: Explanation, cell: str = "", pointer: str = "") -> Page:
    """What happened, what to do, the numbers, and what is still alive."""
    actions: list[tuple[Cell, ...]] = []
    for number, action in enumerate(found.actions, 1):
        about = "about " if action.is_estimate and action.gives.low > 0 else ""
        enough = {True: " [enough for this request]", False: " [not enough alone]", None: ""}[action.is_enough]
        actions.append((f"{number}.", about + amount_text(action.gives), f"{action.text}{enough}"))
    terms = tuple((term.name, amount_text(term.amount), term.meaning) for term in found.terms)
    alive = f"Still alive on {found.label} afterwards: {format_bytes(found.alive_bytes)}, by what references it"
    parts: list[Part] = [PageLines(found.sentences)]
    parts += [Table("What to do", _HOLDS, tuple(actions))] if actions else []
    parts += [Table("The numbers", _HOLDS, terms)] if terms else []
    parts += [named_table(alive, found.named, found.more_named)] if found.named else []
    if found.shares:
        parts.append(Beside(tuple(map(share_table, found.shares)), "Allocated when memory ran out"))
    if found.gaps:
        parts.append(PageLines(tuple(f"- {gap}" for gap in found.gaps), "Not seen"))
    parts += [pointer] if pointer else []
    return Page(
        f"memlab · {f'{one_line(cell, 80)} · ' if cell else ''}{found.title}", tuple(parts), theme.WARNING
    ).remarked(found.remark)


def named_table(title: str, named: Sequence[Named], more: int = 0) -> Table:
    """What keeps memory alive, and the number of further entries."""
    rows: list[tuple[Cell, ...]] = []
    for one in named:
        count = f"{one.count} storages, " if one.count > 1 else ""
        rows.append((one.path or "(no name found)", one.nbytes, f"{count}{one.category}"))
    rows += [(f"and {more} more", None, None)] if more else []
    return Table(title, _HOLDS, tuple(rows))
