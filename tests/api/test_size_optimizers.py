"""Gradients and optimizer state without data, against those of a real step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from api.real_forward import Function, linear
from torch import Tensor, nn

from memlab.api.size import size
from memlab.errors import MemlabError

DENSE = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}.values())


def grad_bytes(model: nn.Module) -> int:
    found = 0
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            found += grad._indices().nbytes + grad._values().nbytes if grad.is_sparse else grad.nbytes
    return found


def real_step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Any) -> tuple[int, int]:
    model(*inputs).sum().backward()
    optimizer.step()
    return grad_bytes(model), state_bytes(optimizer)


def small() -> nn.Sequential:
    return nn.Sequential(linear(8, 16), nn.LayerNorm(16), nn.GELU(), linear(16, 4))


@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_of_torch(name):
    kind, model, x = getattr(torch.optim, name), small(), torch.randn(3, 8)
    by_class, by_name = size(model, x, optimizer=kind), size(model, x, optimizer=name.lower())
    by_instance = size(model, x, optimizer=kind(model.parameters()))
    real = real_step(model, kind(model.parameters()), x)
    for found in (by_class, by_name, by_instance):
        assert (found.gradient_bytes, found.optimizer_bytes) == real
        assert found.optimizer == name
        assert sum(layer.optimizer_bytes for layer in found.layers) == found.optimizer_bytes
        assert sum(layer.gradient_bytes for layer in found.layers) == found.gradient_bytes


OPTIONS: dict[str, Any] = {
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "centered": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.1),
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    model, x = small(), torch.randn(3, 8)
    found = size(model, x, optimizer=OPTIONS[name])
    extra = 4 if name == "tensor lr" else 0
    assert found.optimizer_bytes == real_step(model, OPTIONS[name](model.parameters()), x)[1] + extra


def tied() -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[2].weight = model[0].weight
    return model


def in_one_storage() -> nn.Module:
    flat, model = torch.randn(128), Function(lambda m, x: x @ m.a + x @ m.b)
    model.a, model.b = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[64:].view(8, 8))
    return model


def partly_frozen() -> nn.Module:
    return Function(lambda m, x: m.b(m.a(x)), a=linear().requires_grad_(False), b=linear(), c=linear())


def reentrant() -> nn.Module:
    run = torch.utils.checkpoint.checkpoint
    return Function(lambda m, x: run(m.a, m.b(x), use_reentrant=True), a=linear(), b=linear(), c=linear())


def tied_and_sparse() -> nn.Module:
    model = Function(lambda m, x: m.head(m.emb(x)), emb=nn.Embedding(100, 8, sparse=True), head=nn.Linear(8, 100))
    model.head.weight = model.emb.weight  # so its gradient is dense
    return model


MODELS: dict[str, tuple[Any, str, tuple[int, int, int], str]] = {
    # optimizer; numbers, numbers that train, bytes of the parameters; what is said
    "matrices": (lambda: nn.Sequential(nn.Linear(8, 8, bias=False)), "Muon", (64, 64, 256), ""),
    "frozen and unused": (partly_frozen, "Adam", (216, 144, 864), "do not depend on c.weight, c.bias"),
    "a tied weight": (tied, "Adam", (80, 80, 320), "Counted once: 2.weight is 0.weight."),
    "one storage, two gradients": (in_one_storage, "Adam", (128, 128, 512), ""),
    "hidden in a checkpoint": (reentrant, "Adam", (216, 216, 864), "Reentrant"),
    "sparse and tied": (tied_and_sparse, "SGD", (900, 900, 3600), ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_trains_gets_one_gradient_and_one_state(name):
    make, optimizer, numbers, said = MODELS[name]
    model, x = make(), torch.randint(0, 100, (4, 5)) if name == "sparse and tied" else torch.randn(2, 8)
    found = size(model, x, optimizer=optimizer)
    real = real_step(model, getattr(torch.optim, optimizer)(model.parameters()), x)
    assert (found.gradient_bytes, found.optimizer_bytes) == real
    assert (found.parameter_count, found.trainable_count, found.parameter_bytes) == numbers
    assert not said or any(said in note for note in found.notes)


def test_sparse_gradients_have_the_rows_of_this_input():
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), linear())
    x = torch.randint(0, 100, (4, 5))
    found = size(model, x, optimizer="sgd")
    assert (found.gradient_bytes, found.optimizer_bytes) == real_step(model, torch.optim.SGD(model.parameters()), x)
    assert any("0.weight is sparse: 20 rows" in note for note in found.notes)
    with pytest.raises(MemlabError, match="Adam does not support sparse gradients"):
        size(model, x, optimizer="adam")
    sparse = nn.Sequential(nn.Embedding(100, 8, sparse=True))
    real = real_step(sparse, torch.optim.SparseAdam(sparse.parameters()), x)
    assert size(sparse, x, optimizer="sparseadam").optimizer_bytes == real[1]


def test_inputs_that_want_a_gradient():
    model, x = linear(), torch.randn(2, 8, requires_grad=True)
    assert size(model, x).gradient_bytes == 4 * 72 + x.nbytes


def test_an_optimizer_of_more_than_the_model():
    model, other, x = linear(), linear(), torch.randn(2, 8)
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
    assert size(model, x, optimizer=optimizer).optimizer_bytes == 2 * size(model, x, optimizer="adam").optimizer_bytes


class Master(torch.optim.Optimizer):
    """Keeps its own wide copies beside the state, and wants a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.copies = [p.detach().double() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.norm().item() > 0:
                self.state[parameter]["pair"] = (parameter.clone(), torch.zeros(3))


def test_an_optimizer_of_ones_own():
    model, x = linear(), torch.randn(2, 8)
    found = size(model, x, optimizer=Master)
    assert found.optimizer_bytes == 72 * 8 + 72 * 4 + 2 * 12
    assert "Master asks tensors for numbers in its step; each was taken to be 1." in found.notes


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("adamm", "torch.optim has no optimizer 'adamm'. It has Ada"),
        (3, "optimizer is a class or a name of torch.optim, an optimizer, or a function .* got int"),
        (lambda parameters: 7, "it made int"),
        ("lbfgs", "one step of lbfgs cannot be run without data .*closure"),
        (functools.partial(torch.optim.SGD, lr=-1), "Invalid learning rate: -1"),
    ],
)
def test_bad_optimizers_are_refused_in_one_line(optimizer, words):
    with pytest.raises(MemlabError, match=words) as error:
        size(linear(), (2, 8), optimizer=optimizer)
    assert "\n" not in str(error.value)
