"""Copies from the host to the card: pinned, not waited for, one batch ahead. All are about time, and cost memory.

Limits: how much time they save only a card shows. What they hold is measured: pinned blocks are rounded up to powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memlab.savings.feeding.source import Batch, Source, needs_cuda, source
from memlab.savings.technique import EXACT, Technique
from memlab.workloads.job import Job
from memlab.workloads.nested import tensors_in

_DOCS = (
    "PyTorch tutorial, A guide on good usage of non_blocking and pin_memory, 2024, "
    "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"
)
_NOTES = "PyTorch docs, CUDA semantics, https://docs.pytorch.org/docs/stable/notes/cuda.html"


def _pin(job: Job) -> None:
    needs_cuda(job)
    source(job).pinned = True


def _non_blocking(job: Job) -> None:
    needs_cuda(job)
    feed = source(job)
    feed.pinned = feed.non_blocking = True  # from memory that is not pinned the copy would wait all the same


def _prefetch(job: Job) -> None:
    needs_cuda(job)
    feed = source(job)
    feed.pinned = feed.non_blocking = feed.ahead = True
    feed.fetch = _Ahead(feed)
    job.notes.append(f"One more batch on the card: {sum(one.nbytes for one in tensors_in(feed.host))} bytes.")


class _Ahead:
    """Copies the next batch on a stream of its own while a step runs."""

    def __init__(self, feed: Source) -> None:
        self.feed, self.stream = feed, torch.cuda.Stream(feed.job.device)

    def __call__(self) -> Batch:
        found = self.feed.waiting or self._copied()
        here: Any = torch.cuda.current_stream(self.feed.job.device)
        here.wait_stream(self.stream)
        for one in tensors_in(found):
            one.record_stream(here)  # else its block is given away while the step reads it
        self.feed.waiting = self._copied()
        return found

    def _copied(self) -> Batch:
        with torch.cuda.stream(self.stream):
            return self.feed.on_device(self.feed.next())


def _read_each_step(job: Job) -> None:
    keep = job.keep

    def reading(output: Any, loss: Tensor) -> None:
        keep(output, loss)
        for one in tensors_in(output):
            one.detach().cpu()
        if loss.numel() == 1:
            loss.item()

    job.keep = reading


TECHNIQUES = (
    Technique(
        name="pin_memory",
        idea="Batches in page-locked host memory, from which the card copies by itself.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="Host memory that cannot be swapped; each block is rounded up to a power of two, and kept for the next batch.",
        not_when="On the CPU; host memory is short; tensors are pinned one by one in the loop, which costs what it saves.",
        code="loader = torch.utils.data.DataLoader(dataset, batch_size=32, pin_memory=True)",
        references=(_DOCS, _NOTES),
        tips=("F1", "F2"),
        apply=_pin,
    ),
    Technique(
        name="non_blocking",
        idea="The host goes on while the batch is copied; it needs pinned memory, else the copy is waited for all the same.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="The pinned batch must stay as it is until the copy is done.",
        not_when="From the card to the host: values are read before they are there, unless you synchronise first.",
        code="x = x.pin_memory().to('cuda', non_blocking=True)      # DataLoader(pin_memory=True) pins by itself",
        references=(_DOCS,),
        tips=("F2",),
        apply=_non_blocking,
    ),
    Technique(
        name="prefetch",
        idea="The next batch is copied to the card on a stream of its own while this one is worked on.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="One more batch on the card, and record_stream, which holds its block until the step is done.",
        not_when="The batch is large and memory short; or copying takes little of a step.",
        code="side = torch.cuda.Stream()\n"
        "with torch.cuda.stream(side):\n    ahead = next_batch.to('cuda', non_blocking=True)\n"
        "torch.cuda.current_stream().wait_stream(side)\n"
        "ahead.record_stream(torch.cuda.current_stream())",
        references=(_NOTES,),
        tips=("F4",),
        apply=_prefetch,
    ),
    Technique(
        name="host_reads",
        idea="Leave results on the card and read them at the end: each .item(), .cpu() or print in the loop waits for it.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="A number on the card for each step until it is read.",
        slower=True,
        not_when="Every so many steps, for a log: one wait in a hundred steps is not seen.",
        code="total = torch.zeros((), device=device)\n"
        "for x, y in loader:\n    loss = step(x, y)\n    total += loss.detach()      # no .item() here\n"
        "print(total.item() / len(loader))",
        references=(
            "PyTorch tutorial, Performance Tuning Guide, "
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
        tips=("E4", "C3"),
        habit=_read_each_step,
    ),
)
