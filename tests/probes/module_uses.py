"""What users do with modules and gradients: each makes what it needs, and gives tensors that must be the same when watched."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def double_backward() -> list[torch.Tensor]:
    model, x = net(), torch.ones(3, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    return [x.grad, *gradients(model)]


def twice_through_one_graph() -> list[torch.Tensor]:
    model = net()
    loss = model(torch.ones(3, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def checkpointed(use_reentrant: bool) -> Callable[[], list[torch.Tensor]]:
    def work() -> list[torch.Tensor]:
        model, x = net(), torch.ones(3, 6, requires_grad=True)
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        return [x.grad, *gradients(model)]

    return work


def functional() -> list[torch.Tensor]:
    model, x = net(), torch.ones(3, 6)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, one).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    return [*each.values(), torch.func.hessian(lambda one: model(one).pow(2).sum())(x[0])]


def in_threads() -> list[torch.Tensor]:
    model = net()
    copies = [torch.ones(3, 6, requires_grad=True) for _ in range(3)]
    threads = [threading.Thread(target=lambda x=x: model(x).sum().backward(inputs=[x])) for x in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [x.grad for x in copies]


def changed_in_place() -> list[torch.Tensor]:
    model, x = net(), torch.ones(3, 6)
    hidden = model[0](x)
    hidden.mul_(2)
    part = hidden[:, :4]
    part.add_(1)
    model[2](hidden).sum().backward()
    return gradients(model)


WORKS = (
    double_backward,
    twice_through_one_graph,
    checkpointed(True),
    checkpointed(False),
    functional,
    in_threads,
    changed_in_place,
)
