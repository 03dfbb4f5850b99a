"""The modules of a run as a tree: as text that stands alone, as HTML to unfold, and as a figure on request.

What is largest is unfolded first, and what does not fit is summed up in a row of its own; the figure has the largest few
hundred modules.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from memlab.analysis.calls import components
from memlab.analysis.modules import Module, ModuleTree
from memlab.errors import MemlabError
from memlab.units import format_bytes, plain
from memlab.views import theme
from memlab.views.figure import escaped
from memlab.views.table import peak_text

TEXT_ROWS, HTML_ROWS, FIGURE_TILES = 30, 60, 300
_CHILDREN = 12  # so many of one module are shown; a row sums up the others
_NAME = 60
_COLUMNS = ("at the peak", "for backward", "transient", "calls")
_NOTES = (
    "At the peak: parameters, gradients, optimizer state and what forwards made, each with all below it.",
    "For backward: what the forwards left until the next backward began. Transient: the highest rise inside one call.",
)
_LOST = "Events were lost: figures of calls may be too small."
_NOBODY = "No module was called, and none held anything at the peak."


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree: a module, or (module None) what is summed up or belongs to none."""

    depth: int
    name: str
    cells: tuple[str, ...]
    module: Module | None = None
    rows: tuple[Row, ...] = ()

    def walk(self) -> Iterator[Row]:
        """It and all below it, as they are read."""
        yield self
        for row in self.rows:
            yield from row.walk()


def rows(tree: ModuleTree, limit: int) -> tuple[Row, ...]:
    """At most about `limit` rows."""
    unfolded = _unfolded(tree.roots, limit)
    outside = [Row(0, name, (format_bytes(count), "", "", "")) for name, count in tree.outside.items() if count]
    return (*_level(tree.roots, 0, unfolded), *outside)


def _unfolded(roots: Sequence[Module], limit: int) -> set[str]:
    """The paths whose children are shown: the largest first, in the order of their definition, as long as there is room."""
    room = limit - min(len(roots), _CHILDREN)
    waiting = [(-module.largest_bytes, place, module) for place, module in enumerate(_largest(roots))]
    heapq.heapify(waiting)
    found: set[str] = set()
    place = len(waiting)
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
    """The largest few, in their own order."""
    numbers = sorted(range(len(modules)), key=lambda i: -modules[i].largest_bytes)[:_CHILDREN]
    return [modules[i] for i in sorted(numbers)]


def _level(modules: Sequence[Module], depth: int, unfolded: set[str]) -> Iterator[Row]:
    shown = _largest(modules)
    for module in shown:
        below = tuple(_level(module.children, depth + 1, unfolded)) if module.path in unfolded else ()
        yield Row(depth, _name(module, depth), _cells(module), module, below)
    paths = {module.path for module in shown}
    rest = [module for module in modules if module.path not in paths]
    if rest:
        yield _summed_up(rest, depth)


def _summed_up(modules: Sequence[Module], depth: int) -> Row:
    held, kept = (sum(getattr(one, name) for one in modules) for name in ("held_bytes", "kept_bytes"))
    transient = max(one.transient_bytes for one in modules)
    return Row(depth, f"{len(modules)} more", (*map(format_bytes, (held, kept, transient)), ""))


def _name(module: Module, depth: int) -> str:
    """Below its parent a module needs only the last part of its path."""
    name = components(module.path)[-1] if depth else module.path
    clean = plain(name)
    return clean if len(clean) <= _NAME else clean[: _NAME - 1] + "…"


def _cells(module: Module) -> tuple[str, ...]:
    called = [str(module.calls)] if module.calls or not module.recomputed else []
    called += [f"{module.recomputed} again"] if module.recomputed else []
    called += [f"{module.unended} not ended"] if module.unended else []
    sizes = map(format_bytes, (module.held_bytes, module.kept_bytes, module.transient_bytes))
    return (*sizes, " + ".join(called) if module.calls or module.recomputed or module.unended else "")


def title(tree: ModuleTree) -> str:
    """One line above the tree."""
    return f"Modules on {tree.device.label}, peak allocated {peak_text(tree.peak)}"


def _notes(tree: ModuleTree) -> tuple[str, ...]:
    unknown = () if tree.knows_holders else ("Nobody saw who held the peak: its events were lost.",)
    return (*_NOTES, *unknown, *(() if tree.is_exact else (_LOST,)))


# --- text -------------------------------------------------------------------------------------------------------------


