"""The search: the unchanged work, each technique alone, then combinations, best first, until the target is reached.

Savings do not add up, because the peak moves: every combination is run. After an interrupt the results so far are kept.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memlab import simulated_gpu
from memlab.analysis.advice import Findings, Tried, cheapest, least_saving, ranked, saved
from memlab.api.advise.edits import FIRST
from memlab.api.advise.observed import FOR_INFERENCE, NO_GRAPH
from memlab.api.advise.subject import OfStep, Subject, Tell, TimeUp
from memlab.api.compare import compare, step_seconds
from memlab.api.prediction import Prediction
from memlab.api.run import Run
from memlab.errors import DoesNotApply, MemlabError
from memlab.prediction.cards import Card
from memlab.saving_techniques import Technique, techniques
from memlab.units import ByteRange, number_of

MAX_COMBINED = 12
"""The maximum number of combinations."""
MAX_LATER = 4
"""The maximum number of techniques without a saving of their own that are tried in combinations."""
LEAST_HELD = 0.03
"""A share of the peak: techniques for categories that hold less are skipped."""
RESERVED = "reserved"
KEPT_BYTES = 256 << 20
"""The host memory for runs that are kept until the best is known."""


@dataclass(slots=True)
class Search:
    """One search; `findings` and the runs `before` and `best` are available at any time after `begin`."""

    subject: Subject
    of: str
    tell: Tell
    deadline: float
    target_bytes: int | None = None
    before: Run = field(init=False)
    before_bytes: ByteRange = field(init=False)
    shares: dict[str, int] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    combined: list[Tried] = field(default_factory=list)
    stopped: str = ""
    names: Sequence[str] = ()
    unneeded: list[str] = field(default_factory=list)
    """Techniques that were not tried, as the target was reached without them."""
    waiting: list[str] = field(default_factory=list)
    """Techniques that were not tried alone, as what they act on holds little of the peak until another one has moved it."""
    recommended: Tried | None = None
    _runs: dict[tuple[str, ...], Run] = field(default_factory=dict)
    _count: str = ""

    def begin(self, before: Run) -> None:
        """Set the run of the unchanged work."""
        self.before, self.before_bytes, self.shares = before, level(before, self.of), shares_of(before)

    def go(self, names: Sequence[str], others: Sequence[str] = ()) -> None:
        """Try each of these alone, then together, with `others` as in `each`; an interrupt keeps the results so far."""
        self.names = names
        try:
            for _ in self.each(names, others):
                pass
        except (KeyboardInterrupt, TimeUp) as error:
            why = "it was interrupted" if isinstance(error, KeyboardInterrupt) else "its time limit was reached"
            done = number_of(len(self.combined), "combination")
            self.stopped = f"{why} after all {number_of(len(names), 'technique')} alone and {done}"
            if len(self.tried) < len(names):
                self.stopped = f"{why} after {len(self.tried)} of {number_of(len(names), 'technique')}"
        self.recommended = self._choose()

    def each(self, names: Sequence[str], others: Sequence[str] = ()) -> Iterator[Tried]:
        """Try each of these alone, then together; yield the result of each run as it ends. Raises TimeUp at the deadline.

        Those of `others` act on what holds little of the peak: they are tried with others once those have moved the peak.

        With a target, those come first that can be written into the cell, and of them those that most often reach it: what
        comes after is not tried if they do.
        """
        every = [*names, *(name for name in others if name not in names)]
        written = [name for name in every if self.target_bytes is not None and _is_written(self.subject, name)]
        parts = [[name for name in written if (name in FIRST) == often] for often in (True, False)]
        parts.append([name for name in every if name not in written])
        for number, some in enumerate(parts):
            if not some:
                continue
            self.waiting += [name for name in some if name not in names]
            for name in [name for name in some if name in names]:
                self._count = f"{len(self.tried) + 1} of {len(names)}: "
                self.tried.append(self.attempt((name,)))
                yield self.tried[-1]
            yield from self._combine()
            later = [name for part in parts[number + 1 :] for name in part]
            if later and any(map(self.is_enough, (*self.tried, *self.combined))):
                self.unneeded = [name for name in later if name in names]
                return

    def is_enough(self, one: Tried) -> bool:
        """Whether it is certain to reach the target with the same results."""
        return not one.failed and not one.is_wrong and self._reached(one)

    def attempt(self, names: tuple[str, ...]) -> Tried:
        """Run the work with these techniques; list those that fail, with the reason."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeUp("the time limit was reached")
        used, over = [techniques[name] for name in names], getattr(self.subject, "world_size", 1)
        label = self._count + " + ".join(techniques.said(names, over))
        self.tell(label)
        prices = tuple(one.price for one in used)
        try:
            run = self.subject.attempt(names, lambda text: self.tell(f"{label}, {text}"), left_s)
        except TimeUp:
            raise
        except DoesNotApply as error:
            return Tried(names, prices=prices, failed=f"does not apply: {str(error).removeprefix(f'{names[0]}: ')}")
        except Exception as error:
            return Tried(names, prices=prices, failed=one_reason(error))
        if sum(one.nbytes() for one in self._runs.values()) + run.nbytes() <= KEPT_BYTES:
            self._runs[names] = run
        peak = level(run, self.of)
        verdict, why, is_wrong = agreement(self.before, run, names)
        return Tried(
            names=names,
            peak_bytes=peak,
            saved_bytes=saved(self.before_bytes, peak),
            ratio=ratio(self.before, run),
            results=verdict,
            results_why=why,
            is_wrong=is_wrong,
            costs=any(one.slower for one in used),
            changes=any(one.equality.kind == "changes" for one in used),
            prices=prices,
            world_size=over if any(one.shards for one in used) else 1,
        )

    @property
    def best(self) -> Run | None:
        """The run of the recommendation, if it could be kept."""
        return self._runs.get(self.recommended.names) if self.recommended is not None else None

    def _combine(self) -> Iterator[Tried]:
        """Add the best one by one; start again from the one that saves most if it was excluded."""
        alone = [one.names[0] for one in ranked(self.tried, self.before_bytes)]
        if not alone:
            return
        if self.target_bytes is not None:  # what can be written into the code, then what saves most: fewer runs
            peaks = {one.names[0]: max(one.peak_bytes) for one in self.tried}
            alone.sort(key=lambda name: (not _is_written(self.subject, name), techniques[name].slower, peaks[name]))
            found = cheapest(self.tried, self.target_bytes)
            alone = alone if found is None else [*found.names, *(one for one in alone if one not in found.names)]
        # Those that save nothing alone may do so once the peak has moved: free ones first.
        rest = [one for one in self.tried if not one.failed and not one.is_wrong and one.names[0] not in alone]
        later = [one.names[0] for one in sorted(rest, key=lambda one: (one.changes, one.costs))][:MAX_LATER]
        later += sorted(
            self.waiting, key=lambda name: (techniques[name].equality.kind == "changes", techniques[name].slower)
        )
        best = yield from self._chain([*alone, *later])
        largest = min((one for one in self.tried if one.names[0] in alone), key=lambda one: max(one.peak_bytes))
        if not self._reached(best) and best is not None and largest.names[0] not in best.names:
            others = [one for one in alone if one not in largest.names]
            best = yield from self._chain([*largest.names, *others, *later])
        if self._reached(best) and best is not None:
            yield from self._fewer(best)

    def _chain(self, wanted: Sequence[str]) -> Generator[Tried, None, Tried | None]:
        """Add techniques one by one, keeping those that help; those that can only help once the peak has moved, then."""
        best: Tried | None = None
        own = getattr(self.subject, "techniques", ())
        while wanted:
            began_with, waiting = best, list[str]()
            for name in wanted:
                if self._reached(best) or len(self.combined) >= MAX_COMBINED:
                    return best
                names = (*(best.names if best is not None else ()), name)
                if techniques.conflict([*own, *names]):
                    continue
                if self._known(names) is None and not self._can_help(name, best):
                    waiting.append(name)
                    continue
                found = yield from self._together(names)
                if found.failed or found.is_wrong:
                    continue
                now = best.peak_bytes if best is not None else self.before_bytes
                if min(saved(now, found.peak_bytes)) > least_saving(self.before_bytes):
                    best = found
            wanted = waiting if best is not began_with else ()
        return best

    def _fewer(self, best: Tried) -> Iterator[Tried]:
        """Leave out what the target is reached without, first what costs most: what came later can make it needless."""
        for name in sorted(best.names, key=lambda name: techniques[name].slower, reverse=True):
            names = tuple(one for one in best.names if one != name)
            if len(names) < 2 or len(self.combined) >= MAX_COMBINED:  # of two, each alone is not enough
                return
            found = yield from self._together(names)
            best = found if self.is_enough(found) else best

    def _together(self, names: tuple[str, ...]) -> Generator[Tried, None, Tried]:
        """The result of these, which are run unless they were."""
        if (found := self._known(names)) is None:
            self._count = "together: "
            found = self.attempt(names)
            self.combined.append(found)
            yield found
        return found

    def _known(self, names: tuple[str, ...]) -> Tried | None:
        return next((one for one in (*self.tried, *self.combined) if set(one.names) == set(names)), None)

    def _can_help(self, name: str, best: Tried | None) -> bool:
        """Whether the categories it acts on hold a part of the current peak."""
        run = self._runs.get(best.names) if best is not None else self.before
        if run is None or not (shares := shares_of(run)):
            return True
        return acts_on_peak(techniques[name], shares) or (self.of == "device" and RESERVED in techniques[name].attacks)

    def _reached(self, best: Tried | None) -> bool:
        now = best.peak_bytes if best is not None else self.before_bytes
        return self.target_bytes is not None and max(now) <= self.target_bytes

    def _choose(self) -> Tried | None:
        """The cheapest that reaches the target; else the one that saves most, with nothing in it that adds next to nothing."""
        if self._reached(None):
            return None
        everything = [*self.tried, *self.combined]
        if self.target_bytes is not None and (found := cheapest(everything, self.target_bytes)) is not None:
            return found
        useful = ranked(everything, self.before_bytes)
        lowest = min((max(one.peak_bytes) for one in useful), default=0)
        near = [one for one in useful if max(one.peak_bytes) <= lowest + least_saving(self.before_bytes)]
        return min(near, key=lambda one: (len(one.names), max(one.peak_bytes)), default=None)

    def findings(self, left_out: Sequence[tuple[str, str]], notes: Sequence[str], duration_s: float) -> Findings:
        """Everything as plain values."""
        on, together = self.subject.on, {name for one in self.combined for name in one.names}
        left_out = [(name, why) for name, why in left_out if name not in together]
        left_out += [(name, "not needed: the target is reached without it") for name in self.unneeded]
        done = {*self.unneeded, *(one.names[0] for one in self.tried)}
        left_out += [(name, self.stopped) for name in self.names if self.stopped and name not in done]
        return Findings(
            self.subject.name, str(on) if isinstance(on, str) else on.name, self.of, self.before_bytes, self.target_bytes,
            self.shares, tuple(self.tried), tuple(self.combined), self.recommended, tuple(left_out), tuple(notes),
            self.stopped, isinstance(on, Card), duration_s, on == "cuda" and simulated_gpu.is_simulated(),
        )  # fmt: skip


