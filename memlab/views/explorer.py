"""The explorer: the stack of single allocations over time, as one piece of HTML that needs neither a kernel nor a network.

The blocks of a run are columns of numbers, compressed into the page; a worker of the browser draws what is seen of them.
The layout of the data: gzip of a JSON header, its length before it, and the columns that it lists, the bytes of each sorted by
significance, as small numbers compress better so.
"""

from __future__ import annotations

import base64
import gzip
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memlab.analysis.breakdown import names_of
from memlab.analysis.iterations import distinct
from memlab.analysis.peak import Peak, alive_at, peak
from memlab.analysis.timeline import Timeline, lives, timeline
from memlab.errors import MemlabError
from memlab.trace.columns import Array, Blocks, Category, Kind, Phase
from memlab.trace.file import saving
from memlab.trace.spans import phases
from memlab.trace.trace import Trace
from memlab.units import format_bytes, format_seconds
from memlab.views import theme
from memlab.views.page import Markup, Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table, safe

_SHOWN = 20
_TICK_NS = 1000
_SHORT_NS = 10_000_000
"""A run that is shorter has ticks of nanoseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class ExplorerRun:
    """What the explorer shows of one device of a run.

    `line_name` gives the name of a line as the reader knows it; `holders` is what keeps a block (by number) alive now, None
    where that cannot be known, as the run was measured elsewhere.
    """

    title: str
    trace: Trace
    device: int
    line_name: Callable[[str], str] = str
    holders: Mapping[int, Sequence[str]] | None = None
    peak: Peak = field(init=False)
    line: Timeline = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", timeline(self.trace, self.device))
        object.__setattr__(self, "peak", peak(self.trace, self.device, "allocated", self.line))

    def packed(self) -> bytes:
        """The compressed columns, with their header."""
        trace, line = self.trace, self.line
        block, begin, end, category, unseen = pieces(trace, self.device, line)
        first_row = lives(trace, self.device)[0][block]
        sizes, size = np.unique(trace.events.allocated_bytes[first_row], return_inverse=True)
        rounding = trace.events.allocated_bytes[first_row] - trace.events.requested_bytes[first_row]
        roundings, rounding = np.unique(rounding, return_inverse=True)
        is_old = trace.events.kind[first_row] == Kind.PREEXISTING
        facts = {"category": category, "phase": trace.blocks.phase[block], "old": is_old}
        facts |= {name: getattr(trace.blocks, name)[block] + 1 for name in Blocks.TEXTS}  # 0: unknown
        origin, rows = distinct(*facts.values())
        end_ns = max(trace.made_by.duration_ns, line.end_ns)
        tick_ns = max(_TICK_NS if end_ns > _SHORT_NS else 1, -(-end_ns // 0xFFFFFFFF))
        ticks = np.maximum.accumulate(line.time_ns) // tick_ns
        columns = {
            "time": np.diff(ticks, prepend=0), "begin": np.diff(begin, prepend=0), "age": end - begin,
            "block": block, "size": size, "rounding": rounding, "origin": origin, "sizes": sizes, "roundings": roundings,
        } | {f"of {name}": column[rows] for name, column in facts.items()}  # fmt: skip
        if len(trace.marks):
            phase = phases(trace.marks, trace.texts["mark"])
            columns |= {"phase time": phase.time_ns // tick_ns, "phase code": phase.value}
        return _joined(self._header(tick_ns, end_ns, unseen), columns)

    def _header(self, tick_ns: int, end_ns: int, unseen: int) -> dict[str, Any]:
        trace = self.trace
        texts = {name: ["", *trace.texts[name]] for name in Blocks.TEXTS}
        texts["line"] = ["", *map(self.line_name, trace.texts["line"])]
        texts["stack"] = ["", *("\n".join(map(self._frame, text.split("\n"))) for text in trace.texts["stack"])]
        rows, events = self.line.row, trace.events
        ooms = np.flatnonzero((events.kind == Kind.OOM) & (events.device == self.device))
        at = np.searchsorted(rows, ooms, side="right") - 1
        sizes = events.requested_bytes[ooms].tolist()
        lost = [b for b in trace.made_by.bounded if b.device == self.device and b.end_ns > b.begin_ns]
        row = int(np.searchsorted(rows, self.peak.row, side="right")) - 1
        return {
            "title": self.title, "tick_s": tick_ns / 1e9, "end_s": end_ns / 1e9, "has_times": trace.has_times,
            "peak": {"event": row if self.peak.time_ns >= 0 else -1, "bytes": self.peak.low_bytes, "exact": self.peak.is_exact},
            "capacity": trace.made_by.device(self.device).capacity_bytes, "unseen": unseen, "texts": texts,
            "ooms": list(zip(at.tolist(), sizes, strict=True)), "lost": [[b.begin_ns / 1e9, b.end_ns / 1e9] for b in lost],
            "holders": None if self.holders is None else {str(block): list(names) for block, names in self.holders.items()},
        }  # fmt: skip

    def _frame(self, frame: str) -> str:
        """A frame of a stack, "file:line function", with the reader's name of the line."""
        place, space, function = frame.partition(" ")
        return f"{self.line_name(place)}{space}{function}"

    @property
    def table(self) -> Table:
        """The largest blocks at the peak, for readers without the picture."""
        at = self.peak if self.peak.time_ns >= 0 else None
        row = at.row if at is not None else int(self.line.row[int(self.line.bytes.argmax())])
        rows = alive_at(self.trace, self.device, row)
        rows = rows[np.argsort(-self.trace.events.allocated_bytes[rows], kind="stable")]
        shown, trace = rows[:_SHOWN], self.trace
        blocks = trace.events.block[shown]
        columns = (Column("size", "bytes"), Column("category"), Column("tensor"), Column("shape"), Column("operator"),
                   Column("module"), Column("line"))  # fmt: skip
        cells = [
            (int(trace.events.allocated_bytes[row]), category, str(name),
             *(trace.text(column, int(getattr(trace.blocks, column)[block])) for column in ("shape", "op", "module")),
             self.line_name(trace.text("line", int(trace.blocks.line[block]))))
            for row, block, category, name in zip(
                shown.tolist(), blocks.tolist(), names_of(trace, shown, "category", row),
                names_of(trace, shown, "tensor", row), strict=True)
        ]  # fmt: skip
        rest = int(trace.events.allocated_bytes[rows[_SHOWN:]].sum())
        notes = (f"{len(rows) - len(shown):,} more blocks: {format_bytes(rest)}.",) if rest else ()
        when = f" at {format_seconds(at.time_ns / 1e9)}" if at is not None and trace.has_times else ""
        bound = "" if self.peak.is_exact else "≥ "
        title = f"{self.title}: largest blocks at the peak ({bound}{format_bytes(self.peak.low_bytes)} allocated{when})"
        return Table(title, columns, tuple(cells), notes)


