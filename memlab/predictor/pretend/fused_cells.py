"""`nn.GRUCell` and `nn.LSTMCell`: fused kernels on CUDA, with a workspace that is kept for backward.

What autograd saves follows from PyTorch's own formulas (tools/autograd/derivatives.yaml, _thnn_fused_gru_cell); sizes and order
were read off the allocator's history on 2.12.1 (ATen/native/cuda/RNN.cu).
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.predictor.pretend.rules import rule

_GRU_PARTS, _LSTM_PARTS = 5, 4


def _is_fused(*gates: Any) -> bool:
    """RNN.cpp: on CUDA, and for sizes that are not empty."""
    return all(one.is_cuda and one.numel() for one in gates)


@rule("aten.gru_cell.default")
def gru_cell(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Two products, and one kernel for all the rest."""
    x, h, *weights = args
    if not _is_fused(x, h):
        return run.plain(func, *args, **kwargs)
    gates = [torch.mm(one, weight.t()) for one, weight in zip((x, h), weights, strict=False)]
    return torch.ops.aten._thnn_fused_gru_cell(*gates, h, *_biases(weights))[0]


@rule("aten.lstm_cell.default")
def lstm_cell(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The same with two states."""
    x, (h, c), *weights = args
    if not _is_fused(x, h):
        return run.plain(func, *args, **kwargs)
    gates = [torch.mm(one, weight.t()) for one, weight in zip((x, h), weights, strict=False)]
    return torch.ops.aten._thnn_fused_lstm_cell(*gates, c, *_biases(weights))[:2]


def _biases(weights: Any) -> tuple[Any, Any]:
    both = (*weights[2:], None, None)
    return both[0], both[1]


@rule("aten._thnn_fused_gru_cell.default")
def fused_gru(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The workspace comes before the state."""
    state = args[2]
    workspace = run.empty((state.shape[0], _GRU_PARTS * state.shape[1]), state.dtype, op=func)
    return run.empty(state.shape, state.dtype, op=func), workspace


@rule("aten._thnn_fused_lstm_cell.default")
def fused_lstm(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The workspace, the state and the cell."""
    state = args[2]
    workspace = run.empty((state.shape[0], _LSTM_PARTS * state.shape[1]), state.dtype, op=func)
    return *(run.empty(state.shape, state.dtype, op=func) for _ in range(2)), workspace


@rule("aten._thnn_fused_gru_cell_backward.default")
def fused_gru_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Gradients of both products and of the state, then of both biases."""
    grad, _, has_bias = args
    batch, width = grad.shape
    both = [run.empty((batch, 3 * width), grad.dtype, op=func) for _ in range(2)]
    state = run.empty(grad.shape, grad.dtype, op=func)
    biases = [run.empty((3 * width,), grad.dtype, op=func) if has_bias else None for _ in range(2)]
    return *both, state, *biases


@rule("aten._thnn_fused_lstm_cell_backward_impl.default")
def fused_lstm_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """One gradient for both products, that of the cell, one for both biases."""
    cell, has_bias = args[2], args[5]
    batch, width = cell.shape
    gates = run.empty((batch, 4 * width), cell.dtype, op=func)
    state = run.empty(cell.shape, cell.dtype, op=func)
    return gates, state, run.empty((4 * width,), cell.dtype, op=func) if has_bias else None
