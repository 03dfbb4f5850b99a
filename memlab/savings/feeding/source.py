"""How batches come from the host, as the techniques of this room say it: read, prepared, pinned, copied, one ahead.

The first technique of this room that is applied to a job puts a source into its feed and takes the batch off the device; the
others change the same source, so that any of them go together. Limits: every step gets the same batch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from memlab.errors import DoesNotApply
from memlab.savings.technique import Technique
from memlab.workloads.job import Job, moved
from memlab.workloads.nested import mapped

TECHNIQUES: tuple[Technique, ...] = ()
HOST = torch.device("cpu")
Batch = tuple[Any, ...]


class Source:
    """Gives each step its batch. `read` makes one on the host, `prepare` works on it, on the host or on the card."""

    def __init__(self, job: Job) -> None:
        self.job, self.slices = job, job.feed
        self.host: Any = moved(job.batch, HOST)
        job.batch = ()  # on a card: only here from now on
        self.read: Callable[[], Batch] = lambda: self.host
        self.prepare: Callable[[Batch], Batch] = lambda batch: batch
        self.on_card = self.pinned = self.non_blocking = self.ahead = False
        self.workers = self.prefetch = 0
        self.made: Any = None
        """How many batches the workers have made, where there are workers."""
        self.fetch: Callable[[], Batch] = self._fetch
        self.loaded: Iterator[Batch] | None = None
        self.waiting: Batch = ()
        job.around.append(self.open)

    def __call__(self) -> Iterator[tuple[float, Batch]]:
        """The feed of the job."""
        self.job.batch = ()
        self.job.batch = self.fetch()
        yield from self.slices()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Around all steps: workers start, and end."""
        try:
            if self.workers:
                self.made = multiprocessing.Value("q")
                self.loaded = self._started()
            yield
        finally:
            self.loaded, self.waiting = None, ()  # an iterator that goes takes its workers with it

    def _started(self) -> Iterator[Batch]:
        """The workers at work. Started by a thread: the main one would set a handler of SIGCHLD for good.

        torch/utils/data/_utils/signal_handling.py, _set_SIGCHLD_handler; workers of a thread have no mode that watches.
        """
        data = Endless(self.read, self.made)
        own = torch.Generator()  # it would draw the seed of its workers from the numbers that dropout draws from
        loader = DataLoader(
            data, batch_size=None, num_workers=self.workers, prefetch_factor=self.prefetch, generator=own
        )
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(iter, loader).result()

    def _fetch(self) -> Batch:
        if not self.ahead:
            return self.on_device(self.next())
        found = self.waiting or self.on_device(self.next())
        self.waiting = self.on_device(self.next())
        return found

    def next(self) -> Batch:
        """The next batch, on the host."""
        batch = tuple(next(self.loaded)) if self.loaded is not None else self.read()
        batch = batch if self.on_card else self.prepare(batch)
        return each(batch, lambda one: one.pin_memory()) if self.pinned else batch

    def on_device(self, batch: Batch) -> Batch:
        """The same where the job runs."""
        moved_ = each(batch, lambda one: one.to(self.job.device, non_blocking=self.non_blocking))
        return self.prepare(moved_) if self.on_card else moved_


class Endless(Dataset[Any]):
    """A dataset whose every item is a batch, made anew; it counts them across processes."""

    def __init__(self, read: Callable[[], Batch], made: Any) -> None:
        self.read, self.made = read, made

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Batch:
        with self.made.get_lock():
            self.made.value += 1
        return each(self.read(), torch.clone)


def source(job: Job) -> Source:
    """The source of the job's batches: the one that is there, else a new one."""
    found = _there(job)
    if found is None:
        found = Source(job)
        job.feed = found
    return found


def _there(job: Job) -> Source | None:
    owners = (getattr(context, "__self__", None) for context in job.around)
    return next((one for one in owners if isinstance(one, Source)), None)


def batch_of(job: Job) -> Any:
    """The job's batch, wherever it waits: for looking at, not for changing."""
    found = _there(job)
    return job.batch if found is None else found.host


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every tensor in it changed."""
    return mapped(value, change)


def needs_cuda(job: Job) -> None:
    """DoesNotApply where the job does not run on a card."""
    if job.device.type != "cuda":
        raise DoesNotApply(f"it is about copies to a card, and this job runs on the {job.device.type.upper()}.")
