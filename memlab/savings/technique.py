"""What is known of one technique: how to apply it, what it attacks, what must stay equal, its price, when not to use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from memlab.workloads.job import Job, Parts

Kind = Literal["saving", "myth", "practice"]
"""A saving lowers a peak; a myth is said to, and does not; a practice is about time, safety or knowing."""
Stage = Literal["build", "model", "optimizer", "step"]
"""What it changes, in the order in which several are applied."""
STAGES: tuple[Stage, ...] = ("build", "model", "optimizer", "step")


@dataclass(frozen=True, slots=True)
class Equality:
    """What must stay equal with the technique: bit for bit, within a relative tolerance, or not, and then why."""

    kind: Literal["exact", "close", "changes"]
    relative: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        said = {"exact": "bit for bit", "close": f"within {self.relative:g}", "changes": "changes training"}[self.kind]
        return f"{said}: {self.why}" if self.why else said


EXACT = Equality("exact")


def close(relative: float, why: str) -> Equality:
    """Equal up to this share of the largest value."""
    return Equality("close", relative, why)


def changes(why: str) -> Equality:
    """Results are others, and are meant to be."""
    return Equality("changes", why=why)


@dataclass(frozen=True, slots=True)
class Shown:
    """Where the effect is to be seen, for tests and lessons: a workload, a device, and at least what share of the peak goes.

    `workload` is the name of one, or a function that makes one for this technique. `device` "cuda" needs a card, real or
    pretend: what the CPU cannot show. `of` says which peak. For a myth `share` is how much the peak may move at most.
    """

    workload: str | Callable[[], Parts]
    share: float = 0.25
    size: str = "tiny"
    device: Literal["cpu", "cuda"] = "cpu"
    of: Literal["allocated", "reserved"] = "allocated"
    steps: int = 2


@dataclass(frozen=True, slots=True)
class Technique:
    """One way to save memory, or one that is said to.

    `before` is called on a job that is not built yet, `apply` on a built one; both change it in place and raise DoesNotApply
    where they find nothing to change. `habit` makes the job do what the technique replaces, as it is often written: the job
    that a technique is compared with has it, where the plain job would have nothing to save. `outside` gives a context
    manager that switches it on for code that knows nothing of it; it may patch what it likes, as it is entered in a child
    process alone.
    """

    name: str
    idea: str
    attacks: tuple[str, ...]
    """Categories, as `memlab.trace.columns.Category` names them in lower case; also "reserved", "host memory", "none"."""
    kind: Kind
    stage: Stage
    equality: Equality
    price: str
    not_when: str
    code: str
    """What a reader would paste."""
    references: tuple[str, ...]
    slower: bool = False
    """Whether a step takes longer with it, as far as is known before it is measured."""
    shown: Shown | None = None
    """None: its own test tells what is true of it, as no peak of tensors does."""
    tips: tuple[str, ...] = ()
    """The rows of the classic tips that it answers, as A6 or C2."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Name of another technique -> why both cannot be."""
    conf: str = ""
    """What it adds to PYTORCH_CUDA_ALLOC_CONF."""
    before: Callable[[Job], None] | None = None
    apply: Callable[[Job], None] | None = None
    habit: Callable[[Job], None] | None = None
    outside: Callable[[], AbstractContextManager[Any]] | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.kind}): {self.idea}",
            "",
            *(f"    {one}" for one in self.code.strip().splitlines()),
            "",
        ]
        facts = {"attacks": ", ".join(self.attacks), "results": str(self.equality), "price": self.price}
        facts |= {"not when": self.not_when, "see": "; ".join(self.references)}
        return "\n".join([*lines, *(f"{key:<9} {value}" for key, value in facts.items() if value)])

    def __repr__(self) -> str:
        return f"<Technique {self.name!r}: {self.idea}>"
