"""Checkpointing by policy: keep what matrix products and convolutions give, run only the cheap operators again.

A block with a layer in place is left as it is: what is kept would be changed after it was kept, which PyTorch refuses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memlab.errors import DoesNotApply
from memlab.savings.activations.checkpoint import SAME, blocks, checkpoint_blocks, refuse_inference, residual_stack
from memlab.savings.outside import on_models
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job

DEAR = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention"}
    | {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"}
    | {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"}
)
"""Operators whose results are kept."""


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__ if isinstance(operator, torch._ops.OpOverload) else ""
    return CheckpointPolicy.MUST_SAVE if name in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def _select(model: nn.Module) -> None:
    for block in blocks(model):
        for name, layer in block.named_modules():
            if getattr(layer, "inplace", False):
                raise DoesNotApply(f"{type(block).__name__}.{name} works in place and would change what is kept.")
    checkpoint_blocks(model, _contexts)


def _apply(job: Job) -> None:
    refuse_inference(job)
    _select(job.model)


TECHNIQUES = (
    Technique(
        name="selective_checkpoint",
        idea="Keep what is dear to make (matrix products, convolutions, attention); run only the cheap operators again.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="the norms, activation functions and other element-wise operators once more: a few percent of time.",
        slower=True,
        not_when="Blocks work in place, or matrix products made most of what is kept: then plain checkpointing saves more.",
        code="""\
import functools
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

DEAR = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in DEAR else CheckpointPolicy.PREFER_RECOMPUTE

contexts = functools.partial(create_selective_checkpoint_contexts, policy)

def forward(self, x):
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return self.head(x)
""",
        references=(
            "Current and New Activation Checkpointing Techniques in PyTorch, PyTorch blog 2025,"
            " https://pytorch.org/blog/activation-checkpointing-techniques/",
            "torch.utils.checkpoint, PyTorch documentation, https://docs.pytorch.org/docs/stable/checkpoint.html",
        ),
        shown=Shown(residual_stack, share=0.25),
        tips=("C5",),
        excludes={"in_place": "what is kept would be changed after it was kept", "checkpoint": SAME},
        apply=_apply,
        outside=lambda: on_models(_select),
    ),
)
