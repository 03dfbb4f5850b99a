"""Memory that grows from one iteration of a run to the next, told from a plateau, and the line that allocates what stays.

A leak is an origin of which (nearly) every iteration leaves blocks that are there at the end, or which holds more at the end
of each one. What levels off, ebbs away, is emptied now and then or moves from one place to another is none. Growth of which
the trace shows less than four iterations is not told.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Self

import numpy as np

from memlab.analysis.iterations import MIN_REPEATS, MIN_STEPS, Births, Iterations, grouped, iterations
from memlab.analysis.timeline import timeline
from memlab.trace.columns import Array
from memlab.trace.trace import Trace
from memlab.units import KiB, format_bytes, one_line

MIN_SHARE, IN_ITERATIONS = 0.1, 1000
"""What so many iterations (or those there were, if more) add at least, of the highest level. Less is bookkeeping."""
MIN_TOTAL_BYTES = 64 * KiB
_LONG_LIVED = 3
"""In iterations: what lives so long and goes all the same belongs to a window, or to a list that is emptied."""
_PLACES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of the growth is allocated; "" is what the trace does not know.

    `blocks` is how many allocations of each iteration stay, on average; 0 where one is replaced by a larger one.
    """

    line: str
    module: str
    op: str
    shape: str
    bytes_per_iteration: int
    blocks: float

    @property
    def text(self) -> str:
        """The place in words, as far as it is known."""
        parts = [f"at {short_line(self.line)}"] if self.line else []
        parts += [f"in {one_line(self.module)}"] if self.module else []
        parts += [f"by {one_line(self.op)}"] if self.op and not self.line else []
        return " ".join(parts) or "at a place that is not known"


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory of one device that each iteration adds to: of `kind` "kept" it stays, "growing" is replaced by something larger.

    `since` is the first iteration that adds, counted from 1, of `iterations`; `of` says what an iteration is. The places
    are those that allocate it, the largest first; `total_bytes` is what had gathered by the end of the last iteration.
    """

    kind: str
    device: int
    of: str
    since: int
    iterations: int
    total_bytes: int
    places: tuple[Place, ...]

    @property
    def bytes_per_iteration(self) -> int:
        """What each iteration adds, on average."""
        return sum(place.bytes_per_iteration for place in self.places)

    @property
    def text(self) -> str:
        """The finding in one sentence."""
        what = "What stays" if self.kind == "kept" else "What is replaced by something larger each time"
        where = ", ".join(self._place(place) for place in self.places[:_PLACES_SHOWN])
        rest = self.places[_PLACES_SHOWN:]
        others = f", {len(rest)} more {format_bytes(sum(p.bytes_per_iteration for p in rest))}" if rest else ""
        return (
            f"Grows by {format_bytes(self.bytes_per_iteration)} with each {one_line(self.of)}, since number {self.since} "
            f"of {self.iterations}, {format_bytes(self.total_bytes)} in all. {what} is allocated {where}{others}."
        )

    def _place(self, place: Place) -> str:
        return place.text + (f" {format_bytes(place.bytes_per_iteration)}" if len(self.places) > 1 else "")


class Leaks(tuple[Leak, ...]):
    """What grows, the most first: a tuple that reads as sentences, in a notebook too; `to_pandas()` has one row for each place.

    `looked_at` says which iterations were compared, "" where the run has no row of them that can be told apart.
    """

    looked_at: str

    def __new__(cls, found: Iterable[Leak] = (), looked_at: str = "") -> Self:
        """These leaks, found by a look at these iterations."""
        made = super().__new__(cls, found)
        made.looked_at = looked_at
        return made

    def __getnewargs__(self) -> tuple[tuple[Leak, ...], str]:
        return tuple(self), self.looked_at

    @property
    def text(self) -> str:
        """It in words, also where nothing grows."""
        if self:
            return "\n".join(leak.text for leak in self)
        if self.looked_at:
            return f"Nothing grows from one iteration to the next ({self.looked_at})."
        return (
            "Not told: this run has no row of at least four iterations (optimizer steps, backwards, calls) to compare."
        )

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(f"<div>{escape(line)}</div>" for line in self.text.splitlines())

    def to_pandas(self) -> Any:
        """One row for each place of each leak, sizes in bytes."""
        import pandas

        of_leak = ("kind", "device", "of", "since", "iterations", "total_bytes")
        rows = [
            {"leak": number, **{name: getattr(leak, name) for name in of_leak}, **dataclasses.asdict(place)}
            for number, leak in enumerate(self, 1)
            for place in leak.places
        ]
        return pandas.DataFrame(rows, columns=["leak", *of_leak, *(field.name for field in dataclasses.fields(Place))])


def leaks(trace: Trace, device: int) -> Leaks:
    """What grows on one device across the iterations of a run; empty where it levels off, or nobody can tell."""
    births = Births.of(trace, device)
    found = iterations(trace, device, births)
    if found is None:
        return Leaks()
    level = _Level.of(trace, device, found)
    kept = list(_kept(births, found))
    rest = _can_leak(births, found)
    for group in kept:
        rest[group.members] = False
    groups = [*kept, *_growing(births, found, rest)]
    leaks = [
        _leak(trace, device, births, found, cluster)
        for cluster in _clusters(groups)
        if level.shows(cluster, found.stride)
    ]
    return Leaks(sorted(leaks, key=lambda leak: -leak.total_bytes), f"{found.of}: {found.count * found.stride} of them")


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Blocks of one origin that grow: which ones, the bytes that each iteration adds, and since when."""

    kind: str
    members: Array
    added: Array
    since: int


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Bytes of the device at the end of each iteration, and the most there ever were."""

    at_end: Array
    highest_bytes: int

    @classmethod
    def of(cls, trace: Trace, device: int, found: Iterations) -> _Level:
        line = timeline(trace, device)
        at_end = line.bytes[np.searchsorted(line.row, found.ends, side="left") - 1]
        return cls(at_end, int(line.bytes.max()))

    def shows(self, groups: list[_Group], stride: int) -> bool:
        """Whether these groups together are more than bookkeeping, and the level rises with them."""
        since, added = min(group.since for group in groups), np.sum([group.added for group in groups], axis=0)
        total, count = float(added[since:].sum()), (len(added) - since) * stride
        is_much = total >= MIN_TOTAL_BYTES and total * max(IN_ITERATIONS / count, 1) >= MIN_SHARE * self.highest_bytes
        return is_much and self._rises_with(added, since)

    def _rises_with(self, added: Array, since: int) -> bool:
        """Whether the whole level rises by a good part of this, in one half of the time at least: else other blocks went.

        What is worked off a queue comes as other things go; and something large may go once.
        """
        begin, end = max(since - 1, 0), len(self.at_end) - 1
        half = (begin + end) // 2
        spans = ((begin, end), (begin, half), (half, end))
        return any(self.at_end[b] - self.at_end[a] >= 0.5 * added[a + 1 : b + 1].sum() > 0 for a, b in spans)


# --- growth ---------------------------------------------------------------------------------------------------------


def _kept(births: Births, found: Iterations) -> Iterator[_Group]:
    """Origins of which each iteration leaves blocks that are there at the end: of any size, else of one."""
    born, died = found.index(births.rows), found.index(births.died)
    stays = (born < found.count) & (died >= found.count) & _can_leak(births, found)
    passes = (died < found.count) & (died - born >= max(_LONG_LIVED // found.stride, 1))
    left = np.ones(len(born), bool)
    for key in (births.origin, grouped(births.origin, births.nbytes)):
        passing_bytes = np.bincount(key[passes & left], births.nbytes[passes & left], key.max(initial=0) + 1)
        for members in _members(key, stays & left, MIN_STEPS):
            added = np.bincount(born[members], births.nbytes[members], found.count)
            since = _steady_since(added)
            if since is None or passing_bytes[key[members[0]]] > 0.25 * added.sum():
                continue
            members = members[born[members] >= since]
            left[members] = False
            yield _Group("kept", members, added, since)


def _can_leak(births: Births, found: Iterations) -> Array:
    """What is not there on purpose: states of optimizers, and where only repetition tells iterations, parameters."""
    return ~(births.states | (births.made_to_stay & found.is_weak))


def _members(key: Array, chosen: Array, least: int) -> Iterator[Array]:
    """The chosen indices group by group, of groups with so many at least."""
    at = np.flatnonzero(chosen)
    at = at[np.argsort(key[at], kind="stable")]
    cuts = np.flatnonzero(np.diff(key[at])) + 1
    return (part for part in np.split(at, cuts) if len(part) >= least)


def _growing(births: Births, found: Iterations, chosen: Array) -> Iterator[_Group]:
    """Origins whose bytes rise from the end of one iteration to that of the next: copies that get larger."""
    born, died = found.index(births.rows), found.index(births.died)
    for members in _members(births.origin, chosen & (died > born), MIN_REPEATS):
        added = np.bincount(born[members], births.nbytes[members], found.count + 1)
        added -= np.bincount(died[members], births.nbytes[members], found.count + 1)
        falls = np.flatnonzero(added[:-1] < 0)
        since = _steady_since(added[:-1], int(falls[-1]) + 1 if len(falls) else 0)
        if since is not None and found.count - since > MIN_REPEATS:
            yield _Group("growing", members[born[members] >= since], added[:-1], since)


def _steady_since(added: Array, start: int = 0) -> int | None:
    """The first iteration from which on each adds about as much as the others, to the end; None if there is none.

    It reaches over half of the iterations at least, and before it came nothing or less: what ebbs away is a cache that
    fills. The last iteration still holds what every iteration holds for a while, so it is not weighed.
    """
    count = len(added) - 1
    total = np.concatenate(([0.0], np.cumsum(added[:count])))
    warm = max(2, count // 10)
    for since in np.flatnonzero(added[:count]).tolist():
        length = count - since
        if length < max(MIN_STEPS - 1, (count + 1) // 2):
            return None
        rate = (total[count] - total[since]) / length
        ebbs = since > warm and (total[since] - total[warm]) / (since - warm) > 1.5 * rate
        if since >= start and not ebbs and _is_steady(added[since:]):
            return int(since)
    return None


def _is_steady(added: Array) -> bool:
    """Whether every one of a few iterations adds about the same; of many, every quarter of them."""
    weighed = added[:-1]
    if len(weighed) < MIN_REPEATS:
        return bool(added.min() > 0 and weighed.max() <= 4 * weighed.min())
    edges = np.linspace(0, len(weighed), 5).astype(int)
    quarters = np.add.reduceat(weighed, edges[:-1]) / np.diff(edges)
    return bool(quarters.min() >= 0.6 * quarters.mean() and (weighed > 0).sum() >= MIN_STEPS)


def _clusters(groups: list[_Group]) -> Iterator[list[_Group]]:
    """Groups of one kind that began at about the same time: a graph that is kept has blocks from many places."""
    for kind in ("kept", "growing"):
        cluster: list[_Group] = []
        for group in sorted((g for g in groups if g.kind == kind), key=lambda g: g.since):
            if cluster and group.since > cluster[0].since + max(2, len(group.added) // 20):
                yield cluster
                cluster = []
            cluster.append(group)
        if cluster:
            yield cluster


# --- words ----------------------------------------------------------------------------------------------------------


def _leak(trace: Trace, device: int, births: Births, found: Iterations, cluster: list[_Group]) -> Leak:
    parts: dict[tuple[str, str, str], list[_Group]] = {}
    for group in cluster:
        parts.setdefault(_where(trace, births, int(group.members[0])), []).append(group)
    places = [_place(trace, births, found, groups) for groups in parts.values()]
    places.sort(key=lambda place: -place.bytes_per_iteration)
    return Leak(
        kind=cluster[0].kind,
        device=device,
        of=found.of,
        since=min(group.since for group in cluster) * found.stride + 1,
        iterations=found.count * found.stride,
        total_bytes=int(sum(group.added[group.since :].sum() for group in cluster)),
        places=tuple(places),
    )


def _where(trace: Trace, births: Births, index: int) -> tuple[str, str, str]:
    """By what a birth's place is told: its line, else module and operator."""
    line, block = births.line_text(trace, index), int(births.ids[index])
    if line:
        return line, "", ""
    return "", trace.text("module", int(trace.blocks.module[block])), trace.text("op", int(trace.blocks.op[block]))


