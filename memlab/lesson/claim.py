"""Claims of a lesson: a saving, or none for a myth; and the account of a peak, term by term, which has to explain it.

Where their figures come from is said by what made them, so that no author writes "measured".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from memlab.allocator import CachingAllocator
from memlab.api.advise import Advice
from memlab.api.largest_batch import MaxBatch
from memlab.api.oom import OomExplained
from memlab.api.prediction import Prediction
from memlab.api.provenance import provenance_here
from memlab.api.run import Run
from memlab.api.size import ModelSize
from memlab.api.who import Who
from memlab.errors import ClaimRefuted, MemlabError
from memlab.units import MiB, format_bytes
from memlab.views import theme
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

Maker = Run | ModelSize | Who | MaxBatch | Advice | CachingAllocator | OomExplained | FlopCounterMode
COMPUTED = "computed"
"""What a figure is that no instrument and no prediction made: arithmetic, or the values of tensors."""


def source_of(makers: Iterable[Maker]) -> str:
    """Return the source of a figure, such as "measured on cpu", from what made it; "computed" without any.

    Raises MemlabError for an object that does not say where its figures come from.
    """
    sources = dict.fromkeys(map(_source, makers))
    return " and ".join(sources) or COMPUTED


def _source(maker: Maker) -> str:
    if type(maker).__module__.startswith("psutil"):  # a process: its memory is in no run
        return "measured on the host"
    match maker:
        case Prediction() | MaxBatch():
            return f"predicted for {maker.card.name}"
        case Run():
            where = f" on {maker.devices[0].device.label}" if maker.devices else ""
            return f"{maker.trace.provenance}{where}"
        case Advice():
            return _source(maker.before)
        case CachingAllocator():
            return "simulated"
        case OomExplained():
            return "read from the message"
        case Who():
            return provenance_here(one.device for one in maker.storages)
        case ModelSize() | FlopCounterMode():
            return COMPUTED
    raise MemlabError(
        f"a figure comes from a run, a prediction or another result of memlab, got {type(maker).__name__}. "
        "Leave it out where the notebook computed the figure."
    )


LEAST_SAVING = 0.25
"""A share of the peak: what is taught as a saving has to be clearly visible."""
MOST_OF_A_MYTH = 0.01
MOST_UNEXPLAINED = 0.03
"""A share of the figure: an account whose formulas leave more of it, as a whole or in one term, is refused."""
Measured = Run | int


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence with its figures, and their source, such as "measured on cpu"; "" if what made them is not known."""

    sentence: str
    source: str
    saved_share: float

    text = property(attrgetter("sentence"))  # the earlier name

    def __str__(self) -> str:
        return f"Claim holds ({self.source}): {self.sentence}" if self.source else f"Claim holds: {self.sentence}"

    __repr__ = __str__


def saving(what: str, before: Measured, after: Measured, of: str) -> Claim:
    """What `what` saves of the peak of `of`, as a claim that nobody has judged yet."""
    sources = {source_of([run]) for run in (before, after) if isinstance(run, Run)}
    if len(sources) > 1:
        raise MemlabError(f"a claim compares two of a kind, got {' and '.join(sorted(sources))}.")
    was, now = _peak(before, of), _peak(after, of)
    if was <= 0:
        raise MemlabError(f"the run without {what} has a peak of {was} bytes: there is nothing to save.")
    share = (was - now) / was
    change = f"{0.0 - share:+.0%}" if round(100 * share) else "±0%"
    sentence = f"with {what} the peak of {of} is {format_bytes(now)} instead of {format_bytes(was)} ({change})."
    return Claim(sentence, sources.pop() if sources else "", share)


def _peak(run: Measured, of: str) -> int:
    if isinstance(run, Prediction) and run.fits == "no" and of in ("allocated", "reserved"):
        return sum(run.allocated_bytes if of == "allocated" else run.reserved_bytes) // 2  # needed, not available
    if isinstance(run, Run):
        return int(getattr(run, f"peak_{of}_bytes"))
    if isinstance(run, int) and not isinstance(run, bool):
        return run
    raise MemlabError(f"a claim compares runs, or numbers of bytes, got {type(run).__name__}.")


