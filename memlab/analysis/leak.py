"""Memory that grows from one iteration of a run to the next (and not a plateau), and the line that allocates it.

A leak is an origin from which (nearly) every iteration leaves blocks that exist at the end of the run, or which holds more
at the end of each iteration. What levels off, shrinks, is emptied from time to time or moves from one place to another is no
leak. Growth over fewer than four iterations is not reported.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Self

import numpy as np

from memlab.analysis.iterations import MIN_REPEATS, MIN_STEPS, Iterations, StepBirths, distinct, iterations
from memlab.analysis.timeline import Timeline, timeline
from memlab.trace.columns import Array
from memlab.trace.trace import Trace
from memlab.units import KiB, format_bytes, one_line

MIN_SHARE, IN_ITERATIONS = 0.1, 1000
"""The least that this many iterations (or all, if more) must add, as a share of the highest level. Less is bookkeeping."""
_MIN_TOTAL_BYTES = 64 * KiB
_LONG_LIVED = 3
"""In iterations: what is freed after this long belongs to a window, or to a list that is emptied."""
_PLACES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of the growth is allocated; "" if unknown.

    `blocks` is how many allocations per iteration are not freed, on average; 0 if one is replaced by a larger one.
    """

    line: str
    module: str
    op: str
    shape: str
    bytes_per_iteration: int
    blocks: float

    @property
    def text(self) -> str:
        """The place in words."""
        parts = [f"at {short_line(self.line)}"] if self.line else []
        parts += [f"in {one_line(self.module)}"] if self.module else []
        parts += [f"by {one_line(self.op)}"] if self.op and not self.line else []
        return " ".join(parts) or "at an unknown place"


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory that each iteration adds to on one device: `kind` "kept" is not freed, "growing" is replaced by something larger.

    `since` is the first iteration that adds, counted from 1, of `iterations`; `of` says what an iteration is. The places
    are those that allocate it, the largest first; `total_bytes` is the sum at the end of the last iteration.
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
        shown, rest = self.places[:_PLACES_SHOWN], self.places[_PLACES_SHOWN:]
        is_one = len(self.places) == 1
        where = ", ".join(p.text + ("" if is_one else f" {format_bytes(p.bytes_per_iteration)}") for p in shown)
        others = f", {len(rest)} more {format_bytes(sum(p.bytes_per_iteration for p in rest))}" if rest else ""
        return (
            f"Grows by {format_bytes(self.bytes_per_iteration)} with each {one_line(self.of)}, since number {self.since} "
            f"of {self.iterations}, {format_bytes(self.total_bytes)} in all. {what} is allocated {where}{others}."
        )


