"""Models of images, at any width: VGG, ResNet, DenseNet, U-Net and the vision transformer.

VGG-16 and VGG-19 (Simonyan and Zisserman, 2014, https://arxiv.org/abs/1409.1556): `features` is the stack of convolutions,
`classifier` the three linear layers that hold nine tenths of the parameters.

ResNet-18 and ResNet-50 (He et al., 2015, https://arxiv.org/abs/1512.03385): `conv1`, `bn1`, `relu1` are consecutive, and so on
by number; `blocks` holds all blocks in order. The stride of a bottleneck is in its 3 x 3 convolution, as in torchvision
("ResNet v1.5").

DenseNet-121 (Huang et al., 2016, https://arxiv.org/abs/1608.06993): each layer reads all earlier ones in its block,
concatenated: copies that grow with the square of the depth. BatchNorm comes before the convolution of its number (`norm1`,
`relu1`, `conv1`): there is nothing to fold it into.

U-Net (Ronneberger et al., 2015, https://arxiv.org/abs/1505.04597), with padding and BatchNorm, as it is built today. Its forward
gives every tensor its own name and deletes none: a common style, where `del` and rebinding are said to help.

ViT-B/16 (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929), without dropout; `blocks` are those of GPT-2, not
causal.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import MemlabError
from memlab.workloads.job import Parts
from memlab.workloads.language import DecoderBlock, WithHead
from memlab.workloads.workload import Workload, classifying, divided, images_and_classes

# --- VGG ---

# A number is a 3 x 3 convolution of that width with its ReLU, 0 a max-pooling by two: configurations D and E.
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)


def convolutions(plan: Iterable[int], in_place: bool) -> list[nn.Module]:
    """The layers of a plan, for images of three channels."""
    layers: list[nn.Module] = []
    width = 3
    for out in plan:
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(in_place)] if out else [nn.MaxPool2d(2)]
        width = out or width
    return layers


class ClassicVgg(nn.Module):
    """VGG as published for images of 224 x 224: convolutions, then three large linear layers."""

    def __init__(self, plan: tuple[int, ...], classes: int = 1000, hidden: int = 4096, in_place: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(*convolutions(plan, in_place))
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(max(plan) * 7 * 7, hidden), nn.ReLU(in_place), nn.Dropout()),
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


def _training_vgg(plan: tuple[int, ...], batch: int, side: int, width: int, hidden: int, classes: int) -> Parts:
    scaled = tuple(out * width // 64 for out in plan)
    return classifying(ClassicVgg(scaled, classes, hidden, in_place=False), batch, side, classes)


# --- ResNet ---


def shortcut(width: int, out: int, stride: int) -> nn.Module:
    """The shortcut of a block: its input, or a projection if the shape changes."""
    if stride == 1 and width == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class Basic(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, width: int, inner: int, stride: int, in_place: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, stride, padding=1, bias=False)
        self.bn1, self.relu1 = nn.BatchNorm2d(inner), nn.ReLU(in_place)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(inner), nn.ReLU(in_place)
        self.short = shortcut(width, inner, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of `inner` channels."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + self.short(x))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1 that narrow and widen, with a shortcut."""

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
        self.short = shortcut(width, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of four times `inner` channels."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu3(y + self.short(x))


class DeepResNet(WithHead):
    """A stem, four stages of blocks that halve the image and double the channels, an average, a linear layer."""

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


def _training_resnet(kind: Any, stages: tuple[int, ...], batch: int, side: int, width: int, classes: int) -> Parts:
    return classifying(DeepResNet(kind, stages, width, classes), batch, side, classes)


# --- DenseNet ---


class DenseLayer(nn.Module):
    """Adds `growth` channels to what it reads; `narrowed` is the part that a technique may recompute."""

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
    """`layers`: each gets the block's input and the outputs of all layers before it."""

    def __init__(self, count: int, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(width + index * growth, growth) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The input and all new channels."""
        parts = [x]
        for layer in self.layers:
            parts.append(layer(*parts))
        return torch.cat(parts, 1)


class DenseNet(WithHead):
    """A stem, four dense blocks with transitions between them, a last norm, an average, a linear layer."""

    def __init__(self, growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            *(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.blocks = nn.Sequential()
        for index, count in enumerate((6, 12, 24, 16)):
            if index:  # half the channels, half the side
                narrow = nn.Conv2d(width, width // 2, 1, bias=False)
                steps = {"norm": nn.BatchNorm2d(width), "relu": nn.ReLU(), "conv": narrow, "pool": nn.AvgPool2d(2)}
                self.blocks.append(nn.Sequential(OrderedDict(steps)))
                width //= 2
            self.blocks.append(DenseBlock(count, width, growth))
            width += count * growth
        self.norm, self.relu, self.pool = nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """What goes into `head`: (batch, channels)."""
        return self.pool(self.relu(self.norm(self.blocks(self.stem(x))))).flatten(1)


def densenet121(batch: int, side: int, growth: int, classes: int) -> Parts:
    """DenseNet-121 in training."""
    return classifying(DenseNet(growth, classes), batch, side, classes)


# --- U-Net ---


class Twice(nn.Sequential):
    """Two 3 x 3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(
            *(nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
        )


class DeepUNet(nn.Module):
    """Five levels: `down1` to `down5`, then `grow4`, `up4` to `grow1`, `up1`, where `grow` doubles the side; then `head`."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1, self.down2 = Twice(3, width), Twice(width, 2 * width)
        self.down3, self.down4 = Twice(2 * width, 4 * width), Twice(4 * width, 8 * width)
        self.down5 = Twice(8 * width, 16 * width)
        self.grow4, self.up4 = nn.ConvTranspose2d(16 * width, 8 * width, 2, 2), Twice(16 * width, 8 * width)
        self.grow3, self.up3 = nn.ConvTranspose2d(8 * width, 4 * width, 2, 2), Twice(8 * width, 4 * width)
        self.grow2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), Twice(4 * width, 2 * width)
        self.grow1, self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2), Twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores per pixel, of `classes` channels; the side is a multiple of 16."""
        conv1 = self.down1(x)
        conv2 = self.down2(self.pool(conv1))
        conv3 = self.down3(self.pool(conv2))
        conv4 = self.down4(self.pool(conv3))
        conv5 = self.down5(self.pool(conv4))
        grown4 = self.grow4(conv5)
        joined4 = torch.cat([grown4, conv4], 1)
        up4 = self.up4(joined4)
        grown3 = self.grow3(up4)
        joined3 = torch.cat([grown3, conv3], 1)
        up3 = self.up3(joined3)
        grown2 = self.grow2(up3)
        joined2 = torch.cat([grown2, conv2], 1)
        up2 = self.up2(joined2)
        grown1 = self.grow1(up2)
        joined1 = torch.cat([grown1, conv1], 1)
        up1 = self.up1(joined1)
        return self.head(up1)


def unet(batch: int, side: int, width: int, classes: int) -> Parts:
    """U-Net in training: random images, a random class for each pixel."""
    if side % 16:
        raise MemlabError(f"side has to be a multiple of 16, as it is halved four times, got {side}.")
    model = DeepUNet(width, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, side, side), torch.randint(classes, (batch, side, side))
    return model, optimizer, (x, y), functional.cross_entropy


# --- ViT ---


class VisionTransformer(WithHead):
    """Patches of an image as tokens, and a class token."""

    def __init__(self, layers: int, width: int, heads: int, side: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.asked = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """What goes into `head`: (batch, width)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.asked.expand(len(x), -1, -1), tokens], 1)
        return self.norm(self.blocks(tokens + self.position))[:, 0]


def vit(batch: int, side: int, patch: int, layers: int, width: int, heads: int, classes: int) -> Parts:
    """ViT in training, AdamW."""
    divided("side", "patch", side=side, patch=patch)
    divided("width", "heads", width=width, heads=heads)
    model = VisionTransformer(layers, width, heads, side, patch, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, optimizer, images_and_classes(batch, side, classes), functional.cross_entropy


_VGG = (8, 96, 8, 64, 10), (8, 160, 32, 256, 10), (64, 224, 64, 4096, 1000)
_RESNET18 = (24, 96, 8, 10), (48, 160, 32, 10), (128, 224, 64, 1000)
_RESNET50 = (8, 96, 8, 10), (16, 160, 32, 10), (64, 224, 64, 1000)
_VIT = (16, 64, 8, 6, 64, 4, 10), (16, 128, 8, 8, 128, 4, 10), (64, 224, 16, 12, 768, 12, 1000)
WORKLOADS = (
    Workload.of(
        "vgg16", "13 convolutions and 3 linear layers: the first layers have the activations, the last the parameters",
        functools.partial(_training_vgg, VGG16), *_VGG,
    ),
    Workload.of("vgg19", "VGG-16 with three convolutions more", functools.partial(_training_vgg, VGG19), *_VGG),
    Workload.of(
        "resnet18", "eight blocks of two convolutions with BatchNorm, with shortcuts",
        functools.partial(_training_resnet, Basic, (2, 2, 2, 2)), *_RESNET18,
    ),
    Workload.of(
        "resnet50", "sixteen bottlenecks: wide activations between narrow convolutions",
        functools.partial(_training_resnet, Bottleneck, (3, 4, 6, 3)), *_RESNET50,
    ),
    Workload.of(
        "densenet121", "58 layers that read everything before them: concatenations, normed and kept", densenet121,
        (8, 64, 4, 10), (16, 128, 16, 10), (64, 224, 32, 1000),
    ),
    Workload.of(
        "unet", "skips that keep the largest activations alive until the very end", unet,
        (2, 96, 8, 2), (2, 320, 16, 2), (4, 512, 64, 2),
    ),
    Workload.of("vit", "images cut into patches, and the blocks of a transformer over them", vit, *_VIT),
)  # fmt: skip