class Explorer(Shown):
    """The explorer of one run or several below each other: shows itself in a notebook; `save` writes a page of its own."""

    def __init__(self, *runs: ExplorerRun) -> None:
        self.runs = runs
        if not all(len(run.trace.blocks) for run in runs):
            raise MemlabError("there is nothing to explore: a run without blocks. Was anything allocated?")

    @property
    def page(self) -> Page:
        """The largest blocks of each run: what stays where scripts are not run, and in a terminal."""
        return Page("memlab explorer", tuple(run.table for run in self.runs))

    @property
    def text(self) -> str:
        """The largest blocks, and how to get the picture."""
        how = 'The picture: in a notebook, or as a page: run.explore().save("explorer.html").'
        return f"{self.page.text()}\n\n{how}"

    @property
    def html(self) -> str:
        """The explorer: the tables, which the script replaces, data and script."""
        identifier, colours = f"memlab-{secrets.token_hex(6)}", json.dumps(_colours())
        data = json.dumps([base64.b64encode(run.packed()).decode() for run in self.runs])
        style, script = theme.static("memlab.css"), theme.static("chart.js", "explorer.js")
        start = f"startExplorer(document.getElementById('{identifier}'), {data}, {colours});"
        hint = Markup("<i>To explore: trust the notebook, or run the cell again.</i>")
        page = Page(self.page.title, (hint, *self.page.parts))
        return (
            f"<div id='{identifier}' class='memlab memlab-explorer' data-lm-suppress-shortcuts='true'>"
            f"<style>{style}</style><div class='memlab-static'>{page.html()}</div></div>"
            f"<script>(() => {{\n{script}\n{start}\n}})();</script>"
        )

    def save(self, path: str | Path) -> Path:
        """Write a page that needs no kernel and no network; an existing file is replaced."""
        title = safe(" and ".join(run.title for run in self.runs))
        head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        style = "<style>:root{color-scheme:light dark}body{margin:16px auto;max-width:1400px;padding:0 16px}</style>"
        target = Path(path)
        with saving(target) as file:
            file.write(f"{head}{style}{self.html}</html>".encode())
        return target