class Leaks(tuple[Leak, ...]):
    """The leaks, largest first: a tuple shown as sentences, in a notebook too; `to_pandas()` has one row per place.

    `looked_at` says which iterations were compared, "" if the run has none that can be distinguished; `remark` is the
    trace's.
    """

    looked_at: str
    remark: str

    def __new__(cls, found: Iterable[Leak] = (), looked_at: str = "", remark: str = "") -> Self:
        """The leaks found among these iterations."""
        made = super().__new__(cls, found)
        made.looked_at, made.remark = looked_at, remark
        return made

    def __getnewargs__(self) -> tuple[tuple[Leak, ...], str, str]:
        return tuple(self), self.looked_at, self.remark

    @property
    def text(self) -> str:
        """The finding in words, also if nothing grows."""
        rows = "no row of at least four iterations (optimizer steps, backwards, calls) to compare"
        nothing = f"Unknown: this run has {rows}."
        if self.looked_at:
            nothing = f"Nothing grows from one iteration to the next ({self.looked_at})."
        return "\n".join([*([leak.text for leak in self] or [nothing]), *filter(None, (self.remark,))])

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(f"<div>{escape(line)}</div>" for line in self.text.splitlines())

    def to_pandas(self) -> Any:
        """One row per place of each leak, sizes in bytes."""
        import pandas

        of_leak, of_place = ("kind", "device", "of", "since", "iterations", "total_bytes"), Place.__dataclass_fields__
        rows = []
        for number, leak in enumerate(self, 1):
            facts = {"leak": number, **{name: getattr(leak, name) for name in of_leak}}
            rows += [facts | dataclasses.asdict(place) for place in leak.places]
        return pandas.DataFrame(rows, columns=["leak", *of_leak, *of_place])


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Blocks of one origin that grow: which ones, the bytes that each iteration adds, and since when."""

    kind: str
    members: Array
    added: Array
    since: int


def leaks(trace: Trace, device: int) -> Leaks:
    """What grows on one device across the iterations of a run; empty if it levels off, or if that is unknown."""
    births = StepBirths.of(trace, device)
    found = iterations(trace, device, births)
    if found is None:
        return Leaks()
    # Optimizer state stays on purpose, and so do parameters where iterations were found by repetition only.
    can_leak = ~(births.states | (births.made_to_stay & found.is_weak))
    kept = list(_kept(births, found, can_leak))
    for group in kept:
        can_leak[group.members] = False
    line, leaks = timeline(trace, device), []
    for groups in (kept, list(_growing(births, found, can_leak))):
        # Groups that began at about the same time belong together: a retained graph has blocks from many places.
        clusters: list[list[_Group]] = []
        for group in sorted(groups, key=lambda group: group.since):
            if clusters and group.since <= clusters[-1][0].since + max(2, len(group.added) // 20):
                clusters[-1].append(group)
            else:
                clusters.append([group])
        shown = (cluster for cluster in clusters if _is_shown_by(line, found, cluster))
        leaks += [_leak(trace, device, births, found, cluster) for cluster in shown]
    looked_at = f"{found.of}: {found.count * found.stride} of them"
    return Leaks(sorted(leaks, key=lambda leak: -leak.total_bytes), looked_at, trace.remark)


def _is_shown_by(line: Timeline, found: Iterations, groups: list[_Group]) -> bool:
    """Whether these groups together are more than bookkeeping, and the level at the ends of iterations rises with them.

    It has to rise by a good part of what they add, in at least one half of the run: otherwise other blocks were freed. Work
    taken from a queue allocates while other things are freed; and something large may be freed once.
    """
    at_end = line.bytes[np.searchsorted(line.row, found.ends, side="left") - 1]
    since, added = min(group.since for group in groups), np.sum([group.added for group in groups], axis=0)
    total, count = float(added[since:].sum()), (len(added) - since) * found.stride
    if total < _MIN_TOTAL_BYTES or total * max(IN_ITERATIONS / count, 1) < MIN_SHARE * int(line.bytes.max()):
        return False
    begin, end = max(since - 1, 0), len(at_end) - 1
    half = (begin + end) // 2
    spans = ((begin, end), (begin, half), (half, end))
    return any(at_end[b] - at_end[a] >= 0.5 * added[a + 1 : b + 1].sum() > 0 for a, b in spans)


def _kept(births: StepBirths, found: Iterations, can_leak: Array) -> Iterator[_Group]:
    """Origins from which each iteration leaves blocks to the end of the run: of any size, else of one size."""
    born, died = found.index(births.rows), found.index(births.died)
    stays = (born < found.count) & (died >= found.count) & can_leak
    passes = (died < found.count) & (died - born >= max(_LONG_LIVED // found.stride, 1))
    left = np.ones(len(born), bool)
    for key in (births.origin, distinct(births.origin, births.nbytes)[0]):
        passing_bytes = np.bincount(key[passes & left], births.nbytes[passes & left], key.max(initial=0) + 1)
        for members in _members(key, stays & left, MIN_STEPS):
            added = np.bincount(born[members], births.nbytes[members], found.count)
            since = _steady_since(added)
            if since is not None and passing_bytes[key[members[0]]] <= 0.25 * added.sum():
                members = members[born[members] >= since]
                left[members] = False
                yield _Group("kept", members, added, since)


def _members(key: Array, chosen: Array, least: int) -> Iterator[Array]:
    """The chosen indices by group, of groups of at least this size."""
    at = np.flatnonzero(chosen)
    at = at[np.argsort(key[at], kind="stable")]
    cuts = np.flatnonzero(np.diff(key[at])) + 1
    return (part for part in np.split(at, cuts) if len(part) >= least)


def _growing(births: StepBirths, found: Iterations, chosen: Array) -> Iterator[_Group]:
    """Origins whose bytes rise from one iteration's end to the next: copies that get larger."""
    born, died = found.index(births.rows), found.index(births.died)
    for members in _members(births.origin, chosen & (died > born), MIN_REPEATS):
        added = np.bincount(born[members], births.nbytes[members], found.count + 1)
        added -= np.bincount(died[members], births.nbytes[members], found.count + 1)
        falls = np.flatnonzero(added[:-1] < 0)
        since = _steady_since(added[:-1], int(falls[-1]) + 1 if len(falls) else 0)
        if since is not None and found.count - since > MIN_REPEATS:
            yield _Group("growing", members[born[members] >= since], added[:-1], since)


