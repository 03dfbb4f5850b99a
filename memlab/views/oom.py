"""An out-of-memory error as a page: what was short, what the whole cell needs, ways out, and the details folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memlab.analysis.oom.actions import Action, WaysOut
from memlab.analysis.oom.explain import VERDICTS, Explanation, Named, amount_text
from memlab.units import format_bytes, one_line
from memlab.views import theme
from memlab.views.page import Beside, Folded, Page, PageLines, Part, code_block
from memlab.views.report import share_table, tells_where
from memlab.views.table import Cell, Column, Table

_HOLDS = (Column("", limit=160), Column("", "bytes"), Column("", limit=300, wraps=True))
_WAYS = (
    Column(""),
    Column("ways out, after `%memoom release`", limit=200, wraps=True),
    Column("needs", "bytes"),
    Column("price", limit=160, wraps=True),
)


def oom_page(found: Explanation, cell: str = "", pointer: str = "", ways: WaysOut | None = None) -> Page:
    """What happened, what to do, the numbers, and what is still alive.

    Where ways out were verified they stand in the place of what the facts alone suggest, and everything else is folded.
    """
    parts: list[Part] = _ways(ways) if ways is not None else []
    is_answered = ways is not None and ways.needs is not None
    terms = tuple((term.name, amount_text(term.amount), term.meaning) for term in found.terms)
    alive = f"Still alive on {found.label} afterwards: {format_bytes(found.alive_bytes)}, by what references it"
    happened, details = PageLines(found.sentences), list[tuple[str, PageLines | Table | Beside]]()
    details += [("What to do", _actions(found.actions))] if found.actions and not is_answered else []
    details += [("The numbers", Table("", _HOLDS, terms))] if terms else []
    details += [(alive, named_table("", found.named, found.more_named))] if found.named else []
    held = tuple(share_table(share) for share in found.shares if tells_where(share))
    details += [("Allocated when memory ran out", Beside(held))] if held else []
    details += [("Not seen", PageLines(found.gaps))] if found.gaps else []
    parts.append(Folded("What happened", happened) if is_answered else happened)
    for heading, part in details:
        headed = replace(part, title=heading) if isinstance(part, Table) else replace(part, heading=heading)
        parts.append(Folded(heading, part) if is_answered else headed)
    parts += [pointer] if pointer and not is_answered else []
    title = found.title
    if ways is not None and ways.needs is not None and ways.needs.low > ways.limit_bytes:
        # Why this request failed is no headline where the whole cell needs more than there is.
        title = title.removesuffix(VERDICTS.get(found.verdict, "")).rstrip()
    title = f"memlab · {f'{one_line(cell, 80)} · ' if cell else ''}{title}"
    return Page(title, tuple(parts), theme.WARNING).remarked(found.remark)


def _ways(found: WaysOut) -> list[Part]:
    rows, changes = list[tuple[Cell, ...]](), list[Part]()
    for number, way in enumerate(found.ways, 1):
        rows.append((f"{number}.", way.change, way.needs, way.price or None))
        if way.diff:
            changes.append(Folded(f"{number}. as a change of the cell", code_block(way.diff)))
            changes.append(Folded(f"{number}. the changed cell, as it was predicted", code_block(way.cell)))
        elif way.code:
            changes.append(Folded(f"{number}. how it is written", code_block(way.code)))
    parts: list[Part] = [PageLines(found.sentences), *([Table("", _WAYS, tuple(rows))] if rows else []), *changes]
    if found.not_enough:
        parts.append(Folded("Tried, and not enough", PageLines(found.not_enough)))
    return parts


def _actions(actions: Sequence[Action]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for number, action in enumerate(actions, 1):
        about = "about " if action.is_estimate and action.gives.low > 0 else ""
        enough = {True: " [enough for this request]", False: " [not enough alone]", None: ""}[action.is_enough]
        rows.append((f"{number}.", about + amount_text(action.gives), f"{action.text}{enough}"))
    return Table("", _HOLDS, tuple(rows))


def named_table(title: str, named: Sequence[Named], more: int = 0) -> Table:
    """What keeps memory alive, and the number of further entries."""
    rows: list[tuple[Cell, ...]] = []
    for one in named:
        count = f"{one.count} storages, " if one.count > 1 else ""
        rows.append((one.path or "(no name found)", one.nbytes, f"{count}{one.category}"))
    rows += [(f"and {more} more", None, None)] if more else []
    return Table(title, _HOLDS, tuple(rows))
