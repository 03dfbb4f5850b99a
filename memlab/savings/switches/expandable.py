"""Expandable segments: reserved memory that grows in place, so that blocks of many sizes leave no holes.

Limits: what is allocated does not move. It is said to the allocator before it starts: shown by predictions, and by processes of
their own on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

CONF = "expandable_segments:True"


class Growing(nn.Module):
    """A network whose input is longer in each step, as sentences are: blocks of each step fit into none of the last."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row of the batch, however often it was repeated."""
        self.steps += 1
        return self.layers(x.repeat(self.steps, 1)).mean()


def growing() -> Parts:
    """Training on inputs that grow from 8 to 64 MiB."""
    model = Growing()
    batch = torch.randn(8192, 256), torch.zeros(())
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, nn.functional.mse_loss


def _apply(job: Job) -> None:
    if job.device.type != "cuda":
        raise DoesNotApply("expandable segments are of CUDA's allocator, and this job runs on the CPU.")


TECHNIQUES = (
    Technique(
        name="expandable_segments",
        idea="Reserved memory grows in place instead of in segments of fixed size: no holes between blocks of many sizes.",
        attacks=("reserved",),
        kind="saving",
        stage="build",
        equality=EXACT,
        price="Mapping pages takes a little time; memory cannot be shared with other processes by CUDA IPC.",
        not_when="Every step asks for the same sizes: then nothing is fragmented. On Windows it is not there.",
        code="import os\n\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'      # before the first use of CUDA",
        references=(
            "PyTorch docs, Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF, "
            "https://docs.pytorch.org/docs/stable/notes/cuda.html",
        ),
        shown=Shown(growing, share=0.25, device="cuda", of="reserved", steps=8),
        conf=CONF,
        apply=_apply,
    ),
)
