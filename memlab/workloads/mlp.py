"""A multilayer perceptron: equal layers of parameters and next to no activations.

It is the one workload without a published size: a plain stack, in which the optimizer's state is the largest part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload


class Mlp(nn.Module):
    """`blocks`: linear layers with ReLU, all of one width; then `head`."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class: (batch, classes)."""
        return self.head(self.blocks(x))


def mlp(batch: int, width: int, layers: int, classes: int) -> Parts:
    """Random vectors of the width, random classes, Adam."""
    model = Mlp(width, layers, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, (torch.randn(batch, width), torch.randint(classes, (batch,))), functional.cross_entropy


WORKLOADS = (
    Workload(
        "mlp",
        "equal linear layers with Adam: parameters and what the optimizer keeps of them",
        mlp,
        {
            "tiny": {"batch": 16, "width": 512, "layers": 6, "classes": 10},
            "laptop": {"batch": 256, "width": 2048, "layers": 6, "classes": 10},
            "card": {"batch": 1024, "width": 4096, "layers": 16, "classes": 1000},
        },
    ),
)
