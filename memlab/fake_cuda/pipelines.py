"""Stages of a pipeline that were given no shapes: PyTorch sends them from stage to stage, and the other stages are not there.

Forwards a stage sends on the shapes of its outputs; they are kept, for the prediction of the rank that would receive them.
Backwards it gets those of their gradients, which are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.errors import PredictionError
from memlab.fake_cuda.patches import Patches
from memlab.torch_internals import distributed
from memlab.torch_internals.objects import given_shapes, output_shapes


def exchange_shapes(cuda: Any, patches: Patches) -> None:
    """Patch the stages of `torch.distributed.pipelining`, which is loaded."""
    stage_module = distributed.pipeline_stage
    stages = stage_module.PipelineStage
    if not hasattr(stages, "_warmup_backward_result"):  # before 2.12
        return
    vote, send = stages._warmup_backward_result, stages._send_meta

    def _warmup_backward_result(stage: Any, received_result: Any = None) -> Any:
        """The stages vote on whether all were given shapes: all are assumed to vote as this one."""
        vote(stage, received_result)
        lacks_shapes = stage_module.InferenceMode.needs_dynamic(given_shapes(stage), stage.has_backward)
        return torch.tensor([int(not lacks_shapes)], dtype=torch.int32, device=stage.device)

    def _send_meta(stage: Any, meta: Any, dst_stage: int) -> None:
        if dst_stage > stage.stage_index:
            are_plain = all(type(one) is stage_module._TensorMeta for one in meta.forward_metas)
            cuda.groups.stages[stage.stage_index] = [
                (tuple(one.shape), tuple(one.stride), str(one.dtype).removeprefix("torch."), one.requires_grad)
                for one in meta.forward_metas
                if are_plain
            ]
        send(stage, meta, dst_stage)

    def _recv_meta(stage: Any, src_stage: int) -> Any:
        group = stage.group or distributed.c10d._get_default_group()
        cuda.groups.uses(group.group_name)
        if src_stage > stage.stage_index:
            return stage_module._StageBackwardMeta(stage_module._derive_grad_metas(output_shapes(stage)))
        before = max((one for one in cuda.groups.stages if one <= src_stage), default=None)
        if before is None or not cuda.groups.stages[before]:  # DTensors, which would need their mesh
            what = f"stage {stage.stage_index} of a pipeline gets its shapes from stage {src_stage}"
            raise PredictionError(f"{what}, and they are unknown: pass input_args and output_args to PipelineStage.")
        if before < src_stage:
            cuda.assume(f"stage {stage.stage_index} of the pipeline gets shapes as stage {before} sends them on")
        return stage_module._StageForwardMeta(
            tuple(
                stage_module._TensorMeta(torch.Size(shape), tuple(stride), getattr(torch, dtype), requires_grad)
                for shape, stride, dtype, requires_grad in cuda.groups.stages[before]
            )
        )

    patches.put(stages, _warmup_backward_result=_warmup_backward_result, _send_meta=_send_meta, _recv_meta=_recv_meta)
