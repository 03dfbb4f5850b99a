"""`flex_attention`: as its fused kernel where the program compiles, else as the operators that PyTorch runs without.

Fused, it takes the result and a float per query (torch/_inductor/kernel/flex, read from the source of 2.13, not
measured). Without torch.compile PyTorch's own operators run, which take the whole matrix of scores several times over.
Gradients of what `score_mod` captures are left out.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.fake_cuda.assumed import note
from memlab.fake_cuda.graph_recorder import GraphRecorder, NotOneGraph
from memlab.fake_cuda.kernel_rules import FLOAT
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.tensors import is_fake
from memlab.torch_internals.cuda_names import flex_attention, flex_by_operators

FUSED = "it was predicted as its fused kernel, as the program compiles; what its backward takes was not measured"
UNFUSED = "without torch.compile it takes the whole matrix of scores"


def run_flex_attention(cuda: Any, patches: Patches) -> None:
    """Run it on fake CUDA tensors, where PyTorch would trace it."""
    kind = type(flex_attention)
    traced = kind.__call__

    def call(self, query, key, value, score_mod, block_mask, scale, kernel_options, *buffers):
        if not is_fake(query):
            return traced(self, query, key, value, score_mod, block_mask, scale, kernel_options, *buffers)
        if GraphRecorder.is_on:
            raise NotOneGraph("it calls flex_attention, which is predicted by itself")
        if cuda.compiles:
            note(cuda, "flex_attention", FUSED)
            return _Fused.apply(query, key, value, bool(kernel_options.get("OUTPUT_MAX")))
        note(cuda, "flex_attention", UNFUSED)
        return _Unfused.apply(query, key, value, (score_mod, block_mask, scale, kernel_options, *buffers))

    patches.put(kind, __call__=call)


class _Fused(torch.autograd.Function):
    """One kernel each way."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, has_maxima: bool) -> Any:
        rows, width = query.shape[:-1], value.shape[-1]
        out = torch.empty_like(query) if width == query.shape[-1] else query.new_empty((*rows, width))
        sums = query.new_empty(rows, dtype=FLOAT)
        maxima = query.new_empty(rows if has_maxima else (0,), dtype=FLOAT)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mark_non_differentiable(sums, maxima)
        return out, sums, maxima

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, _, sums = ctx.saved_tensors
        delta = torch.empty_like(sums)
        found = [torch.empty_like(one) for one in (query, key, value)]
        del delta
        return *found, None


class _Unfused(torch.autograd.Function):
    """By operators, forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, rest: Any) -> Any:
        out, sums, maxima = flex_by_operators()[0](query, key, value, *rest)
        ctx.save_for_backward(query, key, value, out, sums, maxima)
        ctx.rest = rest
        ctx.mark_non_differentiable(sums, maxima)
        return out, sums, maxima

    @staticmethod
    def backward(ctx: Any, grad: Any, *others: Any) -> Any:
        query, key, value, out, sums, _ = ctx.saved_tensors
        score_mod, block_mask, scale, options, *buffers = ctx.rest

        def derived(score: Any, batch: Any, head: Any, row: Any, column: Any, above: Any, *captured: Any) -> Any:
            back = torch.func.vjp(lambda one: score_mod(one, batch, head, row, column, *captured), score)[1]
            return [back(above)[0], None, None, None, None]

        given = score_mod, derived, block_mask, scale, options, *(buffers or [(), ()])
        found = flex_by_operators()[1](query, key, value, out, sums, grad, None, *given)
        return *found[:3], None
