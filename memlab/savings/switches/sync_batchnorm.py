"""SyncBatchNorm: BatchNorm over the batches of all processes, where each of them has few samples.

Limits: the exchange needs several processes. From one batch of n to the next the mean of a channel varies by about 1 / sqrt(n) of
its deviation, where each sample gives one value.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memlab.errors import DoesNotApply
from memlab.savings.technique import Technique, changes
from memlab.workloads.job import Job


def _apply(job: Job) -> None:
    if job.device.type != "cuda":
        raise DoesNotApply("SyncBatchNorm works on cards, and this job runs on the CPU.")
    if not job.trains:
        raise DoesNotApply("an inference takes the running statistics: there is nothing to exchange.")
    if not any(isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm) for one in job.model.modules()):
        raise DoesNotApply("the model has no BatchNorm.")
    job.model = nn.SyncBatchNorm.convert_sync_batchnorm(job.model)
    job.notes.append("Without several processes SyncBatchNorm is BatchNorm.")


TECHNIQUES = (
    Technique(
        name="sync_batchnorm",
        idea="With few samples per card BatchNorm takes its statistics over all cards: steadier, and no memory saved.",
        attacks=("none",),
        kind="practice",
        stage="model",
        equality=changes("statistics are those of all cards' samples, not of one card's"),
        price="An exchange between the cards for each layer, forward and backward; a few numbers per channel.",
        not_when="One card; or samples enough per card (above about 16). GroupNorm has no such trouble at all.",
        code="model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
        "model = torch.nn.parallel.DistributedDataParallel(model.to(rank), device_ids=[rank])",
        references=(
            "PyTorch docs, SyncBatchNorm, https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
            "Wu and He, Group Normalization, 2018, https://arxiv.org/abs/1803.08494",
        ),
        tips=("C10",),
        apply=_apply,
    ),
)
