"""Small trainings whose highest moment is known: at the end of the cell one large block is made while everything is alive.

Each generator builds what lives before the cell, yields, runs the cell, and yields (modules, optimizers, other parameters).
The same on the CPU and on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Held = tuple[list[nn.Module], list[torch.optim.Optimizer], list[torch.Tensor]]
Setup = Iterator[Any]
STAGES: dict[str, Callable[[str], Setup]] = {}


def stage(setup: Callable[[str], Setup]) -> None:
    STAGES[setup.__name__] = setup


def network(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32)).to(device)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, count: int = 2) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(40, 64, device=device)).square().sum().backward()
        optimizer.step()


def with_optimizer(name: str, **options: Any) -> None:
    def setup(device: str) -> Setup:
        model = network(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        yield
        steps(model, optimizer, device)
        yield [model], [optimizer], []

    STAGES[f"{name} {options or ''}".strip()] = setup


for known in ("SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta"):
    with_optimizer(known)
with_optimizer("SGD", momentum=0.9, nesterov=True)
with_optimizer("Adam", amsgrad=True, foreach=True)
with_optimizer("AdamW", foreach=False)
with_optimizer("RMSprop", centered=True, momentum=0.5)


@stage
def made_in_the_cell(device: str) -> Setup:
    yield
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, device)
    yield [model], [optimizer], []


@stage
def trained_before(device: str) -> Setup:
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, device)
    yield
    steps(model, optimizer, device, 1)
    yield [model], [optimizer], []


@stage
def by_hand(device: str) -> Setup:
    model = network(device)
    yield
    for clears in (False, True, True):
        for parameter in model.parameters() if clears else ():
            parameter.grad = None
        model(torch.ones(40, 64, device=device)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    yield [model], [], []


@stage
def accumulated(device: str) -> Setup:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield
    for _ in range(2):
        for _ in range(3):
            model(torch.ones(40, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    yield [model], [optimizer], []


@stage
def tied_and_shared(device: str) -> Setup:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 64)
            self.head = nn.Linear(64, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.block = nn.Linear(64, 64)
            self.again = self.block

        def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.block(self.embedding(tokens)).relu()) * scale)

    model = Tied().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    yield
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.zeros(8, 16, dtype=torch.int64, device=device)
        model(tokens, scale=torch.ones(64, device=device)).sum().backward()
        optimizer.step()
    yield [model], [optimizer], []


@stage
def without_modules(device: str) -> Setup:
    weights = [torch.ones(64, 64, device=device, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.Adam(weights)
    yield
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(40, 64, device=device)
        for weight in weights:
            x = (x @ weight).tanh()
        x.sum().backward()
        optimizer.step()
    yield [], [optimizer], weights


@stage
def some_frozen(device: str) -> Setup:
    model = network(device)
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    yield
    steps(model, optimizer, device)
    yield [model], [optimizer], []


@stage
def lbfgs(device: str) -> Setup:
    model = nn.Linear(64, 8).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    yield

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(16, 64, device=device)) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    yield [model], [optimizer], []


@stage
def two_networks(device: str) -> Setup:
    maker, judge = nn.Linear(16, 64).to(device), nn.Linear(64, 1).to(device)
    optimizers = [torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())]
    yield
    for _ in range(2):
        fake = maker(torch.ones(32, 16, device=device))
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = F.softplus(judge(fake)).mean()
            loss.backward(retain_graph=True)
            optimizer.step() if optimizer is optimizers[0] else None
    optimizers[1].step()
    yield [maker, judge], optimizers, []


@stage
def norms_in_a_function(device: str) -> Setup:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True)).to(
        device
    )
    model.register_buffer("table", torch.ones(1000, device=device), persistent=False)
    yield
    with torch.no_grad():
        model(torch.ones(4, 3, 16, 16, device=device))
    yield [model], [], []


@stage
def half_way_to_half(device: str) -> Setup:
    model = nn.Linear(64, 64).to(device)
    yield
    model.to(torch.bfloat16)
    model(torch.ones(8, 64, device=device, dtype=torch.bfloat16)).sum().backward()
    yield [model], [], []


def held_bytes(held: Held, device: str) -> dict[str, int]:
    """Bytes of the storages that these objects hold on the device, by category: the authority."""
    modules, optimizers, others = held
    parameters = [p for module in modules for p in module.parameters()] + others
    state = [value for optimizer in optimizers for value in _tensors(list(optimizer.state.values()))]
    found = {
        "parameter": parameters,
        "gradient": [p.grad for p in parameters if p.grad is not None],
        "buffer": [b for module in modules for b in module.buffers()],
        "optimizer": state,
    }
    return {category: _bytes(tensors, device) for category, tensors in found.items()}


def _tensors(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _bytes(tensors: list[torch.Tensor], device: str) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == device}
    return sum(storage.nbytes() for storage in storages.values())