def _is_written(subject: Subject, name: str) -> bool:
    """Whether a technique can be written into the cell of this subject."""
    return isinstance(subject, OfStep) and bool(subject.changed([name])[1])


# --- candidates ---


def candidates(
    subject: Subject, shares: Mapping[str, int], of: str, named: Iterable[str] | None, allow_changes: bool
) -> tuple[list[str], list[tuple[str, str]]]:
    """The techniques to try, and why the others that save memory are left out.

    `shares` has who held the peak, empty if unknown. Techniques that are `named` are tried whatever they act on.
    """
    chosen: dict[str, None] = {}
    left_out: list[tuple[str, str]] = []
    every = [one for one in techniques.values() if one.kind == "saving"]
    for one in [techniques[name] for name in named] if named is not None else every:
        why = subject.why_not(one)
        if why or named is not None:
            pass
        elif one.equality.kind == "changes" and not allow_changes:
            why = "changes training: allow_changes=True tries it"
        elif RESERVED in one.attacks and of != "device" and shares and not acts_on_peak(one, shares):
            why = "acts on reserved memory, and the peak of allocated is what counts here"
        elif RESERVED not in one.attacks and shares and not acts_on_peak(one, shares):
            hold = f"which hold{'s' if len(one.attacks) == 1 else ''} little of the peak"
            why = f"acts on {', '.join(one.attacks)}, {hold}"
        if why:
            left_out.append((one.name, why))
        else:
            chosen[one.name] = None
    return list(chosen), left_out


