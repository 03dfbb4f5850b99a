"""`memlab.advise`: which techniques save memory here, found by running the work with each of them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memlab.analysis.advice import Findings, Tried, interval_text, saved
from memlab.analysis.breakdown import BEFORE
from memlab.analysis.summary import has_raised
from memlab.api.advise.search import Search, agreement, candidates, level, ratio
from memlab.api.advise.subject import (
    PARTS,
    Asked,
    OfStep,
    Subject,
    Tell,
    TimeUp,
    WorkloadSubject,
    as_after_release,
    card_of,
    here,
    names_unused,
)
from memlab.api.compare import Comparison, compare
from memlab.api.display import Progress
from memlab.api.prediction import Prediction, asks_for_nothing, smallest_card
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.prediction.cards import Card, find
from memlab.saving_techniques import techniques as known_techniques
from memlab.torch_internals.traceback import running_shell
from memlab.units import ByteRange, format_bytes, format_seconds, listed, number_of, parse_bytes
from memlab.views.advice import advice_page
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

LIMIT_S = 300.0
"""The default time limit."""
OF = "allocated"
"""The peak that is checked: what else a device uses does not depend on the code."""


def advise(
    what: Any,
    target: str | int | None = None,
    *,
    card: str | Card | None = None,
    techniques: Iterable[str] | None = None,
    allow_changes: bool = False,
    habits: Iterable[str] = (),
    size: str = "laptop",
    settings: dict[str, Any] | None = None,
    steps: int = 2,
    limit_s: float = LIMIT_S,
    world_size: int = 1,
) -> Advice:
    """Which techniques save memory here, found by running the work with each of them, and how to reach `target` ("8GiB").

    `what` is a workload (a name, a Workload, or a function that gives model, optimizer, batch and loss), a step (a function
    without arguments, run in a child process), or the run of a `%%memtrack` cell, a prediction of one, or a run of the Lab.
    With `card` everything is predicted for it, and the target is for *device used*; else it is measured here, and the
    target is for *allocated*. `techniques` names those to try; by default those that attack what holds the peak, without those that
    change training unless `allow_changes`. `habits`, `size`, `settings` and `steps` are those of a workload. With
    `world_size` GPUs of the kind of `card` a workload is also tried sharded over them; figures are then those of the rank that
    needs most, whose batch stays the same. It ends after `limit_s` seconds, or when interrupted, with the results so far.
    """
    if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not 0 < limit_s < math.inf:
        raise MemlabError(f"limit_s is a number of seconds above 0, got {limit_s!r:.80}.")
    began = time.monotonic()
    on = None if card is None else find(card)
    asked = Asked(what, on, steps, tuple(_known(habits)), world_size, size, settings or {})
    target_bytes = None if target is None else parse_bytes(target)
    named = None if techniques is None else _known(techniques)
    line, count = Progress(), 0
    search: Search | None = None
    remarks: list[str] = []

    def so_far() -> Page | None:
        return advice_page(search.findings((), (), time.monotonic() - began)) if search is not None else None

    def tell(text: str) -> None:
        nonlocal count
        count += "," not in text
        line.write(f"advising: {line.elapsed} of at most {format_seconds(limit_s)}, {text}", so_far)

    try:
        subject, before = _begun(asked, tell, began + limit_s)
        target_bytes, of, notes = _goal(before, target_bytes)
        search = Search(subject, of, tell, began + limit_s, target_bytes)
        search.begin(before)
        remarks += _peak_again(what, search)
        names, left_out = candidates(subject, search.shares, of, named, allow_changes)
        if target_bytes is None or max(search.before_bytes) > target_bytes:
            # Once one of those has moved the peak, others can help: whatever holds the peak now.
            search.go(names, candidates(subject, {}, of, named, allow_changes)[0])
        if target is None and target_bytes is not None:
            remarks += _smallest_gpu(search)
    finally:
        line.close()
    took = format_seconds(time.monotonic() - began)
    notes += [f"{number_of(count, 'prediction' if isinstance(subject.on, Card) else 'run')} in {took}."]
    notes += list(_notes(what, search))
    findings = search.findings(left_out, notes, time.monotonic() - began)
    return Advice(replace(findings, remarks=tuple(remarks)), subject, before, search.best)


def _known(names: Iterable[str]) -> list[str]:
    return [known_techniques[name].name for name in ([names] if isinstance(names, str) else names)]


def _begun(asked: Asked, tell: Tell, deadline: float) -> tuple[Subject, Run]:
    """The subject of an advice and its run as it is; MemlabError if that has nothing to save."""

    def as_it_is(subject: Subject) -> Run:
        tell("as it is")
        left_s = max(deadline - time.monotonic(), 0.001)
        return subject.attempt((), lambda text: tell(f"as it is, {text}"), left_s)

    subject = asked.subject()
    before = as_it_is(subject)
    # Whether a function returns the parts of a workload is known only after running it.
    if isinstance(subject, OfStep) and PARTS in subject.observed:
        subject = asked.workload()
        before = as_it_is(subject)
    if isinstance(before, Prediction) and asks_for_nothing(before.forecast):
        why = f'it allocated nothing on {before.card.name}: is it written for "cuda"?'
        raise MemlabError(f"{why} Without card= it is measured here.")
    if not before.devices or not level(before, OF).high:
        raise MemlabError("it used no memory that can be saved.")
    return subject, before


def _goal(before: Run, target_bytes: int | None) -> tuple[int | None, str, list[str]]:
    """The target and the peak it refers to: with a card *device used*, by default the card's usable memory."""
    if not isinstance(before, Prediction) or (target_bytes is None and before.fits == "yes"):
        return target_bytes, OF, []
    if target_bytes is not None:
        return target_bytes, "device", []
    usable = before.card.usable_bytes
    note = f"No target was given: it is the usable memory of {before.card.name}, {format_bytes(usable)}."
    return usable, "device", [note]


