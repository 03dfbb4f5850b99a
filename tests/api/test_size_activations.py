"""What autograd keeps, predicted without data, against real forwards on the CPU: to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api.real_forward import Function, left_bytes, linear, saved_bytes, unchanged
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from memlab.api.size import size


def attention(model: Function, x: Tensor, **how: Any) -> Tensor:
    q, k, v = model.a(x).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, **how)


def picture(side: int = 12) -> Tensor:
    return torch.randn(2, 3, side, side)


def rows() -> Tensor:
    return torch.randn(4, 8)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2))


def deep() -> nn.Sequential:
    return nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU())


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.doubled = x * 2  # not through save_for_backward: no hook sees it
        ctx.save_for_backward(x * 3)
        return x * 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def dropped_branch(model: Function, x: Tensor) -> Tensor:
    model.b(x).relu().exp().sum()  # its graph goes before the forward has ended
    return model.a(x)


def heads(**how: Any) -> Callable[[], nn.Module]:
    return lambda: Function(lambda m, x: attention(m, x, **how), a=linear(32, 96))


def sequence() -> Tensor:
    return torch.randn(2, 10, 32)


MODELS: dict[str, Callable[[], nn.Module]] = {  # of rows
    "linear, gelu": lambda: nn.Sequential(linear(), nn.GELU(), linear(8, 5)),
    "layer, group, rms norm": lambda: nn.Sequential(linear(), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)),
    "fft": lambda: Function(lambda m, x: torch.fft.rfft(m.a(x)).abs(), a=linear()),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear()),
    "dropout in place": lambda: nn.Sequential(linear(), nn.Dropout(0.5, inplace=True)),
    "dropout, eval": lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear()).eval(),
    "views": lambda: Function(
        lambda m, x: m.b(m.a(x).view(2, 16)[:, 4:12].t().t()).flatten().unbind(), a=linear(), b=linear()
    ),
    "checkpoint": lambda: Function(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=deep(), b=linear()),
    "reentrant checkpoint": lambda: Function(
        lambda m, x: checkpoint(m.a, m.b(x), use_reentrant=True).exp(), a=deep(), b=linear()
    ),
    "checkpoint_sequential": lambda: Function(
        lambda m, x: checkpoint_sequential(m.a, 2, m.b(x), use_reentrant=False), a=deep(), b=linear()
    ),
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(linear()), parametrizations.weight_norm(linear())
    ),
    "frozen": lambda: nn.Sequential(linear().requires_grad_(False), nn.GELU(), linear()),
    "no grad inside": lambda: Function(lambda m, x: m.b(torch.no_grad()(m.a)(x).relu()), a=linear(), b=linear()),
    "a branch that goes": lambda: Function(dropped_branch, a=linear(), b=linear()),
}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    **{name: (make, lambda: (rows(),)) for name, make in MODELS.items()},
    "in-place relu and max-pool": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)),
        lambda: (picture(),),
    ),
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: (picture().to(memory_format=torch.channels_last),),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), lambda: (picture(),)),
    "batch norm, eval": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), lambda: (picture(),)),
    "cumulative batch norm": (lambda: nn.BatchNorm2d(3, momentum=None), lambda: (picture(),)),
    "bf16": (lambda: nn.Sequential(linear(), nn.LayerNorm(8), nn.GELU()).bfloat16(), lambda: (rows().bfloat16(),)),
    "complex": (lambda: nn.Linear(8, 8, dtype=torch.complex64), lambda: (torch.randn(4, 8, dtype=torch.complex64),)),
    "attention": (heads(), lambda: (sequence(),)),
    "attention in bf16": (lambda: heads()().bfloat16(), lambda: (sequence().bfloat16(),)),
    "attention with dropout": (heads(dropout_p=0.1, is_causal=True), lambda: (sequence(),)),
    "attention with a mask": (
        lambda: Function(lambda m, x: attention(m, x, attn_mask=torch.ones(10, 10).tril().bool()), a=linear(32, 96)),
        lambda: (sequence(),),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        lambda: (torch.randn(2, 10, 16),),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(100, 8), linear()), lambda: (torch.randint(0, 100, (4, 5)),)),
    "softmax, sort, gather": (
        lambda: Function(lambda m, x, i: m.a(x).softmax(-1).sort(-1)[0].gather(0, i.expand(3, 8)), a=linear()),
        lambda: (rows(), torch.tensor([[0], [1], [2]])),
    ),
    "cross entropy": (
        lambda: Function(lambda m, x, y: F.cross_entropy(m.a(x), y), a=linear()),
        lambda: (rows(), torch.tensor([0, 1, 2, 3])),
    ),
    "gru": (lambda: nn.GRU(8, 16, 2), lambda: (torch.randn(10, 4, 8),)),
    "gradients of gradients": (
        lambda: Function(lambda m, x: torch.autograd.grad(m.a(x).exp().sum(), x, create_graph=True)[0], a=linear()),
        lambda: (rows().requires_grad_(),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_that_a_real_forward_keeps(name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model, given = make(), inputs()
    with unchanged(model):
        found = size(model, *given)
    assert found.activation_bytes == saved_bytes(model, *given)
    assert found.kept_bytes == left_bytes(model, *given)
    assert sum(layer.activation_bytes for layer in found.layers) == found.activation_bytes
    assert not found.is_lower_bound


def keeps_aside(model: Function, x: Tensor) -> Tensor:
    model.last = x.exp()
    return Keeps.apply(model.a(x))


def outlives(model: Function, x: Tensor) -> Tensor:
    model.last = model.b(x).exp().detach()  # exp saves its result, and its graph goes
    return model.a(x)


@pytest.mark.parametrize(("forward", "rows_of"), [(keeps_aside, (1, 1, 2)), (outlives, (0, 1, 1))])
def test_what_is_held_otherwise_than_by_the_graph_is_told_apart(forward, rows_of):
    model, x = Function(forward, a=linear(), b=linear()), rows()
    found = size(model, x)
    held = (found.activation_bytes, found.output_bytes, found.other_bytes)
    assert held == tuple(count * x.nbytes for count in rows_of)
    assert found.kept_bytes == left_bytes(model, x)


def handed_on(model: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model.a(x).exp()
    return y, torch.empty(0).set_(y.untyped_storage(), 0, y.shape)


@pytest.mark.parametrize("forward", [handed_on, lambda m, x: torch.vmap(m.a)(x).exp()])
def test_a_storage_handed_from_tensor_to_tensor_counts_once_also_in_vmap(forward):
    model, x = Function(forward, a=linear()), rows()
    assert size(model, x).kept_bytes == left_bytes(model, x)
    assert forward is not handed_on or size(model, x).kept_bytes == x.nbytes


def test_offloaded_tensors_are_not_counted_where_hooks_of_the_user_replace_them():
    def forward(model: Function, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.shape, t.dtype), lambda p: torch.zeros(p[0])):
            y = model.a(x).exp()
        return model.b(y)

    model = Function(forward, a=linear(), b=linear())
    found = size(model, rows())
    assert found.activation_bytes == rows().nbytes  # only what is saved outside of the block
    assert found.kept_bytes == left_bytes(model, rows())


def test_a_function_that_forbids_hooks_for_saved_tensors():
    model = Function(lambda m, x: m.a(x).exp() + torch.func.grad(lambda y: (y**2).sum())(x), a=linear())
    found = size(model, rows())
    assert any("forbids hooks for saved tensors" in note for note in found.notes)
    assert found.kept_bytes == left_bytes(model, rows())


def test_recurrent_layers_of_onednn_are_a_lower_bound():
    model, x = nn.LSTM(8, 16, 2), torch.randn(10, 4, 8)
    found = size(model, x)
    real = saved_bytes(model, x)
    if not any("mkldnn" in one.operator for one in found.kept):
        pytest.skip("this PyTorch runs LSTM without oneDNN")
    assert found.is_lower_bound
    assert found.activation_bytes < real
    assert "≥ " in found.text
    with torch.no_grad():
        assert not size(model, x).is_lower_bound


def test_without_gradients_nothing_is_kept():
    model = nn.Sequential(linear(), nn.GELU(), linear())
    with torch.no_grad():
        found = size(model, rows(), optimizer="adam")
    assert (found.activation_bytes, found.gradient_bytes, found.optimizer_bytes) == (0, 0, 0)
    assert "Gradients are off" in found.notes[0]
    with torch.inference_mode():
        assert size(model, rows()).activation_bytes == 0


def test_autocast_of_the_caller_counts():
    model, x = nn.Sequential(linear(), linear()), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = size(model, x)
        real = saved_bytes(model, x)
        torch.clear_autocast_cache()
        left = left_bytes(model, x)
    assert found.activation_bytes == real
    assert found.kept_bytes == left
    assert any("Autocast is on" in note for note in found.notes)
