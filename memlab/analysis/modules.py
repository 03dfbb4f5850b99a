"""Memory by module path as a tree: held at the peak, kept for backward, transient in a forward.

Held are the requested bytes of the blocks that belong to a module: its parameters, their gradients and optimizer state,
and what its forward made. Left and transient are bytes of *allocated*, as a hook around the module would read them, without
library workspaces, which the first call that needs one allocates: they belong to no module.

A call is known from its start to its end. One that never ended (an interrupt: PyTorch then calls no hook) has no figures;
an error ends a call as a return does. Events of other threads count for the call that was running.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from memlab.analysis.breakdown import BEFORE, ELSEWHERE, ROUNDING, breakdown, workspaces
from memlab.analysis.peak import Peak, peak
from memlab.analysis.timeline import highest, lives, timeline
from memlab.by_name import ByName
from memlab.errors import MemlabError
from memlab.trace.columns import MODULE_BEGINS, WORKSPACE_OF, Array, Kind, MarkKind
from memlab.trace.spans import BACKWARD
from memlab.trace.trace import Device, Trace

MOST_NESTED = 1000
"""The depth of nested calls that is followed, as each level costs a pass. Python's default recursion limit is below it."""

_FOLDED_FROM = 3
"""As many equal layers become one row."""
NUMBER = re.compile(r"\d{1,9}")
"""A number in a name."""

OUTSIDE = (ELSEWHERE, BEFORE, ROUNDING)
"""Shares of a peak outside any module, apart from library workspaces."""


@dataclass(frozen=True, slots=True)
class Module:
    """One path of the tree; every figure includes everything below it.

    `held_bytes` were its at the peak, `own_bytes` of them not in submodules. Of its forwards: `left_bytes` existed when
    they ended (all calls within one outermost forward), `kept_bytes` when the next backward began (all calls before it),
    `transient_bytes` is the highest rise inside one call; the largest of each. `calls` counts those outside backward,
    `recomputed` those made by backward, `unended` those whose end was never seen, and which have no figures.
    `layers` is the number of equal layers that it stands for, if `folded` made it.
    """

    path: str
    held_bytes: int = 0
    own_bytes: int = 0
    left_bytes: int = 0
    kept_bytes: int = 0
    transient_bytes: int = 0
    calls: int = 0
    recomputed: int = 0
    unended: int = 0
    children: tuple[Module, ...] = ()
    layers: int = 1

    @property
    def largest_bytes(self) -> int:
        """The largest of its figures, for sorting."""
        return max(self.held_bytes, self.left_bytes, self.kept_bytes, self.transient_bytes)

    def walk(self) -> Iterator[Module]:
        """It and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


_FIGURES = attrgetter(*(one.name for one in fields(Module) if one.name not in ("path", "children")))


@dataclass(frozen=True, slots=True)
class ModuleTree(ByName[Module]):
    """Path -> module, in the order in which models define them.

    The outermost modules' `held_bytes` and `outside` sum to the peak, if its holders are known (`knows_holders`).
    Where events were lost (`is_exact` is False) the figures of calls may be too small. `remark` is the trace's.
    """

    device: Device
    peak: Peak
    roots: tuple[Module, ...]
    outside: Mapping[str, int]
    knows_holders: bool
    is_exact: bool
    remark: str = ""
    _known: dict[str, Module] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", {module.path: module for root in self.roots for module in root.walk()})

    def _unknown(self, name: str) -> MemlabError:
        known = ", ".join(map(repr, list(self)[:10])) or "none"
        return MemlabError(f"no module {name!r:.200} in this run. Known: {known}.")

    def to_pandas(self) -> Any:
        """One row per module, sizes in bytes."""
        import pandas

        columns = [name for name in Module.__dataclass_fields__ if name not in ("path", "children", "layers")]
        rows = {name: [getattr(module, name) for module in self.values()] for name in columns}
        return pandas.DataFrame(rows, index=pandas.Index(list(self), name="module"))


def modules(trace: Trace, device: int) -> ModuleTree:
    """The modules of a run on one device."""
    at = peak(trace, device)
    try:
        held: Mapping[str, int] = breakdown(trace, device, "module", at=at)
        knows_holders = True
    except MemlabError:  # the events around the peak were lost
        held, knows_holders = {}, False
    found = _of_calls(trace, device)
    outside = _add_held(found, held)
    return ModuleTree(
        device=trace.made_by.device(device),
        peak=at,
        roots=_tree(found, [*trace.texts["mark"], *trace.texts["module"]]),
        outside=outside,
        knows_holders=knows_holders,
        is_exact=not any(one.device == device for one in trace.made_by.bounded),
        remark=trace.remark,
    )


def held_tree(shares: Mapping[str, int]) -> tuple[tuple[Module, ...], dict[str, int]]:
    """The shares of a peak by module as a tree, equal layers folded, and those outside any module."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    outside = _add_held(found, shares)
    return folded(_tree(found, list(shares))), outside


