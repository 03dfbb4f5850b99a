"""LSTM, GRU and RNN layers as cuDNN runs them: one buffer of weights, a workspace for the while, a reserve kept for backward.

PyTorch's side (ATen/native/cudnn/RNN.cpp, 2.12) is exact: what is allocated when. The sizes of workspace and reserve are
cuDNN's own business and estimated: the gates of all steps, and two more values per unit kept for backward.
Limits: dropout's random states are not counted; under autocast each weight is cast alone; packed sequences take the longest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.backends.cudnn.rnn

from memlab.predictor.pretend.rules import installer, rule
from memlab.predictor.pretend.tensors import is_pretend

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
"""cudnnRNNMode_t."""
KEPT = 2
"""Values per unit and step in the reserve, beside the gates."""
NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a call looks like."""

    cell: str
    steps: int
    batch: int
    hidden: int
    projection: int
    layers: int
    directions: int
    has_biases: bool
    trains: bool
    is_packed: bool
    first: bool
    """Whether the batch is the first dimension."""

    @property
    def gates(self) -> int:
        """Numbers that the gates of one direction take."""
        return self.steps * self.batch * self.hidden * GATES[self.cell]

    @property
    def reserve(self) -> int:
        """Numbers kept for backward."""
        return self.steps * self.batch * self.hidden * (GATES[self.cell] + KEPT) * self.layers * self.directions

    @property
    def width(self) -> int:
        """Of a result at one step."""
        return (self.projection or self.hidden) * self.directions

    def buffer(self, weights: Any) -> int:
        """Numbers in the buffer of all weights; cuDNN has biases also where the module has none."""
        missing = 0 if self.has_biases else 2 * GATES[self.cell] * self.hidden * self.layers * self.directions
        return sum(one.numel() for one in weights) + missing


def new(shape: Any, dtype: torch.dtype) -> Any:
    """Memory of a tensor."""
    return torch.empty(shape, dtype=dtype, device="cuda")


class Cudnn(torch.autograd.Function):
    """One call of cuDNN: forward and backward take memory in PyTorch's order."""

    @staticmethod
    def forward(ctx: Any, run: Any, layout: Layout, tensor: Any, *rest: Any) -> Any:
        """Results, final states, workspace, reserve (_cudnn_rnn)."""
        count = 2 if layout.cell == "lstm" else 1
        states = rest[:count]
        ctx.run, ctx.layout, ctx.count = run, layout, count
        itemsize = tensor.element_size()
        held = [] if tensor.is_contiguous() else [run.hold(tensor.numel() * itemsize, "aten.contiguous")]
        shape = (tensor.shape[0], layout.width) if layout.is_packed else (layout.steps, layout.batch, layout.width)
        out = new(shape, tensor.dtype)
        finals = [new(one.shape, one.dtype) for one in states]
        space = run.hold(layout.gates * layout.directions * itemsize, "aten._cudnn_rnn")
        ctx.reserve = new((layout.reserve,), tensor.dtype) if layout.trains else None
        ctx.save_for_backward(tensor, *rest, out)
        run.release(space)
        for block in held:
            run.release(block)
        return (out, *finals)

    @staticmethod
    def backward(ctx: Any, grad: Any, *finals: Any) -> Any:
        """Gradients of input and states, then of the weights, as views of one buffer (_cudnn_rnn_backward)."""
        run, layout, count = ctx.run, ctx.layout, ctx.count
        tensor, *rest, _ = ctx.saved_tensors
        states, weights = rest[:count], rest[count:]
        held = [] if tensor.is_contiguous() else [run.hold(tensor.numel() * tensor.element_size(), "aten.contiguous")]
        dense = [] if grad.is_contiguous() else [run.hold(grad.numel() * grad.element_size(), "aten.contiguous")]
        grads = [new(one.shape, one.dtype) for one in (tensor, *states)]
        space = layout.gates * layout.directions * tensor.element_size()
        run.scratch(space, op="aten._cudnn_rnn_backward")
        for block in (*dense, *held):
            run.release(block)
        of_weights = _weight_grads(run, layout, tensor, weights, space)
        ctx.reserve = None
        return None, None, *grads, *of_weights


def _weight_grads(run: Any, layout: Layout, tensor: Any, weights: Any, space: int) -> list[Any]:
    if not any(one.requires_grad for one in weights):
        return [None] * len(weights)
    held = [] if tensor.is_contiguous() else [run.hold(tensor.numel() * tensor.element_size(), "aten.contiguous")]
    buffer = new((layout.buffer(weights),), tensor.dtype)
    held.append(run.hold(space, "aten._cudnn_rnn_backward"))
    views, place = [], 0
    for one in weights:
        views.append(buffer[place : place + one.numel()].view(one.shape))
        place += one.numel()
    grads = views if layout.has_biases else [one.clone() for one in views]
    for block in reversed(held):
        run.release(block)
    return grads


