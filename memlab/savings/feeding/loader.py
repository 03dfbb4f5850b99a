"""DataLoader's settings: workers that read ahead, and the last batch that is smaller than the others.

Limits: memory of the workers lies in processes of their own and in shared memory, where no tally of this process sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memlab.errors import DoesNotApply
from memlab.savings.feeding.source import batch_of, each, source
from memlab.savings.technique import EXACT, Technique, changes
from memlab.workloads.job import Job
from memlab.workloads.nested import tensors_in

WORKERS, PREFETCH = 2, 2
_DOCS = "PyTorch docs, torch.utils.data, https://docs.pytorch.org/docs/stable/data.html"


def _workers(job: Job) -> None:
    if any(type(one) is not Tensor for one in tensors_in(batch_of(job))):
        raise DoesNotApply("tensors of a class of their own, as those of a prediction, are not handed to workers.")
    feed = source(job)
    feed.workers, feed.prefetch = WORKERS, PREFETCH
    bytes_each = sum(one.nbytes for one in tensors_in(feed.host))
    job.notes.append(
        f"{WORKERS} workers x prefetch_factor {PREFETCH} = {WORKERS * PREFETCH} batches of {bytes_each} bytes wait on the host."
    )


def _ragged_end(job: Job) -> None:
    """The last step of a run has only a third of the batch."""
    counts = [one.shape[0] for one in tensors_in(batch_of(job)) if one.dim()]
    if not counts or min(counts) < 3:
        raise DoesNotApply("a batch of fewer than three has no smaller last one.")
    size, feed, done = counts[0], job.feed, 0

    @contextlib.contextmanager
    def from_the_start() -> Iterator[None]:
        nonlocal done
        done = 0
        yield

    def ragged() -> Iterator[tuple[float, tuple[Any, ...]]]:
        nonlocal done
        done += 1
        whole = done < job.steps
        for share, batch in feed():
            yield share, batch if whole else each(batch, lambda one: _third(one, size))

    job.around.append(from_the_start)
    job.feed = ragged


def _third(value: Tensor, size: int) -> Tensor:
    return value[: size // 3] if value.dim() and value.shape[0] == size else value


TECHNIQUES = (
    Technique(
        name="loader_workers",
        idea="DataLoader workers read ahead in processes of their own: workers x prefetch_factor batches wait on the host.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="Host memory: each worker is a process, and workers x prefetch_factor batches wait in shared memory.",
        not_when="Reading is faster than a step; host memory or /dev/shm is short; a dataset of Python objects is copied, "
        "page by page, into each worker as reference counts are written.",
        code="loader = torch.utils.data.DataLoader(dataset, batch_size=32, num_workers=2, prefetch_factor=2)",
        references=(_DOCS,),
        tips=("F1", "F4"),
        apply=_workers,
    ),
    Technique(
        name="drop_last",
        idea="Leave out the last, smaller batch: BatchNorm gets no batch of one, the allocator no block sizes of its own.",
        attacks=("reserved",),
        kind="practice",
        stage="step",
        equality=changes("the last samples of each epoch are not seen, others after each shuffle"),
        price="A few samples of each epoch.",
        not_when="The dataset divides evenly; in evaluation every sample counts. The peak of a full batch does not move.",
        code="loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)",
        references=(_DOCS,),
        tips=("F1",),
        habit=_ragged_end,
    ),
)
