"""Techniques for CUDA only: activations moved to the host, and settings of the caching allocator.

On the CPU the host is the device. Weights that a layer saves for its backward travel too. `torch.cuda.empty_cache()` returns
unused memory to the driver, so the peak of used memory does not change. Expandable segments grow in place, so that
blocks of many sizes leave no holes; what is allocated does not move. It must be set before the allocator starts:
in a prediction, or in a new process on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import linear_stack
from memlab.saving_techniques.patching import must_happen, only_training
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job, Parts


def _offload(job: Job) -> None:
    only_training(job)
    if job.device.type == "cpu":
        raise DoesNotApply(
            "this job is on the CPU, where the host's memory is the device's: there is nowhere to move to."
        )
    job.contexts.append(lambda: save_on_cpu(pin_memory=True))


@contextlib.contextmanager
def _patch_offload() -> Iterator[None]:
    """The child's CUDA is never real: what moves keeps its shape alone, as gigabytes on the host would take minutes."""
    with must_happen("nothing on a GPU was saved for backward: there is nothing to move to the host.") as moved:

        def pack(tensor: Tensor) -> Any:
            moved.append(tensor.device.type != "cpu")
            if tensor.device.type == "cpu":
                return tensor
            return tensor.device, tensor.dtype, tensor.shape, tensor.stride()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            device, dtype, shape, stride = saved
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

        with saved_tensors_hooks(pack, unpack):
            yield


layers = functools.partial(linear_stack, 6, 512, 2048, optimizer=torch.optim.Adam, lr=1e-3)


def _empty_cache(job: Job) -> None:
    if job.device.type != "cuda":
        raise DoesNotApply("it is about CUDA's allocator, and this job runs on the CPU.")
    step = job.step

    def step_then_empty() -> None:
        step()
        torch.cuda.empty_cache()

    job.step = step_then_empty


class Growing(nn.Module):
    """A network whose input gets longer with each step, as for sentences: no block fits into those of the last step."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """The mean over the rows of the batch."""
        self.steps += 1
        return self.layers(x.repeat(self.steps, 1)).mean()


def growing() -> Parts:
    """Training on inputs that grow from 8 to 64 MiB."""
    model = Growing()
    batch = torch.randn(8192, 256), torch.zeros(())
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, nn.functional.mse_loss


def _expand(job: Job) -> None:
    if job.device.type != "cuda":
        raise DoesNotApply("expandable segments belong to CUDA's allocator, and this job runs on the CPU.")


TECHNIQUES = (
    described("offload", Demo("gpt", share=0.3, device="cuda"), _offload, patch=_patch_offload),
    described("empty_cache", Demo(layers, share=0.0, device="cuda", steps=3), _empty_cache),
    described("expandable_segments", Demo(growing, device="cuda", of="reserved", steps=8), _expand),
)
