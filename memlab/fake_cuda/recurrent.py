"""LSTM, GRU and RNN: whole layers by cuDNN, cells and layers without cuDNN by PyTorch's fused kernels.

cuDNN has one buffer of weights, a workspace during a call, and a reserve kept for backward. PyTorch's side of it
(ATen/native/cudnn/RNN.cpp, 2.12) is exact: what is allocated when. The sizes are internal to cuDNN. Those of the reserve and of
dropout's states were read off 226 layers on an H200 (cuDNN 9.19, benchmarks/programs/library_calls.py), and are exact there; the
workspace is an interval that encloses all of these layers. Without cuDNN the layers are those of ATen/native/RNN.cpp, and exact.
Limits: under autocast each weight is cast separately; packed sequences are assumed to have the longest length; on other GPUs than
Hopper the workspace may be as small as the gates of all steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.backends.cudnn.rnn
import torch.nn.functional as F

from memlab.fake_cuda import gpus
from memlab.fake_cuda.convolution_workspaces import WORKSPACE
from memlab.fake_cuda.kernel_rules import name_of, round_up, rule
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.reductions import threads_per_multiprocessor
from memlab.fake_cuda.tensors import is_fake
from memlab.units import MiB

aten = torch.ops.aten
GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
"""In the order of cudnnRNNMode_t."""
_FLATTENED = (torch.float32, torch.float16, torch.float64)
"""CUDNN_TENSOR_DTYPES of torch/backends/cudnn, 2.11 to 2.15: not bfloat16."""
_HOPPER = 9
_KEPT = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
"""Values per unit, step and layer in the reserve; between two layers it has one more, and with dropout a bit."""
_KEPT_MORE_BYTES, _FULL = 256, 32
_STATE_BYTES = 24
"""Of a random generator of dropout; there is one for each thread that a GPU can run."""


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """A call of a recurrent layer, without its tensors: backward must not keep them."""

    cell: str
    steps: int
    batch: int
    width: int
    hidden: int
    element_bytes: int
    has_biases: bool
    layers: int
    dropout: float
    trains: bool
    directions: int
    batch_sizes: list[int] | None
    """For a packed sequence."""

    @property
    def reserve_bytes(self) -> int:
        """What is kept for backward."""
        one = self.steps * self.batch * self.hidden * self.directions
        kept = one * self.element_bytes * (_KEPT[self.cell] * self.layers + self.layers - 1)
        masks = round_up(-(-one // 8), _FULL) * self.directions * (self.layers - 1) if self.dropout else 0
        return round_up(kept + masks + _KEPT_MORE_BYTES, _FULL)

    def workspace_bytes(self, capability: tuple[int, int]) -> tuple[int, int]:
        """The lowest and the highest workspace of cuDNN; the factors enclose what was measured on an H200."""
        gates, one = GATES[self.cell], self.steps * self.batch * self.hidden * self.directions * self.element_bytes
        entering = [self.width, *[self.hidden * self.directions] * (self.layers - 1)]
        rows = sum(gates * self.hidden * (before + self.hidden + 2) for before in entering)
        weights, matrices = rows * self.directions * self.element_bytes, self.layers * self.directions
        read = self.steps * self.batch * self.width * self.element_bytes
        low = 8 * MiB * matrices + 3.5 * one + 0.25 * gates * one + weights + 0.6 * read
        high = 9 * MiB * matrices + 7 * one + 3 * gates * one + 1.05 * weights + 5.5 * read + MiB // 4
        return int(low) if capability[0] == _HOPPER else gates * one, int(high)


def _new(shape: Any, dtype: torch.dtype) -> Any:
    return torch.empty(shape, dtype=dtype, device="cuda")


class Cudnn(torch.autograd.Function):
    """One call of cuDNN: forward and backward allocate in PyTorch's order."""

    @staticmethod
    def forward(ctx: Any, cuda: Any, call: RecurrentCall, num_states: int, tensor: Any, *rest: Any) -> Any:
        """Results, final states, workspace, reserve (_cudnn_rnn)."""
        states = rest[:num_states]
        ctx.cuda, ctx.call, ctx.num_states = cuda, call, num_states
        with cuda.contiguous(tensor):
            if call.dropout and call.trains:
                _dropout_states(cuda)
            width = states[0].shape[-1] * call.directions
            out = _new((*tensor.shape[: tensor.dim() - 1], width), tensor.dtype)
            finals = [_new(one.shape, one.dtype) for one in states]
            # Modules do not flatten weights of other types than these, and a call does it again.
            weights = rest[num_states:]
            is_flat = len({one.untyped_storage().data_ptr() for one in weights}) == 1
            ctx.flat = None if is_flat else _new((_numbers(call, weights),), tensor.dtype)
            with _workspace(cuda, call, "aten._cudnn_rnn", 1 if call.trains else 0):
                ctx.reserve = _new((call.reserve_bytes,), torch.uint8) if call.trains else None
                ctx.save_for_backward(tensor, *rest, out)
        return (out, *finals)

    @staticmethod
    def backward(ctx, grad, *finals):
        """Gradients of input and states, then of the weights, as views of one buffer (_cudnn_rnn_backward)."""
        cuda, call, op = ctx.cuda, ctx.call, "aten._cudnn_rnn_backward"
        tensor, *rest, _ = ctx.saved_tensors
        states, weights = rest[: ctx.num_states], rest[ctx.num_states :]
        with cuda.contiguous(tensor), cuda.contiguous(grad):
            grads = [_new(one.shape, one.dtype) for one in (tensor, *states)]
            with _workspace(cuda, call, op):
                pass
        of_weights: list[Any] = [None] * len(weights)
        if any(one.requires_grad for one in weights):
            with cuda.contiguous(tensor):
                buffer = _new((_numbers(call, weights),), tensor.dtype)
                with _workspace(cuda, call, op):
                    of_weights = _views(buffer, weights)
                    if not call.has_biases:
                        of_weights = [one.clone() for one in of_weights]
                del buffer
        ctx.reserve = ctx.flat = None
        return None, None, None, *grads, *of_weights