def _call(run: Any, cell: str, tensor: Any, states: Any, weights: Any, rest: Any, batch_sizes: Any = None) -> Any:
    has_biases, layers, _, trains, bidirectional = rest[:5]
    first = len(rest) > 5 and rest[5]
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensor, states, weights = (
            tensor.to(dtype),
            [one.to(dtype) for one in states],
            [one.to(dtype) for one in weights],
        )
    if first:
        tensor = tensor.transpose(0, 1)
    hidden = states[-1].shape[-1]
    projection = states[0].shape[-1] if cell == "lstm" and states[0].shape[-1] != hidden else 0
    if batch_sizes is None:
        steps, batch = tensor.shape[0], tensor.shape[1]
    else:
        steps, batch = batch_sizes.numel(), int(batch_sizes[0])
    layout = Layout(
        cell, steps, batch, hidden, projection, layers, 2 if bidirectional else 1, has_biases, bool(trains),
        batch_sizes is not None, first,
    )  # fmt: skip
    out, *finals = Cudnn.apply(run, layout, tensor, *states, *weights)
    return (out.transpose(0, 1) if first else out, *finals)


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def layers(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Dense input."""
    cell = func._schema.name.rpartition("::")[2]
    states = args[1] if cell == "lstm" else [args[1]]
    return _call(run, cell, args[0], states, args[2], args[3:])


@rule("aten.lstm.data", "aten.gru.data", "aten.rnn_tanh.data", "aten.rnn_relu.data")
def packed(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """A packed sequence; its batch sizes lie on the host."""
    cell = func._schema.name.rpartition("::")[2]
    states = args[2] if cell == "lstm" else [args[2]]
    return _call(run, cell, args[0], states, args[3], args[4:], args[1])


@rule("aten._pack_padded_sequence.default")
def pack(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Each run of steps of one batch size is copied, then all are put together (ATen/native/PackedSequence.cpp)."""
    tensor, lengths, first = args
    if first:
        tensor = run.op(torch.ops.aten.transpose.int, tensor, 0, 1)
    sizes = lengths.tolist()
    batches = [sum(one > step for one in sizes) for step in range(max(sizes))]
    per_row = tensor[0, 0].numel() * tensor.element_size()
    counts = [batches.count(batch) * batch for batch in dict.fromkeys(batches)]
    blocks = [
        run.hold(count * per_row, func) for count in (counts[1:] if _is_whole(tensor, sizes, batches) else counts)
    ]
    out = run.empty((sum(batches), *tensor.shape[2:]), tensor.dtype, op=func)
    for block in blocks:
        run.release(block)
    return out, torch.tensor(batches)


def _is_whole(tensor: Any, sizes: Any, batches: Any) -> bool:
    """Whether the first steps, of all sequences, lie densely already."""
    return bool(tensor.is_contiguous() and len(sizes) == batches[0])


@installer
@contextlib.contextmanager
def flattening(run: Any, patches: Any) -> Iterator[None]:
    """Modules lay their weights into one buffer as they move (torch/nn/modules/rnn.py, flatten_parameters, 2.11 to 2.15)."""
    acceptable = torch.backends.cudnn.is_acceptable
    patches.put(
        torch.backends.cudnn,
        is_acceptable=lambda one: (
            (one.is_floating_point() and torch.backends.cudnn.enabled) if is_pretend(one) else acceptable(one)
        ),
    )
    patches.put(
        torch.backends.cudnn.rnn, get_cudnn_mode=MODES.__getitem__
    )  # there is no cuDNN to ask on the host's wheel
    patches.put(torch, _use_cudnn_rnn_flatten_weight=lambda: True, _cudnn_rnn_flatten_weight=flatten)
    yield


def flatten(
    weights: Any, stride: int, width: int, mode: int, hidden: int, projection: int, layers: int, *rest: Any
) -> Any:
    """One buffer for all weights, which become views of it."""
    gates = {MODES["LSTM"]: 4, MODES["GRU"]: 3}.get(mode, 1)
    directions = 2 if rest[1] else 1
    has_biases = stride >= 4
    missing = 0 if has_biases else 2 * gates * hidden * layers * directions
    buffer = torch.zeros(sum(one.numel() for one in weights) + missing, dtype=weights[0].dtype, device="cuda")
    place = 0
    for one in weights:
        count = math.prod(one.shape)
        one.set_(buffer[place : place + count].view(one.shape))
        place += count
    return buffer
