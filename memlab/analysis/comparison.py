"""Two runs side by side: the difference of their peaks, by category, module or line.

The differences sum to the difference of the peaks exactly: what was not seen has a row of its own.

Limits: only the device with the largest peak of each run is compared. Modules and lines are matched by name, those of a model that
was built again without its number, and lines of a cell that was changed by their text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from operator import attrgetter
from typing import Any

from memlab.analysis.breakdown import BY, breakdown
from memlab.analysis.curves import BINS, LAYERS, in_order, moments
from memlab.analysis.lines import WITH_LINES, sources_of
from memlab.analysis.timeline import timeline
from memlab.by_name import ByName
from memlab.errors import MemlabError
from memlab.trace.columns import Array
from memlab.trace.trace import Device, Trace
from memlab.units import UNBOUNDED, ByteRange, format_bytes, plain, signed

UNTOLD = "not attributed"
"""The part of a peak that no event explains: events were lost, or a predicted GPU is too small for the run."""
_FAR_APART = 4
"""If one run takes this many times as long, the shorter one is hard to read on a common axis."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two runs, with the peak of *allocated* on one of its devices."""

    name: str
    trace: Trace
    device: Device
    peak: ByteRange

    @property
    def is_predicted(self) -> bool:
        """Whether nothing of it was measured."""
        return self.trace.provenance == "predicted"

    @property
    def duration_s(self) -> float:
        """Its duration; for a prediction, that of its dry run."""
        return self.trace.made_by.duration_ns / 1e9

    def shares(self, by: str) -> dict[str, int]:
        """Shares of the peak by name; they sum to its lower bound, or to what the trace reaches if that is more."""
        try:
            shares = dict(breakdown(self.trace, self.device.index, by))
        except MemlabError:
            if by not in BY:
                raise
            shares = {}  # the events around the peak were lost
        untold = max(self.peak.low - sum(shares.values()), 0)
        return {**shares, UNTOLD: untold} if untold else shares


@dataclass(frozen=True, slots=True)
class Difference:
    """The bytes of one name at the peaks of `a` and `b`."""

    a_bytes: int
    b_bytes: int

    @property
    def difference_bytes(self) -> int:
        """`b` minus `a`."""
        return self.b_bytes - self.a_bytes


@dataclass(frozen=True, slots=True)
class Differences(ByName[Difference]):
    """Name -> Difference, the largest first.

    `texts` has the code of lines by their name, where it is known; `remark` is that of the traces.
    """

    by: str
    rows: Mapping[str, Difference]
    texts: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    _known = property(attrgetter("rows"))

    @property
    def total(self) -> Difference:
        """The peaks themselves."""
        return Difference(sum(one.a_bytes for one in self.values()), sum(one.b_bytes for one in self.values()))

    def __str__(self) -> str:
        rows = [*self.items(), ("peak allocated", self.total)]
        width = max(len(name) for name, _ in rows)
        lines = []
        for name, one in rows:
            sizes = f"{format_bytes(one.a_bytes):>10}  {format_bytes(one.b_bytes):>10}"
            lines.append(f"{plain(name):<{width}}  {sizes}  {signed(one.difference_bytes):>11}")
        return "\n".join([*lines, *filter(None, (self.remark,))])

    def to_pandas(self) -> Any:
        """One row per name, sizes in bytes."""
        import pandas

        rows = [(name, one.a_bytes, one.b_bytes, one.difference_bytes) for name, one in self.items()]
        return pandas.DataFrame(rows, columns=[self.by, "a_bytes", "b_bytes", "difference_bytes"]).set_index(self.by)


def known_by(a: Side, b: Side) -> tuple[str, ...]:
    """What both can be broken down by: "category", "module", "line".

    Lines only if both runs followed theirs, or neither: one that did has other names for its lines, and other bytes, as what
    PyTorch's frames have no line for counts for the line that ran.
    """
    blocks = a.trace.blocks, b.trace.blocks
    has_changes = len(a.trace.recategorised) or len(b.trace.recategorised)
    known = {"category": has_changes or any(one.category.any() for one in blocks)}
    known["module"] = any((one.module >= 0).any() for one in blocks)
    known["line"] = all((one.line >= 0).any() for one in blocks) and _follows(a) == _follows(b)
    return tuple(by for by, is_known in known.items() if is_known)


def _follows(side: Side) -> bool:
    return bool(sources_of(side.trace))


def differences(a: Side, b: Side, by: str = "category") -> Differences:
    """Break down the difference of the peaks; `by` is as for `breakdown`."""
    if by not in BY:
        raise MemlabError(f"cannot compare by {by!r:.80}. Choose one of {', '.join(BY)}.")
    if by == "line" and not any((one.trace.blocks.line >= 0).any() for one in (a, b)):
        raise MemlabError(f"neither run knows its lines: measure with {WITH_LINES}.")
    names = matched(sources_of(a.trace), sources_of(b.trace)) if by == "line" else Matched()
    first, second = Counter[str](), Counter[str]()
    shares = (a.shares(by), b.shares(by))
    if by in ("module", "tensor"):
        stripped = list(map(_without_numbers, shares))
        names = Matched(*stripped) if all(stripped) else names
    for held, new, sums in zip(shares, (names.of_a, names.of_b), (first, second), strict=True):
        for name, count in held.items():
            sums[new.get(name, name)] += count
    rows = {name: Difference(first[name], second[name]) for name in {**first, **second}}
    largest = sorted(rows.items(), key=lambda item: (-abs(item[1].difference_bytes), -item[1].a_bytes, item[0]))
    return Differences(by, dict(largest), names.texts, a.trace.remark or b.trace.remark)


