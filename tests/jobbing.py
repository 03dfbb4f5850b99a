"""Jobs in tests: run one with techniques under a tally, and know its peak, its results and its buffers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import memlab
from memlab.savings import techniques
from memlab.session.runs import runs
from memlab.workloads.job import Job, Parts, digest, seeded


@dataclass(frozen=True)
class Tried:
    peak_bytes: int
    values: np.ndarray
    """Losses and a sample of the weights, or the output."""
    weights: str
    """The digest of all parameters."""
    buffers: str
    notes: list[str]

    def off(self, other: Tried) -> float:
        """The largest difference as a share of the largest value; NaN where one of them is none."""
        assert self.values.shape == other.values.shape
        return float(np.abs(self.values - other.values).max() / np.abs(self.values).max())

    def share(self, other: Tried) -> float:
        """What share of this peak the other saves."""
        return 1 - other.peak_bytes / self.peak_bytes

    def same(self, other: Tried) -> bool:
        """Bit for bit, buffers and all."""
        equal = np.array_equal(self.values, other.values, equal_nan=True)
        return equal and (self.weights, self.buffers) == (other.weights, other.buffers)


JOBS: list[Job] = []
"""Those that `jobs` ends."""


@pytest.fixture
def jobs() -> Iterator[None]:
    """One thread; and no job survives its test: its pieces are its own methods, a cycle that would keep its tensors."""
    with one_thread():
        yield
    for job in JOBS:
        vars(job).clear()
    JOBS.clear()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums of floats depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepared(make: Callable[[], Parts], *names: str, habits: Iterable[str] = (), steps: int = 2) -> Job:
    job = Job("cpu", steps)
    with seeded():
        techniques.prepare(job, make, names, habits)
    return job


def tried(make: Callable[[], Parts], *names: str, habits: Iterable[str] = (), steps: int = 2) -> Tried:
    gc.collect()
    with one_thread(), seeded(), memlab.track(show=False) as run:
        job = Job("cpu", steps)
        techniques.prepare(job, make, names, habits)
        job.run()
    runs.discard(run)
    return Tried(rise(run), *results(job), job.notes)


def rise(run: memlab.Run) -> int:
    """The peak above what other tests left alive."""
    return run.peak_allocated_bytes - run.devices[0].levels[0].start_bytes


def results(job: Job) -> tuple[np.ndarray, str, str]:
    found: dict[str, Any] = job.outcome()
    if job.trains:
        values = np.concatenate([np.array(found["losses"]), found["weights"].numpy()])
    else:
        values = found["output"].detach().float().numpy().reshape(-1).copy()
    return values, digest([one.detach() for one in job.model.parameters()]), digest(list(job.model.buffers()))


def naive(make: Callable[[], Parts], steps: int = 2) -> tuple[int, list[float]]:
    """A training loop that knows nothing of techniques: its peak and its losses."""
    gc.collect()
    with one_thread(), seeded(), memlab.track(show=False) as run:
        model, optimizer, (*inputs, target), loss_of = make()
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(*inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss
    runs.discard(run)
    return rise(run), losses