@contextlib.contextmanager
def _workspace(cuda: Any, call: RecurrentCall, op: str, rows: int = 0) -> Iterator[None]:
    """The lowest one, during a block that makes so many tensors; what it may take more is logged."""
    low, high = call.workspace_bytes(tuple(cuda.gpu.compute_capability))
    with cuda.held(low, op=op):
        cuda.log.note(WORKSPACE, False, ((high - low, rows),), "uint8")
        yield


def _dropout_states(cuda: Any) -> None:
    """Made with the first dropout of a process on a GPU, and kept."""
    if gpus.current() not in cuda.has_dropout_states:
        cuda.has_dropout_states.add(gpus.current())
        cuda.scratch(8, op="aten._cudnn_init_dropout_state")
        threads = cuda.gpu.multiprocessors * threads_per_multiprocessor(tuple(cuda.gpu.compute_capability))
        cuda.hold(_STATE_BYTES * threads, "aten._cudnn_init_dropout_state")


def _numbers(call: RecurrentCall, weights: Any) -> int:
    """Those of the buffer of all weights: cuDNN has biases even if the module has none."""
    missing = 0 if call.has_biases else 2 * GATES[call.cell] * call.hidden * call.layers * call.directions
    return sum(one.numel() for one in weights) + missing


def _views(buffer: Any, weights: Any) -> list[Any]:
    ends = itertools.accumulate(one.numel() for one in weights)
    return [buffer[end - one.numel() : end].view(one.shape) for one, end in zip(weights, ends, strict=True)]


def flatten(
    weights: Any, stride: int, width: int, mode: int, hidden: int, projection: int, layers: int, *rest: Any
) -> Any:
    """One buffer for all weights, which become views of it."""
    missing = 0 if stride >= 4 else 2 * [*GATES.values()][mode] * hidden * layers * (2 if rest[1] else 1)
    numbers = sum(one.numel() for one in weights) + missing
    buffer = torch.zeros(numbers, dtype=weights[0].dtype, device="cuda")
    for one, view in zip(weights, _views(buffer, weights), strict=True):
        one.set_(view)
    return buffer


def flatten_weights(cuda: Any, patches: Patches) -> None:
    """Modules flatten their weights into one buffer when moved (torch/nn/modules/rnn.py, flatten_parameters, 2.11 to 2.15)."""
    acceptable = torch.backends.cudnn.is_acceptable

    def is_acceptable(one: Any) -> bool:
        return (one.dtype in _FLATTENED and torch.backends.cudnn.enabled) if is_fake(one) else acceptable(one)

    patches.put(torch.backends.cudnn, is_acceptable=is_acceptable)
    # The CPU build has no cuDNN to ask.
    patches.put(torch.backends.cudnn.rnn, get_cudnn_mode=lambda name: [*GATES].index(name.lower()))
    patches.put(torch, _use_cudnn_rnn_flatten_weight=lambda: True, _cudnn_rnn_flatten_weight=flatten)


