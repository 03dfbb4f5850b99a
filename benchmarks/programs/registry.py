"""Where the training programs are gathered, and the step that most of them take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

PROGRAMS: dict[str, Callable[[], None]] = {}
"""Name -> program. Each builds a model, trains it two or three steps on "cuda" and frees everything."""


def program(body: Callable[[], None]) -> Callable[[], None]:
    """Register a program under the name of its function."""
    PROGRAMS[body.__name__] = body
    return body


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    steps: int = 3,
) -> None:
    """The plain loop: the last of a batch is the target, the rest goes into the model."""
    model.train()
    for _ in range(steps):
        *inputs, target = batch()
        optimizer.zero_grad()
        loss = loss_of(model(*inputs), target)
        loss.backward()
        optimizer.step()


def images(count: int, size: int, classes: int = 1000, channels: int = 3) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches of pictures with labels, made on the host and moved."""

    def batch() -> tuple[Tensor, Tensor]:
        pictures = torch.randn(count, channels, size, size)
        return pictures.to("cuda"), torch.randint(classes, (count,)).to("cuda")

    return batch


def tokens(count: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches of token ids with the next token as the target."""

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (count, length + 1), device="cuda")
        return ids[:, :-1], ids[:, 1:]

    return batch


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.reshape(-1))