def _peak_again(what: Any, search: Search) -> Iterator[str]:
    """Whether the cell of a run has another peak of *allocated* now than when it was tracked, as the notebook has changed.

    On a GPU it is predicted without the variables that it does not use, and what comes of that is said.
    """
    subject, again = search.subject, search.before
    if not isinstance(what, Run) or not isinstance(subject, OfStep) or has_raised(what.trace):
        return
    if isinstance(subject.on, Card) and subject.on != card_of(what):  # another GPU has other kernels
        return
    then, now = level(what, OF), level(again, OF)
    if max(then.low - now.high, now.low - then.high) * 50 <= max(then.low, now.low):
        return
    yield f"Run again, the cell peaks at {now} allocated{_older(again)}; the first time it was {then}{_older(what)}."
    names = names_unused(subject.text) if isinstance(subject.on, Card) and now.low > then.high else []
    if not names:
        return
    search.tell("without variables that it does not use")
    without = replace(subject, before=functools.partial(as_after_release, names))
    try:
        freed = without.attempt((), lambda text: None, max(search.deadline - time.monotonic(), 0.001))
    except MemlabError:  # it needs one of them in a way that does not show, or the time is over
        return
    if level(freed, OF).high < now.low:
        peak = f"peak of {'the device' if search.of == 'device' else search.of}"
        yield (
            f"Without {listed([f'`{one}`' for one in names], 3)}, which the cell does not use, the {peak} was predicted as "
            f"{level(freed, search.of)}: delete what is not needed any more."
        )


def _older(run: Run) -> str:
    """How much of the peak is of tensors that are older than the cell; "" if its events are unknown."""
    try:
        return f", with {format_bytes(dict(run.breakdown('phase')).get(BEFORE, 0))} from before the cell"
    except MemlabError:
        return ""


def _smallest_gpu(search: Search) -> Iterator[str]:
    """The smallest GPU on which what misses the memory of this one was predicted to fit, if the time is enough for that."""
    best, subject = search.recommended, search.subject
    names, found = (best.names, search.best) if best is not None else ((), search.before)
    is_one = isinstance(subject, OfStep) or subject.world_size == 1
    if not isinstance(found, Prediction) or found.fits == "yes" or search.stopped or not is_one:
        return

    def predicted(card: Card) -> Prediction | None:
        search.tell(f"on {card.name}")
        there = replace(subject, on=card, asked={}) if isinstance(subject, OfStep) else replace(subject, on=card)
        try:
            run = there.attempt(names, lambda text: None, max(search.deadline - time.monotonic(), 0.001))
        except TimeUp:
            raise
        except MemlabError:  # it does not run there
            return None
        return run if isinstance(run, Prediction) else None

    try:
        there = smallest_card(found, predicted)
    except (KeyboardInterrupt, TimeUp):
        return
    if there is not None:
        what = f"With {best.name} the" if best is not None else "The"
        size = format_bytes(there.card.total_bytes)
        yield f"{what} smallest GPU that it was predicted to fit is {there.card.name} ({size})."