@dataclass(frozen=True, slots=True)
class AccountTerm:
    """One term of an account: `formula` is text for the reader, or "" if the cell has it; `predicted_bytes` is its value."""

    name: str
    formula: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def residual_bytes(self) -> int:
        """Measured minus formula."""
        return self.measured_bytes - self.predicted_bytes


def by_category(run: Measured, computed: Mapping[str, int]) -> Iterator[AccountTerm]:
    """The terms of an account whose names are categories of the run's peak, alone or joined by "and"."""
    if not isinstance(run, Run):
        raise MemlabError(f"only a run has categories, got {type(run).__name__}: give rows of name, formula and bytes.")
    held = run.breakdown()
    for name, computed_bytes in computed.items():
        parts = name.split(" and ")
        if unknown := [part for part in parts if part not in theme.CATEGORIES]:
            raise MemlabError(f"a term of an account is one of {', '.join(theme.CATEGORIES)}, got {unknown[0]!r:.80}.")
        yield AccountTerm(name, "", computed_bytes, sum(held.get(part, 0) for part in parts))


@dataclass(frozen=True, slots=True, repr=False)
class Account(Shown):
    """All terms of one figure; `total_bytes` is the measured figure, and the unexplained rest is a row.

    The value of a formula is computed, whatever it is compared with; `source` is the heading of the other column: whether
    that was measured, simulated or predicted. Where the cell itself counted it, the heading is "counted".
    """

    title: str
    total_bytes: int
    terms: tuple[AccountTerm, ...]
    source: str = "measured"
    workspace_bytes: int = 0
    """What GPU libraries may hold beyond every formula, by their settings."""

    @property
    def unexplained_bytes(self) -> int:
        """The measured figure minus the sum of the formulas."""
        return self.total_bytes - sum(term.predicted_bytes for term in self.terms)

    @property
    def unexplained_share(self) -> float:
        """The same as a share of the figure."""
        return self.unexplained_bytes / max(self.total_bytes, 1)

    def checked(self) -> Account:
        """The account; ClaimRefuted if a formula, or all together, is further off than MOST_UNEXPLAINED, workspaces aside."""
        rests = {"together": self.unexplained_bytes, **{term.name: term.residual_bytes for term in self.terms}}
        allowed = MOST_UNEXPLAINED * self.total_bytes + self.workspace_bytes
        gaps = [f"{name} ({rest / MiB:+.1f} MiB)" for name, rest in rests.items() if abs(rest) > allowed]
        if gaps:
            most = f"at most {MOST_UNEXPLAINED:.0%} of {format_bytes(self.total_bytes)} may be left"
            raise ClaimRefuted(f"{self.title}: not explained: {', '.join(gaps)}; {most}.")
        return self

    @property
    def page(self) -> Page:
        """The account as a table."""
        total = AccountTerm("together", "", self.total_bytes - self.unexplained_bytes, self.total_bytes)
        shown = ["name", "formula", "predicted_bytes", "measured_bytes", "residual_bytes"]
        found = "counted" if self.source == COMPUTED else self.source  # two columns of one name would say nothing
        sizes = (Column(COMPUTED, "bytes"), Column(found, "bytes"), Column("residual", "change"))
        left = f"{format_bytes(self.unexplained_bytes)} of {format_bytes(self.total_bytes)}"
        note = f"The formulas leave {left} unexplained ({abs(self.unexplained_share):.1%})."
        columns = [Column("what"), Column("formula"), *sizes]
        if not any(term.formula for term in self.terms):
            del shown[1], columns[1]
        rows = tuple(map(attrgetter(*shown), (*self.terms, total)))
        return Page(self.title, (Table("", tuple(columns), rows, (note,)),))

    def to_pandas(self) -> Any:
        """One row per term, sizes in bytes."""
        import pandas

        names = ["formula", "predicted_bytes", "measured_bytes", "residual_bytes"]
        rows = [{"what": one.name, **{name: getattr(one, name) for name in names}} for one in self.terms]
        return pandas.DataFrame(rows)
