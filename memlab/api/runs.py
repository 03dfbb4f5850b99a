"""The runs of this session by name (the last fifty, at most one gigabyte of them), and runs from files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from memlab.api.run import Run
from memlab.by_name import ByName
from memlab.errors import MemlabError
from memlab.trace.file import load as load_trace
from memlab.units import GiB

MAX_RUNS = 50
MAX_BYTES = 1 * GiB


class Runs(ByName[Run]):
    """Name -> the latest run of that name, oldest first."""

    def __init__(self) -> None:
        self._known: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._count = 0

    def _unknown(self, name: str) -> MemlabError:
        known = ", ".join(map(repr, list(self)[-10:])) or "none yet"
        return MemlabError(f"there is no run {name!r}. Known: {known}.")

    def __repr__(self) -> str:
        return "\n".join(map(repr, list(self._known.values()))) or "no runs yet"

    def new_name(self) -> str:
        """The name of an unnamed run: run 1, run 2, ..."""
        with self._lock:
            self._count += 1
            return f"run {self._count}"

    def add(self, run: Run) -> None:
        """Keep a finished run and drop the oldest if there are too many. A run of the same name is replaced."""
        with self._lock:
            kept = self._known
            kept.pop(run.name, None)
            kept[run.name] = run
            while len(kept) > 1 and (len(kept) > MAX_RUNS or sum(one.nbytes() for one in kept.values()) > MAX_BYTES):
                del kept[next(iter(kept))]

    def discard(self, run: Run) -> None:
        """Remove a run that recorded nothing."""
        with self._lock:
            if self._known.get(run.name) is run:
                del self._known[run.name]

    def last(self) -> Run:
        """The latest run."""
        with self._lock:
            if not self._known:
                how = "put %%memtrack on a cell, or use memlab.track() or `memlab run SCRIPT`"
                raise MemlabError(f"there is no run yet: {how}.")
            return next(reversed(self._known.values()))


runs = Runs()
"""The runs of this process."""


def last_run() -> Run:
    """The latest run of this session."""
    return runs.last()


def load(path: str | os.PathLike[str]) -> Run:
    """Read a run that was saved, or a PyTorch memory snapshot; files are read without executing anything in them."""
    from memlab.trace.snapshot_read import looks_like_snapshot

    if looks_like_snapshot(path):
        from memlab.probes.snapshot import load as load_snapshot

        return Run(Path(path).name, load_snapshot(path))
    trace = load_trace(path)
    name = str(trace.notes.get("name", ""))
    if "prediction" in trace.notes:
        from memlab.api.prediction import Prediction

        return Prediction(name, trace)
    return Run(name, trace)
