"""VGG-16 and VGG-19 (Simonyan and Zisserman, 2014, https://arxiv.org/abs/1409.1556), at any width.

`features` is the stack of convolutions, `classifier` the three linear layers that hold nine tenths of the parameters.
"""

from __future__ import annotations

import functools

from torch import Tensor, nn

from memlab.workloads.classification import classified
from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload

# A number is a 3 x 3 convolution of that width with its ReLU, 0 a max-pooling by two: configurations D and E.
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)


class ClassicVgg(nn.Module):
    """VGG as published for pictures of 224 x 224: convolutions, then three large linear layers."""

    def __init__(self, plan: tuple[int, ...], classes: int = 1000, hidden: int = 4096, in_place: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for out in plan:
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(in_place)] if out else [nn.MaxPool2d(2)]
            width = out or width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(width * 7 * 7, hidden), nn.ReLU(in_place), nn.Dropout()),
            *(nn.Linear(hidden, hidden), nn.ReLU(in_place), nn.Dropout()),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class: (batch, classes)."""
        return self.classifier(self.pool(self.features(x)).flatten(1))


def vgg16(classes: int = 1000) -> nn.Module:
    """VGG-16, a model of 138,357,544 parameters. Under `torch.device("meta")` it takes no memory."""
    return ClassicVgg(VGG16, classes)


def vgg19(classes: int = 1000) -> nn.Module:
    """VGG-19, a model of 143,667,240 parameters (548 MiB). Under `torch.device("meta")` it takes no memory."""
    return ClassicVgg(VGG19, classes)


def _training(plan: tuple[int, ...], batch: int, side: int, width: int, hidden: int, classes: int) -> Parts:
    scaled = tuple(out * width // 64 for out in plan)
    return classified(ClassicVgg(scaled, classes, hidden, in_place=False), batch, side, classes)


_SIZES = {
    "tiny": {"batch": 8, "side": 96, "width": 8, "hidden": 64, "classes": 10},
    "laptop": {"batch": 8, "side": 160, "width": 32, "hidden": 256, "classes": 10},
    "card": {"batch": 64, "side": 224, "width": 64, "hidden": 4096, "classes": 1000},
}
WORKLOADS = (
    Workload(
        "vgg16",
        "13 convolutions and 3 linear layers: the first layers have the activations, the last the parameters",
        functools.partial(_training, VGG16),
        _SIZES,
    ),
    Workload("vgg19", "VGG-16 with three convolutions more", functools.partial(_training, VGG19), _SIZES),
)
