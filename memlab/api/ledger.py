"""`memlab.ledger()`: what the cells of this notebook did not free: one entry per executed cell, with its memory.

It keeps weak references, texts and numbers: no tensor, error or frame. Nested cells count for the outermost. Searches
that would take long are postponed until the ledger is shown, which says so. Its own failures are reported and never fail a cell.

Nothing is initialized and no counter is reset. On CUDA the peak of a cell is exact if it exceeded the earlier maximum. Else
it lies between the highest of a few readings a second and that maximum. Other accelerators have only readings, and the CPU
has no counters.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.analysis.growth import MIN_GROWTH_BYTES, Accounts, Entry, Left, LevelAfterRun, growing
from memlab.analysis.peak import Peak
from memlab.api.live_set import LiveSet, LiveStorage
from memlab.api.provenance import remark_here
from memlab.api.run import Run
from memlab.api.who import cut_in_the_middle
from memlab.errors import MemlabError
from memlab.probes.counters import NOT_READ, AcceleratorCounters, cuda_counters, cuda_devices
from memlab.probes.sampler import Sample, Sampler
from memlab.references.live_storages import live_storages
from memlab.units import UNBOUNDED, ByteRange, MiB, number_of
from memlab.views.ledger import ledger_page
from memlab.views.page import Page
from memlab.views.shown import Shown

MAX_CELLS = 500
MAX_LEFT = 5_000
"""The maximum number of storages listed per cell, the largest first."""
DEAD_FOR = 50
"""After this many cells freed storages are dropped."""
MAX_PATH = 300
NAME_FROM_BYTES = 1 * MiB
"""Above this size what a cell left is named at once; a smaller size if the cell ran before."""
NAMES_S = 0.1
ASKED_S = 2.0
LOOK_S = 0.1
"""The time that a scan or a search for names may take after any cell; a longer one uses a credit of a twentieth of the cells'
own time and 20 ms of each. In CPU seconds, so that a busy machine does not disable it.
"""
_SHARE, _CREDIT_S, _MAX_CREDIT_S = 0.05, 0.02, 1.0
POLLS_HZ = 4.0


@dataclass(frozen=True, slots=True)
class LedgerReading:
    """One device's counters; `moves` counts allocations and frees, `peak_bytes` is -1 if unknown."""

    allocated_bytes: int = 0
    peak_bytes: int = 0
    moves: int = 0


Readings = Mapping[str, LedgerReading]
"""Device ("cuda:0") -> its counters."""
_NOTHING = LedgerReading()


@dataclass(slots=True)
class _Open:
    """The cell that is being executed."""

    text: str
    before: Readings
    host: Counter[str]
    polls: Polls
    begun_s: float = field(default_factory=time.perf_counter)