Hidden = tuple[Any, ...]


def _step(cell: str, x: Any, hidden: Hidden, weights: list[Any]) -> Hidden:
    """One step of one layer (LSTMCell, GRUCell and SimpleCell of RNN.cpp)."""
    biases = weights[2:4] if len(weights) >= 4 else [None, None]
    if cell in ("rnn_tanh", "rnn_relu"):
        both = F.linear(hidden[0], weights[1], biases[1]), F.linear(x, weights[0], biases[0])
        return ((torch.tanh if cell == "rnn_tanh" else torch.relu)(both[0].add_(both[1])),)
    gates = [x.matmul(weights[0].t()), hidden[0].matmul(weights[1].t())]
    if cell == "gru":
        return (aten._thnn_fused_gru_cell(*gates, hidden[0], *biases)[0],)
    out, state, _ = aten._thnn_fused_lstm_cell(*gates, hidden[1], *biases)
    is_projected = len(weights) in (3, 5)
    return out.matmul(weights[-1].t()) if is_projected else out, state


def _from_last(function: Any, *hidden: Hidden) -> Hidden:
    """The function of each state, that of the cell first, as C++ evaluates the arguments of make_tuple."""
    return tuple([function(*states) for states in reversed(list(zip(*hidden, strict=True)))][::-1])


def _layer(call: RecurrentCall, take: Any, hidden: Hidden, weights: list[Any], reverse: bool) -> tuple[Any, Hidden]:
    """All steps of one layer in one direction (FullLayer, PackedLayer, ReversedPackedLayer); `take` gives a step's input."""
    sizes, order = call.batch_sizes or [0] * call.steps, range(call.steps)
    outputs: list[Any] = []
    ended: list[Hidden] = []
    initial, last = hidden, sizes[-1 if reverse else 0]
    if last and reverse:
        hidden = _from_last(lambda one: one[:last], initial)
    for step in reversed(order) if reverse else order:
        size = sizes[step]
        if size > last:
            hidden = _from_last(lambda one, start: torch.cat([one, start[last:size]]), hidden, initial)  # noqa: B023
        x = take(step)
        if size < last:
            ended.append(_from_last(lambda one: one[size:], hidden))  # noqa: B023
            hidden = _from_last(lambda one: one[:size], hidden)  # noqa: B023
        last = size
        hidden = _step(call.cell, x, hidden, weights)
        outputs.append(hidden[0])
    if reverse:
        outputs.reverse()
    out = torch.cat(outputs) if last else torch.stack(outputs)
    if last and not reverse:
        hidden = _from_last(lambda *parts: torch.cat(parts), hidden, *reversed(ended))
    return out, hidden


def _native(call: RecurrentCall, data: Any, states: Any, all_weights: Any) -> Any:
    """All layers (RNN.cpp, apply_layer_stack)."""
    finals, sizes = [], call.batch_sizes
    starts = list(zip(*(one.unbind(0) for one in states), strict=True))
    per_layer = len(all_weights) // len(starts)

    def taking(data):
        """The input of a step; for a packed sequence it is sliced when needed."""
        if sizes is None:
            return data.unbind(0).__getitem__
        return lambda step: data.narrow(0, sum(sizes[:step]), sizes[step])

    for place, start in enumerate(starts):
        weights = all_weights[place * per_layer : (place + 1) * per_layer]
        reverse = bool(place % call.directions)
        if not reverse:
            take = taking(data)
        out, final = _layer(call, take, start, weights, reverse)
        finals.append(final)
        if not reverse:
            forward = out
        if place % call.directions < call.directions - 1:
            continue
        data = torch.cat([forward, out], -1) if reverse else out
        forward = out = None
        if call.dropout and call.trains and place < len(starts) - 1:
            data = torch.dropout(data, call.dropout, True)
    return data, *_from_last(lambda *parts: torch.stack(parts), *finals)


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def dense(cuda, func, tensor, states, weights, *args, sizes=None):
    """A whole layer; `sizes` are the batch sizes of a packed sequence, which lie on the host."""
    cell = name_of(func)
    states = states if cell == "lstm" else [states]
    has_biases, layers, dropout, trains, bidirectional = args[:5]
    batch_first = len(args) > 5 and args[5]
    is_new = tensor.dtype != torch.bfloat16 or tuple(cuda.gpu.compute_capability) >= (8, 0)
    uses_cudnn = torch.backends.cudnn.enabled and is_new
    if uses_cudnn and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensor, states = tensor.to(dtype), [one.to(dtype) for one in states]
        weights = [one.to(dtype) for one in weights]
    if batch_first:
        tensor = tensor.transpose(0, 1)
    batch_sizes: Any = None if sizes is None else sizes.tolist()
    steps, batch = tensor.shape[:2] if sizes is None else (len(batch_sizes), batch_sizes[0])
    call = RecurrentCall(
        cell, steps, batch, tensor.shape[-1], states[-1].shape[-1], tensor.element_size(), has_biases, layers, dropout,
        bool(trains), 2 if bidirectional else 1, batch_sizes,
    )  # fmt: skip
    if uses_cudnn:
        out, *finals = Cudnn.apply(cuda, call, len(states), tensor, *states, *weights)
    else:
        out, *finals = _native(call, tensor, states, list(weights))
    return (out.transpose(0, 1) if batch_first else out, *finals)


