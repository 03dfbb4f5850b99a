"""The scoreboard of edits to one training program: the peak, time and loss of each, against a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from memlab.api.run import Run
from memlab.api.track import track
from memlab.units import format_bytes
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

REPEATS = 2
"""How often an edit is timed; the shorter time counts, since other work on the machine only adds to it."""
Train = Callable[[int], float]
"""Makes the model, trains it for so many steps, and returns the last loss."""


@dataclass(frozen=True, slots=True)
class Score:
    """One edit: its run, the seconds of its training, and the loss that it ended with."""

    run: Run
    seconds_s: float
    loss: float


class Scoreboard(Shown):
    """Edits of one program in their order; `board["checkpoint"]` is the run of one. On a simulated GPU there are peaks only."""

    def __init__(self, budget_bytes: int, device: str, steps: int, is_simulated: bool) -> None:
        self.budget_bytes, self._device, self._steps, self._is_simulated = budget_bytes, device, steps, is_simulated
        self.scores: dict[str, Score] = {}

    def __getitem__(self, name: str) -> Run:
        return self.scores[name].run

    def score(self, name: str, train: Train) -> Scoreboard:
        """Train and time the edit, measure the peak of two steps of it, and return the board, to be shown."""
        if not self.scores:
            train(1)  # the first call imports and allocates
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            loss = train(self._steps)  # which reads the loss, and so waits for the device
            times.append(time.perf_counter() - begin)
        with track(name, device=self._device, show=False) as run:
            train(2)  # the optimizer makes its state in the first
        self.scores[name] = Score(run, min(times), loss)
        return self

    @property
    def page(self) -> Page:
        """A row for each edit; those within the budget are strong."""
        first_s = next(iter(self.scores.values())).seconds_s if self.scores else 1.0
        columns = (
            Column("edit"), Column("peak", "bytes"), Column(f"within {format_bytes(self.budget_bytes)}"),
            Column("time", "times"), Column(f"loss after {self._steps} steps"),
        )  # fmt: skip
        rows, within = [], []
        for name, score in self.scores.items():
            peak = score.run.peak_allocated_bytes
            within.append(peak <= self.budget_bytes)
            values = (None, None) if self._is_simulated else (score.seconds_s / first_s, f"{score.loss:.3f}")
            rows.append((name, peak, "✓ yes" if within[-1] else "✗ no", *values))
        strong = frozenset(number for number, one in enumerate(within) if one)
        return Page(
            f"{sum(within)} of {len(rows)} within the budget", (Table("", columns, tuple(rows), bar=1, strong=strong),)
        )
