"""What autograd keeps, moved to the host and fetched back in backward.

The CPU cannot show it: there the host is the device. Weights that a layer keeps for its backward travel too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memlab.errors import DoesNotApply
from memlab.savings.activations.checkpoint import refuse_inference
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job


def _apply(job: Job) -> None:
    refuse_inference(job)
    if job.device.type == "cpu":
        raise DoesNotApply(
            "this job is on the CPU, where the host's memory is the device's: there is nowhere to move to."
        )
    job.contexts.append(lambda: save_on_cpu(pin_memory=True))


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    host = save_on_cpu(pin_memory=True)
    moved = 0

    def pack(tensor: Tensor) -> Any:
        nonlocal moved
        moved += tensor.device.type != "cpu"
        return host.pack_hook(tensor)

    with saved_tensors_hooks(pack, host.unpack_hook):
        yield
    if not moved:
        raise DoesNotApply("nothing on a card was kept for backward: there is nothing to move to the host.")


TECHNIQUES = (
    Technique(
        name="offload",
        idea="Move what autograd keeps to the host's memory during the forward, and fetch it back in backward.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="every byte crosses the bus twice, and the step waits for it: about 25 GB/s on PCIe 4.0 x16 one way. The"
        " host holds the same bytes, pinned.",
        slower=True,
        not_when="The bus is the slowest part already, the host has no memory to spare, or computing again"
        " (checkpoint) is faster than copying. On the CPU it does nothing.",
        code="""\
from torch.autograd.graph import save_on_cpu

with save_on_cpu(pin_memory=True):
    loss = loss_of(model(images), labels)
loss.backward()
""",
        references=(
            "Hooks for autograd saved tensors, PyTorch tutorial,"
            " https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html",
            "ZeRO-Offload: Democratizing Billion-Scale Model Training, Ren et al. 2021, https://arxiv.org/abs/2101.06840",
        ),
        shown=Shown("gpt", share=0.3, device="cuda"),
        apply=_apply,
        outside=_outside,
    ),
)
