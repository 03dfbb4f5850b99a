"""A technique: how to apply it, which memory it reduces, what stays equal, its price, when not to use it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memlab.workloads.job import Job, Parts

Kind = Literal["saving", "myth"]
"""A saving lowers a peak; a myth is often said to, and does not."""
Stage = Literal["build", "model", "optimizer", "step"]
"""The part of a job that it changes, in the order of application."""
STAGES: tuple[Stage, ...] = ("build", "model", "optimizer", "step")
TEXTS = tomllib.loads(Path(__file__).with_name("techniques.toml").read_text(encoding="utf-8"))
"""Name -> texts of a technique, in the order of listing, and of application within a stage."""


@dataclass(frozen=True, slots=True)
class Equality:
    """How results with the technique compare with those without: bitwise equal, within a relative tolerance, or different."""

    kind: Literal["exact", "close", "changes"]
    relative: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        texts = {"exact": "bitwise equal", "close": f"within {self.relative:g}", "changes": "changes training"}
        return f"{texts[self.kind]}: {self.why}" if self.why else texts[self.kind]


@dataclass(frozen=True, slots=True)
class Demo:
    """How to measure the effect, for tests and benchmarks: a workload, a device, and the minimum share of the peak saved.

    `workload` is a name, or a function that makes one for this technique. `device` "cuda" is for what the CPU cannot
    show. `of` says which peak. For a myth `share` is the largest change of the peak.
    """

    workload: str | Callable[[], Parts]
    share: float = 0.25
    size: str = "tiny"
    device: Literal["cpu", "cuda"] = "cpu"
    of: Literal["allocated", "reserved"] = "allocated"
    steps: int = 2


@dataclass(frozen=True, slots=True)
class Technique:
    """A way to save memory, or a myth.

    `apply` changes a built job in place and raises DoesNotApply if it finds nothing to change. `baseline_pattern` gives the
    job the common code that the technique replaces: without it the plain job would have nothing to save. `patch` returns a
    context manager that switches the technique on for unmodified code; it may patch anything, as it is only used in a child
    process.
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
    """The code to paste."""
    references: tuple[str, ...]
    demo: Demo
    apply: Callable[[Job], None]
    slower: bool = False
    """Whether a step is expected to take longer."""
    tips: tuple[str, ...] = ()
    """The rows of docs/tips.md that it answers, such as A6 or C2."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Name of another technique -> why both cannot be on."""
    conf: str = ""
    """Its setting in PYTORCH_CUDA_ALLOC_CONF."""
    shards: bool = False
    """Whether it is for a job of several GPUs, each with a part of what one would hold."""
    make: Callable[[Callable[[], Parts]], Callable[[], Parts]] | None = None
    """Changes the function that makes the parts of a job."""
    baseline_pattern: Callable[[Job], None] | None = None
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    change: Callable[[Any], Any] | None = None
    """What `patch` does to a model; on a copy it tells whether there is anything to change."""

    @property
    def only_predicted(self) -> str:
        """Why it cannot be tried in this process, "" if it can."""
        if self.shards:
            return "is for several GPUs: it can be predicted for a GPU"
        return "configures CUDA's allocator before it starts: it can be predicted for a GPU" if self.conf else ""

    def code_over(self, world_size: int) -> str:
        """The code to paste, for so many GPUs if it is for several."""
        return self.code.strip("\n").replace("--nproc-per-node 8", f"--nproc-per-node {world_size}")

    # Earlier names. What was done before a job is built belonged to practices, which are no longer techniques.
    before = None
    habit = property(lambda self: self.baseline_pattern)
    outside = property(lambda self: self.patch)
    shown = property(lambda self: self.demo)

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.kind}): {self.idea}", ""]
        lines += [*(f"    {line}" for line in self.code.strip().splitlines()), ""]
        facts = {"attacks": ", ".join(self.attacks), "results": str(self.equality), "price": self.price}
        facts |= {"not when": self.not_when, "see": "; ".join(self.references)}
        return "\n".join([*lines, *(f"{key:<9} {value}" for key, value in facts.items() if value)])

    def __repr__(self) -> str:
        return f"<Technique {self.name!r}: {self.idea}>"


def described(name: str, demo: Demo, /, apply: Callable[[Job], None], **code: Any) -> Technique:
    """The technique of that name: its texts from techniques.toml, and the code that demonstrates, applies and patches it."""
    text: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in TEXTS[name].items()
    }
    equality = Equality(text.pop("results"), text.pop("relative", 0.0), text.pop("why", ""))
    return Technique(name=name, equality=equality, demo=demo, apply=apply, **text, **code)
