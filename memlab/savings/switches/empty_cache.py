"""`torch.cuda.empty_cache()`: gives back what nobody uses, so the peak of what is used stays where it is."""

from __future__ import annotations

import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts


def layers() -> Parts:
    """A training step of six linear layers with Adam."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)))
    batch = torch.randn(2048, 512), torch.randn(2048, 512)
    return model, torch.optim.Adam(model.parameters()), batch, nn.functional.mse_loss


def _apply(job: Job) -> None:
    if job.device.type != "cuda":
        raise DoesNotApply("it is about CUDA's allocator, and this job runs on the CPU.")
    step = job.step

    def then_empty() -> None:
        step()
        torch.cuda.empty_cache()

    job.step = then_empty


TECHNIQUES = (
    Technique(
        name="empty_cache",
        idea="Said to free memory. It gives unused blocks back to the driver: the peak stays, and the next step asks anew.",
        attacks=("none",),
        kind="myth",
        stage="step",
        equality=EXACT,
        price="It waits for the card, and each cudaMalloc of the next step waits again: users report 1-2 s a call.",
        slower=True,
        not_when="Always for the peak. It helps another process on the card, or once, between phases of other sizes.",
        code="torch.cuda.empty_cache()      # once, before something else needs the card; not in the loop",
        references=(
            "PyTorch docs, Memory management, https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
        ),
        shown=Shown(layers, share=0.0, device="cuda", steps=3),
        tips=("E1", "B4"),
        apply=_apply,
    ),
)
