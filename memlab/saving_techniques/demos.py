"""Small models that show one technique each, where no workload does; sizes are those of docs/techniques.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.job import Parts


def linear_stack(
    layers: int,
    width: int,
    rows: int,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    classes: int = 0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> Parts:
    """Equal linear layers in training; with `classes` a last layer and cross-entropy, else the mean squared error."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)))
    batch = torch.randn(rows, width), torch.randn(rows, width)
    loss: Callable[..., Tensor] = functional.mse_loss
    if classes:
        model.append(nn.Linear(width, classes))
        batch, loss = (batch[0], torch.randint(classes, (rows,))), functional.cross_entropy
    return model, optimizer(model.parameters(), **{"lr": 0.1, **settings}), batch, loss


def conv_stack(
    layers: int,
    width: int,
    *parts: Callable[[int], nn.Module],
    images: tuple[int, int, int] = (8, 3, 48),
    head: bool = True,
    training: bool = True,
) -> Parts:
    """3 x 3 convolutions, each followed by `parts` of its width; `images` are number, channels, side.

    With `head` the outputs are averaged over each image, and trained with cross-entropy.
    """
    count, channels, side = images
    model = nn.Sequential()
    for index in range(layers):
        model.append(nn.Conv2d(width if index else channels, width, 3, padding=1))
        model.extend(part(width) for part in parts)
    x = torch.randn(count, channels, side, side)
    if head:
        model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    if not training:
        return model, None, (x,), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if head:
        return model, optimizer, (x, torch.randint(width, (count,))), functional.cross_entropy
    return model, optimizer, (x, torch.randn(count, width, side, side)), functional.mse_loss


def vocabulary_stack(vocabulary: int, width: int, time: int) -> Parts:
    """A language model that is little more than its vocabulary: (batch, time) -> (batch, time, vocabulary)."""

    def next_token(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten())

    body = nn.Embedding(vocabulary, width), nn.Linear(width, width), nn.Tanh()
    model = nn.Sequential(*body, nn.Linear(width, vocabulary, bias=False))
    batch = torch.randint(vocabulary, (2, time)), torch.randint(vocabulary, (2, time))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, next_token


class Parallel(nn.Module):
    """Branches on one input, added up."""

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all branches."""
        total = self.branches[0](x)
        for branch in self.branches[1:]:  # functools.reduce would keep the branch before
            total = total + branch(x)
        return total


class Serving(nn.Sequential):
    """Layers whose forward records no graph."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """The output of the last layer."""
        return super().forward(x)


def relu(width: int) -> nn.Module:
    """A ReLU, whatever the width: a part of `conv_stack`."""
    return nn.ReLU()
