"""The runs of this session by name: the last fifty, at most one gigabyte of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from memlab.errors import MemlabError
from memlab.session.run import Run
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
        """A name for a run that was given none: run 1, run 2, ..."""
        with self._lock:
            self._count += 1
            return f"run {self._count}"

    def add(self, run: Run) -> None:
        """Keep a finished run; older ones go where there are too many. A run of the same name is replaced."""
        with self._lock:
            self._runs.pop(run.name, None)
            self._runs[run.name] = run
            while len(self._runs) > 1 and (len(self._runs) > MAX_RUNS or self._nbytes() > MAX_BYTES):
                del self._runs[next(iter(self._runs))]

    def discard(self, run: Run) -> None:
        """Let go of a run that came to nothing."""
        with self._lock:
            if self._runs.get(run.name) is run:
                del self._runs[run.name]

    @contextlib.contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within it runs may come; afterwards there are those that were there before, and none of them had to make room."""
        with self._lock:
            before = dict(self._runs)
        try:
            yield
        finally:
            with self._lock:
                self._runs = before

    def last(self) -> Run:
        """The latest run."""
        with self._lock:
            if not self._runs:
                raise MemlabError("there is no run yet: put %%memtrack on a cell, or use memlab.track().")
            return next(reversed(self._runs.values()))

    def _nbytes(self) -> int:
        return sum(run.nbytes() for run in self._runs.values())


runs = Runs()
"""The runs of this process."""


def last_run() -> Run:
    """The latest run of this session."""
    return runs.last()