@rule("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data")
def packed(cuda, func, tensor, sizes, states, weights, *args):
    """A packed sequence."""
    return dense(cuda, func, tensor, states, weights, *args, sizes=sizes)


@rule("_pack_padded_sequence.default")
def pack(cuda, func, tensor, lengths, first):
    """Consecutive steps of one batch size are copied together, then all of them (ATen/native/PackedSequence.cpp)."""
    if first:
        tensor = cuda.op(aten.transpose.int, tensor, 0, 1)
    sizes = lengths.tolist()
    batches = [sum(one > step for one in sizes) for step in range(max(sizes))]
    per_row = tensor[0, 0].numel() * tensor.element_size()
    copied = [batches.count(batch) * batch * per_row for batch in dict.fromkeys(batches)]
    is_whole = tensor.is_contiguous() and len(sizes) == batches[0]  # the first steps are contiguous already
    with cuda.held(*copied[is_whole:], op=func, in_order=True):
        return cuda.empty((sum(batches), *tensor.shape[2:]), tensor.dtype, op=func), torch.tensor(batches)


@rule("gru_cell.default", "lstm_cell.default")
def cell(cuda, func, x, given, *args):
    """Two products, and one fused kernel for the rest, for sizes that are not empty (RNN.cpp)."""
    states = given if isinstance(given, list | tuple) else (given,)
    if not (x.is_cuda and x.numel() and states[0].is_cuda and states[0].numel()):
        return func.decompose(x, given, *args)
    weights = [one for one in args if one is not None]
    gates = [torch.mm(one, weight.t()) for one, weight in zip((x, states[0]), weights, strict=False)]
    biases = (*weights[2:], None, None)[:2]
    if func is aten.gru_cell.default:
        return aten._thnn_fused_gru_cell(*gates, states[0], *biases)[0]
    return aten._thnn_fused_lstm_cell(*gates, states[1], *biases)[:2]


# What autograd saves follows from PyTorch's own formulas (tools/autograd/derivatives.yaml, _thnn_fused_gru_cell); sizes and
# order were read off the allocator's history on 2.12.1 (ATen/native/cuda/RNN.cu).
@rule("_thnn_fused_gru_cell.default", "_thnn_fused_lstm_cell.default")
def fused_cell(cuda, func, inner, outer, state, *args):
    """The workspace, kept for backward, comes before the state, and the cell of an LSTM."""
    is_lstm = func is aten._thnn_fused_lstm_cell.default
    workspace = cuda.empty((state.shape[0], (4 if is_lstm else 5) * state.shape[1]), state.dtype, op=func)
    return *(cuda.empty(state.shape, state.dtype, op=func) for _ in range(1 + is_lstm)), workspace


@rule("_thnn_fused_gru_cell_backward.default")
def fused_gru_backward(cuda, func, grad, workspace, has_bias):
    """Gradients of both products and of the state, then of both biases."""
    batch, width = grad.shape
    both = [cuda.empty((batch, 3 * width), grad.dtype, op=func) for _ in range(2)]
    state = cuda.empty(grad.shape, grad.dtype, op=func)
    return *both, state, *(one.sum(0) if has_bias else None for one in both)


@rule("_thnn_fused_lstm_cell_backward_impl.default")
def fused_lstm_backward(cuda, func, grad, grad_cell, state, cell, workspace, has_bias):
    """One gradient for both products, that of the cell, one for both biases."""
    batch, width = state.shape
    gates = cuda.empty((batch, 4 * width), state.dtype, op=func)
    of_state = cuda.empty(state.shape, state.dtype, op=func)
    return gates, of_state, gates.sum(0) if has_bias else None