def _add_held(found: defaultdict[str, Counter[str]], shares: Mapping[str, int]) -> dict[str, int]:
    """Add shares of a peak to the figures of modules; returns those outside any."""
    outside = {}
    for path, count in shares.items():
        if path in OUTSIDE or path.startswith(WORKSPACE_OF):
            outside[path] = count
            continue
        found[path]["own_bytes"] += count
        for prefix in prefixes(path):
            found[prefix]["held_bytes"] += count
    return outside


def _of_calls(trace: Trace, device: int) -> defaultdict[str, Counter[str]]:
    """The figures of calls by field, summed into every path and its ancestors."""
    made, texts = calls(trace), trace.texts["mark"]
    above = {name: prefixes(texts[name]) for name in {*made.name.tolist(), *made.unended}}
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, paths in above.items():
        for path in paths:
            found[path]["unended"] += made.unended[name] if path == paths[-1] else 0
    # Path -> its calls and those of its submodules, without those nested in another of them.
    outer: defaultdict[str, list[int]] = defaultdict(list)
    until: Counter[str] = Counter()  # the last call inside the latest one found
    rise = rise_of(trace, device, made)
    columns = (column.tolist() for column in (made.name, made.last, made.in_backward, rise))
    for call, (name, last, in_backward, risen) in enumerate(zip(*columns, strict=True)):
        for path in above[name]:
            if call >= until[path]:
                outer[path].append(call)
                until[path] = last + 1
        own = found[above[name][-1]]
        own["recomputed" if in_backward else "calls"] += 1
        own["transient_bytes"] = max(own["transient_bytes"], risen)  # a nested call of the same path can rise further
    left, kept = left_by(trace, device, made, made.end), left_by(trace, device, made, made.backward_row)
    for path, numbers in outer.items():
        found[path]["transient_bytes"] = max(found[path]["transient_bytes"], int(rise[numbers].max()))
        forwards = np.array(numbers)[~made.in_backward[numbers]]
        for what, group, count in (("left_bytes", made.root, left), ("kept_bytes", made.backward, kept)):
            starts = np.flatnonzero(np.diff(group[forwards], prepend=-1))  # groups are consecutive
            sums = np.add.reduceat(count[forwards], starts) if len(starts) else count[:0]
            found[path][what] = int(sums.max(initial=0))
    return found


def _tree(found: Mapping[str, Mapping[str, int]], order: list[str]) -> tuple[Module, ...]:
    """The top-level modules, each with its submodules."""
    place = {path: i for i, path in reversed(list(enumerate(order)))}
    below: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(found, key=lambda path: place.get(path, len(order))):
        above = prefixes(path)
        below[above[-2] if len(above) > 1 else ""].append(path)

    def made(path: str) -> Module:
        figures: dict[str, Any] = dict(found[path])
        return Module(path, **figures, children=tuple(map(made, below[path])))

    return tuple(map(made, below[""]))


def folded(modules: Sequence[Module]) -> tuple[Module, ...]:
    """The same modules; three or more that differ only in the numbers of their paths become one, "net.0…999", with their sums.

    All their figures are equal, and those of everything below them.
    """

    def figures(module: Module) -> tuple[Any, ...]:
        return NUMBER.sub("#", module.path), _FIGURES(module), tuple(map(figures, module.children))

    alike: defaultdict[tuple[Any, ...], list[Module]] = defaultdict(list)
    for module in (replace(module, children=folded(module.children)) for module in modules):
        alike[figures(module)].append(module)
    groups = ([_sum_of(same)] if len(same) >= _FOLDED_FROM else same for same in alike.values())
    return tuple(module for group in groups for module in group)


def _sum_of(alike: Sequence[Module]) -> Module:
    """Equal modules as one; of a rise inside one call the sum would mean nothing."""
    names = ("held_bytes", "own_bytes", "left_bytes", "kept_bytes", "calls", "recomputed", "unended", "layers")
    sums = {name: sum(getattr(one, name) for one in alike) for name in names}
    below = zip(*(one.children for one in alike), strict=True)
    return replace(alike[0], path=ranged([one.path for one in alike]), children=tuple(map(_sum_of, below)), **sums)


def ranged(names: Collection[str]) -> str:
    """Names that differ in their numbers only as one.

    >>> ranged(["net.9.weight", "net.10.weight"]), ranged(["net.01", "net.01"])
    ('net.9…10.weight', 'net.01')
    """
    texts, ranges = NUMBER.split(next(iter(names))), []
    for numbers in zip(*map(NUMBER.findall, dict.fromkeys(names)), strict=True):
        low, high = min(numbers, key=int), max(numbers, key=int)
        ranges.append(low if int(low) == int(high) else f"{low}…{high}")
    return "".join(text + number for text, number in zip(texts, [*ranges, ""], strict=True))