def _without_numbers(names: Iterable[str]) -> dict[str, str]:
    """Names without the number that a model gets which was built again ("net#2.0"); {} where two would be the same."""
    found = {name: re.sub(r"#\d+(?=\.|$)", "", name) for name in names}
    return found if len(set(found.values())) == len(found) else {}


# --- which lines are the same: matched by text, as an edit moves the lines below it ----------------------------------------

Sources = Mapping[str, Mapping[int, str]]
"""Label of a source -> number of a line -> its text."""
_MANY = 2000  # lines; above this the matcher may ignore frequent lines, for speed


@dataclass(frozen=True, slots=True)
class Matched:
    """Line names of each run -> common names; `texts` has their code."""

    of_a: dict[str, str] = field(default_factory=dict)
    of_b: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def matched(a: Sources, b: Sources) -> Matched:
    """Common names for the lines of two runs.

    A line in both is "cell:3", or "cell:3 → 5" if it has moved; a line in only one of them, if the other has different code
    at that number, is "cell:3 (a)" or "cell:3 (b)".

    >>> found = matched({"cell": {1: "x = f()", 2: "y = x"}}, {"cell": {1: "x = g()", 2: "", 3: "y = x"}})
    >>> dict(found.of_a), dict(found.of_b)
    ({'cell:1': 'cell:1 (a)', 'cell:2': 'cell:2 → 3'}, {'cell:1': 'cell:1 (b)', 'cell:2': 'cell:2 (b)', 'cell:3': 'cell:2 → 3'})
    """
    found = Matched()
    for label in {**a, **b}:
        first, second = a.get(label, {}), b.get(label, {})
        numbers = sorted(first), sorted(second)
        texts = [first[one].strip() for one in numbers[0]], [second[one].strip() for one in numbers[1]]
        matcher = SequenceMatcher(None, *texts, autojunk=max(len(first), len(second)) > _MANY)
        of_a, of_b = dict[int, str](), dict[int, str]()
        for block in matcher.get_matching_blocks():
            for step in range(block.size):
                old, new = numbers[0][block.a + step], numbers[1][block.b + step]
                of_a[old] = of_b[new] = f"{label}:{old}" if old == new else f"{label}:{old} → {new}"
        sides = ((first, of_a, second, found.of_a, "a"), (second, of_b, first, found.of_b, "b"))
        for lines, common, others, names, side in sides:
            for number, text in lines.items():
                alone = f"{label}:{number} ({side})" if number in others else f"{label}:{number}"
                name = names[f"{label}:{number}"] = common.get(number, alone)
                found.texts.setdefault(name, text.strip())
    return found


# --- what a figure shows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One run as drawn: its timeline, and the stacked bar of its peak, bottom first.

    `full_bytes` is the capacity of a device that ran out of memory, else 0.
    """

    name: str
    time_s: Array
    bytes: Array
    duration_s: float
    peak: ByteRange
    shares: tuple[tuple[str, int], ...]
    full_bytes: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether it ran out of memory and the curve ends there: its peak is what a prediction needs beyond that."""
        return self.full_bytes > 0 and self.peak.low > int(self.bytes.max(initial=0))

    @property
    def top_bytes(self) -> int:
        """The highest value drawn."""
        known = self.peak.high if self.peak.high < UNBOUNDED else self.peak.low
        return max(int(self.bytes.max(initial=0)), known)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Two runs on one axis, each from 0. `by_share` is the initial axis: seconds, or the share of each run.

    Without `has_times` a second of either is one event. `remark` is that of the traces.
    """

    a: Drawn
    b: Drawn
    by_share: bool
    why: str
    remark: str = ""
    has_times: bool = True

    @property
    def sides(self) -> tuple[Drawn, Drawn]:
        """Both."""
        return self.a, self.b

    @property
    def top_bytes(self) -> int:
        """The highest value of both."""
        return max(self.a.top_bytes, self.b.top_bytes, 1)

    @property
    def duration_s(self) -> float:
        """The duration of the longer one."""
        return max(self.a.duration_s, self.b.duration_s, 1e-9)


def picture(a: Side, b: Side, has_time: bool = True) -> Picture:
    """The figure of two runs; without `has_time`, where not both durations were measured, over their events in order."""
    by = "category" if "category" in known_by(a, b) else ""
    first, second = (_drawn(side, by, has_time) for side in (a, b))
    shorter, longer = sorted((first.duration_s, second.duration_s))
    times = longer / shorter if shorter else 1.0
    much = f"took {times:,.0f} times as long" if has_time else f"has {times:,.0f} times as many events"
    why = f"one {much}" if times > _FAR_APART else ""
    return Picture(first, second, bool(why), why, a.trace.remark or b.trace.remark, has_time)


def _drawn(side: Side, by: str, has_time: bool) -> Drawn:
    """Draw every step: there are few, and the peak is among them."""
    trace = side.trace if has_time else in_order(side.trace)
    line = timeline(trace, side.device.index)
    time_ns, shown = moments(line, BINS)
    time_s = time_ns / 1e9
    shares = side.shares(by) if by else {"allocated": side.peak.low}
    order = [*LAYERS, *sorted(set(shares) - set(LAYERS))]
    stacked = tuple((name, shares[name]) for name in order if shares.get(name, 0) > 0)
    duration_s = max(trace.made_by.duration_ns / 1e9, float(time_s[-1]))
    full_bytes = side.device.capacity_bytes if side.device.num_ooms > 0 else 0
    return Drawn(side.name, time_s, line.bytes[shown], duration_s, side.peak, stacked, max(full_bytes, 0))