def _notes(what: Any, search: Search) -> Iterator[str]:
    """Remarks on the figures."""
    subject = search.subject
    if isinstance(what, Run) and isinstance(subject, OfStep) and isinstance(subject.on, str):
        yield "Seconds are those of the tracked cell; its values were not compared."
    if isinstance(subject, WorkloadSubject) and isinstance(subject.on, Card):
        names = search.recommended.names if search.recommended is not None else ()
        # An advice that a cell shows has no name but `_`.
        how = "`_.measure()` in the next cell" if running_shell() is not None else "advice.measure()"
        runs = "" if any(known_techniques[one].only_predicted for one in names) else f" {how} runs it here."
        yield f"Predicted: seconds and results were not checked.{runs}"


class Advice(Shown):
    """Which techniques save memory here, each tried: see `recommended`, `tried`, `code`."""

    def __init__(self, findings: Findings, subject: Subject, before: Run, best: Run | None) -> None:
        self.findings, self.before, self.best = findings, before, best
        self._subject = subject

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Each technique and combination that was tried, in the order of their runs."""
        return (*self.findings.tried, *self.findings.combined)

    @property
    def recommended(self) -> tuple[str, ...]:
        """The names of the recommended techniques; empty if there are none."""
        best = self.findings.recommended
        return best.names if best is not None else ()

    @property
    def saved_bytes(self) -> ByteRange:
        """What the recommended techniques save together: lower and upper bound."""
        best = self.findings.recommended
        return best.saved_bytes if best is not None else ByteRange(0, 0)

    @property
    def reaches(self) -> bool | None:
        """Whether the target is certain to be reached; None without a target."""
        return self.findings.reaches

    @property
    def code(self) -> str:
        """What to paste for the recommended techniques."""
        chosen = [known_techniques[name] for name in self.recommended]
        over = self.findings.recommended.world_size if self.findings.recommended is not None else 1
        parts = [f"# {one.name}: {one.idea}\n{one.code_over(over)}" for one in chosen]
        code = "\n\n".join(parts) + "\n" * bool(parts)
        # As it was tried: autocast for "cuda" has no effect on the CPU.
        return code.replace('"cuda"', '"cpu"') if self.findings.on == "cpu" else code

    @property
    def diff(self) -> str:
        """The change of the cell, exactly as it was run; "" if the recommendation cannot be written into it."""
        return self._subject.diff(self.recommended) if isinstance(self._subject, OfStep) and self.recommended else ""

    @property
    def cell(self) -> str:
        """The changed cell, ready to run; "" if there is no diff."""
        return self._subject.changed(self.recommended)[0] if self.diff and isinstance(self._subject, OfStep) else ""

    @property
    def comparison(self) -> Comparison:
        """Compare the work without and with the recommendation (`memlab.compare`)."""
        if self.best is None:
            raise MemlabError("there is nothing to compare: nothing is recommended, or its run was too large to keep.")
        return compare(self.before, self.best)

    def measure(self) -> Checked:
        """Apply the recommendation, measure it here on CUDA or the CPU, and compare with the prediction."""
        if not self.recommended:
            raise MemlabError("nothing is recommended, so there is nothing to measure.")
        subject = self._subject
        for one in self.recommended:
            if why := known_techniques[one].only_predicted:
                raise MemlabError(f"{one} {why}, and is not measured here.")
        if isinstance(subject, WorkloadSubject):
            subject = WorkloadSubject(subject.work, here(), subject.steps, subject.techniques, subject.habits)
        elif isinstance(subject.on, Card):
            what = f"a {'cell' if subject.text else 'step'} for a GPU is not measured from here"
            how = "paste advice.code into it, track it, and call advice.check(memlab.last_run())"
            raise MemlabError(f"{what}: {how}.")
        before, after = (subject.attempt(names, lambda text: None, float("inf")) for names in ((), self.recommended))
        return self._checked(before, after, str(subject.on))

    def check(self, run: Run, before: Run | None = None) -> Checked:
        """Compare a run of the changed code with the advice; `before` is a run of the unchanged one."""
        if not isinstance(run, Run):
            raise MemlabError(
                f"check needs a run, got {type(run).__name__}: pass memlab.last_run() after the changed cell."
            )
        on = run.devices[0].device.label if run.devices else "no device"
        return self._checked(before if before is not None else self.before, run, on)

    def _checked(self, before: Run, after: Run, on: str) -> Checked:
        said = (level(self.before, OF), level(self.best or self.before, OF))
        measured = (level(before, OF), level(after, OF))
        results = agreement(before, after, self.recommended)[0]
        was_predicted, longer = self.findings.is_predicted, ratio(before, after)
        return Checked(self.recommended, on, said, measured, was_predicted, longer, results, before, after)

    @property
    def page(self) -> Page:
        """Build the report."""
        setting = ",".join(known_techniques[name].conf for name in self.recommended if known_techniques[name].conf)
        return advice_page(self.findings, self.code, self.diff, self.cell, setting)

    def noted(self, text: str) -> Advice:
        """The same advice with one more remark."""
        findings = replace(self.findings, notes=(*self.findings.notes, text))
        return Advice(findings, self._subject, self.before, self.best)

    def to_pandas(self) -> Any:
        """One row per run that was tried, sizes in bytes."""
        return self.findings.to_pandas()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Checked(Shown):
    """The predicted and the measured peaks of *allocated*, each (before, after)."""

    names: tuple[str, ...]
    on: str
    said: tuple[ByteRange, ByteRange]
    measured: tuple[ByteRange, ByteRange]
    was_predicted: bool
    ratio: float | None
    results: str
    before: Run
    after: Run

    @property
    def said_bytes(self) -> ByteRange:
        """The predicted saving: lower and upper bound."""
        return saved(*self.said)

    @property
    def measured_bytes(self) -> ByteRange:
        """The measured saving."""
        return saved(*self.measured)

    @property
    def off_bytes(self) -> int:
        """The measured saving minus the predicted one; 0 within the range."""
        (low, high), said = self.measured_bytes, self.said_bytes
        return high - said.high if high > said.high else min(low - said.low, 0)

    @property
    def comparison(self) -> Comparison:
        """Both runs on one axis (`memlab.compare`)."""
        return compare(self.before, self.after)

    @property
    def sentence(self) -> str:
        """The outcome in one line."""
        low, high = self.measured_bytes
        saves, promised = interval_text(self.measured_bytes), interval_text(self.said_bytes)
        if high < 0:
            more = interval_text(ByteRange(-high, -low))
            return f"It saves nothing and takes {more} more; the advice said {promised}."
        if not self.off_bytes:
            return f"It saves {saves}, as the advice said."
        off = f"{format_bytes(abs(self.off_bytes))} {'more' if self.off_bytes > 0 else 'less'}"
        return f"It saves {saves}, {off} than the advice said."

    @property
    def page(self) -> Page:
        """Build the report: a table of two rows."""
        rows = []
        said = "predicted" if self.was_predicted else "measured before"
        for what, (before, after) in ((said, self.said), (f"measured on {self.on}", self.measured)):
            share = sum(saved(before, after)) / max(sum(before), 1)  # comparable on different devices
            rows.append((what, before, after, saved(before, after), f"{100 * share:.1f} %"))
        columns = (Column(""), *(Column(name, "bytes") for name in ("before", "with", "saved")), Column("share"))
        notes = [self.sentence]
        if self.ratio is not None:
            notes.append(f"A step takes {self.ratio:.2f} times as long.")
        title = f"memlab · {' + '.join(self.names) or 'nothing'}"
        return Page(title, (Table("", columns, tuple(rows)), *notes, f"Results: {self.results}."))

    listing = page

    def to_pandas(self) -> Any:
        """Two rows, sizes in bytes."""
        import pandas

        rows = [[size for of in (*both, saved(*both)) for size in of] for both in (self.said, self.measured)]
        columns = [f"{what}_{end}_bytes" for what in ("before", "with", "saved") for end in ("low", "high")]
        return pandas.DataFrame(rows, columns=columns, index=["said", "measured"])
