"""The modules of a run as a tree: as text, as collapsible HTML, and as a figure on request.

The largest modules are expanded first, and what does not fit is summed in one row; the figure has the largest few hundred
modules.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from memlab.analysis.modules import Module, ModuleTree, components, folded
from memlab.errors import MemlabError
from memlab.units import format_bytes, one_line
from memlab.views import theme
from memlab.views.page import Page, PageLines
from memlab.views.plotly import escaped
from memlab.views.table import BOX, Column, Table

TEXT_ROWS, HTML_ROWS, FIGURE_TILES = 30, 60, 300
_CHILDREN = 12  # how many children of a module are shown; a row sums the others
_NAME = 60
_SIZES = {"held_bytes": "at the peak", "kept_bytes": "for backward", "transient_bytes": "transient"}
_COLUMNS = (*_SIZES.values(), "calls")
_NOTES = (
    "At the peak: parameters, gradients, optimizer state and what forwards made, each with all below it.",
    "For backward: what the forwards left until the next backward began. Transient: the highest rise inside one call.",
)
_LOST = "Events were lost: figures of calls may be too small."
_NOBODY = "No module was called, and none held anything at the peak."


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree: a module, or (module None) a sum or memory outside any module."""

    depth: int
    name: str
    cells: tuple[str, ...]
    module: Module | None = None
    rows: tuple[Row, ...] = ()

    def walk(self) -> Iterator[Row]:
        """It and its descendants, in reading order."""
        yield self
        for row in self.rows:
            yield from row.walk()


def rows(tree: ModuleTree, limit: int) -> tuple[Row, ...]:
    """At most about `limit` rows."""
    roots = folded(tree.roots)
    unfolded = _unfolded(roots, limit)

    def level(modules: Sequence[Module], depth: int, layers: int = 1) -> Iterator[Row]:
        shown = _largest(modules)
        for module in shown:
            below = tuple(level(module.children, depth + 1, module.layers)) if module.path in unfolded else ()
            each = f": {each_of(module)}" if module.layers > layers and module.held_bytes else ""
            yield Row(depth, f"{_name(module, depth)}{each}", _cells(module), module, below)
        paths = {module.path for module in shown}
        rest = [module for module in modules if module.path not in paths]
        if rest:
            held, kept = (sum(getattr(one, name) for one in rest) for name in ("held_bytes", "kept_bytes"))
            sizes = (held, kept, max(one.transient_bytes for one in rest))
            yield Row(depth, f"{sum(one.layers for one in rest):,} more", (*map(format_bytes, sizes), ""))

    outside = [Row(0, name, (format_bytes(count), "", "", "")) for name, count in tree.outside.items() if count]
    return (*level(roots, 0), *outside)


def _unfolded(roots: Sequence[Module], limit: int) -> set[str]:
    """The paths to expand: the largest first, as long as they fit."""
    waiting = [(-module.largest_bytes, place, module) for place, module in enumerate(_largest(roots))]
    heapq.heapify(waiting)
    found: set[str] = set()
    place, room = len(waiting), limit - len(waiting)
    while waiting:
        _, _, module = heapq.heappop(waiting)
        shown = _largest(module.children)
        if shown and len(shown) <= room:
            found.add(module.path)
            room -= len(shown)
            for child in shown:
                heapq.heappush(waiting, (-child.largest_bytes, place, child))
                place += 1
    return found


def _largest(modules: Sequence[Module]) -> list[Module]:
    """The largest few, in their original order."""
    numbers = sorted(range(len(modules)), key=lambda i: -modules[i].largest_bytes)[:_CHILDREN]
    return [modules[i] for i in sorted(numbers)]


def each_of(module: Module) -> str:
    """How many equal layers it stands for, and what each held."""
    return f"{module.layers:,} × {format_bytes(module.held_bytes // module.layers)}"


def _name(module: Module, depth: int) -> str:
    """The last part of the path, as shown below its parent."""
    return one_line(components(module.path)[-1] if depth else module.path, _NAME)


def _cells(module: Module) -> tuple[str, ...]:
    called = [str(module.calls)] if module.calls or (module.unended and not module.recomputed) else []
    called += [f"{module.recomputed} recomputed"] if module.recomputed else []
    called += [f"{module.unended} not ended"] if module.unended else []
    return (*(format_bytes(getattr(module, size)) for size in _SIZES), " + ".join(called))


def title(tree: ModuleTree) -> str:
    """One line above the tree."""
    return " · ".join(filter(None, (f"Modules on {tree.device.label}, peak allocated {tree.peak.bytes}", tree.remark)))


def _notes(tree: ModuleTree) -> tuple[str, ...]:
    unknown = () if tree.knows_holders else ("Who held the peak is not known: its events were lost.",)
    return (*_NOTES, *unknown, *(() if tree.is_exact else (_LOST,)))


