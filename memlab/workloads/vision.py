"""Plain convolutional training steps: a VGG-like stack, a residual network, and a U-Net that only predicts.

Not tuned, not deep: small enough for a laptop's CPU, and each shows one pattern of memory. What is known by name and size is
among the workloads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.classic_vgg import ClassicVgg as ClassicVgg
from memlab.workloads.classic_vgg import vgg16 as vgg16
from memlab.workloads.classic_vgg import vgg19 as vgg19


class Vgg(nn.Sequential):
    """Seven convolutions in three stages, in-place ReLU, two linear layers."""

    def __init__(self, stages: tuple[tuple[int, int], ...] = ((32, 2), (64, 2), (128, 3)), classes: int = 10) -> None:
        layers: list[nn.Module] = []
        width = 3
        for out, count in stages:
            for _ in range(count):
                layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True)]
                width = out
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(width * 8 * 8, 256), nn.ReLU(), nn.Linear(256, classes))


class ResidualBlock(nn.Module):
    """Two convolutions beside a short cut, as in ResNet-18."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        changes = stride != 1 or width != out
        self.short = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of `out` channels."""
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        return functional.relu(self.norm2(self.conv2(y)) + self.short(x), inplace=True)


class ResNet(nn.Sequential):
    """A stem and six residual blocks of 32, 64 and 128 channels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
            *(ResidualBlock(32, 32), ResidualBlock(32, 32)),
            *(ResidualBlock(32, 64, 2), ResidualBlock(64, 64)),
            *(ResidualBlock(64, 128, 2), ResidualBlock(128, 128)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)),
        )


def _two_convolutions(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Three levels with skips; its forward lets go of every tensor after its last use."""

    def __init__(self, width: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.down1 = _two_convolutions(3, width)
        self.down2 = _two_convolutions(width, 2 * width)
        self.middle = _two_convolutions(2 * width, 4 * width)
        self.up2 = _two_convolutions(6 * width, 2 * width)
        self.up1 = _two_convolutions(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores per pixel, of `classes` channels."""
        skip1 = self.down1(x)
        y = functional.max_pool2d(skip1, 2)
        skip2 = self.down2(y)
        y = functional.max_pool2d(skip2, 2)
        y = self.middle(y)
        y = functional.interpolate(y, scale_factor=2.0)
        y = torch.cat([y, skip2], dim=1)
        del skip2
        y = self.up2(y)
        y = functional.interpolate(y, scale_factor=2.0)
        y = torch.cat([y, skip1], dim=1)
        del skip1
        y = self.up1(y)
        return self.head(y)


def _classify(model: nn.Module, side: int, batch: int, device: str) -> Callable[[], float]:
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, side, side, device=device), torch.randint(0, 10, (batch,), device=device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def vgg(batch: int = 2, device: str = "cpu") -> Callable[[], float]:
    """A training step of a VGG-like network on 64 x 64 pictures, SGD with momentum."""
    torch.manual_seed(0)
    return _classify(Vgg(), 64, batch, device)


def resnet(batch: int = 2, device: str = "cpu") -> Callable[[], float]:
    """A training step of a small ResNet on 32 x 32 pictures, SGD with momentum."""
    torch.manual_seed(0)
    return _classify(ResNet(), 32, batch, device)


def unet(batch: int = 1, side: int = 128, device: str = "cpu") -> Callable[[], float]:
    """A prediction of a three-level U-Net without gradients; every tensor goes after its last use."""
    torch.manual_seed(0)
    model = UNet().to(device)
    x = torch.randn(batch, 3, side, side, device=device)

    def step() -> float:
        with torch.no_grad():
            return model(x).mean().item()

    return step
