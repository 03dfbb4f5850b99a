"""An Advice: what was tried and what is recommended, with the code to paste, and the loop closed by measuring it."""

from __future__ import annotations

from typing import Any

from memlab.analysis.advice import Findings, Interval, Tried, interval_text, saved
from memlab.errors import MemlabError
from memlab.predictor.cards import Card
from memlab.savings import techniques
from memlab.session.advise.again import OfStep
from memlab.session.advise.search import agreement, level, ratio
from memlab.session.advise.subject import OfWork, Subject, here
from memlab.session.run import Run
from memlab.units import format_bytes
from memlab.views.advice import AdvicePage, page
from memlab.views.who import Listing

OF = "allocated"
"""The peak at which the loop is closed: what a device uses beside it is no matter of the code."""


class Advice:
    """What saves memory here, tried: `print` it, let a notebook show it, or ask `recommended`, `tried`, `code`."""

    def __init__(self, findings: Findings, subject: Subject, before: Run, best: Run | None) -> None:
        self.findings, self.before, self.best = findings, before, best
        self._subject = subject

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Each technique that was tried, and each combination, in the order in which they were run."""
        return (*self.findings.tried, *self.findings.combined)

    @property
    def recommended(self) -> tuple[str, ...]:
        """The names of the techniques that are recommended; empty where none is."""
        found = self.findings.recommended
        return found.names if found is not None else ()

    @property
    def saved_bytes(self) -> Interval:
        """What the recommended ones save together, at least and at most."""
        found = self.findings.recommended
        return found.saved_bytes if found is not None else (0, 0)

    @property
    def reaches(self) -> bool | None:
        """Whether the target is reached for certain; None where none was named."""
        return self.findings.reaches

    @property
    def code(self) -> str:
        """What to paste for the recommended techniques."""
        parts = [f"# {name}: {techniques[name].idea}\n{techniques[name].code.strip()}" for name in self.recommended]
        return "\n\n".join(parts) + "\n" * bool(parts)

    @property
    def comparison(self) -> Any:
        """The work as it is beside the work with what is recommended (`memlab.compare`)."""
        from memlab.session.compare import compare

        if self.best is None:
            raise MemlabError("there is nothing to compare: nothing is recommended, or its run was too large to keep.")
        return compare(self.before, self.best)

    # --- the loop closed ----------------------------------------------------------------------------------------------

    def measure(self) -> Checked:
        """Apply what is recommended and measure it here, on CUDA or the CPU: how far was the advice off?"""
        if not self.recommended:
            raise MemlabError("nothing is recommended, so there is nothing to measure.")
        subject = self._here()
        before = subject.attempt((), _silent, float("inf"))
        after = subject.attempt(self.recommended, _silent, float("inf"))
        return self._checked(before, after, str(subject.on))

    def _here(self) -> Subject:
        subject = self._subject
        if isinstance(subject, OfWork):
            return OfWork(subject.work, here(), subject.steps, subject.techniques, subject.habits)
        if isinstance(subject.on, Card):
            what = "cell" if isinstance(subject, OfStep) and subject.text else "step"
            raise MemlabError(
                f"a {what} for a card is not measured from here: paste advice.code, track it, and pass that run to "
                "advice.check(run)."
            )
        return subject

    def check(self, run: Run, before: Run | None = None) -> Checked:
        """Compare a run of the changed code with what was said; `before` is a run of the unchanged one, if it was measured."""
        if not isinstance(run, Run):
            raise MemlabError(
                f"check needs a run, got {type(run).__name__}: pass memlab.last_run() after the changed cell."
            )
        was = before if before is not None else self.before
        return self._checked(was, run, run.devices[0].device.label if run.devices else "no device")

    def _checked(self, before: Run, after: Run, on: str) -> Checked:
        said_before = level(self.before, OF)
        said_after = level(self.best, OF) if self.best is not None else said_before
        was, now = level(before, OF), level(after, OF)
        verdict = agreement(before, after, self.recommended)[0]
        return Checked(
            self.recommended, on, (said_before, said_after), (was, now), self.findings.is_predicted, ratio(before, after),
            verdict, before, after,
        )  # fmt: skip

    # --- faces --------------------------------------------------------------------------------------------------------

    @property
    def page(self) -> AdvicePage:
        """The words of it."""
        return page(self.findings, self.code)

    @property
    def text(self) -> str:
        """It in words."""
        return self.page.text()

    @property
    def html(self) -> str:
        """It as small HTML tables; everything in them is escaped."""
        return self.page.html()

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content; a front end shows the richest it knows."""
        return {"text/html": self.html, "text/plain": self.text}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """A row for each run that was tried, sizes in bytes."""
        return self.findings.to_pandas()