class Ledger:
    """What the cells of one shell did not free. `before_cell` and `after_cell` are for its events."""

    def __init__(self) -> None:
        self.is_on = True
        self.failures: Counter[str] = Counter()
        # The entries, each with what the cell left, whose names and lifetimes still change.
        self.records: deque[tuple[dict[str, Any], list[LiveStorage]]] = deque(maxlen=MAX_CELLS)
        self._ran: Counter[str] = Counter()
        self._count = 0
        self._reset()

    def _reset(self) -> None:
        self.live: LiveSet | None = None
        self._found: list[LiveStorage] = []
        self.credit_s = _MAX_CREDIT_S
        self._naming_s, self._has_looked, self._is_whole = 0.0, False, True
        self._infos: list[Any] = []
        self._thread = 0
        self._open: _Open | None = None

    # --- start and stop ---

    def on(self) -> None:
        """Start with the next cell."""
        self.is_on = True

    def off(self) -> None:
        """Stop: no more scans, no thread. The entries so far stay."""
        self.is_on = False
        self.close()

    def close(self) -> None:
        """Drop the open cell and the live set, as when the extension is unloaded."""
        if self._open is not None:
            self._open.polls.stop()
        self._settle()
        self._reset()

    def clear(self) -> None:
        """Drop all cells; whatever is alive counts as older."""
        for one in (self.records, self._ran, self.failures):
            one.clear()
        self._count = 0

    # --- cells ---

    def before_cell(self, info: Any) -> None:
        """Start a cell, given IPython's `info`."""
        if not self.is_on or (self._infos and self._thread != threading.get_ident()):
            return
        self._infos.append(info)
        if len(self._infos) > 1:
            return
        self._thread = threading.get_ident()
        try:
            if self.live is None:
                live = LiveSet()
                live.look()
                self.live = live  # only now: an interrupted first scan does not count as a start
            self._settle()
            self._open = _Open(info.raw_cell, readings(), self.live.bytes.copy(), Polls())
            self._open.polls.start()
        except (Exception, KeyboardInterrupt) as error:
            # Text, not the error: its traceback would keep frames and their tensors alive.
            self.failures[type(error).__name__] += 1

    def after_cell(self, result: Any, runs: Sequence[Run] = ()) -> None:
        """End a cell, given IPython's `result` (or None) and the runs that measured all of it."""
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
            self.failures[type(error).__name__] += 1
        finally:
            opened.polls.stop()

    def _end(self, opened: _Open, duration_s: float, result: Any, runs: Sequence[Run]) -> None:
        polled, after, error = opened.polls.stop(), readings(), error_of(result)
        new, notes = self._what_came(opened, after, duration_s)
        if self.live is None:  # stopped meanwhile
            return
        text, status = opened.text, "ok" if error is None else type(error).__name__
        first, _, rest = text.partition("\n")
        if first.split(None, 1)[:1] == ["%%memtrack"]:  # tracked or not, it is the same cell
            text = rest
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        cell = hashlib.blake2s(text.strip().encode("utf-8", "replace"), digest_size=8).hexdigest()
        if len(new) > MAX_LEFT:
            new = sorted(new, key=lambda known: -known.nbytes)[:MAX_LEFT]
            notes.append(f"more than {MAX_LEFT:,} storages: the smallest are not named")
        for known in new:
            known.cell = self._count
        entry = {
            "index": self._count,
            "number": 0 if result is None else result.execution_count or 0,
            "text": lines[0][:200] if lines else "",
            "cell": cell,
            "again": self._ran[cell],
            "duration_s": duration_s,
            "status": "interrupted" if result is None else status,
            "is_tracked": bool(runs),
            "is_whole": self._is_whole,
            "levels": _levels(opened, after, self.live.bytes, polled, runs),
            "notes": tuple(notes),
        }
        del error
        self.records.append((entry, new))
        self._ran[cell] += 1
        self._count += 1
        if len(self.records) > DEAD_FOR:
            old = self.records[-DEAD_FOR - 1][1]
            old[:] = [known for known in old if known.died is None]
        least = MIN_GROWTH_BYTES if entry["again"] else NAME_FROM_BYTES
        if sum(known.nbytes for known in new) >= least and self._afford(self._naming_s):
            self._name(new, NAMES_S)

    # --- scanning ---

    def _settle(self) -> list[LiveStorage]:
        """Mark what was freed; it was freed during the next entry."""
        gone = self.live.settle() if self.live is not None else []
        for known in gone:
            known.died = self._count
        return gone

    def _what_came(self, opened: _Open, after: Readings, duration_s: float) -> tuple[list[LiveStorage], list[str]]:
        """The storages made during a cell, and what could not be seen."""
        live, gone, before = self.live, self._settle(), opened.before
        assert live is not None
        new, self._found = self._found, []
        # Gradients have no Python object until they are read. A backward is recognized by what it frees or, if an older
        # graph holds nothing but its leaves, by its name.
        wants = live.may_have_changed() or bool(gone) or "backward" in opened.text
        pairs = {one: (before.get(one, _NOTHING), after.get(one, _NOTHING)) for one in (*before, *after)}
        has_moved = any(begun.moves != ended.moves for begun, ended in pairs.values())
        for device, (begun, ended) in pairs.items() if has_moved else ():
            came, went = ([known.nbytes for known in some if known.device == device] for some in (new, gone))
            unexplained = ended.allocated_bytes - begun.allocated_bytes - sum(came) + sum(went)
            wants = wants or abs(unexplained) > 512 * (len(came) + len(went))  # up to rounding
        self.credit_s = min(self.credit_s + _CREDIT_S + _SHARE * duration_s, _MAX_CREDIT_S)
        self._has_looked = wants and self._afford(live.cost_s)
        notes = []
        if self._has_looked:
            new += live.look()
            notes += [live.graphs.unseen] if live.graphs.unseen else []
        elif wants:
            notes = [f"not looked at, as that takes {live.cost_s:.2f} s here: what it left may count for a later cell"]
        self._is_whole = self._has_looked or not wants
        self._settle()
        return [known for known in new if known.died is None], notes

    def _afford(self, cost_s: float) -> bool:
        """Whether there is time for what took this long last time; a long one uses the credit."""
        if cost_s <= LOOK_S:
            return True
        if cost_s > self.credit_s:
            return False
        self.credit_s -= cost_s
        return True

    def _name(self, known: list[LiveStorage], budget_s: float) -> str:
        """Name these storages within the time limit; return why the search was incomplete, "" if it was not."""
        wanted = {one.key: one for one in known if one() is not None}
        if not wanted:
            return ""
        if self.live is not None and not self.live.graphs.may_search():
            return "names were not looked for, as a graph has too many nodes to scan repeatedly"
        begun = time.thread_time()
        found = live_storages(only=wanted.keys(), budget_s=budget_s)  # for naming; it lists everything first
        self._naming_s = time.thread_time() - begun
        if self._has_looked and self.live is not None:
            self.live.mark()  # exclude what naming itself made
        for storage in found.storages:
            one = wanted.get(storage.key)
            if one is not None:
                one.path, one.category = cut_in_the_middle(storage.path, MAX_PATH) or one.path, storage.category
        return "" if found.is_complete else f"the search for names was cut short after {budget_s:g} s"

    # --- report ---

    def accounts(self) -> LedgerReport:
        """The current ledger; live storages are searched again and named as they are called now."""
        notes = [f"the ledger failed {number_of(times, 'time')}: {what}" for what, times in self.failures.items()]
        left = [known for _, some in self.records for known in some if known.died is None]
        if self.live is not None:
            self._found += self.live.look()
            self._has_looked = True
            self._settle()
        for known in left:
            if known.died is None and known() is None:  # it was freed while the ledger was stopped
                known.died = self._count
        why_not = self._name(left, ASKED_S)
        notes += [why_not] if why_not else []
        entries = []
        for facts, some in self.records:
            mine = (Left(one.path, one.device, one.nbytes, one.category, one.died) for one in some)
            entries.append(Entry(**facts, left=tuple(mine)))
        return LedgerReport(tuple(entries), growing(tuple(entries)), self.is_on, tuple(notes))


