"""All techniques by name, and what holds among several of them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

from memlab.errors import DoesNotApply, MemlabError
from memlab.savings.technique import STAGES, Technique
from memlab.workloads.job import Job, Parts


class Techniques(Mapping[str, Technique]):
    """Name -> Technique, in the order of the rooms they stand in. Files are found, not listed: a new one is there at once."""

    ROOMS = (
        "activations",
        "precision",
        "loop",
        "parameters",
        "optimizers",
        "inference",
        "feeding",
        "switches",
        "design",
    )

    @cached_property
    def _known(self) -> dict[str, Technique]:
        found: dict[str, Technique] = {}
        for module in _modules(self.ROOMS):
            for one in _techniques_of(module):
                if one.name in found:
                    raise MemlabError(f"two techniques are named {one.name!r}: rename that of {module.__name__}.")
                found[one.name] = one
        return found

    def __getitem__(self, name: str) -> Technique:
        try:
            return self._known[name]
        except (KeyError, TypeError):
            raise MemlabError(f"there is no technique {name!r:.80}. {self._near(name)}") from None

    def _near(self, name: object) -> str:
        """The few that may have been meant, or where all of them stand."""
        near = difflib.get_close_matches(str(name)[:80], self._known, 5)
        return f"Did you mean {' or '.join(near)}?" if near else f"memlab.techniques shows all {len(self)}."

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def get(self, name: str, default: Any = None) -> Any:  # Mapping's own expects a KeyError
        """The technique of that name, or `default`."""
        return self._known.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        width = max(map(len, self._known), default=0)
        return "\n".join(f"{one.name:<{width}}  {one.kind:<8}  {one.idea}" for one in self._known.values())

    def to_pandas(self) -> Any:
        """One row per technique."""
        import pandas

        columns = ("name", "kind", "idea", "attacks", "equality", "price", "not_when", "tips")
        rows = [[_cell(getattr(one, column)) for column in columns] for one in self._known.values()]
        return pandas.DataFrame(rows, columns=list(columns)).set_index("name")

    # --- several at once ---------------------------------------------------------------------------------------------------

    def conflict(self, names: Iterable[str]) -> str:
        """Why these cannot be together, in a sentence; "" where they can."""
        chosen = [self[name] for name in names]
        for one in chosen:
            for other in chosen:
                if other.name in one.excludes:
                    return f"{one.name} and {other.name} exclude each other: {one.excludes[other.name]}"
        return ""

    def ordered(self, names: Iterable[str]) -> list[Technique]:
        """The techniques as they are applied; refused where two exclude each other."""
        if isinstance(names, str):
            raise MemlabError(f"techniques is a list of names, got {names!r:.80}.")
        names = list(dict.fromkeys(names))
        if why := self.conflict(names):
            raise MemlabError(f"{why}. Leave one out.")
        place = {name: index for index, name in enumerate(self._known)}
        return sorted((self[name] for name in names), key=lambda one: (STAGES.index(one.stage), place[one.name]))

    def prepare(
        self, job: Job, make: Callable[[], Parts], names: Iterable[str] = (), habits: Iterable[str] = ()
    ) -> None:
        """Build the parts of `make` into the job, with these techniques, and with the habits that others would replace."""
        chosen = self.ordered(names)
        for one in chosen:
            if one.before is not None:
                _named(one, one.before, job)
        job.build(make)
        for one in [self[name] for name in habits]:
            if one.habit is not None:
                one.habit(job)
        for one in chosen:
            if one.apply is not None:
                _named(one, one.apply, job)


def _named(one: Technique, change: Callable[[Job], None], job: Job) -> None:
    """Let a technique change a job; where it does not apply, the error begins with its name: there may be others."""
    try:
        change(job)
    except DoesNotApply as error:
        raise DoesNotApply(f"{one.name}: {str(error).removeprefix(f'{one.name}: ')}") from error


def _cell(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _techniques_of(module: ModuleType) -> Iterable[Technique]:
    try:
        found: Iterable[Technique] = module.TECHNIQUES
    except AttributeError:
        raise MemlabError(
            f"{module.__name__} has no TECHNIQUES: give it the tuple, empty where it only helps."
        ) from None
    return found


def _modules(rooms: Iterable[str]) -> Iterator[ModuleType]:
    for room in rooms:
        package = importlib.import_module(f"memlab.savings.{room}")
        for found in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


techniques = Techniques()
"""Every technique that memlab knows."""
