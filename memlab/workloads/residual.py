"""ResNet-18 and ResNet-50 (He et al., 2015, https://arxiv.org/abs/1512.03385), at any width.

`conv1`, `bn1`, `relu1` follow each other, and so on by number; `blocks` holds all blocks in one row; `features(x)` is what goes
into `head`. The stride of a bottleneck is in its 3 x 3 convolution, as in torchvision ("ResNet v1.5").
"""

from __future__ import annotations

from torch import Tensor, nn

from memlab.workloads.classification import classified
from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload


def _short_cut(width: int, out: int, stride: int) -> nn.Module:
    """What the sum needs of a block's input: itself, or a projection where the shape changes."""
    if stride == 1 and width == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside a short cut."""

    expansion = 1

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, stride, padding=1, bias=False)
        self.bn1, self.relu1 = nn.BatchNorm2d(inner), nn.ReLU()
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(inner), nn.ReLU()
        self.short = _short_cut(width, inner, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of `inner` channels."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + self.short(x))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1 that narrow and widen, beside a short cut."""

    expansion = 4

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = self.expansion * inner
        self.conv1 = nn.Conv2d(width, inner, 1, bias=False)
        self.bn1, self.relu1 = nn.BatchNorm2d(inner), nn.ReLU()
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(inner), nn.ReLU()
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3, self.relu3 = nn.BatchNorm2d(out), nn.ReLU()
        self.short = _short_cut(width, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of four times `inner` channels."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu3(y + self.short(x))


class DeepResNet(nn.Module):
    """A stem, four stages of blocks that halve the picture and double the channels, an average, a linear layer."""

    def __init__(
        self, kind: type[Basic] | type[Bottleneck], stages: tuple[int, ...], width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1, self.relu1 = nn.BatchNorm2d(width), nn.ReLU()
        self.pool1 = nn.MaxPool2d(3, 2, padding=1)
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(stages):
            inner = width << stage
            for index in range(count):
                blocks.append(kind(channels, inner, stride=2 if stage and not index else 1))
                channels = kind.expansion * inner
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def features(self, x: Tensor) -> Tensor:
        """What goes into `head`: (batch, channels)."""
        y = self.pool1(self.relu1(self.bn1(self.conv1(x))))
        return self.pool(self.blocks(y)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class: (batch, classes)."""
        return self.head(self.features(x))


def resnet18(batch: int, side: int, width: int, classes: int) -> Parts:
    """ResNet-18 in training."""
    return classified(DeepResNet(Basic, (2, 2, 2, 2), width, classes), batch, side, classes)


def resnet50(batch: int, side: int, width: int, classes: int) -> Parts:
    """ResNet-50 in training."""
    return classified(DeepResNet(Bottleneck, (3, 4, 6, 3), width, classes), batch, side, classes)


WORKLOADS = (
    Workload(
        "resnet18",
        "eight blocks of two convolutions with BatchNorm, beside short cuts",
        resnet18,
        {
            "tiny": {"batch": 24, "side": 96, "width": 8, "classes": 10},
            "laptop": {"batch": 48, "side": 160, "width": 32, "classes": 10},
            "card": {"batch": 128, "side": 224, "width": 64, "classes": 1000},
        },
    ),
    Workload(
        "resnet50",
        "sixteen bottlenecks: wide activations between narrow convolutions",
        resnet50,
        {
            "tiny": {"batch": 8, "side": 96, "width": 8, "classes": 10},
            "laptop": {"batch": 16, "side": 160, "width": 32, "classes": 10},
            "card": {"batch": 64, "side": 224, "width": 64, "classes": 1000},
        },
    ),
)