def text(tree: ModuleTree, limit: int = TEXT_ROWS) -> str:
    """The tree for terminals, screen readers and converted notebooks."""
    if not tree.roots:
        return f"{title(tree)}\n{_NOBODY}"
    shown = tuple(("  " * row.depth + row.name, *row.cells) for top in rows(tree, limit) for row in top.walk())
    columns = (Column("module", limit=200), *(Column(name, "bytes") for name in _COLUMNS))
    return Page(title(tree), (Table("", columns, shown), PageLines(_notes(tree)))).text()


_CELL = "display:inline-block;width:7em;margin-left:6px;text-align:right"
_BARS = (theme.SERIES["allocated"], theme.CATEGORIES["activation"], theme.CATEGORIES["temporary"])


def html(tree: ModuleTree, limit: int = HTML_ROWS) -> str:
    """The collapsible tree, with bars; everything in it is escaped."""
    head = f"<div style='{BOX};max-width:820px'><div><b>{escape(title(tree))}</b></div>"
    if not tree.roots:
        return f"{head}<div>{_NOBODY}</div></div>"
    tops = [max(getattr(one, size) for one in tree.values()) for size in _SIZES]

    def shown(row: Row) -> str:
        cells = ""
        for at, cell in enumerate(row.cells):
            size = getattr(row.module, list(_SIZES)[at], 0) if at < len(_SIZES) else 0
            bare = round(100 - 100 * min(size / tops[at], 1)) if size else 100
            bar = f";background:linear-gradient(90deg,#0000 {bare}%,{_BARS[at]}44 0)" if bare < 100 else ""
            cells += f"<span style='{_CELL}{bar}'>{escape(cell)}</span>"
        line = f"{escape(row.name)}<span style='float:right'>{cells}</span>"
        if not row.rows:
            return f"<div style='padding-left:15px'>{line}</div>"
        is_open = " open" if row.depth < 2 else ""
        below = "".join(map(shown, row.rows))
        # Only the left side is indented, so that the columns on the right stay aligned.
        return f"<details{is_open}><summary>{line}</summary><div style='padding-left:15px'>{below}</div></details>"

    columns = "".join(f"<span style='{_CELL}'>{name}</span>" for name in _COLUMNS)
    names = f"<div style='color:{theme.TEXT}'>module<span style='float:right'>{columns}</span></div>"
    notes = "".join(f"<div style='color:{theme.TEXT}'>{escape(note)}</div>" for note in _notes(tree))
    return f"{head}{names}{''.join(map(shown, rows(tree, limit)))}{notes}</div>"


def figure(tree: ModuleTree) -> Any:
    """An icicle of what the modules held at the peak, or else kept for backward."""
    import plotly.graph_objects as go

    size = next((size for size in _SIZES if any(getattr(one, size) for one in tree.values())), None)
    if size is None:
        raise MemlabError("no module held, left or needed anything in this run: there is nothing to draw.")
    chart = go.Figure(go.Icicle(**_tiles(tree, size), branchvalues="total", tiling={"orientation": "h"}, sort=False))
    chart.layout.template = go.layout.Template()
    chart.update_layout(
        title={"text": escaped(f"{title(tree)}: {_SIZES[size]}"), "font": {"size": 13}, "x": 0.01},
        height=360, margin={"l": 8, "r": 8, "t": 34, "b": 8}, paper_bgcolor="rgba(0,0,0,0)", font={"color": theme.TEXT},
    )  # fmt: skip
    return chart


def _tiles(tree: ModuleTree, size: str) -> dict[str, Any]:
    largest = sorted(tree.values(), key=lambda module: -getattr(module, size))[:FIGURE_TILES]
    kept = {module.path for module in largest if getattr(module, size)}
    shown = [module for module in tree.values() if module.path in kept]  # in the order of the model
    parents = {child.path: module.path for module in tree.values() for child in module.children}
    # Each module of the first level with more than one gets a colour, shared by its descendants.
    level: Sequence[Module] = tree.roots
    while len(level) == 1 and level[0].children:
        level = level[0].children
    colours = {root.path: theme.PALETTE[i % len(theme.PALETTE)] for i, root in enumerate(level)}

    def colour(path: str) -> str:
        while path and path not in colours:
            path = parents.get(path, "")
        return colours.get(path, theme.CATEGORIES["rounding"])

    hover = "<br>".join(f"{name} {{}}" for name in _COLUMNS)
    return {
        "ids": [escaped(module.path) for module in shown],
        "labels": [escaped(_name(module, int(module.path in parents))) for module in shown],
        "parents": [escaped(parents.get(module.path, "")) for module in shown],
        "values": [getattr(module, size) for module in shown],
        "text": [format_bytes(getattr(module, size)) for module in shown],
        "hovertext": [hover.format(*_cells(module)) for module in shown],
        "hovertemplate": "%{id}<br>%{hovertext}<extra></extra>",
        "marker": {"colors": [colour(module.path) for module in shown]},
        "textinfo": "label+text",
        "textfont": {"color": "#ffffff"},
    }
