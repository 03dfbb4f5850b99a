"""What a saving costs, and the scoreboard of edits to one training program: the peak, time and loss of each, against a budget.

Costs are FLOPs, counted, or seconds; always as a ratio, never an absolute time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from memlab.api.run import Run
from memlab.api.track import track
from memlab.errors import MemlabError
from memlab.units import format_bytes
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

PAIRS = 5
"""How often both steps are timed, one after the other, so that other work on the machine meets both."""
Step = Callable[[], object]


def flops_ratio(before: Step, after: Step) -> float:
    """How many times the FLOPs of `before` those of `after` are."""
    counts = []
    for step in (before, after):
        with FlopCounterMode(display=False) as counter:
            step()
        counts.append(int(counter.get_total_flops()))
    gc.collect()  # optimizers and hooks refer to themselves, and the next peak would have what they hold
    if not counts[0]:
        raise MemlabError("the step without the saving has no FLOPs that PyTorch counts: compare seconds.")
    return counts[1] / counts[0]


def seconds_ratios(before: Step, after: Step) -> list[float]:
    """How many times as long `after` takes, in each pair, sorted."""
    before(), after()  # the first calls import and allocate
    ratios = sorted(_seconds(after) / _seconds(before) for _ in range(PAIRS))
    gc.collect()
    return ratios


def _seconds(step: Step) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


Train = Callable[[int], float]
"""Makes the model, trains it for so many steps, and returns the last loss."""


@dataclass(frozen=True, slots=True)
class Score:
    """One edit: its code, its run, how many times the seconds of the first it takes, and the loss that it ended with."""

    train: Train
    run: Run
    times: float
    loss: float


class Scoreboard(Shown):
    """Edits of one program in their order; `board["checkpoint"]` is the run of one. On a simulated GPU there are peaks only."""

    def __init__(self, budget_bytes: int, device: str, steps: int, is_simulated: bool) -> None:
        self.budget_bytes, self._device, self._steps, self._is_simulated = budget_bytes, device, steps, is_simulated
        self.scores: dict[str, Score] = {}

    def __getitem__(self, name: str) -> Run:
        return self.scores[name].run

    def score(self, name: str, train: Train) -> Scoreboard:
        """Train the edit, time it against the first in pairs of steps, measure the peak of two steps; the board is shown."""
        loss, times = train(self._steps), 1.0
        if first := next((score for other, score in self.scores.items() if other != name), None):
            times = statistics.median(seconds_ratios(lambda: first.train(1), lambda: train(1)))
        with track(name, device=self._device, show=False) as run:
            train(2)  # the optimizer makes its state in the first
        self.scores[name] = Score(train, run, times, loss)
        return self

    @property
    def page(self) -> Page:
        """A row for each edit; those within the budget are strong."""
        columns = (
            Column("edit"), Column("peak", "bytes"), Column(f"within {format_bytes(self.budget_bytes)}"),
            Column("time", "times"), Column(f"loss after {self._steps} steps"),
        )  # fmt: skip
        rows, within = [], []
        for name, score in self.scores.items():
            peak = score.run.peak_allocated_bytes
            within.append(peak <= self.budget_bytes)
            values = (None, None) if self._is_simulated else (score.times, f"{score.loss:.3f}")
            rows.append((name, peak, "✓ yes" if within[-1] else "✗ no", *values))
        strong = frozenset(number for number, one in enumerate(within) if one)
        return Page(
            f"{sum(within)} of {len(rows)} within the budget", (Table("", columns, tuple(rows), bar=1, strong=strong),)
        )