def _place(trace: Trace, births: Births, found: Iterations, groups: list[_Group]) -> Place:
    """The place of these groups, told by its largest block."""
    members = np.concatenate([group.members for group in groups])
    largest = int(members[births.nbytes[members].argmax()])
    block = int(births.ids[largest])
    op, shape = (trace.text(name, int(getattr(trace.blocks, name)[block])) for name in ("op", "shape"))
    module = _common([trace.text("module", int(m)) for m in np.unique(trace.blocks.module[births.ids[members]])])
    each = sum(_each(group, found.count - 1) for group in groups) / found.stride
    stay = sum(len(group.members) / ((found.count - group.since) * found.stride) for group in groups)
    blocks = round(stay, 2) if groups[0].kind == "kept" else 0.0
    return Place(births.line_text(trace, largest), module, op, shape, round(each), blocks)


def _each(group: _Group, count: int) -> float:
    """What one of the first `count` iterations adds, without the last, which still holds what goes."""
    added = group.added[group.since : count]
    return float(np.median(added) if group.kind == "growing" else added.mean())


def _common(paths: list[str]) -> str:
    """What module paths have in common: "net.blocks" of "net.blocks.0" and "net.blocks.1.fc"."""
    steps = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(step[0] for step in itertools.takewhile(lambda step: len(set(step)) == 1, steps))


def short_line(line: str) -> str:
    """The end of a path and the line number; a cell's temporary file is the cell, and what is no line stays as it is.

    >>> short_line("/home/me/train.py:7"), short_line("cell:3"), short_line("before the cell")
    ('train.py:7', 'line 3 of a cell', 'before the cell')
    """
    path, _, number = one_line(line, 1000).rpartition(":")
    if "ipykernel_" in path or path.startswith("<ipython-input") or path == "cell":
        return f"line {number} of a cell"
    return f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{number}" if path else number