the_ledger = Ledger()
"""The ledger of this process; the extension reports the cells to it."""


class LedgerReport(Shown, Accounts):
    """A snapshot of the ledger: `print` it, let a notebook show it, or use `.to_pandas()`."""

    accounts = property(lambda self: self)
    """The ledger as a value."""

    @property
    def page(self) -> Page:
        """The ledger as text."""
        devices = {level.device for entry in self.entries for level in entry.levels}
        return ledger_page(self).remarked(remark_here(devices))

    table = page


def ledger() -> LedgerReport:
    """What each cell allocated and did not free, by name, and which cells grow when run again."""
    return the_ledger.accounts()


# --- IPython's events around cells ---


def depth_of(infos: Sequence[Any], result: Any) -> int:
    """The index of the cell of this result in the stack of executing cells (IPython's infos).

    On some interrupts IPython makes a new info of the same text, and ipykernel has no result at all: then everything has
    ended. A result of no cell in the stack ends nothing (empty cells start without an event).
    """
    if result is None:
        return 0
    for depth in reversed(range(len(infos))):
        if infos[depth] is result.info:
            return depth
    same = (d for d in reversed(range(len(infos))) if not result.success and infos[d].raw_cell == result.info.raw_cell)
    return next(same, len(infos))


def error_of(result: Any) -> BaseException | None:
    """The error of a cell; None if it did not fail or this is unknown."""
    return None if result is None else result.error_in_exec or result.error_before_exec


