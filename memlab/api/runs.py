"""The runs of this session by name: the last fifty, at most one gigabyte of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.units import GiB

MAX_RUNS = 50
MAX_BYTES = 1 * GiB


class Runs(Mapping[str, Run]):
    """Name -> the latest run of that name, oldest first."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._count = 0

    def __getitem__(self, name: str) -> Run:
        try:
            return self._runs[name]
        except KeyError:
            known = ", ".join(map(repr, list(self._runs)[-10:])) or "none yet"
            raise MemlabError(f"there is no run {name!r}. Known: {known}.") from None

    def get(self, name: str, default: Any = None) -> Any:  # Mapping's own expects a KeyError
        """The run of that name, or `default`."""
        return self._runs.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._runs))

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return "\n".join(map(repr, list(self._runs.values()))) or "no runs yet"

    def new_name(self) -> str:
        """The name of an unnamed run: run 1, run 2, ..."""
        with self._lock:
            self._count += 1
            return f"run {self._count}"

    def add(self, run: Run) -> None:
        """Keep a finished run and drop the oldest if there are too many. A run of the same name is replaced."""
        with self._lock:
            kept = self._runs
            kept.pop(run.name, None)
            kept[run.name] = run
            while len(kept) > 1 and (len(kept) > MAX_RUNS or sum(one.nbytes() for one in kept.values()) > MAX_BYTES):
                del kept[next(iter(kept))]

    def discard(self, run: Run) -> None:
        """Remove a run that recorded nothing."""
        with self._lock:
            if self._runs.get(run.name) is run:
                del self._runs[run.name]

    def last(self) -> Run:
        """The latest run."""
        with self._lock:
            if not self._runs:
                raise MemlabError("there is no run yet: put %%memtrack on a cell, or use memlab.track().")
            return next(reversed(self._runs.values()))


runs = Runs()
"""The runs of this process."""


def last_run() -> Run:
    """The latest run of this session."""
    return runs.last()
