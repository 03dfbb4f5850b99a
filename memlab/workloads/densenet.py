"""DenseNet-121 (Huang et al., 2016, https://arxiv.org/abs/1608.06993), at any growth.

Each layer reads all that came before it in its block, concatenated: copies that grow with the square of the depth.
BatchNorm comes before the convolution of its number (`norm1`, `relu1`, `conv1`): there is nothing to fold it into.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from memlab.workloads.classification import classified
from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload

BLOCKS = (6, 12, 24, 16)
"""Layers of each block."""


class DenseLayer(nn.Module):
    """Adds `growth` channels to what it reads; `narrowed` is the part that a technique may compute again."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(width), nn.ReLU()
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * growth), nn.ReLU()
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def narrowed(self, *parts: Tensor) -> Tensor:
        """All parts as one tensor, normed, and narrowed to four times the growth."""
        return self.conv1(self.relu1(self.norm1(torch.cat(parts, 1))))

    def forward(self, *parts: Tensor) -> Tensor:
        """The new channels."""
        return self.conv2(self.relu2(self.norm2(self.narrowed(*parts))))


class DenseBlock(nn.Module):
    """`layers`: each gets the block's input and what every layer before it gave."""

    def __init__(self, count: int, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(width + index * growth, growth) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The input and all new channels."""
        parts = [x]
        for layer in self.layers:
            parts.append(layer(*parts))
        return torch.cat(parts, 1)


def _transition(width: int) -> nn.Sequential:
    """Half the channels, half the side."""
    steps = [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
    return nn.Sequential(OrderedDict(zip(("norm", "relu", "conv", "pool"), steps, strict=True)))


class DenseNet(nn.Module):
    """A stem, four dense blocks with transitions between them, a last norm, an average, a linear layer."""

    def __init__(self, growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            *(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.blocks = nn.Sequential()
        for index, count in enumerate(BLOCKS):
            if index:
                self.blocks.append(_transition(width))
                width //= 2
            self.blocks.append(DenseBlock(count, width, growth))
            width += count * growth
        self.norm, self.relu, self.pool = nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """What goes into `head`: (batch, channels)."""
        return self.pool(self.relu(self.norm(self.blocks(self.stem(x))))).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class: (batch, classes)."""
        return self.head(self.features(x))


def densenet121(batch: int, side: int, growth: int, classes: int) -> Parts:
    """DenseNet-121 in training."""
    return classified(DenseNet(growth, classes), batch, side, classes)


WORKLOADS = (
    Workload(
        "densenet121",
        "58 layers that read everything before them: concatenations, normed and kept",
        densenet121,
        {
            "tiny": {"batch": 8, "side": 64, "growth": 4, "classes": 10},
            "laptop": {"batch": 16, "side": 128, "growth": 16, "classes": 10},
            "card": {"batch": 64, "side": 224, "growth": 32, "classes": 1000},
        },
    ),
)
