"""Memory by module path as a tree: what was held at the peak, what forwards leave for backward, what they need for a moment.

Held are the requested bytes of the blocks that belong to a module: its parameters, their gradients and optimizer state,
and what was made in its forward. Left and transient are bytes of *allocated*, as a hook around the module would read them, but
for workspaces that a library takes for itself in the first call that needs one: those are no module's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.analysis.breakdown import BEFORE, ELSEWHERE, ROUNDING, breakdown
from memlab.analysis.calls import Calls, calls, kept_by, left_by, prefixes, rise_of
from memlab.analysis.peak import Peak, peak
from memlab.errors import MemlabError
from memlab.trace.columns import WORKSPACE_OF, Array
from memlab.trace.trace import Device, Trace

OUTSIDE = (ELSEWHERE, BEFORE, ROUNDING)
"""Shares of a peak that are no module's, beside the workspaces of libraries."""


@dataclass(frozen=True, slots=True)
class Module:
    """One path of the tree; every figure includes what lies below it.

    `held_bytes` were its at the peak, `own_bytes` of them not further below. Of its forwards: `left_bytes` were there when
    they ended (all calls within one outermost forward), `kept_bytes` when the next backward began (all calls before it),
    `transient_bytes` is the highest rise inside one call; the largest of each. `calls` counts those outside of backward,
    `recomputed` those that backward made, `unended` those whose end was never seen, of which nothing else is known.
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

    @property
    def largest_bytes(self) -> int:
        """By what it is worth showing."""
        return max(self.held_bytes, self.left_bytes, self.kept_bytes, self.transient_bytes)

    def walk(self) -> Iterator[Module]:
        """It and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class ModuleTree(Mapping[str, Module]):
    """Path -> module, in the order in which models define them.

    The outermost modules' `held_bytes` and `outside` together are the peak, where it is known who held it
    (`knows_holders`). Where events were lost (`is_exact` is False) the figures of calls may be too small.
    """

    device: Device
    peak: Peak
    roots: tuple[Module, ...]
    outside: Mapping[str, int]
    knows_holders: bool
    is_exact: bool
    _at: dict[str, Module] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_at", {module.path: module for root in self.roots for module in root.walk()})

    def __getitem__(self, path: str) -> Module:
        try:
            return self._at[path]
        except KeyError:
            known = ", ".join(map(repr, list(self._at)[:10])) or "none"
            raise MemlabError(f"no module {path!r:.200} in this run. Known: {known}.") from None

    def __contains__(self, path: object) -> bool:
        return path in self._at

    def get(self, path: str, default: Any = None) -> Any:  # Mapping's own expects a KeyError
        """The module of that path, or `default`."""
        return self._at.get(path, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def to_pandas(self) -> Any:
        """One row per module, sizes in bytes."""
        import pandas

        columns = [name for name in Module.__dataclass_fields__ if name not in ("path", "children")]
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
    found = _found(trace, device, calls(trace))
    for path, count in held.items():
        if not _is_outside(path):
            found[path].own += count
            for prefix in prefixes(path):
                found[prefix].held += count
    return ModuleTree(
        device=trace.made_by.device(device),
        peak=at,
        roots=_tree(found, [*trace.texts["mark"], *trace.texts["module"]]),
        outside={name: count for name, count in held.items() if _is_outside(name)},
        knows_holders=knows_holders,
        is_exact=not any(one.device == device for one in trace.made_by.bounded),
    )


def _is_outside(name: str) -> bool:
    return name in OUTSIDE or name.startswith(WORKSPACE_OF)


@dataclass(slots=True)
class _Figures:
    """What is being summed up for one path."""

    held: int = 0
    own: int = 0
    left: int = 0
    kept: int = 0
    transient: int = 0
    calls: int = 0
    recomputed: int = 0
    unended: int = 0


def _found(trace: Trace, device: int, made: Calls) -> defaultdict[str, _Figures]:
    """The figures of calls, for every path and those above it."""
    texts = trace.texts["mark"]
    above = {name: prefixes(texts[name]) for name in {*made.name.tolist(), *made.unended}}
    found: defaultdict[str, _Figures] = defaultdict(_Figures)
    for name, paths in above.items():
        for path in paths:
            found[path].unended += made.unended[name] if path == paths[-1] else 0
    for name, in_backward in zip(made.name.tolist(), made.in_backward.tolist(), strict=True):
        figures = found[above[name][-1]]
        figures.recomputed += in_backward
        figures.calls += not in_backward
    outer = _outermost(made, above)
    rise, left, kept = (
        rise_of(trace, device, made),
        left_by(trace, device, made, made.end),
        kept_by(trace, device, made),
    )
    for path, count in _largest_sums(outer, made.root, left, ~made.in_backward):
        found[path].left = count
    for path, count in _largest_sums(outer, made.backward, kept, ~made.in_backward):
        found[path].kept = count
    for path, numbers in outer.items():
        found[path].transient = int(rise[numbers].max())
    for call, name in enumerate(made.name.tolist()):  # a call inside of another of the same module can rise further
        found[above[name][-1]].transient = max(found[above[name][-1]].transient, int(rise[call]))
    return found


def _outermost(made: Calls, above: Mapping[int, list[str]]) -> dict[str, list[int]]:
    """Path -> its calls and those of modules below it, without those that happened inside of another one of them."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    until: Counter[str] = Counter()  # the last call inside of the latest one found
    for call, (name, last) in enumerate(zip(made.name.tolist(), made.last.tolist(), strict=True)):
        for path in above[name]:
            if call >= until[path]:
                found[path].append(call)
                until[path] = last + 1
    return dict(found)


def _largest_sums(
    outer: Mapping[str, list[int]], group: Array, count: Array, counts: Array
) -> Iterator[tuple[str, int]]:
    """Path -> the largest sum over those of its calls that belong to one group; groups follow one another."""
    for path, numbers in outer.items():
        mine = np.array(numbers)
        mine = mine[counts[mine]]
        starts = np.flatnonzero(np.diff(group[mine], prepend=-1))
        yield path, int(np.add.reduceat(count[mine], starts).max(initial=0)) if len(mine) else 0


def _tree(found: Mapping[str, _Figures], order: list[str]) -> tuple[Module, ...]:
    """The modules at the top, each with those below it."""
    place = {path: i for i, path in reversed(list(enumerate(order)))}
    below: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(found, key=lambda path: place.get(path, len(order))):
        above = prefixes(path)
        below[above[-2] if len(above) > 1 else ""].append(path)

    def made(path: str) -> Module:
        f = found[path]
        figures = (f.held, f.own, f.left, f.kept, f.transient, f.calls, f.recomputed, f.unended)
        return Module(path, *figures, tuple(map(made, below[path])))

    return tuple(map(made, below[""]))
