"""Jobs in tests: run one with techniques under the CPU tracker; check its peak, results and buffers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from processes import python
from torch.nn.functional import mse_loss
from torch.optim import SGD

import memlab
from memlab.api.runs import runs
from memlab.saving_techniques import techniques
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


def training(model: torch.nn.Module, *batch: Any, loss: Any = mse_loss, kind: Any = SGD, **settings: Any) -> Parts:
    """The parts of a training, by plain SGD and the mean squared error unless others are given."""
    return model, kind(model.parameters(), **{"lr": 0.1, **settings}), batch, loss


def one_layer() -> Parts:
    """A training with next to nothing in it."""
    return training(torch.nn.Linear(2, 2), torch.ones(1, 2), torch.ones(1, 2))


def one_inference() -> Parts:
    """An inference with next to nothing in it."""
    return torch.nn.Sequential(torch.nn.Linear(2, 2)), None, (torch.ones(1, 2),), None


def ran(make: Callable[[], Parts], names: Iterable[str] = (), habits: Iterable[str] = (), steps: int = 2) -> Job:
    """A job that took its steps, seeded."""
    job = Job("cpu", steps)
    with seeded():
        techniques.prepare(job, make, names, habits)
        job.run()
    return job


def tried(make: Callable[[], Parts], *names: str, habits: Iterable[str] = (), steps: int = 2) -> Tried:
    gc.collect()
    with one_thread(), seeded(), memlab.track(show=False) as run:
        job = Job("cpu", steps)
        techniques.prepare(job, make, names, habits)
        job.run()
    runs.discard(run)
    return Tried(rise(run), *results(job), job.notes)


def no_new_runs() -> Iterator[None]:
    """For a fixture: what is listed within is not listed afterwards."""
    before = set(runs.values())
    yield
    for run in set(runs.values()) - before:
        runs.discard(run)


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


def measured(step: Callable[[], object]) -> int:
    """The peak of what runs."""
    gc.collect()
    with memlab.track(show=False) as run:
        step()
    runs.discard(run)
    return rise(run)


def printed(code: str, **env: str) -> list[str]:
    """What a process of its own prints, where CUDA is not initialized yet.

    It ends at once after that: where a thread of the autograd engine still starts when Python ends, as on a busy machine,
    the process is aborted ("terminate called without an active exception", https://github.com/pytorch/pytorch/issues/38228).
    """
    return python("-c", f"{code}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)", **env).split()


def loop(
    make: Callable[[], Parts],
    steps: int = 3,
    clear: Callable[..., object] = lambda model, optimizer: optimizer.zero_grad(),
    backward: Callable[..., object] = torch.Tensor.backward,
    before_step: Callable[..., object] = lambda model, loss: None,
) -> list[float]:
    """A training loop, or an inference, as users write it, which knows nothing of techniques: its losses, or its output."""
    with seeded():
        model, optimizer, batch, loss_of = make()
        if optimizer is None:
            return model.eval()(*batch).detach().float().flatten().tolist()
        losses = []
        for _ in range(steps):
            clear(model, optimizer)
            loss = loss_of(model(*batch[:-1]), batch[-1])
            backward(loss)
            before_step(model, lambda: loss_of(model(*batch[:-1]), batch[-1]))
            optimizer.step()
            losses.append(loss.item())
        return losses