def _silent(text: str) -> None:
    pass


class Checked:
    """What was said to be saved of the peak of *allocated*, beside what was measured. Each is (before, with it)."""

    def __init__(
        self, names: tuple[str, ...], on: str, said: tuple[Interval, Interval], measured: tuple[Interval, Interval],
        was_predicted: bool, time_ratio: float | None, results: str, before: Run, after: Run,
    ) -> None:  # fmt: skip
        self.names, self.on, self.said, self.measured = names, on, said, measured
        self.was_predicted, self.ratio, self.results = was_predicted, time_ratio, results
        self.before, self.after = before, after

    @property
    def said_bytes(self) -> Interval:
        """What was said to be saved, at least and at most."""
        return saved(*self.said)

    @property
    def measured_bytes(self) -> Interval:
        """What was saved."""
        return saved(*self.measured)

    @property
    def off_bytes(self) -> int:
        """By how much more (or, negative, less) was saved than said; 0 within the interval."""
        low, high = self.measured_bytes
        if high > self.said_bytes[1]:
            return high - self.said_bytes[1]
        return min(low - self.said_bytes[0], 0)

    @property
    def comparison(self) -> Any:
        """Both runs on one axis (`memlab.compare`)."""
        from memlab.session.compare import compare

        return compare(self.before, self.after)

    def _shares(self) -> str:
        """The savings as shares of their own peaks: what two devices have in common."""
        said = 100 * sum(self.said_bytes) / max(sum(self.said[0]), 1)
        measured = 100 * sum(self.measured_bytes) / max(sum(self.measured[0]), 1)
        return f"Of the peak before: {said:.1f} % said, {measured:.1f} % measured."

    @property
    def listing(self) -> Listing:
        """It as a table of two rows."""
        said = "predicted" if self.was_predicted else "measured before"
        rows = tuple(
            (what, *map(interval_text, (*both, saved(*both))))
            for what, both in ((said, self.said), (f"measured on {self.on}", self.measured))
        )
        notes = [self.sentence, self._shares()]
        if self.ratio is not None:
            notes.append(f"A step takes {self.ratio:.2f} times as long.")
        notes.append(f"Results: {self.results}.")
        return Listing(
            f"memlab · {' + '.join(self.names) or 'nothing'}", ("", "before", "with", "saved"), rows, tuple(notes), 0
        )

    @property
    def sentence(self) -> str:
        """In one line."""
        saves = interval_text(self.measured_bytes)
        if max(self.measured_bytes) < 0:
            low, high = self.measured_bytes
            return f"It saves nothing and takes {interval_text((-high, -low))} more; {interval_text(self.said_bytes)} were said."
        if not self.off_bytes:
            return f"It saves {saves}, as was said."
        more = "more" if self.off_bytes > 0 else "less"
        return f"It saves {saves}, {format_bytes(abs(self.off_bytes))} {more} than was said."

    def __str__(self) -> str:
        return self.listing.text()

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.listing.html(), "text/plain": self.listing.text()}

    def to_pandas(self) -> Any:
        """Two rows, sizes in bytes."""
        import pandas

        rows = [[size for of in (*both, saved(*both)) for size in of] for both in (self.said, self.measured)]
        columns = [f"{what}_{end}_bytes" for what in ("before", "with", "saved") for end in ("low", "high")]
        return pandas.DataFrame(rows, columns=columns, index=["said", "measured"])
