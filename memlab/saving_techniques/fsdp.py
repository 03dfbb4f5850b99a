"""FSDP2: each of several GPUs keeps a slice of the parameters, gradients and optimizer state, and gathers a block when it runs.

Only a prediction can try it: it joins a job of several ranks, of which the others are not there. Weights are made on the
meta device, as a model that is too large for one GPU has to be; buffers keep their values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from unittest import mock

from torch import distributed, nn
from torch.optim import AdamW

from memlab.errors import DoesNotApply
from memlab.saving_techniques.checkpoint import blocks
from memlab.saving_techniques.demos import linear_stack
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job, Parts


def _on_meta(make: Callable[[], Parts]) -> Callable[[], Parts]:
    """`make`, with every parameter moved to the meta device as soon as a module has it."""
    register = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not nn.parameter.is_lazy(param) and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    def made() -> Parts:
        try:
            with mock.patch.object(nn.Module, "register_parameter", register_parameter):
                return make()
        except Exception:  # it computes with its weights, which have no values there
            return make()

    return made


def _shard(job: Job) -> None:
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    if "WORLD_SIZE" not in os.environ or job.device.type != "cuda":
        raise DoesNotApply("it is for a job of several GPUs: predict it for one of them.")
    if distributed.is_initialized():
        raise DoesNotApply("the program forms process groups of its own.")
    model = job.model
    if not (names := {id(one): name for name, one in model.named_parameters()}):
        raise DoesNotApply("the model has no parameters to shard.")
    if not all(one.is_meta for one in model.parameters()):
        job.notes.append(
            "The whole model was on each GPU before it was sharded: making it needs values of its weights."
        )
    buffers = [(one, name, it) for one in model.modules() for name, it in one.named_buffers(recurse=False)]
    distributed.init_process_group("nccl")
    try:
        for one in (*blocks(model), model):
            fully_shard(one)
    except (NotImplementedError, ValueError) as error:
        raise DoesNotApply(str(error)) from error
    if any(one.is_meta for one in model.parameters()):
        model.to_empty(device=job.device)
    for module, name, buffer in buffers:
        setattr(module, name, buffer.to(job.device))
    for group in job.optimizer.param_groups if job.optimizer is not None else ():
        group["params"] = [model.get_parameter(names[id(one)]) if id(one) in names else one for one in group["params"]]


weights = functools.partial(linear_stack, 8, 1024, 8, optimizer=AdamW, lr=1e-3)
"""Eight layers and Adam: almost nothing but weights, gradients and optimizer state."""
TECHNIQUES = (described("fsdp2", Demo(weights, share=0.5, device="cuda"), _shard, make=_on_meta, shards=True),)
