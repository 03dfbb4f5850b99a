"""The report of a run, as a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from memlab.analysis.breakdown import BEFORE, ELSEWHERE, Breakdown
from memlab.analysis.leak import short_line
from memlab.analysis.modules import Module, held_tree
from memlab.analysis.summary import DeviceSummary, Summary, TensorGroup
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import UNBOUNDED, format_bytes, format_seconds, one_line
from memlab.views import theme
from memlab.views.modules import each_of
from memlab.views.page import Beside, Folded, Page, PageLines, Part
from memlab.views.table import Cell, Column, Table

_ROWS_SHOWN = {"category": 7, "phase": 5, "module": 6, "line": 4, "tensor": 6}
_NAME = 48
_OUTSIDE = "outside any module"
_LEVELS = (
    Column("", limit=_NAME), Column("peak", "bytes"), Column("at start", "bytes"), Column("at end", "bytes"),
    Column("not freed", "change"),
)  # fmt: skip
_WHEN = Column("when", "seconds")
_LEAST = 200  # a row is at least this part of the whole
_Bar = tuple[str, str, int, str]
"""A row with a bar: name, how many of which size, bytes, colour."""


def report(summary: Summary, pointer: str = "", verdict: str = "") -> Page:
    """The page of a run; `pointer` is a line with the next step, `verdict` whether a predicted run fits."""
    held = ("allocated", "reserved")
    shown = [one for one in summary.devices if any(lv.peak.high_bytes > 0 for lv in one.levels if lv.of in held)]
    shown = shown or list(summary.devices[:1])
    of = SIMULATED_GPU if summary.provenance == "simulated" else summary.provenance
    source = (of, format_seconds(summary.duration_s)) if summary.has_times else (of,)
    facts = ("memlab", summary.name, *source, summary.engine)
    parts: list[Part] = [" · ".join(filter(None, facts))]
    for number, device in enumerate(shown):
        parts += [PageLines((), headline(device, summary.provenance))] if number else []
        parts.append(_levels(device, summary.has_times))
        # Categories imply phases; single tensors are more than sums of them.
        known = {share.by for share in device.shares}
        left_out = {"tensor", "phase" if "category" in known else ""}
        tables = {share.by: share_table(share, summary.code) for share in device.shares if share.by not in left_out}
        lines = tables.pop("line", None)
        parts.append(Beside(tuple(tables.values())))
        if device.tensors:
            parts.append(Folded("Largest tensors at the peak", _tensors(device, summary.code), is_open=True))
        if lines is not None and len(lines.rows) > 1:
            parts.append(Folded("Lines that hold the peak", lines))
    title = headline(shown[0], summary.provenance) if shown else "No measured device was used."
    title = f"{verdict[:1].upper()}{verdict[1:]}. {title}" if verdict else title
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
    capacity = format_bytes(device.capacity_bytes) if device.capacity_bytes > 0 else ""
    known = ", ".join(filter(None, (device.name, capacity)))
    return Table(f"{device.label} ({known})" if known else device.label, columns, tuple(rows), tuple(notes))


def tells_where(share: Breakdown) -> bool:
    """Whether one of its rows has a name: not if all that is large is on no known line, or outside any module."""
    large = {name for name, count in share.items() if count * _LEAST >= share.total_bytes}
    return bool(large - {ELSEWHERE})


def share_table(share: Breakdown, code: Mapping[str, str] | None = None) -> Table:
    """The largest shares with bars, and the rest in one more row; `code` is the text of lines."""
    named: list[_Bar] = []
    if share.by == "module":
        named = _modules(share)
    else:
        for name, count in share.items():
            colour = theme.CATEGORIES.get(name, "") if share.by == "category" else ""
            called = _with_code(name, code or {}) if share.by == "line" else one_line(name, _NAME)
            named.append((called, "", count, colour))
    return _bars(f"peak by {share.by}", named, share.total_bytes, _ROWS_SHOWN.get(share.by, 5))


def _bars(head: str, named: Sequence[_Bar], total: int, most: int) -> Table:
    """The largest, and the rest in one more row."""
    total = max(total, 1)
    large = [one for one in named if one[2] * _LEAST >= total]  # no row for "0 %"
    shown = (large or named)[:most]
    rows: list[tuple[Cell, ...]] = [(name, each, count, count / total) for name, each, count, _ in shown]
    if len(named) > len(shown):
        rest = total - sum(count for _, _, count, _ in shown)
        rows.append((f"{len(named) - len(shown):,} more", "", rest, rest / total))
    columns = (
        Column(head, limit=2 * _NAME, wraps=True),
        Column("", limit=40),
        Column("allocated", "bytes"),
        Column("share", "share"),
    )
    return Table("", columns, tuple(rows), bar=2, colours=tuple(colour for *_, colour in shown))


def _modules(share: Breakdown) -> list[_Bar]:
    """The modules, equal layers folded; the largest are split into their submodules as long as the rows are few."""
    roots, outside = held_tree(share)
    waiting, whole = list(roots), list[Module]()
    while waiting:
        largest = max(waiting, key=lambda module: module.held_bytes)
        waiting.remove(largest)
        below = [replace(largest, held_bytes=largest.own_bytes, children=())] if largest.own_bytes else []
        below += [child for child in largest.children if child.held_bytes]
        large = [one for one in (*waiting, *whole, *below) if one.held_bytes * _LEAST >= share.total_bytes]
        if largest.children and len(large) <= _ROWS_SHOWN["module"] - 1:
            waiting += below
        else:
            whole.append(largest)
    named = [(one_line(one.path, _NAME), each_of(one) if one.layers > 1 else "", one.held_bytes, "") for one in whole]
    named += [(_OUTSIDE if name == ELSEWHERE else name, "", count, "") for name, count in outside.items()]
    return sorted(named, key=lambda bar: -bar[2])


def _tensors(device: DeviceSummary, code: Mapping[str, str]) -> Table:
    """The largest tensors, alike ones in one row."""
    named: list[_Bar] = []
    for group in device.tensors:
        each = f"{group.count:,} × {format_bytes(group.tensor_bytes)}" if group.count > 1 else ""
        called = one_line(group.name, 2 * _NAME) if group.name else _origin(group, code)
        named.append((called, each, group.nbytes, theme.CATEGORIES.get(group.category, "")))
    return _bars("", named, sum(group.nbytes for group in device.tensors), _ROWS_SHOWN["tensor"])


def _origin(group: TensorGroup, code: Mapping[str, str]) -> str:
    """What made a tensor that has no name: its category, operator, module and line, as far as they are known."""
    operator = re.sub(r"^aten[.:]+|\.\w+$", "", group.operator)
    what = group.category if group.category != "other" else "tensor"
    made = [f"made by {operator}" if operator else "", f"in {group.module}" if group.module else ""]
    if group.phase == BEFORE:
        made.append(f"from {BEFORE}")
    elif not group.module and group.phase in ("backward", "optimizer"):
        made.append(f"in {group.phase}")
    line = f", {_with_code(group.line, code)}" if group.line else ""
    if not any(made) and not line:
        made.append("of unknown origin")
    return one_line(" ".join(filter(None, (what, *made))) + line, 2 * _NAME)


def _with_code(line: str, code: Mapping[str, str]) -> str:
    """A line with its text, where it is known."""
    if line == ELSEWHERE:
        return "no known line"
    text = code.get(line, "").strip()
    return f"{_line(line)}  {one_line(text, _NAME)}" if text else _line(line) if ":" in line else line
