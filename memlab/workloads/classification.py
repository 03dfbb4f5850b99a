"""What all picture classifiers share: random pictures, random classes, cross-entropy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from memlab.workloads.job import Parts


def pictures(batch: int, side: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of square pictures, each with its class."""
    return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))


def classified(model: nn.Module, batch: int, side: int, classes: int) -> Parts:
    """The model with SGD and momentum, as the convolutional networks were trained."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, pictures(batch, side, classes), functional.cross_entropy