def acts_on_peak(one: Technique, shares: Mapping[str, int]) -> bool:
    """Whether the categories that a technique acts on hold a part of the peak."""
    total = sum(shares.values())
    acted_on = sum(shares.get(name, 0) for name in one.attacks)
    if one.name in FOR_INFERENCE - NO_GRAPH and "activation" in one.attacks and not shares.get("activation"):
        acted_on += shares.get("other", 0)  # what a forward without a graph makes and passes on
    return acted_on >= LEAST_HELD * max(total, 1)


# --- figures of a run ---


def shares_of(run: Run) -> dict[str, int]:
    """Who held the peak of *allocated*, by category; empty if its events are unknown.

    Of a prediction that runs out of memory it is the peak of all of the work: what is there when memory runs out can be less.
    """
    try:
        if isinstance(run, Prediction) and run.forecast.out_of_memory:
            enough = 2 * run.peak_device_bytes.high
            roomy = replace(run.card, total_bytes=enough, usable_bytes=enough, usable_high_bytes=enough)
            run = run.for_card(roomy)
        return dict(run.breakdown("category"))
    except MemlabError:
        return {}


def level(run: Run, of: str) -> ByteRange:
    """The interval of the peak; for samples, which have no upper bound, both ends are the lower one."""
    if isinstance(run, Prediction):
        return ByteRange(*(run.allocated_bytes if of == "allocated" else run.peak_device_bytes))
    if of == "allocated" and run.devices:
        return run.devices[0].levels[0].peak.bytes
    return ByteRange.exact(run.peak_device_bytes if of == "device" else 0)


def ratio(before: Run, after: Run) -> float | None:
    """The ratio of step times; None if they were not measured, as on a simulated GPU.

    The minimum of the untracked steps, else of the tracked run: other load on the machine can only add time.
    """
    if any(run.trace.provenance != "measured" for run in (before, after)):
        return None
    first, second = (min(step_seconds(run) or [run.summary.duration_s]) for run in (before, after))
    return second / first if first and second else None


def agreement(before: Run, after: Run, names: Sequence[str]) -> tuple[str, str, bool]:
    """Whether results agree, why, and whether they differ more than these techniques allow."""
    try:
        found = compare(before, after).results
    except MemlabError as error:
        return "not checked", one_reason(error), False
    claims = [techniques[name].equality for name in names]
    if found.verdict != "different" or any(one.kind == "changes" for one in claims):
        return found.verdict, found.why, False
    is_within = found.relative is not None and found.relative <= sum(one.relative for one in claims)
    return "close" if is_within else found.verdict, found.why, not is_within


def one_reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().split("\n")[0][:300]
    return text if isinstance(error, MemlabError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
