"""A workload: a small plain model with its optimizer, batch and loss, sized by a knob."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.errors import MemlabError
from memlab.workloads.job import Parts

SIZES = ("tiny", "laptop", "card")
"""For a test (well below a second a step on two cores), for a laptop (about a second), and as published, for a card."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`make(**settings)` gives model, optimizer, batch and loss; `sizes` has the settings of each size."""

    name: str
    idea: str
    make: Callable[..., Parts]
    sizes: Mapping[str, Mapping[str, Any]]

    def sized(self, size: str = "laptop", **settings: Any) -> Callable[[], Parts]:
        """What makes the four parts at this size; `settings` go over those of the size."""
        if size not in self.sizes:
            raise MemlabError(
                f"workload {self.name!r} has no size {size!r:.80}. Choose one of {', '.join(self.sizes)}."
            )
        wrong = sorted(set(settings) - set(self.sizes[size]))
        if wrong:
            known = ", ".join(self.sizes[size])
            raise MemlabError(f"workload {self.name!r} has no setting {wrong[0]!r:.80}. It has {known}.")
        for key, value in settings.items():
            self._check(key, value, self.sizes[size][key])
        return functools.partial(self.make, **{**self.sizes[size], **settings})

    def _check(self, key: str, value: Any, usual: Any) -> None:
        least = min(1, usual) if type(usual) is int else 0
        if type(usual) in (int, bool) and (type(value) is not type(usual) or value < least):
            what = f"a whole number from {least}" if type(usual) is int else "True or False"
            raise MemlabError(f"{key} of workload {self.name!r} is {what}, got {value!r:.80}.")

    def __call__(self) -> Parts:
        """The four parts at the size of a laptop."""
        return self.sized()()

    def __str__(self) -> str:
        rows = [
            f"  {size:<7} {', '.join(f'{key}={value}' for key, value in at.items())}" for size, at in self.sizes.items()
        ]
        return "\n".join([f"{self.name}: {self.idea}", *rows])

    def __repr__(self) -> str:
        return f"<Workload {self.name!r}: {self.idea}>"


def divided(whole: str, by: str, **settings: int) -> None:
    """Refuse two settings of which one has to be a multiple of the other."""
    if settings[whole] % settings[by]:
        raise MemlabError(f"{whole} has to be a multiple of {by}, got {settings[whole]} and {settings[by]}.")


def named(found: Iterable[Workload]) -> dict[str, Workload]:
    """Name -> Workload."""
    return {one.name: one for one in found}
