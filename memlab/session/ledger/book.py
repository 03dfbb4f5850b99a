"""The ledger: one entry for each executed cell, with what it took and what it left behind.

It is told when a cell begins and ends, looks at counters and at what came and went, and keeps weak references, texts and
numbers: no tensor, error or frame. Cells within cells count for the outermost. What it cannot see in a moment it leaves for
when it is asked, and says so. Whatever fails in it is kept as a text, and never the cell's.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlab.analysis.growth import MIN_GROWTH_BYTES, Accounts, Entry, Left, Level, growing
from memlab.analysis.peak import Peak
from memlab.errors import MemlabError
from memlab.names.census import census
from memlab.session.executions import depth_of, error_of
from memlab.session.ledger.gauge import Polls, Reading, Readings, have_moved, peak_between, readings
from memlab.session.ledger.stock import Known, Stock
from memlab.session.run import Run
from memlab.units import MiB

MAX_CELLS = 500
MAX_LEFT = 5_000
"""Of what one cell left, so many storages are kept apart, the largest."""
_DEAD_FOR = 50
"""After so many cells what has gone is forgotten."""
MAX_PATH = 300
NAME_FROM_BYTES = 1 * MiB
"""What a cell left is named at once from here on, when it ran before from less on, and else when the ledger is asked."""
NAMES_S = 0.1
ASKED_S = 2.0
LOOK_S = 0.1
"""A look or a search for names may take so long at any cell; one that takes longer is paid for by a twentieth of the cells'
own time and 20 milliseconds of each. In seconds of the processor, so that a busy machine does not blind it.
"""
_SHARE, _CREDIT_S, _MAX_CREDIT_S = 0.05, 0.02, 1.0


@dataclass(slots=True)
class _Open:
    """The cell that is being executed."""

    text: str
    before: Readings
    host: Counter[str]
    polls: Polls = field(default_factory=Polls)
    begun_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class _Record:
    """An entry as far as it can still change: the names and the lives of what the cell left."""

    entry: dict[str, Any]
    left: list[Known]


class Ledger:
    """What the cells of one shell left behind. `before_cell` and `after_cell` are for its events."""

    def __init__(self) -> None:
        self.is_on = True
        self.failures: Counter[str] = Counter()
        self._records: deque[_Record] = deque(maxlen=MAX_CELLS)
        self._ran: Counter[str] = Counter()
        self._count = 0
        self._reset()

    def _reset(self) -> None:
        self._stock: Stock | None = None
        self._found: list[Known] = []
        self._credit_s = _MAX_CREDIT_S
        self._naming_s, self._has_looked, self._is_whole = 0.0, False, True
        self._infos: list[Any] = []
        self._thread = 0
        self._open: _Open | None = None

    # --- on and off -------------------------------------------------------------------------------------------------

    def on(self) -> None:
        """Keep the ledger from the next cell on."""
        self.is_on = True

    def off(self) -> None:
        """Stop keeping it: no look and no thread any more. The entries so far stay."""
        self.is_on = False
        self.close()

    def close(self) -> None:
        """Forget the cell that is open and what is alive, as when the extension is unloaded; on or off stays as it is."""
        if self._open is not None:
            self._open.polls.stop()
        self._settle()
        self._reset()

    def clear(self) -> None:
        """Forget the cells so far; what is alive counts as there before."""
        self._records.clear()
        self._ran.clear()
        self.failures.clear()
        self._count = 0

    # --- cells ------------------------------------------------------------------------------------------------------

    def before_cell(self, info: Any) -> None:
        """A cell begins: IPython's `info` of it."""
        if not self.is_on or (self._infos and self._thread != threading.get_ident()):
            return
        self._infos.append(info)
        if len(self._infos) > 1:
            return
        self._thread = threading.get_ident()
        try:
            self._begin(info)
        except (Exception, KeyboardInterrupt) as error:
            self._failed(error)

    def after_cell(self, result: Any, runs: Sequence[Run] = ()) -> None:
        """A cell has ended: IPython's `result` of it (or None), and the runs that measured all of it."""
        if not self._infos or self._thread != threading.get_ident():
            return
        del self._infos[depth_of(self._infos, result) :]
        if self._infos or self._open is None:
            return
        opened, self._open = self._open, None
        duration_s = time.perf_counter() - opened.begun_s
        try:
            self._end(opened, duration_s, result, runs)
        except (Exception, KeyboardInterrupt) as error:  # the cell is over: there is nothing left to interrupt
            self._failed(error)
        finally:
            opened.polls.stop()

    def _failed(self, error: BaseException) -> None:
        # Text, not the error: its traceback would keep frames and with them tensors alive.
        self.failures[type(error).__name__] += 1

    def _begin(self, info: Any) -> None:
        if self._stock is None:
            stock = Stock()
            stock.look()
            self._stock = stock  # only now: a first look that was interrupted is no beginning
        self._settle()
        self._open = _Open(info.raw_cell, readings(), self._stock.bytes.copy())
        self._open.polls.start()

    def _end(self, opened: _Open, duration_s: float, result: Any, runs: Sequence[Run]) -> None:
        polled, after, error = opened.polls.stop(), readings(), error_of(result)
        new, notes = self._what_came(opened, after, duration_s)
        if self._stock is None:  # switched off meanwhile
            return
        levels = _levels(opened, after, self._stock.bytes, polled, runs)
        text = _without_magic(opened.text)
        cell = hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
        entry = {
            "index": self._count,
            "number": 0 if result is None else result.execution_count or 0,
            "text": next((line.strip() for line in text.splitlines() if line.strip()), "")[:200],
            "cell": cell,
            "again": self._ran[cell],
            "duration_s": duration_s,
            "status": _status(result, error),
            "is_tracked": bool(runs),
            "is_whole": self._is_whole,
            "levels": levels,
            "notes": tuple(notes),
        }
        del error
        self._add(entry, new)

    def _add(self, entry: dict[str, Any], new: list[Known]) -> None:
        if len(new) > MAX_LEFT:
            new = sorted(new, key=lambda known: -known.nbytes)[:MAX_LEFT]
            entry["notes"] += (f"more than {MAX_LEFT:,} storages: the smallest are not named",)
        for known in new:
            known.cell = self._count
        self._records.append(_Record(entry, new))
        self._ran[entry["cell"]] += 1
        self._count += 1
        if len(self._records) > _DEAD_FOR:
            old = self._records[-_DEAD_FOR - 1]
            old.left = [known for known in old.left if known.died is None]
        least = MIN_GROWTH_BYTES if entry["again"] else NAME_FROM_BYTES
        if sum(known.nbytes for known in new) >= least and self._afford(self._naming_s):
            self._name(new, NAMES_S)

    # --- looking ----------------------------------------------------------------------------------------------------

    def _settle(self) -> list[Known]:
        """What has gone; it went during the entry that comes next."""
        gone = self._stock.settle() if self._stock is not None else []
        for known in gone:
            known.died = self._count
        return gone

    def _what_came(self, opened: _Open, after: Readings, duration_s: float) -> tuple[list[Known], list[str]]:
        """The storages that came during a cell, and what could not be seen of them."""
        stock, gone = self._stock, self._settle()
        assert stock is not None
        new, self._found = self._found, []
        # Gradients have no Python object until they are asked for. A backward is told by what it lets go, and where an older
        # graph keeps nothing but its leaves, by its name.
        wants = stock.may_have_changed() or bool(gone) or "backward" in opened.text
        wants = wants or (have_moved(opened.before, after) and not _explains(opened.before, after, new, gone))
        self._credit_s = min(self._credit_s + _CREDIT_S + _SHARE * duration_s, _MAX_CREDIT_S)
        self._has_looked = wants and self._afford(stock.cost_s)
        notes = []
        if self._has_looked:
            new += stock.look()
            notes += [stock.graphs.unseen] if stock.graphs.unseen else []
        elif wants:
            notes = [f"not looked at, as that takes {stock.cost_s:.2f} s here: what it left may count for a later cell"]
        self._is_whole = self._has_looked or not wants
        self._settle()
        return [known for known in new if known.died is None], notes

    def _afford(self, cost_s: float) -> bool:
        """Whether there is time for something that took so long last time; what is long is taken off the credit."""
        if cost_s <= LOOK_S:
            return True
        if cost_s > self._credit_s:
            return False
        self._credit_s -= cost_s
        return True

    def _name(self, known: list[Known], budget_s: float) -> str:
        """Give names to these, as far as the time goes; in words, why not all of them were looked for."""
        wanted = {one.key: one for one in known if one() is not None}
        if not wanted:
            return ""
        if self._stock is not None and not self._stock.graphs.may_search():
            return "names were not looked for, as a graph has too many nodes to look at them again and again"
        begun = time.thread_time()
        found = census(only=wanted.keys(), budget_s=budget_s)  # the budget is that of naming; it lists everything first
        self._naming_s = time.thread_time() - begun
        if self._has_looked and self._stock is not None:
            self._stock.mark()  # what naming made is not the user's
        for storage in found.storages:
            one = wanted.get(storage.key)
            if one is not None:
                one.path, one.category = storage.path[:MAX_PATH] or one.path, storage.category
        return "" if found.is_complete else f"the search for names was cut short after {budget_s:g} s"

    # --- what it says -----------------------------------------------------------------------------------------------

    def accounts(self, budget_s: float = ASKED_S) -> Accounts:
        """The ledger as a value; what is alive is looked for again and named as it is called now."""
        notes = [f"the ledger failed {times} time(s): {what}" for what, times in self.failures.items()]
        left = [known for record in self._records for known in record.left if known.died is None]
        if self._stock is not None:
            self._found += self._stock.look()
            self._has_looked = True
            self._settle()
        for known in left:
            if known.died is None and known() is None:  # it went while the ledger was off
                known.died = self._count
        why_not = self._name(left, budget_s)
        notes += [why_not] if why_not else []
        entries = tuple(map(_entry, self._records))
        return Accounts(entries, growing(entries), self.is_on, tuple(notes))