def _steady_since(added: Array, start: int = 0) -> int | None:
    """The first iteration from which each adds about the same, to the end of the run; None if there is none.

    It covers at least half of the iterations, and those before added nothing or less: growth that slows down is a cache
    that fills. The last iteration still holds its temporaries, so it is not weighed.
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
    """Whether every iteration adds about the same; of many iterations, every quarter of them."""
    weighed = added[:-1]
    if len(weighed) < MIN_REPEATS:
        return bool(added.min() > 0 and weighed.max() <= 4 * weighed.min())
    edges = np.linspace(0, len(weighed), 5).astype(int)
    quarters = np.add.reduceat(weighed, edges[:-1]) / np.diff(edges)
    return bool(quarters.min() >= 0.6 * quarters.mean() and (weighed > 0).sum() >= MIN_STEPS)


def _leak(trace: Trace, device: int, births: StepBirths, found: Iterations, cluster: list[_Group]) -> Leak:
    parts: dict[tuple[str, str, str], list[_Group]] = {}
    for group in cluster:  # a place is its line, else module and operator
        first = int(group.members[0])
        line, block = births.line_text(trace, first), int(births.ids[first])
        module, op = (trace.text(name, int(getattr(trace.blocks, name)[block])) for name in ("module", "op"))
        parts.setdefault((line, "", "") if line else ("", module, op), []).append(group)
    places = [_place(trace, births, found, groups) for groups in parts.values()]
    return Leak(
        kind=cluster[0].kind,
        device=device,
        of=found.of,
        since=min(group.since for group in cluster) * found.stride + 1,
        iterations=found.count * found.stride,
        total_bytes=int(sum(group.added[group.since :].sum() for group in cluster)),
        places=tuple(sorted(places, key=lambda place: -place.bytes_per_iteration)),
    )


def _place(trace: Trace, births: StepBirths, found: Iterations, groups: list[_Group]) -> Place:
    """The place of these groups: that of their largest block; its module is the common prefix of their module paths."""
    members = np.concatenate([group.members for group in groups])
    largest = int(members[births.nbytes[members].argmax()])
    block, is_growing = int(births.ids[largest]), groups[0].kind == "growing"
    op, shape = (trace.text(name, int(getattr(trace.blocks, name)[block])) for name in ("op", "shape"))
    paths = [trace.text("module", int(m)).split(".") for m in np.unique(trace.blocks.module[births.ids[members]])]
    steps = itertools.takewhile(lambda step: len(set(step)) == 1, zip(*paths, strict=False))
    module = ".".join(step[0] for step in steps)
    each = stay = 0.0
    for group in groups:  # the last iteration still holds its temporaries
        added = group.added[group.since : found.count - 1]
        each += float(np.median(added) if is_growing else added.mean()) / found.stride
        stay += len(group.members) / ((found.count - group.since) * found.stride)
    blocks = 0.0 if is_growing else round(stay, 2)
    return Place(births.line_text(trace, largest), module, op, shape, round(each), blocks)


def short_line(line: str) -> str:
    """The end of a path and the line number; a cell's temporary file becomes the cell; any other text stays as it is.

    >>> short_line("/home/me/train.py:7"), short_line("cell:3"), short_line("before the run")
    ('train.py:7', 'line 3 of a cell', 'before the run')
    """
    path, _, number = one_line(line, 1000).rpartition(":")
    if "ipykernel_" in path or path.startswith("<ipython-input") or path == "cell":
        return f"line {number} of a cell"
    return f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{number}" if path else number


def named_bytes(items: Any) -> tuple[tuple[str, int], ...]:
    """Names and bytes from the notes of a file, as far as they are that."""
    pairs = [one for one in items if isinstance(one, list) and len(one) == 2] if isinstance(items, list) else []
    return tuple((str(name), count) for name, count in pairs if isinstance(count, int))