# --- levels: the allocators' counters before, during and after a cell ---


def readings() -> dict[str, LedgerReading]:
    """The counters of every accelerator that this process uses."""
    found = {}
    for device in cuda_devices():
        counters = cuda_counters(device)
        if counters["allocated"] >= 0:
            moves = counters["alloc_count"] + counters["free_count"]
            found[f"cuda:{device}"] = LedgerReading(counters["allocated"], counters["peak_allocated"], moves)
    current = None if found or torch.backends.cuda.is_built() else torch.accelerator.current_accelerator()
    if current is not None and current.type not in ("cuda", "cpu"):
        seen = AcceleratorCounters(current.type).read()
        if seen.allocated_bytes is not None:
            peak_bytes = NOT_READ if seen.peak_allocated_bytes is None else seen.peak_allocated_bytes
            found[f"{current.type}:0"] = LedgerReading(seen.allocated_bytes, peak_bytes, seen.allocated_bytes)
    return found


class Polls:
    """The highest readings while a cell runs, taken by a thread that ends with it."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}
        self._sampler: Sampler | None = None

    def start(self) -> None:
        """Start, if an accelerator is in use."""
        if readings():
            self._sampler = Sampler(self.read, rate_hz=POLLS_HZ, max_rows=1)
            self._sampler.start()

    def stop(self) -> Mapping[str, int]:
        """End the thread; return device -> highest reading in bytes."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        return self.highest

    def read(self) -> Sample:
        """Raise the highest levels to those of now."""
        for device, reading in readings().items():
            self.highest[device] = max(self.highest.get(device, 0), reading.allocated_bytes)
        return Sample(0, ())


def peak_between(before: LedgerReading, after: LedgerReading, polled_bytes: int = 0) -> Peak:
    """The peak of a cell, from the counters around it and the highest reading in it."""
    seen = max(before.allocated_bytes, after.allocated_bytes, polled_bytes)
    if after.peak_bytes > before.peak_bytes >= 0 and after.peak_bytes >= seen:
        exact = ByteRange.exact(after.peak_bytes)
        return Peak(exact, -1, -1, "PyTorch's counter, which rose above its earlier maximum")
    if after.peak_bytes == before.peak_bytes >= seen:
        return Peak(ByteRange(seen, after.peak_bytes), -1, -1, "readings, and PyTorch's counter, which did not rise")
    return Peak(ByteRange(max(seen, after.peak_bytes), UNBOUNDED), -1, -1, "readings")


def _levels(
    opened: _Open, after: Readings, host: Counter[str], polled: Mapping[str, int], runs: Sequence[Run]
) -> tuple[LevelAfterRun, ...]:
    """Every device's bytes before and after, from its counters or, without any, from what Python sees.

    The peak is the highest of the runs that measured the cell.
    """
    peaks: dict[str, Peak] = {}
    for run in runs:
        try:
            measured = {one.device.label: one.levels[0].peak for one in run.devices}
        except MemlabError:  # a run that could not be measured
            continue
        for device, peak in measured.items():
            if device not in peaks or peak.low_bytes > peaks[device].low_bytes:
                peaks[device] = peak
    levels = []
    for device, ended in after.items():
        begun = opened.before.get(device, _NOTHING)
        peak = peaks.get(device) or peak_between(begun, ended, polled.get(device, 0))
        levels.append(LevelAfterRun(device, begun.allocated_bytes, ended.allocated_bytes, peak))
    for device in dict.fromkeys([*opened.host, *host, "cpu"]):
        if device not in after:
            levels.append(LevelAfterRun(device, opened.host[device], host[device], peaks.get(device)))
    return tuple(levels)