def _entry(record: _Record) -> Entry:
    left = (Left(one.path, one.device, one.nbytes, one.category, one.died) for one in record.left)
    return Entry(**record.entry, left=tuple(left))


def _status(result: Any, error: BaseException | None) -> str:
    if result is None:
        return "interrupted"
    return "ok" if error is None else type(error).__name__


def _without_magic(text: str) -> str:
    """A cell's text without the line that tracks it: tracked or not, it is the same cell."""
    first, _, rest = text.partition("\n")
    return (rest if first.split(None, 1)[:1] == ["%%memtrack"] else text).strip()


# --- levels ---------------------------------------------------------------------------------------------------------


def _levels(
    opened: _Open, after: Readings, host: Counter[str], polled: Mapping[str, int], runs: Sequence[Run]
) -> tuple[Level, ...]:
    """Every device's bytes before and after, by its counters or, where it has none, by what Python sees."""
    peaks = _peaks_of(runs)
    levels = []
    for device in after:
        begun, ended = opened.before.get(device, Reading()), after[device]
        peak = peaks.get(device) or peak_between(begun, ended, polled.get(device, 0))
        levels.append(Level(device, begun.allocated_bytes, ended.allocated_bytes, peak))
    for device in dict.fromkeys([*opened.host, *host, "cpu"]):
        if device not in after:
            levels.append(Level(device, opened.host[device], host[device], peaks.get(device)))
    return tuple(levels)


def _peaks_of(runs: Sequence[Run]) -> dict[str, Peak]:
    """Device -> the peak of *allocated* that a run measured, the highest of several."""
    peaks: dict[str, Peak] = {}
    for run in runs:
        try:
            measured = {one.device.label: one.levels[0].peak for one in run.devices}
        except MemlabError:  # a run that could not be measured
            continue
        for device, peak in measured.items():
            if device not in peaks or peak.low_bytes > peaks[device].low_bytes:
                peaks[device] = peak
    return peaks


def _explains(before: Readings, after: Readings, new: list[Known], gone: list[Known]) -> bool:
    """Whether what came and went accounts for what the counters say, up to rounding."""
    for device in before.keys() | after.keys():
        moved = after.get(device, Reading()).allocated_bytes - before.get(device, Reading()).allocated_bytes
        came, went = ([one.nbytes for one in some if one.device == device] for some in (new, gone))
        if abs(moved - sum(came) + sum(went)) > 512 * (len(came) + len(went)):
            return False
    return True