def text(tree: ModuleTree, limit: int = TEXT_ROWS) -> str:
    """The tree for terminals, screen readers and converted notebooks."""
    if not tree.roots:
        return f"{title(tree)}\n{_NOBODY}"
    lines = [("  " * row.depth + row.name, *row.cells) for top in rows(tree, limit) for row in top.walk()]
    table = [("module", *_COLUMNS), *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    shown = ["  ".join(_padded(line, widths)).rstrip() for line in table]
    return "\n".join([title(tree), "", *shown, "", *_notes(tree)])


def _padded(line: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    yield line[0].ljust(widths[0])
    yield from (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))


# --- HTML -------------------------------------------------------------------------------------------------------------

_BOX = "font-size:13px;line-height:1.6;max-width:820px;font-variant-numeric:tabular-nums"
_CELL = "display:inline-block;width:7em;margin-left:6px;text-align:right"
_BARS = (theme.SERIES["allocated"], theme.CATEGORIES["activation"], theme.CATEGORIES["temporary"])


def html(tree: ModuleTree, limit: int = HTML_ROWS) -> str:
    """The tree to unfold, with bars; everything in it is escaped."""
    head = f"<div style='{_BOX}'><div><b>{escape(title(tree))}</b></div>"
    if not tree.roots:
        return f"{head}<div>{_NOBODY}</div></div>"
    tops = [max(getattr(one, f"{what}_bytes") for one in tree.values()) for what in _SIZES]
    columns = "".join(f"<span style='{_CELL}'>{name}</span>" for name in _COLUMNS)
    names = f"<div style='color:{theme.TEXT}'>module<span style='float:right'>{columns}</span></div>"
    shown = "".join(_html_row(row, tops) for row in rows(tree, limit))
    notes = "".join(f"<div style='color:{theme.TEXT}'>{escape(note)}</div>" for note in _notes(tree))
    return f"{head}{names}{shown}{notes}</div>"


_SIZES = ("held", "kept", "transient")


def _html_row(row: Row, tops: list[int]) -> str:
    cells = "".join(_html_cell(row, i, tops) for i in range(len(_COLUMNS)))
    line = f"{escape(row.name)}<span style='float:right'>{cells}</span>"
    if not row.rows:
        return f"<div style='padding-left:15px'>{line}</div>"
    is_open = " open" if row.depth < 2 else ""
    below = "".join(_html_row(one, tops) for one in row.rows)
    # Only the left side moves in, so that the columns on the right stay where they are.
    return f"<details{is_open}><summary>{line}</summary><div style='padding-left:15px'>{below}</div></details>"


def _html_cell(row: Row, column: int, tops: list[int]) -> str:
    """A figure, with a bar behind it as long as its share of the largest."""
    bar = ""
    if row.module is not None and column < len(_SIZES) and tops[column]:
        bare = round(100 - 100 * getattr(row.module, f"{_SIZES[column]}_bytes") / tops[column])
        bar = f";background:linear-gradient(90deg,#0000 {bare}%,{_BARS[column]}44 0)" if bare < 100 else ""
    return f"<span style='{_CELL}{bar}'>{escape(row.cells[column])}</span>"


# --- figure -----------------------------------------------------------------------------------------------------------


def figure(tree: ModuleTree) -> Any:
    """An icicle of what the modules held at the peak; where that is unknown or nothing, of what they left for backward."""
    import plotly.graph_objects as go

    what = next((what for what in _SIZES if any(getattr(one, f"{what}_bytes") for one in tree.values())), None)
    if what is None:
        raise MemlabError("no module held, left or needed anything in this run: there is nothing to draw.")
    chart = go.Figure(go.Icicle(**_tiles(tree, what), branchvalues="total", tiling={"orientation": "h"}, sort=False))
    chart.layout.template = go.layout.Template()
    name = dict(zip(_SIZES, _COLUMNS, strict=False))[what]
    chart.update_layout(
        title={"text": escaped(f"{title(tree)}: {name}"), "font": {"size": 13}, "x": 0.01},
        height=360, margin={"l": 8, "r": 8, "t": 34, "b": 8}, paper_bgcolor="rgba(0,0,0,0)", font={"color": theme.TEXT},
    )  # fmt: skip
    return chart


def _tiles(tree: ModuleTree, what: str) -> dict[str, Any]:
    modules = [module for module in tree.values() if getattr(module, f"{what}_bytes")]
    modules = sorted(modules, key=lambda module: -getattr(module, f"{what}_bytes"))[:FIGURE_TILES]
    kept = {module.path for module in modules}
    parents = {child.path: module.path for module in tree.values() for child in module.children}
    colours = {root.path: theme.PALETTE[i % len(theme.PALETTE)] for i, root in enumerate(_coloured(tree))}
    shown = [module for module in tree.values() if module.path in kept]  # in the order of the model
    hover = "<br>".join(f"{name} {{}}" for name in _COLUMNS)
    return {
        "ids": [escaped(module.path) for module in shown],
        "labels": [escaped(_name(module, int(module.path in parents))) for module in shown],
        "parents": [escaped(parents.get(module.path, "")) for module in shown],
        "values": [getattr(module, f"{what}_bytes") for module in shown],
        "text": [format_bytes(getattr(module, f"{what}_bytes")) for module in shown],
        "hovertext": [hover.format(*_cells(module)) for module in shown],
        "hovertemplate": "%{id}<br>%{hovertext}<extra></extra>",
        "marker": {"colors": [_colour(module.path, parents, colours) for module in shown]},
        "textinfo": "label+text",
        "textfont": {"color": "#ffffff"},
    }


def _coloured(tree: ModuleTree) -> Iterable[Module]:
    """The modules that get a colour of their own: the first level with more than one of them."""
    level: Sequence[Module] = tree.roots
    while len(level) == 1 and level[0].children:
        level = level[0].children
    return level


def _colour(path: str, parents: dict[str, str], colours: dict[str, str]) -> str:
    here: str | None = path
    while here is not None and here not in colours:
        here = parents.get(here)
    return colours.get(here or "", theme.CATEGORIES["rounding"])