def components(path: str) -> list[str]:
    """The parts of a path; a subscript stays with its name.

    >>> components("nets['a.b'].layers.0")
    ["nets['a.b']", 'layers', '0']
    """
    return re.findall(r"(?:\[[^\]]*\]|[^.\[]|\[)+", path) or [path]


def prefixes(path: str) -> list[str]:
    """A path and all those above it, the outermost first."""
    parts = components(path)
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


# --- calls ------------------------------------------------------------------------------------------------------------

NEVER = np.iinfo(np.int64).max
_OF_CALLS = (*MODULE_BEGINS, MarkKind.MODULE_END, MarkKind.PHASE_BEGIN, MarkKind.PHASE_END)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls in the order in which they began, so that nested ones follow.

    `begin` and `end` are rows: the events of a call are begin..end-1. `depth` is how many calls are around it, `root` the
    outermost one, `last` the last call inside it. `backward` is the number of the next backward pass, and
    `backward_row` the row in which that begins (NEVER: none came). `unended` counts the calls without an end
    by name; `still_open` has name and row of the outermost that was running when the trace ended, if any.
    """

    name: Array
    begin: Array
    end: Array
    depth: Array
    root: Array
    last: Array
    in_backward: Array
    backward: Array
    backward_row: Array
    unended: Counter[int]
    still_open: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.name)


def calls(trace: Trace) -> Calls:
    """Every call of a module in a trace."""
    marks, texts = trace.marks, trace.texts["mark"]
    found: list[tuple[int, int, int, bool]] = []  # marks of begin and end, name, whether in backward
    unended: Counter[int] = Counter()
    running: list[tuple[int, int, bool]] = []
    passes: list[int] = []  # marks that begin backward
    depth = 0  # of backward
    wanted = np.flatnonzero(np.isin(marks.kind, _OF_CALLS))  # there may be millions of marks, most of them lines
    for i, kind, name in zip(wanted.tolist(), marks.kind[wanted].tolist(), marks.name[wanted].tolist(), strict=True):
        if kind in MODULE_BEGINS:
            running.append((i, name, depth > 0))
        elif kind == MarkKind.MODULE_END:
            at = next((at for at in range(len(running) - 1, -1, -1) if running[at][1] == name), -1)
            if at >= MOST_NESTED:
                unended[name] += 1
            elif at >= 0:
                found.append((running[at][0], i, name, running[at][2]))
            if at >= 0:
                unended.update(other for _, other, _ in running[at + 1 :])
                del running[at:]
        elif kind == MarkKind.PHASE_BEGIN and texts[name] == BACKWARD:
            passes.append(i)
            depth += 1
        elif kind == MarkKind.PHASE_END and texts[name] == BACKWARD:
            depth = max(depth - 1, 0)
    unended.update(name for _, name, _ in running)
    still_open = [(name, int(marks.row[i])) for i, name, _ in running[:1]]
    begin, end, name_of, in_backward = np.array(sorted(found), np.int64).reshape(-1, 4).T
    number, starts = np.arange(len(begin)), np.array(passes, np.int64)
    around, backward = number - np.searchsorted(np.sort(end), begin), np.searchsorted(starts, end)
    return Calls(
        name=name_of,
        begin=marks.row[begin],
        end=marks.row[end],
        depth=around,
        root=np.maximum.accumulate(np.where(around == 0, number, 0)),
        last=np.searchsorted(begin, end) - 1,
        in_backward=in_backward.astype(bool),
        backward=backward,
        backward_row=np.append(marks.row[starts], NEVER)[backward],
        unended=unended,
        still_open=still_open,
    )


def left_by(trace: Trace, device: int, made: Calls, limit: Array) -> Array:
    """Per call the allocated bytes of blocks made in it, or in a nested call, that still existed at row `limit`.

    Library workspaces do not count.
    """
    come, go = lives(trace, device)
    block = np.flatnonzero(come >= trace.first_row)
    block = block[(trace.events.kind[come[block]] == Kind.ALLOC) & ~workspaces(trace)[block]]
    born, died, size = come[block], go[block], trace.events.allocated_bytes[come[block]]
    left = np.zeros(len(made), np.int64)
    by_depth = np.argsort(made.depth, kind="stable")
    for same in np.split(by_depth, np.flatnonzero(np.diff(made.depth[by_depth])) + 1) if len(made) else ():
        # Calls of one depth do not overlap: a block was made in the last that had begun, or in none.
        call = same[np.searchsorted(made.begin[same], born, side="right") - 1]
        stays = (made.begin[call] <= born) & (born < made.end[call]) & (died >= limit[call])
        np.add.at(left, call[stays], size[stays])
    return left


def rise_of(trace: Trace, device: int, made: Calls) -> Array:
    """Per call the highest level of *allocated* inside it minus the level at its start, without workspaces."""
    line = timeline(trace, device)
    level = line.without(workspaces(trace)[trace.events.block[line.row[1:]]])
    first = np.searchsorted(line.row, made.begin) - 1
    rise: Array = highest(level, first, np.searchsorted(line.row, made.end)) - level[first]
    return rise
