"""The vision transformer ViT-B/16 (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929), at any width.

Without dropout. `blocks` are those of GPT-2, seeing in both directions; `features(x)` is what goes into `head`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.attention import Block
from memlab.workloads.classification import pictures
from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload, divided


class VisionTransformer(nn.Module):
    """Patches of a picture as tokens, and one more token that is asked for the class."""

    def __init__(self, layers: int, width: int, heads: int, side: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.asked = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """What goes into `head`: (batch, width)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.asked.expand(len(x), -1, -1), tokens], 1)
        return self.norm(self.blocks(tokens + self.position))[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class: (batch, classes)."""
        return self.head(self.features(x))


def vit(batch: int, side: int, patch: int, layers: int, width: int, heads: int, classes: int) -> Parts:
    """ViT in training, AdamW."""
    divided("side", "patch", side=side, patch=patch)
    divided("width", "heads", width=width, heads=heads)
    model = VisionTransformer(layers, width, heads, side, patch, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, optimizer, pictures(batch, side, classes), functional.cross_entropy


WORKLOADS = (
    Workload(
        "vit",
        "pictures cut into patches, and the blocks of a transformer over them",
        vit,
        {
            "tiny": {"batch": 16, "side": 64, "patch": 8, "layers": 6, "width": 64, "heads": 4, "classes": 10},
            "laptop": {"batch": 16, "side": 128, "patch": 8, "layers": 8, "width": 128, "heads": 4, "classes": 10},
            "card": {"batch": 64, "side": 224, "patch": 16, "layers": 12, "width": 768, "heads": 12, "classes": 1000},
        },
    ),
)