def pieces(trace: Trace, device: int, line: Timeline) -> tuple[Array, Array, Array, Array, int]:
    """The blocks of a device, each in as many pieces as it had categories, in order of allocation.

    Gives the block, the step of `line` in which the piece begins and the one in which it ends (their number: never), its
    category, and how many blocks are missing, as their allocation was not seen.
    """
    born, died = lives(trace, device)
    block = np.flatnonzero(born >= 0)
    unseen = int(((born < 0) & (died < len(trace.events))).sum())
    begin, end, category = born[block], died[block], trace.blocks.category[block]
    if len(changes := trace.recategorised):
        changes = changes.rows(np.lexsort((changes.row, changes.block)))
        changes = changes.rows((born[changes.block] >= 0) & (changes.row < died[changes.block]))
        # A change before the block was allocated makes a piece without length, which is left out below.
        block = np.concatenate((block, changes.block))
        begin = np.concatenate((begin, np.maximum(changes.row, born[changes.block])))
        category = np.concatenate((category, changes.category))
        order = np.lexsort((begin, block))
        block, begin, category = block[order], begin[order], category[order]
        is_last = np.append(block[1:] != block[:-1], True)
        end = np.where(is_last, died[block], np.append(begin[1:], 0))

    def step(row: Array) -> Array:
        return np.maximum(np.searchsorted(line.row, row, side="right") - 1, 0)

    begin, end = step(begin), np.where(end < len(trace.events), step(end), len(line.row))
    order = np.lexsort((block, begin))
    order = order[(end > begin)[order]]
    return block[order], begin[order], end[order], category[order], unseen


def _joined(header: dict[str, Any], columns: Mapping[str, Array]) -> bytes:
    parts, heads = [], []
    for name, column in columns.items():
        is_large = len(column) and int(column.max()) > 0xFFFFFFFF
        kept = np.ascontiguousarray(column, "<f8" if is_large else "<u4")
        heads.append([name, "f8" if is_large else "u4", len(kept)])
        parts.append(np.ascontiguousarray(kept.view("u1").reshape(len(kept), -1).T).tobytes())
    # Names may hold what is no text (half a surrogate pair): JSON escapes it.
    head = json.dumps({**header, "columns": heads}).encode("ascii")
    return gzip.compress(len(head).to_bytes(4, "little") + head + b"".join(parts), 6, mtime=0)


def _colours() -> dict[str, Any]:
    phases = [phase.name.lower() for phase in Phase]
    return {
        "categories": [[code.name.lower(), theme.CATEGORIES[code.name.lower()]] for code in Category],
        "order": [name for name in theme.CATEGORIES if name != "rounding"],
        "palette": list(theme.PALETTE),
        "phases": [[name, theme.PHASE_COLOURS[name]] for name in phases],
        "capacity": theme.CAPACITY,
        "peak": theme.SERIES["allocated"],
    }
